"""Ask a loss a question of the table, and tell a refusal from an answer, and a wrong answer from a
right one.

`losses.questions` makes the steps of a question, and `losses.judge` compares the answer with the
oracle's, both as in a run.
"""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rnnt_bench.conformance.outcomes import (
    DIFFERS,
    IMPRECISE,
    NOT_ASKED,
    PASS,
    Outcome,
)
from rnnt_bench.core import text
from rnnt_bench.core.questions import Question
from rnnt_bench.losses import judge, layouts, questions, words
from rnnt_bench.losses.adapter import Adapter
from rnnt_bench.losses.inputs import Joiner
from rnnt_bench.losses.judge import Answer, Factors, Run
from rnnt_bench.losses.step import LossStep, NotOfEach, run_together
from rnnt_bench.system.memory import is_out_of_memory


class Refused(Exception):
    """Raised where the loss raised an error instead of an answer.

    reason: the error in one line; the message also tells whether backward raised it.
    """

    def __init__(self, reason: str, in_backward: bool = False):
        super().__init__(f"in backward: {reason}" if in_backward else reason)
        self.reason = reason


class NotAsked(Exception):
    """Raised where a question does not apply to this adapter here; the message says why."""


def context_lost(device: torch.device) -> bool:
    """Return whether every operation on a GPU fails, as after an illegal access or a device-side
    assert.  False for a CPU, and for a GPU that is only out of memory."""
    if device.type != "cuda":
        return False
    for _ in range(2):  # the first try may read, and clear, the error of an earlier launch
        try:
            torch.zeros(1, device=device).add_(1).item()
            return False
        except Exception as error:
            if is_out_of_memory(error):
                return False
    return True


def message(error: BaseException) -> str:
    """Return the first line of an error without folders; for a failed assertion, the line of source
    that failed."""
    line = text.reason_of(error)
    if isinstance(error, AssertionError) and error.__traceback__ is not None:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        line = f"AssertionError: {frame.line or line} ({Path(frame.filename).name}:{frame.lineno})"
    return text.clipped(text.without_folders(line))


def attempt(run: Run, steps: list[LossStep], factors: Factors) -> list[torch.Tensor]:
    """Run steps, and return their losses.  CUDA reports some errors late, so this waits for the
    device.

    Raises NotAsked if memory runs out, and Refused for another error of the loss.  Two kinds of
    errors are raised as they are: NotOfEach, and those that leave the device unusable.
    """
    device = steps[0].batch.targets.device
    try:
        losses = run(steps, factors)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return losses
    except Exception as error:
        if isinstance(error, NotOfEach) or context_lost(device):
            raise
        if is_out_of_memory(error):
            raise NotAsked(f"not enough memory: {message(error)}") from error
        has_losses = all(step.answer is not None for step in steps)
        raise Refused(message(error), in_backward=has_losses) from error


@dataclass
class Examination:
    """Ask a loss a question on a device.

    Raises NotAsked where the question does not apply to the loss.
    """

    adapter: Adapter
    device: torch.device
    question: Question

    def __post_init__(self) -> None:
        self.scope: str = layouts.of(self.adapter).scopes[0]  # "loss", if the loss has it
        self.must_apply()

    def but(self, **values: Any) -> Examination:
        """Return the examination with other values of the question."""
        return Examination(self.adapter, self.device, self.question.but(**values))

    @property
    def interpreted(self) -> bool:
        """Return whether Python simulates the threads of the loss's kernels one by one: then a
        small batch takes minutes."""
        return self.adapter.simulated and not self.adapter.simulator_compiled

    def must_apply(self) -> None:
        """Raise NotAsked if the adapter lacks what the question is about, or would take too
        long."""
        adapter, question = self.adapter, self.question
        if self.interpreted and question.slow:
            raise NotAsked("not in a simulator, which would take hours")
        if questions.takes_minutes(adapter, self.device, question):
            raise NotAsked(
                f"Python loops over its cells on this {self.device.type}, which would take minutes"
            )
        if self.interpreted and question.dtype and question.dtype not in adapter.dtypes:
            raise NotAsked(
                f"its kernels have no {question.dtype}; a simulator computes with any dtype"
            )
        lacks_durations = question.durations and adapter.topology != "tdt"
        lacks_sigma = question.sigma is not None and not adapter.lattice.durations
        if lacks_durations or lacks_sigma:
            raise NotAsked("it predicts no durations")
        if not questions.gives_each(adapter, question):
            raise NotAsked("it has no losses of utterances, only their sum")
        if question.blank and adapter.but(blank=question.blank).options() == adapter.options():
            raise NotAsked("it has no option for the blank: it is symbol 0")
        # A question with "sine" is about one thing.  If that is the padding of the logits, a layout
        # without any cannot show it.  Other questions have padding only by the way: they are asked.
        pads_logits = question.garbage is not None or any(question.slack)
        padding_of_logits = layouts.of(adapter).padding(question.shapes)["given"]
        if question.logits == "sine" and pads_logits and not padding_of_logits:
            raise NotAsked("its layout has no padding")

    def ready(self) -> tuple[Adapter, Joiner, list[LossStep]]:
        """Return the adapter with the question's options, the joiner, and the steps to run."""
        return questions.ready(self.adapter, self.question, self.device, self.scope)

    def answer(self, run: Run = run_together, factors: Factors = ()) -> Answer:
        """Return the answer in the first scope of the loss, which is `self.scope`.

        Raises what `attempt` raises: Refused where the loss fails, NotAsked without enough memory.

        Args:
            run: runs the steps, and returns their losses.
            factors: that multiply the losses; () for those of the question.
        """
        attempted = partial(attempt, run)
        return questions.answer(
            self.adapter, self.question, self.device, self.scope, factors, attempted
        )

    def right_losses(self) -> torch.Tensor:
        """Return the oracle's losses of the first step's utterances, (N,) float64."""
        adapter, model, steps = self.ready()
        factors = questions.factors_of(self.question)
        right = judge.Right(adapter, model, self.scope, steps, factors)
        right.solve()
        return right.losses[0]

    def outcome(self, run: Run = run_together, has_gradient: bool = True) -> Outcome:
        """Judge the answer in each scope that the question is asked in.

        Return the first outcome that is not right, or that has a message (imprecise, say), else the
        last one.  Without any scope the outcome is NOT_ASKED.  Raises NotAsked and Refused.

        Args:
            run: runs the steps, and returns their losses.
            has_gradient: whether `run` makes gradients, which are then judged too.
        """
        attempted = partial(attempt, run)
        # With `may_refuse`, questions.answers would leave out a scope in which the loss fails.
        asked = [self.question.but(may_refuse=False)]
        result = Outcome(NOT_ASKED, "it returns the sum of its losses alone")
        for _, answer in questions.answers(self.adapter, self.device, asked, run=attempted):
            result = self.compare(answer, attempted, has_gradient)
            if result.result != PASS or result.message:
                break
        return result

    def compare(
        self, answer: Answer, run: Run = run_together, has_gradient: bool = True
    ) -> Outcome:
        """Judge an answer; raise Refused if it lacks a gradient.

        run, has_gradient: as in `outcome`."""
        if not answer.rights.isfinite().all():
            return _without_path(answer)
        leaves = answer.errors.leaves.values()
        if has_gradient and any(leaf.missing for leaf in leaves):
            raise Refused("it left the logits without a gradient", in_backward=True)
        verdict = questions.verdict(self.adapter, self.device, self.question, answer, run=run)
        # A line without a leaf is the one of the loss, which is judged without gradients too.
        wrong = [line for line in verdict.wrong if has_gradient or not line.leaf]
        message = ""
        if wrong:
            message = words.of_answer(answer, wrong)
        elif verdict.imprecise is not None:
            message = f"{IMPRECISE}{words.size(verdict.imprecise)} in float32, right in float64"
        grad_error = answer.grad_error if has_gradient else None
        return Outcome(DIFFERS if wrong else PASS, message, answer.loss_error, grad_error)


def _without_path(answer: Answer) -> Outcome:
    """Judge an answer about utterances of which at least one has no path: the loss of each of these
    must be infinite.  The message tells how large the gradient is."""
    infinite = answer.losses[~answer.rights.isfinite()].isinf()
    if not infinite.all():
        line = f"loss {listed(answer.losses)} where its lattice has no path"
        return Outcome(DIFFERS, f"{line}: must be infinite or refused")
    message = "no path through its lattice: an infinite loss"
    entries = gradient_entries(answer)
    if len(entries):
        message += f", gradient up to {entries.abs().max():g}"
    return Outcome(PASS, message)


def gradient_entries(answer: Answer) -> torch.Tensor:
    """Return the entries of all gradients of an answer, (n,)."""
    entries = [
        values.reshape(-1)
        for name, values in answer.computed.items()
        if name != "loss" and values is not None
    ]
    return torch.cat(entries) if entries else torch.zeros(0)


def listed(values: torch.Tensor) -> str:
    """Return numbers as text: "1.5" for one, "(1.5, 2)" for several."""
    numbers = [f"{value:.6g}" for value in values.reshape(-1).tolist()]
    return numbers[0] if len(numbers) == 1 else f"({', '.join(numbers)})"
