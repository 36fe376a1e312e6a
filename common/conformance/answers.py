"""Let a package answer a question of the table: tell refusals from answers, and an answer from the
right one.

`losses.questions` makes the steps, and `losses.judge` compares them, as they do in a run.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rnnt_bench.conformance.outcomes import DIFFERS, NAN_GRADIENT, PASS, Outcome
from rnnt_bench.core import text
from rnnt_bench.core.questions import AT_SIZE, Question
from rnnt_bench.losses import inputs, judge, layouts, questions
from rnnt_bench.losses.adapter import Adapter
from rnnt_bench.losses.inputs import Joiner
from rnnt_bench.losses.judge import Answer, Factors
from rnnt_bench.losses.step import LossStep, NotOfEach, run_together
from rnnt_bench.system.memory import is_out_of_memory

Run = Callable[[list[LossStep], Factors], list[torch.Tensor]]


class Refused(Exception):
    """The loss raised an error and gave no answer; `stage` is "" or "in backward"."""

    def __init__(self, error: BaseException, stage: str = ""):
        self.reason = message(error)
        super().__init__(f"{stage}: {self.reason}" if stage else self.reason)


class NotAsked(Exception):
    """The case does not apply to this adapter here; the message says why."""


class ContextLost(Exception):
    """An error of the loss left the CUDA context unusable; the message is that of the error."""


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

    Raises NotAsked if memory runs out, ContextLost if an error left the device unusable, else
    Refused."""
    device = steps[0].batch.targets.device
    try:
        losses = run(steps, factors)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return losses
    except NotOfEach:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise NotAsked(f"not enough memory: {message(error)}") from error
        if context_lost(device):
            raise ContextLost(message(error)) from error
        raise Refused(
            error, "in backward" if all(step.answer is not None for step in steps) else ""
        ) from error


@dataclass
class Examination:
    """A question to an adapter on a device."""

    adapter: Adapter
    device: torch.device
    question: Question

    def but(self, **values: Any) -> Examination:
        """Return the examination with another question."""
        return Examination(self.adapter, self.device, self.question.but(**values))

    @property
    def interpreted(self) -> bool:
        """Return whether Python runs its kernels, thread by thread, which takes minutes for a small
        batch."""
        return self.adapter.simulated and not self.adapter.simulator_compiled

    @property
    def dtype(self) -> str:
        return self.question.dtype or "float32"

    def must_apply(self) -> None:
        """Raise NotAsked for what the adapter does not have."""
        adapter, question = self.adapter, self.question
        if self.interpreted and question.slow:
            raise NotAsked("not in a simulator, which would take hours")
        if self.device.type in adapter.python_loops and question.shapes == AT_SIZE:
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
        if question.blank and adapter.but(blank=question.blank).options() == adapter.options():
            raise NotAsked("it has no option for the blank: it is symbol 0")
        _, T, U = inputs.padded_sizes(question.shapes)
        slack = question.slack
        is_padded = question.logits == "sine" and (question.garbage is not None or any(slack))
        if (
            is_padded
            and layouts.of(adapter).padding(question.shapes, T + slack[0], U + slack[1]) is None
        ):
            raise NotAsked("its layout has no padding")

    def ready(self) -> tuple[Adapter, Joiner, list[LossStep]]:
        """Return the adapter as the question needs it, the joiner, and the steps of the first
        scope."""
        self.must_apply()
        dtype, scope = getattr(torch, self.dtype), layouts.of(self.adapter).scopes[0]
        adapter, model, batches = questions.given(self.adapter, self.question, self.device, dtype)
        return adapter, model, questions.steps_of(adapter, self.question, model, batches, scope)

    def run(self) -> tuple[LossStep, torch.Tensor]:
        """Return the step after it ran, and its loss."""
        (step,) = self.ready()[2]
        (loss,) = attempt(run_together, [step], questions.factors_of(self.question))
        return step, loss

    def answer(self, run: Run = run_together, factors: Factors | None = None) -> Answer:
        """Return the answer in the first scope; `run` runs the step, and `factors` are of its
        losses."""
        adapter, model, steps = self.ready()
        scope, factors = (
            layouts.of(adapter).scopes[0],
            factors or questions.factors_of(self.question),
        )
        return judge.ask(
            adapter,
            model,
            steps,
            scope,
            lambda: self.ready()[1:],
            factors,
            run=partial(attempt, run),
        )

    def right_losses(self) -> torch.Tensor:
        """Return the right losses (N,), float64."""
        adapter, model, steps = self.ready()
        factors = questions.factors_of(self.question)
        right = judge.Right(adapter, model, layouts.of(adapter).scopes[0], steps, factors)
        right.lattices()
        return right.losses[0]

    def outcome(self, run: Run = run_together, has_gradient: bool = True) -> Outcome:
        """Return the outcome in all scopes that the question is asked in: the first that is wrong,
        else the last."""
        self.must_apply()
        dtype, asked = getattr(torch, self.dtype), [self.question.but(may_refuse=False)]
        result = Outcome(PASS)
        for _, answer in questions.answers(
            self.adapter, self.device, dtype, asked, run=partial(attempt, run)
        ):
            result = compare(answer, self.adapter, self.dtype, has_gradient)
            if result.result != PASS:
                break
        return result


def compare(answer: Answer, adapter: Adapter, dtype: str, has_gradient: bool = True) -> Outcome:
    """Return the outcome of an answer.  Raises Refused where a gradient is missing."""
    loss, right, padding = answer.losses, answer.rights, answer.errors.padding
    gradients = [
        gradient
        for name, gradient in answer.given.items()
        if name != "loss" and gradient is not None
    ]
    if not right.isfinite().all():
        return _without_path(loss, right, gradients)
    if has_gradient and any(leaf.missing for leaf in answer.errors.leaves.values()):
        raise Refused(RuntimeError("backward left the logits without a gradient"), "in backward")
    grad_error = answer.grad_error if has_gradient else None
    limits = answer.allowed(adapter, dtype)
    is_nan = any(gradient.isnan().any() for gradient in gradients)
    wrong = []
    if not answer.loss_error <= limits.loss:
        wrong.append(
            f"loss {listed(loss)} instead of {listed(right)} (off by {size(answer.loss_error)})"
        )
    if grad_error is not None and not grad_error <= limits.gradient:
        wrong.append(NAN_GRADIENT if is_nan else f"gradient off by {size(grad_error)}")
    if padding:
        wrong.append(f"gradient in the padding {'nan' if is_nan else size(padding)} instead of 0")
    return Outcome(DIFFERS if wrong else PASS, "; ".join(wrong), answer.loss_error, grad_error)


def _without_path(
    loss: torch.Tensor, right: torch.Tensor, gradients: Sequence[torch.Tensor]
) -> Outcome:
    """Return the outcome where an utterance has no path: its loss must be infinite; the message
    tells the gradient."""
    if not torch.isinf(loss[~torch.isfinite(right)]).all():
        return Outcome(
            DIFFERS,
            f"loss {listed(loss)} where its lattice has no path: must be infinite or refused",
        )
    message = "no path through its lattice: an infinite loss"
    if not gradients:
        return Outcome(PASS, message)
    gradient = torch.cat([each.detach().reshape(-1) for each in gradients])
    if gradient.isnan().any():
        return Outcome(PASS, f"{message}, {NAN_GRADIENT}")
    if gradient.isinf().any():
        return Outcome(PASS, f"{message}, gradient infinite")
    return Outcome(PASS, f"{message}, gradient {'not' if (gradient != 0).any() else 'all'} 0")


def size(value: float) -> str:
    """Return an error as text ("1.2e-03", "nan")."""
    return "nan" if value != value else f"{value:.1e}"


def listed(values: torch.Tensor) -> str:
    """Return numbers as text: "1.5" for one, "(1.5, 2)" for several."""
    words = [f"{value:.6g}" for value in values.reshape(-1).tolist()]
    return words[0] if len(words) == 1 else f"({', '.join(words)})"
