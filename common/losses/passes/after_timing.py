"""Judge a loss again in the process that timed it: after the last sample, untimed, and after many
calls.

The correctness pass judges a loss in a fresh process.  A loss that is wrong here has no times:

- The loss of the last timed step of each batch, against the float64 loss.
- Of the last timed step of the scope, of another batch in each round: its inputs, which must be
  what they were bit for bit, and its gradient, each leaf by itself, by random sums
  (`losses.gradients.Sketch`) whose seed is drawn after the last sample.
- Where repeats have the same numbers, as on CUDA: one more step on other numbers.
- In the first rounds one of the HARD questions of `core/questions.py`, on the lightest measured
  batch: half of its utterances, at least two, are one loss in flight, as many in reverse order the
  other: together they take the memory of one step.

The oracle takes longer than a step, so the losses of a round that are given the same numbers share
its answers.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from rnnt_bench.core.errors import WrongResult
from rnnt_bench.core.questions import HARD, Question, Shapes
from rnnt_bench.core.settings import FEWEST_IN_BUDGET
from rnnt_bench.core.text import finite
from rnnt_bench.data.batching import lightest
from rnnt_bench.losses import layouts, questions, rounding, words
from rnnt_bench.losses.gradients import Sketch
from rnnt_bench.losses.inputs import OUTPUTS, Batch
from rnnt_bench.losses.judge import ONE, Factors, Right, gradient_of
from rnnt_bench.losses.step import (
    LossStep,
    changed,
    fingerprints,
    leaves_of,
    prepare,
    remembered,
    run_together,
)
from rnnt_bench.records.schema import Stop

#: Repeat of the further step: its numbers are those of no timed step, and the same for all losses
#: of a round.
FURTHER_REPEAT = 1 << 20


@dataclass
class Taken:
    """Hold the last timed step of a batch: its loss, and the ranges of a pruned one."""

    repeat: int
    loss: float
    ranges: torch.Tensor | None
    # of the last step of a scope alone
    inputs: dict[str, bytes] = field(default_factory=dict)  # of what the loss may only read
    sketch: Sketch | None = None  # of its gradients

    def keep(self, context, scope: str, step: LossStep) -> None:
        """Keep what is judged of the inputs and gradients of the last step of a scope."""
        names = ("targets", "T_lengths", "U_lengths", *OUTPUTS)
        self.inputs = fingerprints({name: getattr(step.batch, name) for name in names})
        if not context.forward_only:
            self.sketch = sketch_of(context, scope, [step])


def sketch_of(context, scope: str, steps: Sequence[LossStep], factors: Factors = (ONE,)) -> Sketch:
    """Return the sketch of the gradients that the loss computed."""
    right = Right(context.adapter, context.model, scope, steps, factors)
    return right.sketch_of_loss(seed_of(context))


def seed_of(context) -> int:
    """Return the seed of the round, the same for all its losses; it is drawn when it is first asked
    for."""
    if context.seed is None:

        def drawn() -> dict[str, list[float]]:
            return {"seed": [float(int.from_bytes(os.urandom(6), "big"))]}

        (seed,) = remembered(context.shared, ("seed", context.round), {}, drawn)["seed"]
        context.seed = int(seed)
    return context.seed


def precision(context) -> str:
    """Return the key of rounding.PRECISIONS of what is timed."""
    return "tf32" if context.settings.tf32 else context.settings.dtype


class Rights(NamedTuple):
    """Hold what is right of steps that are run together."""

    losses: list[float]  # of the steps, summed over the batch
    score: float  # the largest magnitude of the logits
    most: float  # the largest loss of an utterance
    leaves: dict[str, list[float]]  # of each: the length of its gradient, then the sums of a Sketch


def rights_of(context, scope: str, steps: Sequence[LossStep], factors: Factors = (ONE,)) -> Rights:
    """Return what is right of steps that are run together; of steps without leaves the losses
    alone.

    Some frames at a time are made from encoder and decoder outputs, or in scope "loss" from the
    logits that are given.
    """
    adapter, layout = context.adapter, layouts.of(context.adapter)
    tensors: dict[str, Any] = {}
    names: list[str] = []
    for number, step in enumerate(steps):
        ranges = getattr(step.prepared, "ranges", None)
        read = {"targets": step.batch.targets, "ranges": ranges}
        for name, tensor in {**leaves_of(context.model, step.batch), **read}.items():
            tensors[f"{name} {number}"] = tensor
        names += [f"{name} {number}" for name, leaf in step.leaves.items() if leaf.requires_grad]
    seed = seed_of(context) if names else 0
    numbers = [(step.batch.shapes, factor.tolist()) for step, factor in zip(steps, factors)]
    added = scope if layout.approximate else ""  # a step of a pruned loss adds the simple one
    question = [adapter.lattice, adapter.blank, added, context.dtype, seed, names, numbers]

    def compute() -> dict[str, list[float]]:
        # on a CPU twice as fast as in float64, and as good where a leaf may be off by a hundredth
        narrow = names and context.device.type == "cpu" and context.dtype == torch.float32
        dtype = torch.float32 if narrow else torch.float64
        right = Right(adapter, context.model, scope, steps, factors, dtype)
        sketch = right.sketch(seed)
        most = float(torch.cat(right.losses).abs().max())
        return {
            "": [right.score, most, *(float(loss.sum()) for loss in right.losses)],
            **sketch.numbers(),
        }

    leaves = remembered(context.shared, question, tensors, compute)
    score, most, *losses = leaves.pop("")
    return Rights(losses, score, most, leaves)


def judge_losses(
    context, shapes: Shapes, losses: Iterable[float], rights: Rights
) -> tuple[float, str]:
    """Return (the largest relative error of the losses of steps, what is wrong in words or "")."""
    errors, wrong = [], ""
    for loss, right in zip(losses, rights.losses):
        limits = rounding.allowed(
            precision(context), shapes, rights.score, rights.most, right=right
        )
        errors.append(abs(loss - right) / max(abs(right), rounding.TINY))
        if not errors[-1] <= limits.loss and not wrong:
            wrong = f"{words.of_values(loss, right, shapes)}; {limits.loss:.0e} is allowed"
    return max(errors), wrong


def judge_loss(context, scope: str, inputs: Batch, prepared: Any, loss: float) -> tuple[float, str]:
    """Return (the relative error of the loss of a batch, what is wrong in words or "")."""
    alone = LossStep(lambda: ONE, inputs, prepared, {})
    return judge_losses(context, inputs.shapes, [loss], rights_of(context, scope, [alone]))


def judge_gradient(
    context, shapes: Shapes, sketch: Sketch, rights: Rights, scale: float = 1.0
) -> tuple[float, str]:
    """Return (the largest error of a leaf's gradient, what is wrong in words or "").  scale: the
    largest factor."""
    largest = max(length for length, *_ in rights.leaves.values()) / scale
    limits = rounding.allowed(
        precision(context), shapes, rights.score, rights.most, largest=largest
    )
    errors = sketch.errors(rights.leaves)
    name = max(errors, key=errors.__getitem__)
    if errors[name] <= limits.length:
        return errors[name], ""
    amount = f"{words.size(errors[name])} of its length; {limits.length:.0e} is allowed"
    return errors[name], f"the {gradient_of(name)} {amount}"


def check(context, scope: str, taken: Mapping[int, Taken]) -> tuple[float, float, str]:
    """Return (the largest relative error of the losses, that of the gradient, what is wrong in
    words or "")."""
    adapter, model = context.adapter, context.model
    errors, grad_error, wrong = [0.0], 0.0, []
    for batch, step in taken.items():
        inputs = context.new_batch(batch, 0 if batch in context.held else step.repeat)
        shapes = inputs.shapes
        where = f"scope {scope}, batch {batch} ({words.sizes(shapes)})"
        now = {name: getattr(inputs, name) for name in step.inputs}
        if overwritten := ", ".join(changed(step.inputs, now)):
            wrong.append(f"{where}: it overwrites {overwritten}, which it may only read")
        prepared = layouts.of(adapter).prepare(inputs)
        if step.ranges is not None:
            prepared.ranges = step.ranges
        error, line = judge_loss(context, scope, inputs, prepared, step.loss)
        errors.append(error)
        if step.sketch and not line:
            fresh = prepare(adapter, model, inputs, scope)
            if (
                step.ranges is None
                or scope == "step"
                or torch.equal(step.ranges, fresh.prepared.ranges)
            ):
                fresh.prepared = prepared
                rights = rights_of(context, scope, [fresh])
                grad_error, line = judge_gradient(context, shapes, step.sketch, rights)
        if line:
            wrong.append(f"{where}: of the last step, {line}")
    if context.held and not context.loops_in_python:
        last = next(batch for batch, step in taken.items() if step.inputs)
        inputs = context.new_batch(last, FURTHER_REPEAT)
        further = prepare(adapter, model, inputs, scope)
        error, line = judge_loss(context, scope, inputs, further.prepared, float(further.run()))
        errors.append(error)
        if line:
            wrong.append(f"scope {scope}: of one more step with other numbers, {line}")
    return finite(max(errors)), finite(grad_error), wrong[0] if wrong else ""


def hard_questions(context) -> Sequence[Question]:
    """Return those of this round: each once in a run, in the first rounds, of one row of the same
    code."""
    if context.forward_only or context.loops_in_python or context.same_as:
        return ()
    several = min(context.settings.rounds, FEWEST_IN_BUDGET, len(HARD))
    return HARD[(context.round or 1) - 1 :: several]


def ask_hard(context, question: Question) -> str:
    """Ask a hard question on the lightest measured batch; return what is wrong in words.  It
    changes the weights."""
    question = questions.of_dtype(
        question, "float16" if precision(context) == "tf32" else context.settings.dtype
    )
    batch, factors = lightest(context.all_batches, context.batches), questions.factors_of(question)
    # of one alone the reverse has the same lengths
    half = max(2, -(-len(context.all_batches[batch]) // 2))
    batches = [
        context.new_batch(batch, FURTHER_REPEAT + 1 + n, half, reverse=n > 0)
        for n in range(len(factors))
    ]
    questions.scale_weights(question, context.model, batches[0])
    questions.set_up_leaves(context.adapter, question, context.model, batches)
    steps = [prepare(context.adapter, context.model, batch, "step") for batch in batches]
    losses = run_together(steps, factors)
    sketch = sketch_of(context, "step", steps, factors)
    rights = rights_of(context, "step", steps, factors)
    shapes = batches[0].shapes
    _, line = judge_losses(context, shapes, map(float, losses), rights)
    if not line:
        scale = max(map(abs, question.upstream))
        _, line = judge_gradient(context, shapes, sketch, rights, scale)
    return line and f"asked for {question.title} ({words.sizes(shapes)} each): {line}"


def run(context, ends: Sequence[tuple[Stop, Mapping[int, Taken]]], rounded: str) -> Iterator[Stop]:
    """Yield the ``stop`` record of each scope with its errors; raise WrongResult after one that is
    wrong.

    rounded: names of the weights that the loss has written over."""
    for end, taken in ends:
        wrong = f"it overwrites {rounded}, which it may only read" if rounded else ""
        if taken and not wrong:
            end.loss_error, end.grad_error, wrong = check(context, end.scope, taken)
            end.seed = seed_of(context)
            if not wrong and end is ends[-1][0]:
                asked = (ask_hard(context, question) for question in hard_questions(context))
                wrong = next(filter(None, asked), "")
        yield end
        if wrong:
            raise WrongResult(f"after timing, {wrong}")
