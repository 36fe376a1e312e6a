"""Ask a loss the questions of the table: make joiner, batches and steps of one, and let
`losses.judge` run and compare.

The correctness pass asks a small loss all that are JUDGED, and a measured batch; a timed process of
the first rounds asks one HARD question at its size after its last sample (passes/after_timing.py).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations
from typing import Any, NamedTuple

import torch

from rnnt_bench.core.implementations import ONE_SYMBOL
from rnnt_bench.core.questions import JUDGED, RAGGED, SHAPES, Question
from rnnt_bench.losses import inputs, layouts
from rnnt_bench.losses.adapter import Adapter, OfFunction
from rnnt_bench.losses.inputs import Batch, Joiner
from rnnt_bench.losses.judge import ONE, Answer, Factors, Judged, Run, ask, failing
from rnnt_bench.losses.rounding import Allowed
from rnnt_bench.losses.step import LossStep, NotOfEach, leaves_of, prepare, run_together

#: Frames whose logits say how far the weights are scaled.
FEW_FRAMES = 8
#: Cells beyond which a question would take minutes of a loss that loops over them in Python.
MOST_LOOPED = 50_000


def change(question: Question, model: Joiner, batch: Batch) -> None:
    """Change the weights in place, as an optimizer does."""
    if question.largest is None:
        return
    few = batch.utterance(0)
    few.encoder_out = few.encoder_out[:, :FEW_FRAMES]
    with torch.no_grad():
        factor = question.largest / model.logits(few).abs().max()
        model.output.weight.mul_(factor)
        model.output.bias.mul_(factor).add_(question.offset)


def set_up_leaves(
    adapter: Adapter, question: Question, model: Joiner, batches: Sequence[Batch]
) -> None:
    """Freeze the leaves that the question has frozen, no others, and fill the padding of all."""
    for batch in batches:
        leaves = leaves_of(model, batch)
        for name, leaf in leaves.items():
            leaf.requires_grad_(not name.startswith(question.frozen))
        fill_padding(adapter, question, batch, leaves)


def factors_of(question: Question) -> list[torch.Tensor]:
    """Return the upstream gradient of each loss in flight, float64: a scalar, or (N,) where the one
    loss has an element for each utterance."""
    upstream = torch.tensor(question.upstream, dtype=torch.float64)
    if question.is_weighted:
        return [upstream]
    return [*upstream] or [ONE]


def of_dtype(question: Question, dtype: str) -> Question:
    """Return a question as the dtype can hold it."""
    if dtype in ("float32", "float64"):
        return question
    upstream = question.upstream
    if dtype == "float16":
        upstream = tuple(max(-100.0, min(factor, 100.0)) for factor in upstream)
    largest = None if question.largest is None else min(question.largest, 2.0)
    return question.but(upstream=upstream, largest=largest, offset=0.0)


def first(adapter: Adapter) -> Question:
    """Return the first question, with utterances that are long enough for the loss."""
    return Question(shapes=adapter.lengthened(SHAPES))


def takes_minutes(adapter: Adapter, device: torch.device, question: Question) -> bool:
    """Return whether Python would loop over too many cells."""
    return device.type in adapter.python_loops and question.cells > MOST_LOOPED


def gives_each(adapter: Adapter, question: Question) -> bool:
    """Return whether the loss may give what a question asks of each utterance."""
    has_none = "none" in adapter.reductions or isinstance(adapter, OfFunction)
    return has_none or not question.is_weighted


def small(adapter: Adapter, device: torch.device) -> Iterator[Question]:
    """Yield the questions of small batches; in a simulator, which would take hours, the first and
    its utterances."""
    yield first(adapter)
    for n, (T, U) in enumerate(adapter.lengthened(SHAPES)):
        if U > 0:  # some losses refuse a batch with no target at all
            yield Question(shapes=[(T, U)], draw=n + 1)
    if adapter.simulated:
        return
    takes_many = adapter.takes_many_targets and adapter.topology not in ONE_SYMBOL
    for question in JUDGED:
        is_many = any(U >= T for T, U in question.shapes)
        is_for_others = question.one_symbol if takes_many else is_many
        if is_for_others or not adapter.takes(question.shapes):
            continue
        if not takes_minutes(adapter, device, question) and gives_each(adapter, question):
            yield question
    yield from partly_frozen(adapter)
    yield Question(
        title="other numbers in the first batch's shapes",
        shapes=adapter.lengthened(SHAPES),
        draw=19,
    )


def partly_frozen(adapter: Adapter) -> Iterator[Question]:
    """Yield a question for each subset of what the loss is given that needs no gradient."""
    names = {"weight": "output.weight", "bias": "output.bias"}
    tensors = [names.get(name, name) for name in layouts.of(adapter).tensors]
    for count in range(1, len(tensors)):
        for frozen in combinations(tensors, count):
            title = f"no gradient of {' and '.join(frozen)}"
            yield Question(title=title, shapes=RAGGED, draw=18, frozen=frozen)


class Verdict(NamedTuple):
    """Hold what is wrong with an answer."""

    limits: Allowed
    wrong: list[Judged]  # the errors above these limits, the worst first
    # the largest error, which is above what is allowed, of a loss that is right in float64
    imprecise: float | None = None


def verdict(
    adapter: Adapter, device: torch.device, question: Question, answer: Answer, **how: Any
) -> Verdict:
    """Return what is wrong with the answer of a question; `how` it was asked, as in `answers`.

    A loss in float32 that is off by little, and right in float64, is not wrong."""
    dtype = question.dtype or adapter.settings.dtype
    limits = answer.allowed(adapter, dtype)
    wrong = failing(answer, limits)
    loosened = limits.imprecise()
    may_be_right = wrong and dtype == "float32" and "float64" in adapter.dtypes
    if not may_be_right or failing(answer, loosened):
        return Verdict(limits, wrong)
    double = adapter.but(settings=replace(adapter.settings, dtype="float64"))
    right = [
        not failing(precise, precise.allowed(double, "float64"))
        for _, precise in answers(double, device, [question], **how)
    ]
    if not right or not all(right):
        return Verdict(limits, wrong)
    return Verdict(loosened, [], max(line.error for line in wrong))


def answers(
    adapter: Adapter, device: torch.device, asked: Sequence[Question], **how: Any
) -> Iterator[tuple[Question, Answer]]:
    """Yield the answer of each question in each scope that it is asked in; `how` goes to
    `answer`."""
    for question in asked:
        scopes: tuple[str, ...] = layouts.of(adapter).scopes
        asked_of = adapter.but(reduction="none") if question.is_weighted else adapter
        question = of_dtype(question, adapter.settings.dtype)
        if question.logits == "sine":
            scopes = scopes[:1]
        elif adapter.settings.dtype in ("float16", "bfloat16") and (
            question.logits == "trained" or question.largest
        ):
            # the joiner's own rounding is larger
            scopes = tuple(scope for scope in scopes if scope == "loss")
        elif question.frozen:
            scopes = scopes[-1:]
        elif question.is_weighted:
            scopes = scopes[:1]
        # a function, or an adapter's own `loss`, may return the sum
        suppressed = Exception if question.may_refuse else NotOfEach
        for scope in scopes:
            with contextlib.suppress(suppressed):
                yield question, answer(asked_of, question, device, scope, **how)


def answer(
    adapter: Adapter,
    question: Question,
    device: torch.device,
    scope: str,
    factors: Factors = (),
    run: Run = run_together,
) -> Answer:
    """Return the answer of a question about a small batch.

    Args:
        factors: upstream gradients in place of the question's.
        run: runs steps, and returns their losses.
    """
    steps = partial(ready, adapter, question, device, scope, run)
    return ask(steps, scope, factors or factors_of(question), run=run)


def ready(
    adapter: Adapter,
    question: Question,
    device: torch.device,
    scope: str,
    run: Run = run_together,
) -> tuple[Adapter, Joiner, list[LossStep]]:
    """Return the adapter as the question needs it, the joiner, and the steps; `run` runs the
    earlier call."""
    wide, model, batches = made(adapter, question, device)
    if question.earlier:
        before = Question(shapes=question.earlier, draw=question.draw + 1)
        (earlier,) = made(adapter, before, device)[2]
        run([prepare(wide, model, earlier, scope)], [ONE])
    if question.logits == "sine":
        steps = [of_sines(wide, question, model, batches[0], scope)]
    else:
        change(question, model, batches[0])
        set_up_leaves(wide, question, model, batches)
        steps = [prepare(wide, model, batch, scope) for batch in batches]
    for step in steps:
        fill_padding(wide, question, step.batch, step.leaves)
    return wide, model, steps


def made(
    adapter: Adapter, question: Question, device: torch.device
) -> tuple[Adapter, Joiner, list[Batch]]:
    """Return (the adapter as the question needs it, with its range widened to all of U, the joiner,
    the batches)."""
    dtype = getattr(torch, question.dtype or adapter.settings.dtype)
    N, T, U = inputs.padded_sizes(question.shapes)
    is_sine = question.logits == "sine"
    settings = adapter.settings
    settings = replace(
        settings,
        vocab_size=question.V,
        encoder_dim=question.D,
        logits="random" if is_sine else question.logits,
        durations=question.durations or settings.durations,
        sigma=settings.sigma if question.sigma is None else question.sigma,
    )
    wide = adapter.but(settings=settings, prune_range=U + question.slack[1] + 1)
    if question.blank is not None:
        wide.blank = question.blank
    if is_sine:
        # In scope "loss" the sines are the logits, and D has no use. A loss that has the step alone
        # gets a square output layer.
        D = 1 if "loss" in layouts.of(adapter).scopes else wide.outputs(question.V)
        wide.settings = replace(settings, encoder_dim=D)
    model = layouts.of(wide).model(device, dtype)
    source = inputs.source_of(wide.settings)
    sizes: Any = {
        "vocab_size": question.V,
        "encoder_dim": wide.settings.encoder_dim,
        "device": device,
        "dtype": dtype,
    }
    batches = []
    for number in range(1 + question.in_flight):
        shapes = question.shapes[::-1] if number else question.shapes
        key = (5, N, T, U) if is_sine else (settings.seed, question.draw + 100 * number)
        batches.append(
            relabelled(question, inputs.make_batch(shapes, **sizes, key=key, source=source))
        )
    return wide, model, batches


def relabelled(question: Question, batch: Batch) -> Batch:
    """Return the batch with the targets and lengths that a question asks for; no other target is
    its blank."""
    if question.blank:
        batch.targets.masked_fill_(batch.targets == question.blank, 0)
    # without any target, they have no column
    batch.targets = torch.nn.functional.pad(
        batch.targets, (0, question.slack[1]), value=0 if question.blank else 1
    )
    if question.entry:
        name, index, value = question.entry
        getattr(batch, name)[index] = value
    return batch


def of_sines(
    adapter: Adapter, question: Question, model: Joiner, batch: Batch, scope: str
) -> LossStep:
    """Return a step whose leaves hold largest * sin(0.7 k), k = 0, 1, 2, ..., from the first leaf on
    to the last: the same numbers on every machine.

    The padding grows by the question's `slack`, its `minus_inf` has the logit or the bias -inf, and
    what the loss is given as integers has the dtype `integers`. In scope "step" the leaves take the
    place of the outputs of `batch`, and of the weight and bias of `model.output`."""
    N, T, U = inputs.padded_sizes(question.shapes)
    T, U = T + question.slack[0], U + question.slack[1]
    layout = layouts.of(adapter)
    output = model.output
    sizes: list[tuple[int, ...]] = [(N, T, U + 1, adapter.outputs(question.V))]
    if scope == "step":
        D = output.weight.size(1)
        sizes = [(N, T, D), (N, U + 1, D), tuple(output.weight.shape), tuple(output.bias.shape)]
    counts = [math.prod(size) for size in sizes]
    numbers = (question.largest or 1.0) * torch.sin(
        0.7 * torch.arange(sum(counts), dtype=torch.float64)
    )
    leaves = [part.view(size).to(output.weight) for size, part in zip(sizes, numbers.split(counts))]
    if question.minus_inf is not None:
        # The last leaf is the logits, or the bias.
        leaves[-1][..., question.minus_inf] = -math.inf
    if scope == "step":
        batch.encoder_out, batch.decoder_out = (leaf.requires_grad_() for leaf in leaves[:2])
        output.weight.data, output.bias.data = leaves[2:]
    step = prepare(adapter, model, batch, scope, leaves[0] if scope == "loss" else None)
    # It reads the leaves when it is called: a check of conformance may put other tensors there.
    step.forward = lambda: layout.of_leaves(step.leaves, batch, step.prepared)
    if question.integers:
        cast_integers(step.prepared, getattr(torch, question.integers))
    return step


def cast_integers(prepared: Any, dtype: torch.dtype) -> None:
    """Give the tensors of integers among the attributes of `prepared` another dtype, in place."""
    for name, value in vars(prepared).items():
        if isinstance(value, torch.Tensor) and not value.is_floating_point():
            setattr(prepared, name, value.to(dtype))


def fill_padding(
    adapter: Adapter, question: Question, batch: Batch, leaves: Mapping[str, torch.Tensor]
) -> None:
    """Fill the padding of the leaves with the garbage of a question, if it has any."""
    if question.garbage is None:
        return
    with torch.no_grad():
        for name, regions in layouts.of(adapter).padding(batch.shapes).items():
            if name in leaves:
                for region in regions:
                    leaves[name][region] = question.garbage


def reached_by_padding(adapter: Adapter, device: torch.device) -> list[str]:
    """Return what is not finite of the first question's answer where the padding holds NaN."""
    question = first(adapter).but(garbage=math.nan)
    (step,) = ready(adapter, question, device, layouts.of(adapter).scopes[0])[2]
    results = {"loss": step.run(), **step.gradients()}
    return [
        name
        for name, values in results.items()
        if values is not None and not values.isfinite().all()
    ]
