"""Let a package answer a question of the table: tell refusals from answers, and an answer from the
right one.

`losses.questions` makes the steps, and `losses.judge` compares them, as they do in a run.
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
    """Tells that the loss raised an error and gave no answer; its message, and whether it came in
    backward."""


class NotAsked(Exception):
    """Tells that the case does not apply to this adapter here; the message says why."""


def context_lost(device: torch.device) -> bool:
    """Return whether every operation on `device` fails, as after an illegal access or a device-side
    assert; a launch error is cleared once it was read, so a second try works."""
    for _ in range(2 if device.type == "cuda" else 0):
        try:
            torch.zeros(1, device=device).add_(1).item()
            return False
        except Exception as error:
            if is_out_of_memory(error):
                return False
    return device.type == "cuda"


def message(error: BaseException) -> str:
    """Return the first line of an error, without folders; of an assertion its line of source."""
    line = text.reason_of(error)
    if isinstance(error, AssertionError) and error.__traceback__ is not None:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        line = f"AssertionError: {frame.line or line} ({Path(frame.filename).name}:{frame.lineno})"
    return text.clipped(text.without_folders(line))


def attempt(run: Run, steps: list[LossStep], factors: Factors) -> list[torch.Tensor]:
    """Return the losses that `run` returns, after waiting for the device, so that late errors of
    CUDA count.

    Raises NotAsked if memory runs out, and Refused for an error of the loss that leaves the device
    usable."""
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
        if all(step.answer is not None for step in steps):
            raise Refused(f"in backward: {message(error)}") from error
        raise Refused(message(error)) from error


@dataclass
class Examination:
    """Ask an adapter a question on a device."""

    adapter: Adapter
    device: torch.device
    question: Question

    def __post_init__(self) -> None:
        self.scope: str = layouts.of(self.adapter).scopes[0]  # the first one of the loss
        self.must_apply()

    def but(self, **values: Any) -> Examination:
        """Return the examination with another question."""
        return Examination(self.adapter, self.device, self.question.but(**values))

    @property
    def interpreted(self) -> bool:
        """Return whether Python runs its kernels, thread by thread, which takes minutes for a small
        batch."""
        return self.adapter.simulated and not self.adapter.simulator_compiled

    def must_apply(self) -> None:
        """Raise NotAsked for what the adapter does not have."""
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
        durations, is_tdt = adapter.lattice.durations, adapter.topology == "tdt"
        if (question.durations and not is_tdt) or (question.sigma is not None and not durations):
            raise NotAsked("it predicts no durations")
        if not questions.gives_each(adapter, question):
            raise NotAsked("it has no losses of utterances, only their sum")
        if question.blank and adapter.but(blank=question.blank).options() == adapter.options():
            raise NotAsked("it has no option for the blank: it is symbol 0")
        pads_logits = question.garbage is not None or any(question.slack)
        is_padded = layouts.of(adapter).padding(question.shapes)["given"]
        if question.logits == "sine" and pads_logits and not is_padded:
            raise NotAsked("its layout has no padding")

    def ready(self) -> tuple[Adapter, Joiner, list[LossStep]]:
        """Return the adapter as the question needs it, the joiner, and the steps of the scope."""
        return questions.ready(self.adapter, self.question, self.device, self.scope)

    def answer(self, run: Run = run_together, factors: Factors = ()) -> Answer:
        """Return the answer in the scope; `run` runs the step, and `factors` are of its losses."""
        attempted = partial(attempt, run)
        return questions.answer(
            self.adapter, self.question, self.device, self.scope, factors, attempted
        )

    def right_losses(self) -> torch.Tensor:
        """Return the right losses (N,), float64."""
        adapter, model, steps = self.ready()
        factors = questions.factors_of(self.question)
        right = judge.Right(adapter, model, self.scope, steps, factors)
        right.lattices()
        return right.losses[0]

    def outcome(self, run: Run = run_together, has_gradient: bool = True) -> Outcome:
        """Return the outcome in all scopes that the question is asked in: the first that is wrong
        or imprecise, else the last."""
        attempted = partial(attempt, run)
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
        """Return the outcome of an answer; `run` ran its steps.  Raises Refused where a gradient is
        missing."""
        if not answer.rights.isfinite().all():
            return _without_path(answer)
        leaves = answer.errors.leaves.values()
        if has_gradient and any(leaf.missing for leaf in leaves):
            raise Refused("in backward: it left the logits without a gradient")
        verdict = questions.verdict(self.adapter, self.device, self.question, answer, run=run)
        wrong = [line for line in verdict.wrong if has_gradient or not line.leaf]
        message = ""
        if wrong:
            message = words.of_answer(answer, wrong)
        elif verdict.imprecise is not None:
            message = f"{IMPRECISE}{words.size(verdict.imprecise)} in float32, right in float64"
        grad_error = answer.grad_error if has_gradient else None
        return Outcome(DIFFERS if wrong else PASS, message, answer.loss_error, grad_error)


def _without_path(answer: Answer) -> Outcome:
    """Return the outcome where an utterance has no path: its loss must be infinite; the message
    tells the gradient."""
    infinite = answer.losses[~answer.rights.isfinite()].isinf()
    if not infinite.all():
        line = f"loss {listed(answer.losses)} where its lattice has no path"
        return Outcome(DIFFERS, f"{line}: must be infinite or refused")
    message = "no path through its lattice: an infinite loss"
    gradients = [
        gradient.reshape(-1)
        for name, gradient in answer.given.items()
        if name != "loss" and gradient is not None
    ]
    if gradients:
        message += f", gradient up to {torch.cat(gradients).abs().max():g}"
    return Outcome(PASS, message)


def listed(values: torch.Tensor) -> str:
    """Return numbers as text: "1.5" for one, "(1.5, 2)" for several."""
    numbers = [f"{value:.6g}" for value in values.reshape(-1).tolist()]
    return numbers[0] if len(numbers) == 1 else f"({', '.join(numbers)})"
