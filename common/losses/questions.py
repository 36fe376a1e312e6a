"""The questions that a loss is asked, in one table: on small batches all of them, at the measured size the HARD ones.

A right loss answers each as if it were asked first and alone: neither other numbers, lengths and weights before it, nor
what lies in the padding, nor a factor of the loss, nor what needs no gradient may change anything else.  The corner
cases of `rnnt-bench check` are of packages: what they take and refuse.

The correctness pass asks a small loss all, and a measured batch; a timed process of the first rounds asks one
HARD question at its size after its last sample (passes/after_timing.py).
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace
from itertools import combinations
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import torch

from rnnt_bench.core.implementations import ONE_SYMBOL
from rnnt_bench.losses import inputs, layouts
from rnnt_bench.losses.adapter import Adapter, OfFunction
from rnnt_bench.losses.inputs import OUTPUTS, Batch, Joiner
from rnnt_bench.losses.judge import Answer, ask
from rnnt_bench.losses.step import LossStep, NotOfEach, changed, fingerprints, leaves_of, prepare

Shapes = List[Tuple[int, int]]  # (T, U) of each utterance
#: Ragged in both, T = 1 and U = 0 among them.
SHAPES: Shapes = [(11, 5), (7, 4), (9, 2), (1, 0)]
BLOCKS: Shapes = [(32, 8), (16, 15), (17, 14), (48, 3)]
RAGGED: Shapes = [(9, 4), (6, 5), (8, 1)]
FIVE: Shapes = [(6, 3), (5, 2), (7, 4), (4, 1), (8, 5)]
#: Tokens as many as frames, and more: none of a lattice with one symbol a frame.
MANY_TOKENS: Shapes = [(3, 5), (4, 4), (2, 3)]
MORE_TOKENS: Shapes = [(3, 140), (2, 120)]
NO_TOKENS: Shapes = [(6, 0), (4, 0)]
#: Sizes of the joiner, and of that with logits "trained".
RANDOM: Dict[str, Any] = {"vocab_size": 17, "encoder_dim": 24}
TRAINED: Dict[str, Any] = {"vocab_size": 101, "encoder_dim": 128}
#: Logits whose exponential is infinite in float32, or 0 where they are negative.
SHARP = 100.0
#: What lies in the padding of encoder and decoder outputs.
GARBAGE = 1000.0
#: Frames whose logits say how far the weights are scaled.
FEW_FRAMES = 8
JOINER = ("output", "extra")


class Question(NamedTuple):
    """Hold what a loss is asked.

    name: what is special about it, in words; "" for nothing; shapes: none for those of a measured batch; draw: number
    of the draw of random inputs; logits: "random", or "trained"; largest: magnitude of the largest logit, to which the
    weights are scaled, in place; offset: is added to all logits; upstream: factors of the sum, of each utterance, or of
    each loss in flight; in_flight: a second loss, of as many utterances with the lengths in reverse order, runs its
    forward before the backward of both; earlier: an earlier call, with the weights as they were; frozen: beginnings of
    the names of leaves that need no gradient; garbage: fills the padding; may_refuse: an error is as right.
    """

    name: str
    shapes: Shapes = []
    draw: int = 0
    logits: str = "random"
    largest: Optional[float] = None
    offset: float = 0.0
    upstream: Tuple[float, ...] = ()
    in_flight: bool = False
    earlier: Shapes = []
    frozen: Tuple[str, ...] = ()
    garbage: bool = False
    may_refuse: bool = False

    def needs_gradient(self, name: str) -> bool:
        return not name.startswith(self.frozen) if self.frozen else True

    def change(self, model: Joiner, batch: Batch) -> None:
        """Change the weights in place, as an optimizer does."""
        if self.largest is None:
            return
        few = batch.utterance(0)
        few.encoder_out = few.encoder_out[:, :FEW_FRAMES]
        with torch.no_grad():
            factor = self.largest / model.logits(few).abs().max()
            model.output.weight.mul_(factor)
            model.output.bias.mul_(factor).add_(self.offset)

    def freeze(self, model: Joiner, batches: Sequence[Batch]) -> None:
        """Say of all leaves whether they need a gradient, and fill the padding."""
        for batch in batches:
            for name, leaf in leaves_of(model, batch).items():
                leaf.requires_grad_(self.needs_gradient(name))
            if self.garbage:
                fill_padding(batch, GARBAGE)

    def factors(self) -> List[torch.Tensor]:
        """Return the factors of each loss in flight; those of utterances are of one loss."""
        upstream = torch.tensor(self.upstream, dtype=torch.float64)
        if self.in_flight or len(upstream) == 1:
            return [*upstream]
        return [upstream] if len(upstream) else [torch.ones((), dtype=torch.float64)]


IN_FLIGHT = Question(
    "two losses in flight, times -30,000 and 7, after other weights and lengths in the same padded shape",
    largest=24.0,
    upstream=(-30000.0, 7.0),
    in_flight=True,
    garbage=True,
)
#: At the measured size a timed process asks one of these.  Large logits: without their maximum exp() overflows.
HARD = (
    IN_FLIGHT._replace(offset=SHARP),
    IN_FLIGHT._replace(name=f"{IN_FLIGHT.name}, with a frozen joiner", frozen=JOINER, offset=-SHARP),
    IN_FLIGHT._replace(name=f"{IN_FLIGHT.name}, with frozen outputs of encoder and decoder", frozen=OUTPUTS),
)


def of_dtype(question: Question, dtype: str) -> Question:
    """Return a question as the dtype can hold it."""
    if dtype in ("float32", "float64"):
        return question
    upstream = tuple(max(-100.0, min(factor, 100.0)) for factor in question.upstream) if dtype == "float16" else None
    largest = None if question.largest is None else min(question.largest, 2.0)
    return question._replace(upstream=upstream or question.upstream, largest=largest, offset=0.0)


def first(adapter: Adapter) -> Question:
    """Return the first question, with utterances that are long enough for the loss."""
    return Question("", adapter.lengthened(SHAPES))


def small(adapter: Adapter) -> Iterator[Question]:
    """Yield the questions of small batches; in a simulator, which would take hours, the first and its utterances."""
    yield first(adapter)
    for n, (T, U) in enumerate(adapter.lengthened(SHAPES)):
        if U > 0:  # some losses refuse a batch with no target at all
            yield Question("", [(T, U)], n + 1)
    if adapter.simulated:
        return
    yield Question("", BLOCKS, 5)
    yield Question("", FIVE, 13)
    if adapter.takes_many_targets and adapter.topology not in ONE_SYMBOL:
        yield Question("", MANY_TOKENS, 14)
        yield Question("", MORE_TOKENS, 16)
    elif not adapter.python_loops:
        yield Question("", [(150, 140), (121, 3)], 16)
    if adapter.takes([*NO_TOKENS]):
        yield Question("no token in the batch", NO_TOKENS, 17, may_refuse=True)
    for factor in (2.0**16, -2.0):  # the first scale of torch.amp.GradScaler; a loss that is subtracted
        yield Question(f"a loss times {factor:g}", RAGGED, 6, upstream=(factor,))
    yield Question("a factor for each utterance", RAGGED, 7, upstream=(2.0, -1.0, 0.5))
    yield Question("logits of a trained model", BLOCKS, 8, logits="trained")
    for name, largest, offset in (
        (f"logits of up to {SHARP:g}", SHARP, 0.0),
        (f"logits of at most -{SHARP:g}", SHARP, -2 * SHARP),
        ("logits that are almost alike", 1e-3, SHARP),
    ):
        yield Question(name, RAGGED, 9, largest=largest, offset=offset)
    yield Question("garbage in the padding", RAGGED, 10, garbage=True)
    yield Question("a larger batch before it", RAGGED, 11, earlier=BLOCKS)
    for question in HARD:
        yield question._replace(shapes=RAGGED, draw=12, earlier=RAGGED)
    names = {"weight": "output.weight", "bias": "output.bias"}
    tensors = [names.get(name, name) for name in layouts.of(adapter).tensors]
    for count in range(1, len(tensors)):
        for frozen in combinations(tensors, count):
            yield Question(f"no gradient of {' and '.join(frozen)}", RAGGED, 18, frozen=frozen)
    yield Question("other numbers in the first batch's shapes", adapter.lengthened(SHAPES), 19)


def answers(
    adapter: Adapter, device: torch.device, dtype: torch.dtype, asked: Sequence[Question]
) -> Iterator[Tuple[Question, Answer]]:
    """Yield the answer of each question in each scope that it is asked in."""
    for question in asked:
        scopes: Tuple[str, ...] = layouts.of(adapter).scopes
        question = of_dtype(question, adapter.settings.dtype)
        of_each = len(question.upstream) > 1 and not question.in_flight
        if dtype in (torch.float16, torch.bfloat16) and (question.logits == "trained" or question.largest):
            scopes = tuple(scope for scope in scopes if scope == "loss")  # the joiner's own rounding is larger
        elif question.frozen or of_each:
            scopes = scopes[-1:] if question.frozen else scopes[:1]
        for scope in scopes:
            if of_each and ("none" in adapter.reductions or isinstance(adapter, OfFunction)):
                with contextlib.suppress(NotOfEach):  # a function, or an adapter's own `loss`, may return the sum
                    yield question, answer(adapter.but(reduction="none"), question, device, dtype, scope)
                    continue
            with contextlib.suppress(*[Exception] * question.may_refuse):
                yield question, answer(adapter, question, device, dtype, scope)


def answer(adapter: Adapter, question: Question, device: torch.device, dtype: torch.dtype, scope: str) -> Answer:
    """Return the answer of a question about a small batch.

    A loss without the reduction "none" is given each utterance alone, all in flight, for a factor for each."""

    of_each = len(question.upstream) > 1 and not question.in_flight and adapter.reduction != "none"
    factors = [*question.factors()[0]] if of_each else question.factors()
    wide, model, batches = given(adapter, question, device, dtype)

    def ready(model: Joiner, batches: List[Batch]) -> Tuple[Joiner, List[LossStep]]:
        if of_each:
            batches = [alone(batches[0], n) for n in range(len(question.shapes))]
        question.change(model, batches[0])
        question.freeze(model, batches)
        steps = [prepare(wide, model, batch, scope) for batch in batches]
        for step in steps if question.garbage else ():
            fill_inputs(layouts.of(wide), step, GARBAGE)
        return model, steps

    if question.earlier:
        before = given(adapter, Question("", question.earlier, question.draw + 1), device, dtype)[2]
        prepare(wide, model, before[0], scope).run()
    model, steps = ready(model, batches)
    return ask(wide, model, steps, scope, lambda: ready(*given(adapter, question, device, dtype)[1:]), factors)


def given(
    adapter: Adapter, question: Question, device: torch.device, dtype: torch.dtype
) -> Tuple[Adapter, Joiner, List[Batch]]:
    """Return (the adapter with its range widened to all of U, the joiner, the batches) of a question."""
    sizes, widest = TRAINED if question.logits == "trained" else RANDOM, max(U for _, U in question.shapes)
    wide = adapter.but(settings=replace(adapter.settings, **sizes, logits=question.logits), prune_range=widest + 1)
    model, source = layouts.of(wide).model(device, dtype), inputs.source_of(wide.settings)
    batches = []
    for number in range(1 + question.in_flight):
        shapes = question.shapes[::-1] if number else question.shapes
        key = (wide.settings.seed, question.draw + 100 * number)
        batches.append(inputs.make_batch(shapes, **sizes, device=device, dtype=dtype, key=key, source=source))
    return wide, model, batches


def alone(batch: Batch, n: int) -> Batch:
    """Return the utterance `n` alone, without padding, as a batch of new tensors."""
    piece = batch.utterance(n)
    new = {name: getattr(piece, name).clone() for name in ("targets", "T_lengths", "U_lengths")}
    return replace(piece, **new, **{name: getattr(piece, name).clone().requires_grad_() for name in OUTPUTS})


def fill_padding(batch: Batch, value: float) -> None:
    with torch.no_grad():
        for n, (T, U) in enumerate(batch.shapes):
            batch.encoder_out[n, T:] = batch.decoder_out[n, U + 1 :] = value


def fill_inputs(layout: layouts.Layout, step: LossStep, value: float) -> None:
    """Fill the padding of what a loss is given."""
    if "given" not in step.leaves:
        fill_padding(step.batch, value)
        return
    with torch.no_grad():
        _, T, U = inputs.padded_sizes(step.batch.shapes)
        for region in layout.padding(step.batch.shapes, T, U) or ():
            step.given[region] = value


def repeated(adapter: Adapter, device: torch.device, dtype: torch.dtype) -> Tuple[List[str], List[str]]:
    """Ask the first question twice more, the last time with NaN in its padding.

    Returns what has other bits when it is asked for again, and what is not finite where the padding holds NaN.
    """
    results = []
    for padding in (None, None, math.nan):
        wide, model, (batch,) = given(adapter, first(adapter), device, dtype)
        if padding is not None:
            fill_padding(batch, padding)
        step = prepare(wide, model, batch, layouts.of(wide).scopes[0])
        results.append({"loss": step.run(), **step.gradients()})
    before, again, reached = results
    differing = changed(fingerprints(before), again)
    return differing, [name for name, values in reached.items() if values is not None and not values.isfinite().all()]
