"""Judge a loss again in the process that timed it, after its last sample.

The correctness pass judges a loss in a fresh process.  Here the loss has been called many times.
A loss that is wrong here has no times.  What is judged:

- The loss of the last timed step of each batch, against the float64 loss.
- The inputs of the last timed step of a scope: they must have the bits that they had.
- The gradient of this step, leaf by leaf, by random sums (`losses.gradients.Sketch`) whose seed is
  drawn after the last sample.  The step is of another batch in each round.
- One more step on other numbers, where all repeats had the same ones, as on CUDA.
- In the first rounds one of the HARD questions of `core/questions.py`, on the lightest measured
  batch.  Two losses are in flight: one of half of its utterances, at least two, and one of as many
  in reverse order.  Together they take the memory of one step.

The oracle takes longer than a step, so the losses of a round that are given the same numbers share
its answers.
"""

from __future__ import annotations

import math
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
    """Hold what is judged of the last timed step of a batch.

    Attributes:
        repeat: number of the draw of its inputs.
        loss: its loss.
        ranges: the ranges of a pruned loss, else None.
        inputs: digests of what the loss may only read, by name; {} unless the step is the last of
            its scope.
        sketch: of its gradients; None unless the step is the last of its scope.
    """

    repeat: int
    loss: float
    ranges: torch.Tensor | None
    inputs: dict[str, bytes] = field(default_factory=dict)
    sketch: Sketch | None = None

    def keep(self, context, scope: str, step: LossStep) -> None:
        """Keep digests of the inputs of the last step of a scope and, unless it is --mode forward,
        the sketch of its gradients."""
        names = ("targets", "T_lengths", "U_lengths", *OUTPUTS)
        self.inputs = fingerprints({name: getattr(step.batch, name) for name in names})
        if not context.forward_only:
            self.sketch = sketch_of(context, scope, [step])


def sketch_of(context, scope: str, steps: Sequence[LossStep], factors: Factors = (ONE,)) -> Sketch:
    """Return the sketch of the gradients that the loss computed, with the seed of `seed_of`.

    steps: those that were run together, with `factors`."""
    right = Right(context.adapter, context.model, scope, steps, factors)
    return right.sketch_of_loss(seed_of(context))


def seed_of(context) -> int:
    """Return the seed of the random sums, and set `context.seed` to it.

    It is the same for all losses of a round: the first job that needs it draws it."""
    if context.seed is None:
        key = ("seed", context.round)
        context.seed = int(
            remembered(context.shared, key, tensors={}, compute=draw_seed)["seed"][0]
        )
    return context.seed


def draw_seed() -> dict[str, list[float]]:
    """Return a random seed of 48 bits, which a float holds exactly, as `remembered` keeps it."""
    return {"seed": [float(int.from_bytes(os.urandom(6), "big"))]}


def precision(context) -> str:
    """Return the key of rounding.PRECISIONS of what is timed."""
    return "tf32" if context.settings.tf32 else context.settings.dtype


class Rights(NamedTuple):
    """Hold the oracle's answer to steps that are run together.

    Attributes:
        losses: the loss of each step, summed over its batch.
        score: largest magnitude of the logits.
        largest_loss: largest loss of an utterance.
        leaves: by leaf the length of its gradient, then the random sums of a Sketch.
    """

    losses: list[float]
    score: float
    largest_loss: float
    leaves: dict[str, list[float]]

    def allowed(self, context, shapes: Shapes, **values: float) -> rounding.Allowed:
        """Return how far a right loss may be off; `values`: further ones of `rounding.allowed`."""
        return rounding.allowed(precision(context), shapes, self.score, self.largest_loss, **values)


def rights_of(context, scope: str, steps: Sequence[LossStep], factors: Factors = (ONE,)) -> Rights:
    """Return the oracle's answer to steps that are run together. It has no gradients of steps
    without leaves.

    The answer is read from the folder `context.shared`, if another loss of the round with the same
    inputs and lattice has left it there. Else it is computed, and left there.
    """
    adapter = context.adapter
    tensors: dict[str, Any] = {}
    names: list[str] = []  # of the leaves that need a gradient
    for number, step in enumerate(steps):
        reads: dict[str, Any] = {**leaves_of(context.model, step.batch)}
        reads["targets"] = step.batch.targets
        reads["ranges"] = getattr(step.prepared, "ranges", None)
        tensors.update({f"{name} {number}": tensor for name, tensor in reads.items()})
        names += [f"{name} {number}" for name, leaf in step.leaves.items() if leaf.requires_grad]
    seed = seed_of(context) if names else 0
    asked = [(step.batch.shapes, factor.tolist()) for step, factor in zip(steps, factors)]
    # A pruned loss adds its simple one in scope "step" alone.
    added = scope if layouts.of(adapter).approximate else ""
    key = [adapter.lattice, adapter.blank, added, context.dtype, seed, names, asked]

    def compute() -> dict[str, list[float]]:
        """Ask the oracle; return the numbers of a Rights as the lists that a file can hold."""
        dtype = torch.float64
        if names and context.device.type == "cpu" and context.dtype == torch.float32:
            # Twice as fast on a CPU, and as good where a leaf may be off by a hundredth.
            dtype = torch.float32
        right = Right(adapter, context.model, scope, steps, factors, dtype)
        sketch = right.sketch(seed)
        largest_loss = float(torch.cat(right.losses).abs().max())
        losses = [float(loss.sum()) for loss in right.losses]
        # The key "" is no leaf: it has the numbers that are not of gradients.
        return {"": [right.score, largest_loss, *losses], **sketch.numbers()}

    answer = remembered(context.shared, key, tensors, compute)
    score, largest_loss, *losses = answer.pop("")  # what is left of the answer is by leaf
    return Rights(losses, score, largest_loss, leaves=answer)


def judge_losses(
    context, shapes: Shapes, losses: Iterable[float], rights: Rights
) -> tuple[float, str]:
    """Return the largest relative error of the losses, and in words what is wrong with the first
    wrong loss; "" if none is wrong.

    shapes: of the batch of one step; losses: one of each step, in the order of `rights.losses`"""
    errors = []
    wrong = ""
    for loss, right in zip(losses, rights.losses):
        allowed = rights.allowed(context, shapes, right=right).loss
        error = abs(loss - right) / max(abs(right), rounding.TINY)
        errors.append(error)
        if not wrong and not error <= allowed:  # not `>`: an error of NaN is wrong too
            wrong = f"{words.of_values(loss, right, shapes)}; {allowed:.0e} is allowed"
    return max(errors), wrong


def judge_loss(context, scope: str, inputs: Batch, prepared: Any, loss: float) -> tuple[float, str]:
    """Return the relative error of the loss of a batch, and in words what is wrong with it; "" if
    it is right."""
    # This step is never run. It has no leaves, so the oracle makes no gradient.
    step = LossStep(lambda: ONE, inputs, prepared, leaves={})
    return judge_losses(context, inputs.shapes, [loss], rights_of(context, scope, [step]))


def judge_gradient(
    context, shapes: Shapes, sketch: Sketch, rights: Rights, scale: float = 1.0
) -> tuple[float, str]:
    """Return the largest error of the gradient of a leaf, and in words what is wrong with it; "" if
    it is right.

    An error is the length of the difference of two gradients, the computed one and the right one,
    as a share of the length of the right one.

    sketch: that of the computed gradients
    scale: the largest factor that a loss is multiplied by; `rounding.allowed` takes a gradient
        without this factor.
    """
    # No entry is larger than the length of its gradient, the first number of each of `leaves`.
    largest = max(length for length, *_ in rights.leaves.values()) / scale
    allowed = rights.allowed(context, shapes, largest=largest).length
    errors = sketch.errors(rights.leaves)
    name = max(errors, key=errors.__getitem__)
    error = errors[name]
    if error <= allowed:
        return error, ""
    line = f"the {gradient_of(name)} {words.size(error)} of its length; {allowed:.0e} is allowed"
    return error, line


class Judgement(NamedTuple):
    """Hold the relative errors of timed steps, and what is wrong in words, "" if nothing is."""

    loss_error: float
    grad_error: float
    wrong: str


def check(context, scope: str, taken: Mapping[int, Taken]) -> Judgement:
    """Judge the last timed step of each batch.

    If all repeats had the same numbers (`context.held`), a loss that keeps its first result would
    be right so far: judge one more step on other numbers, unless the loss loops in Python.  Return
    the largest errors of these steps, and what is wrong with the first wrong one.

    taken: number of a batch -> its last timed step."""
    every = [judge_step(context, scope, batch, step) for batch, step in taken.items()]
    if context.held and not context.loops_in_python:
        every.append(judge_further_step(context, scope, taken))
    return Judgement(
        max(finite(judgement.loss_error) for judgement in every),
        max(finite(judgement.grad_error) for judgement in every),
        next((judgement.wrong for judgement in every if judgement.wrong), ""),
    )


def judge_step(context, scope: str, batch: int, taken: Taken) -> Judgement:
    """Judge the last timed step of a batch by its loss, and by its inputs and gradient if they were
    kept.

    The inputs are made again.  In scope "loss" a pruned loss may have other ranges then.  If so,
    its gradient is not judged."""
    adapter, model = context.adapter, context.model
    repeat = 0 if batch in context.held else taken.repeat  # held inputs are those of repeat 0
    inputs = context.new_batch(batch, repeat)
    shapes = inputs.shapes
    overwritten = changed(taken.inputs, {name: getattr(inputs, name) for name in taken.inputs})
    prepared = layouts.of(adapter).prepare(inputs)
    if taken.ranges is not None:
        prepared.ranges = taken.ranges
    loss_error, wrong = judge_loss(context, scope, inputs, prepared, taken.loss)
    grad_error = 0.0
    if taken.sketch and not wrong:
        # This step is never run: the oracle takes its leaves and its ranges.
        fresh = prepare(adapter, model, inputs, scope)
        # In scope "loss" the ranges choose the entries of the leaf.  Gradients can be compared only
        # if the timed step and the new one have the same entries.
        has_same_leaf = (
            taken.ranges is None
            or scope == "step"
            or torch.equal(taken.ranges, fresh.prepared.ranges)
        )
        if has_same_leaf:
            fresh.prepared = prepared  # with the ranges of the timed step
            rights = rights_of(context, scope, [fresh])
            grad_error, wrong = judge_gradient(context, shapes, taken.sketch, rights)
    if overwritten:
        wrong = f"it overwrites {', '.join(overwritten)}, which it may only read"
    elif wrong:
        wrong = f"of the last step, {wrong}"
    if wrong:
        wrong = f"scope {scope}, batch {batch} ({words.sizes(shapes)}): {wrong}"
    return Judgement(loss_error, grad_error, wrong)


def judge_further_step(context, scope: str, taken: Mapping[int, Taken]) -> Judgement:
    """Judge the loss of one more step: of the batch that was timed last, with other numbers.

    Its gradient is not judged."""
    # Only the step that was timed last has digests of its inputs.
    last = next(batch for batch, step in taken.items() if step.inputs)
    inputs = context.new_batch(last, FURTHER_REPEAT)
    step = prepare(context.adapter, context.model, inputs, scope)
    error, wrong = judge_loss(context, scope, inputs, step.prepared, float(step.run()))
    if wrong:
        wrong = f"scope {scope}: of one more step with other numbers, {wrong}"
    return Judgement(error, grad_error=0.0, wrong=wrong)


def hard_questions(context) -> Sequence[Question]:
    """Return the HARD questions that the process of this round asks.

    The first rounds of a run together ask each question once; later ones ask none.  No question is
    asked with --mode forward, of a loss that loops in Python, or of a row whose code another row
    has (`same_as`).
    """
    if context.forward_only or context.loops_in_python or context.same_as:
        return ()
    # Round r of those that share the questions asks number r - 1, and each `rounds` further on.
    # With --budget no more than FEWEST_IN_BUDGET rounds are certain.
    rounds = min(context.settings.rounds, FEWEST_IN_BUDGET, len(HARD))
    return HARD[(context.round or 1) - 1 :: rounds]


def ask_hard(context, question: Question) -> str:
    """Ask a HARD question on the lightest measured batch; return "", or a text that says what is
    wrong.

    The question changes the weights of the joiner, so nothing may be timed afterwards.
    """
    adapter, model = context.adapter, context.model
    # TF32 has as few digits as float16.
    dtype = "float16" if precision(context) == "tf32" else context.settings.dtype
    question = questions.of_dtype(question, dtype)
    factors = questions.factors_of(question)
    batch = lightest(context.all_batches, context.batches)
    # One batch for each loss that the question asks for at once, the later ones in reverse order.
    # Half of the batch, but at least two utterances: a single one has the same lengths in reverse.
    utterances = max(2, math.ceil(len(context.all_batches[batch]) / 2))
    # FURTHER_REPEAT itself has the numbers of the further step, so these repeats begin behind it.
    batches = [
        context.new_batch(batch, FURTHER_REPEAT + 1 + number, utterances, reverse=number > 0)
        for number in range(len(factors))
    ]
    questions.scale_weights(question, model, batches[0])
    questions.set_up_leaves(adapter, question, model, batches)
    steps = [prepare(adapter, model, inputs, "step") for inputs in batches]
    losses = run_together(steps, factors)
    sketch = sketch_of(context, "step", steps, factors)
    rights = rights_of(context, "step", steps, factors)
    shapes = batches[0].shapes
    _, wrong = judge_losses(context, shapes, map(float, losses), rights)
    if not wrong:
        scale = max(map(abs, question.upstream))
        _, wrong = judge_gradient(context, shapes, sketch, rights, scale)
    if wrong:
        wrong = f"asked for {question.title} ({words.sizes(shapes)} each): {wrong}"
    return wrong


def run(
    context, ends: Sequence[tuple[Stop, Mapping[int, Taken]]], overwritten: str
) -> Iterator[Stop]:
    """Judge the last timed steps of each scope, and yield its ``stop`` record with the errors.

    Raises WrongResult after the record of a scope in which the loss is wrong.

    Args:
        context: a subject.Context.
        ends: the record of each scope, with the last timed steps by batch.
        overwritten: names of the weights that the loss has written over, "" if there are none.
    """
    for number, (end, taken) in enumerate(ends, 1):
        wrong = f"it overwrites {overwritten}, which it may only read" if overwritten else ""
        if taken and not wrong:
            end.loss_error, end.grad_error, wrong = check(context, end.scope, taken)
            end.seed = seed_of(context)
            if number == len(ends):  # after all scopes, since questions change the weights
                for question in hard_questions(context):
                    wrong = wrong or ask_hard(context, question)
        yield end
        if wrong:
            raise WrongResult(f"after timing, {wrong}")
