"""Judge a loss again in the process that timed it: after the last sample, untimed, and after many
calls.

The correctness pass judges a loss in a fresh process.  A loss that is wrong here has no times:

- The loss of the last timed step of each batch, against the float64 loss.
- Of the last timed step of the scope, of another batch in each round: its inputs, which must be
  what they were bit for bit, and its gradient, each leaf by itself, by random sums
  (`losses.judge.Sketch`) whose seed is drawn after the last sample.
- Where repeats have the same numbers, as on CUDA: one more step on other numbers.
- In the first rounds one of the HARD questions of `core/questions.py`, on the lightest measured
  batch: half of its utterances, at least two, are one loss in flight, as many in reverse order the
  other: together they take the memory of one step.

The oracle takes longer than a step, so the losses of a round that are given the same numbers share
its answers.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from rnnt_bench.core.errors import WrongResult
from rnnt_bench.core.questions import HARD, Question
from rnnt_bench.core.settings import FEWEST_IN_BUDGET
from rnnt_bench.core.text import finite
from rnnt_bench.data.batching import lightest
from rnnt_bench.losses import layouts, oracle, questions, rounding, words
from rnnt_bench.losses.inputs import OUTPUTS
from rnnt_bench.losses.judge import ONE, OTHER, Factors, Right, Sketch, gradient_of, parts
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


@dataclass
class Last:
    """Hold the last timed step of a scope."""

    batch: int
    inputs: dict[str, bytes]  # fingerprints of what the loss may only read
    sketch: Sketch  # of its gradients

    @classmethod
    def taken(cls, context, scope: str, batch: int, step: LossStep) -> Last:
        read = {
            name: getattr(step.batch, name)
            for name in ("targets", "T_lengths", "U_lengths", *OUTPUTS)
        }
        right = Right(context.adapter, context.model, scope, [step], [ONE])
        return cls(batch, fingerprints(read), right.sketch_of_loss(seed_of(context)))


def seed_of(context) -> int:
    """Return the seed of the round, the same for all its losses; it is drawn when it is first asked
    for."""
    if context.seed is None:
        question = ("seed", context.round)
        (seed,) = remembered(
            context.shared, question, {}, lambda: [float(int.from_bytes(os.urandom(6), "big"))]
        )
        context.seed = int(seed)
    return context.seed


def precision(context) -> str:
    """Return the key of rounding.PRECISIONS of what is timed."""
    return "tf32" if context.settings.tf32 else context.settings.dtype


def expected(context, scope: str, batch: Any, prepared: Any) -> tuple[float, float]:
    """Return (the right loss of a step, summed over the batch; the largest magnitude of its
    logits).

    The scores of some frames at a time are made in float64 from encoder and decoder outputs, in
    both scopes.
    """
    adapter, layout, model = context.adapter, layouts.of(context.adapter), context.model
    leaves = leaves_of(model, batch)
    tensors = {**leaves, "targets": batch.targets, "ranges": getattr(prepared, "ranges", None)}
    question = [
        layout.step_cells.__qualname__,
        adapter.lattice,
        adapter.blank,
        context.dtype,
        batch.shapes,
    ]
    if layout.approximate:
        question.append(scope)

    def of_lattice() -> list[float]:
        step = LossStep(lambda: ONE, batch, prepared, leaves)
        right = Right(adapter, model, "step", [step], [ONE])
        (cells,), loss = right.cells, 0.0
        for n in range(len(batch.shapes)):
            loss -= oracle.log_likelihood(adapter.lattice.arcs(parts(cells, n, adapter)))
            with torch.no_grad():
                loss += right.beside(0, n) if scope == "step" else 0.0
        return [loss, cells.score]

    loss, score = remembered(context.shared, question, tensors, of_lattice)
    return loss, score


class Rights(dict[str, list[float]]):
    """Hold for each leaf the length of the right gradient, then its sums; `losses` of the steps,
    `score` of the logits, and the largest loss of an utterance."""

    losses: list[float]
    score: float
    most: float


def sketched(context, scope: str, steps: Sequence[LossStep], factors: Factors) -> Rights:
    """Return what is right of steps that are run together."""
    adapter, layout, seed = context.adapter, layouts.of(context.adapter), seed_of(context)
    tensors: dict[str, Any] = {}
    for number, step in enumerate(steps):
        leaves = leaves_of(context.model, step.batch)
        read = {
            **leaves,
            "targets": step.batch.targets,
            "ranges": getattr(step.prepared, "ranges", None),
        }
        tensors.update({f"{name} {number}": value for name, value in read.items()})
    cells = layout.step_cells if scope == "step" else layout.cells
    names = [
        name + OTHER * (number > 0 and name in OUTPUTS)
        for number, step in enumerate(steps)
        for name, leaf in step.leaves.items()
        if leaf.requires_grad and (number == len(steps) - 1 or name in OUTPUTS)
    ]
    about = [
        f"sketch by {cells.__qualname__}",
        adapter.lattice,
        adapter.blank,
        context.dtype,
        seed,
        names,
    ]
    about.append([(step.batch.shapes, factor.tolist()) for step, factor in zip(steps, factors)])

    def compute() -> list[float]:
        # on a CPU twice as fast as in float64, and as good where a leaf may be off by a hundredth
        narrow = context.device.type == "cpu" and context.dtype == torch.float32
        dtype = torch.float32 if narrow else torch.float64
        right = Right(adapter, context.model, scope, steps, factors, dtype)
        sketch = right.sketch(seed)
        numbers = [
            right.score,
            float(torch.cat(right.losses).abs().max()),
            *(float(loss.sum()) for loss in right.losses),
        ]
        for name in names:
            numbers.append(sketch.squares[name] ** 0.5)
            numbers += sketch.sums[name].tolist() if name in sketch.sums else [0.0] * Sketch.COUNT
        return numbers

    numbers = iter(remembered(context.shared, about, tensors, compute))
    rights = Rights()
    rights.score, rights.most = next(numbers), next(numbers)
    rights.losses = [next(numbers) for _ in steps]
    for name in names:
        rights[name] = [next(numbers) for _ in range(1 + Sketch.COUNT)]
    return rights


def judged(
    context, shapes: Sequence[tuple[int, int]], sketch: Sketch, rights: Rights, scale: float = 1.0
):
    """Return (the largest error of a leaf's gradient, what is wrong in words or "").  scale: the
    largest factor."""
    largest = max((length for length, *_ in rights.values()), default=1.0) / scale
    limits = rounding.allowed(
        precision(context), shapes, rights.score, rights.most, largest=largest
    )
    errors = sketch.errors(rights)
    wrong = {name: error for name, error in errors.items() if not error <= limits.length}
    if not wrong:
        return max(errors.values(), default=0.0), ""
    name = max(wrong, key=wrong.__getitem__)
    line = f"the {gradient_of(name)} {words.size(wrong[name])} of its length; {limits.length:.0e} is allowed"
    return wrong[name], line


def compared(context, scope: str, inputs: Any, prepared: Any, loss: float) -> tuple[float, str]:
    """Return (relative error of the loss, what is wrong in words or "")."""
    right, score = expected(context, scope, inputs, prepared)
    limits = rounding.allowed(precision(context), inputs.shapes, score, right)
    return of_loss(loss, right, limits.loss, inputs.shapes)


def of_loss(
    loss: float, right: float, most: float, shapes: Sequence[tuple[int, int]]
) -> tuple[float, str]:
    error = abs(loss - right) / max(abs(right), rounding.TINY)
    if error <= most:
        return error, ""
    guess = words.guess(loss, right, [*shapes])
    return error, f"the loss is {loss:.6g}, expected {right:.6g}{guess}; {most:.0e} is allowed"


def check(context, scope: str, taken: Mapping[int, Taken], last: Last) -> tuple[float, float, str]:
    """Return (the largest relative error of the losses, that of the gradient, what is wrong in
    words or "")."""
    errors, grad_error, wrong = [0.0], 0.0, []
    for batch, step in taken.items():
        inputs = context.new_batch(batch, 0 if batch in context.held else step.repeat)
        where = f"after timing, scope {scope}, batch {batch} ({words.sizes(inputs.shapes)})"
        if batch == last.batch:
            overwritten = changed(
                last.inputs, {name: getattr(inputs, name) for name in last.inputs}
            )
            if overwritten:
                wrong.append(
                    f"{where}: it overwrites {', '.join(overwritten)}, which it may only read"
                )
        prepared = layouts.of(context.adapter).prepare(inputs)
        if step.ranges is not None:
            prepared.ranges = step.ranges
        error, line = compared(context, scope, inputs, prepared, step.loss)
        errors.append(error)
        wrong += [f"{where}: of the last timed step, {line}"] if line else []
        if batch == last.batch and not line and not context.forward_only:
            fresh = prepare(context.adapter, context.model, inputs, scope)
            if (
                step.ranges is None
                or scope == "step"
                or torch.equal(step.ranges, fresh.prepared.ranges)
            ):
                fresh.prepared = prepared
                grad_error, line = judged(
                    context, inputs.shapes, last.sketch, sketched(context, scope, [fresh], [ONE])
                )
                wrong += [f"{where}: of the last timed step, {line}"] if line else []
    if context.held and not context.loops_in_python:
        inputs = context.new_batch(last.batch, FURTHER_REPEAT)
        further = prepare(context.adapter, context.model, inputs, scope)
        error, line = compared(context, scope, inputs, further.prepared, float(further.run()))
        errors.append(error)
        wrong += (
            [f"after timing, scope {scope}: of one more step with other numbers, {line}"]
            if line
            else []
        )
    return finite(max(errors)), finite(grad_error), wrong[0] if wrong else ""


def hard_questions(context) -> Sequence[Question]:
    """Return those of this round: each once in a run, in the first rounds, of one row of the same
    code."""
    if context.forward_only or context.loops_in_python or context.same_as:
        return ()
    several = min(context.settings.rounds, FEWEST_IN_BUDGET, len(HARD))
    return HARD[(context.round or 1) - 1 :: several]


def ask_hard(context, scope: str, question: Question) -> str:
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
    questions.change(question, context.model, batches[0])
    questions.freeze(question, context.model, batches)
    ready = partial(prepare, context.adapter, context.model, scope=scope)
    steps = [ready(batch) for batch in batches]
    losses = run_together(steps, factors)
    sketch = Right(context.adapter, context.model, scope, steps, factors).sketch_of_loss(
        seed_of(context)
    )
    if scope == "loss":
        steps = [ready(batch) for batch in batches]
    rights = sketched(context, scope, steps, factors)
    shapes = batches[0].shapes
    for loss, right in zip(losses, rights.losses):
        limits = rounding.allowed(
            precision(context), shapes, rights.score, rights.most, right=right
        )
        _, line = of_loss(float(loss), right, limits.loss, shapes)
        if line:
            break
    else:
        _, line = judged(
            context, shapes, sketch, rights, max(abs(factor) for factor in question.upstream)
        )
    return line and f"after timing, asked for {question.title} ({words.sizes(shapes)} each): {line}"


def run(
    context, ends: Sequence[tuple[Stop, Mapping[int, Taken], Last | None]], rounded: str
) -> Iterator[Stop]:
    """Yield the ``stop`` record of each scope with its errors; raise WrongResult after one that is
    wrong.

    rounded: names of the weights that the loss has written over."""
    for end, taken, last in ends:
        wrong = f"after timing: it overwrites {rounded}, which it may only read" if rounded else ""
        if last is not None and not wrong:
            end.loss_error, end.grad_error, wrong = check(context, end.scope, taken, last)
            end.seed = last.sketch.seed
            if not wrong and end is ends[-1][0]:
                scope = layouts.of(context.adapter).scopes[-1]
                asked = (ask_hard(context, scope, question) for question in hard_questions(context))
                wrong = next(filter(None, asked), "")
        yield end
        if wrong:
            raise WrongResult(wrong)
