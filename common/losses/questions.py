"""Ask a loss the questions of core/questions.py: make the joiner, the batches and the steps of a
question, and let `losses.judge` run them and compare.

The correctness pass asks all JUDGED questions on small batches, and then about a measured batch.  A
timed process of the first rounds asks one of the HARD questions at the measured size, after its
last sample (passes/after_timing.py).
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

#: How many first frames of a batch's first utterance have the logits that say by how much the
#: weights are scaled.
FEW_FRAMES = 8
#: Cells above which a loss that loops over them in Python would take minutes.
MOST_LOOPED = 50_000
#: Half precision has room for factors of the loss and for logits up to these magnitudes.
LARGEST_FACTOR = 100.0
LARGEST_LOGIT = 2.0
#: Added to the number of the draw for the second batch of a question with two losses in flight.
OTHER_DRAW = 100
#: First number of the key of the targets of a question with sines.
SINE_KEY = 5


def scale_weights(question: Question, model: Joiner, batch: Batch) -> None:
    """Scale the output layer in place, as an optimizer changes it, if the question says how large
    the logits are.

    Of the first frames of the batch's first utterance, the largest logit gets the magnitude
    `question.largest`.  Then `question.offset` is added to all logits."""
    if question.largest is None:
        return
    few = batch.utterance(0)
    few.encoder_out = few.encoder_out[:, :FEW_FRAMES]
    with torch.no_grad():
        scale = question.largest / model.logits(few).abs().max()
        model.output.weight.mul_(scale)
        model.output.bias.mul_(scale).add_(question.offset)


def set_up_leaves(
    adapter: Adapter, question: Question, model: Joiner, batches: Sequence[Batch]
) -> None:
    """Require gradients of all leaves but those that the question freezes; fill the padding of all
    leaves with the question's garbage."""
    for batch in batches:
        leaves = leaves_of(model, batch)
        for name, leaf in leaves.items():
            # `frozen` is a tuple of beginnings of names; no name begins with one of ().
            leaf.requires_grad_(not name.startswith(question.frozen))
        fill_padding(adapter, question, batch, leaves)


def factors_of(question: Question) -> list[torch.Tensor]:
    """Return what each loss of a question is multiplied by: a tensor float64 () for each loss.

    A question with a factor for each utterance has one loss, and so one tensor, (N,).  A question
    without factors gets [ONE]."""
    upstream = torch.tensor(question.upstream, dtype=torch.float64)
    if question.is_weighted:
        return [upstream]
    return [*upstream] or [ONE]


def of_dtype(question: Question, dtype: str) -> Question:
    """Return a question that can be asked in `dtype`.

    In float16 and bfloat16 that is a copy without offset, whose factors and logits the dtype can
    hold; in another dtype it is the question itself."""
    if not is_half(dtype):
        return question
    upstream = question.upstream
    if dtype == "float16":  # bfloat16 has the range of float32
        upstream = tuple(max(-LARGEST_FACTOR, min(factor, LARGEST_FACTOR)) for factor in upstream)
    largest = None if question.largest is None else min(question.largest, LARGEST_LOGIT)
    return question.but(upstream=upstream, largest=largest, offset=0.0)


def is_half(dtype: str) -> bool:
    return dtype in ("float16", "bfloat16")


def first(adapter: Adapter) -> Question:
    """Return the first question, with utterances that are long enough for the loss."""
    return Question(shapes=adapter.lengthened(SHAPES))


def takes_minutes(adapter: Adapter, device: torch.device, question: Question) -> bool:
    """Return whether the loss would loop in Python over too many cells."""
    return device.type in adapter.python_loops and question.cells > MOST_LOOPED


def gives_each(adapter: Adapter, question: Question) -> bool:
    """Return whether the adapter can return the losses that a question needs: that of each
    utterance if the question weights them, else the sum.

    True for a user's function, which does not declare what it returns: its answer will tell."""
    may_give = "none" in adapter.reductions or isinstance(adapter, OfFunction)
    return may_give or not question.is_weighted


def fits(adapter: Adapter, device: torch.device, question: Question) -> bool:
    """Return whether a run asks the loss a question of JUDGED on this device.

    A loss that takes U >= T, and whose topology has paths for it, is asked all but the questions
    with `one_symbol`.  Any other loss is asked the questions whose utterances all have U < T: those
    with `one_symbol` are among them.  Left out are also questions about utterances that are too
    short for the loss, about weights that it cannot apply, and about so many cells that the answer
    takes minutes."""
    if adapter.takes_many_targets and adapter.topology not in ONE_SYMBOL:
        takes_targets = not question.one_symbol
    else:
        takes_targets = all(U < T for T, U in question.shapes)
    return (
        takes_targets
        and adapter.takes(question.shapes)
        and gives_each(adapter, question)
        and not takes_minutes(adapter, device, question)
    )


def small(adapter: Adapter, device: torch.device) -> Iterator[Question]:
    """Yield the questions about small batches that a run asks the loss.

    A simulator would take hours, so it is asked only about the first batch, and about each
    utterance of it as a batch of its own."""
    yield first(adapter)
    for n, (T, U) in enumerate(adapter.lengthened(SHAPES)):
        if U > 0:  # some losses refuse a batch with no target at all
            yield Question(shapes=[(T, U)], draw=n + 1)
    if adapter.simulated:
        return
    for question in JUDGED:
        if fits(adapter, device, question):
            yield question
    yield from partly_frozen(adapter)
    # Draws 18 (of `partly_frozen`) and 19 are in no other question, so these numbers are new.
    yield first(adapter).but(title="other numbers in the first batch's shapes", draw=19)


def partly_frozen(adapter: Adapter) -> Iterator[Question]:
    """Yield a question for each choice of some, but not all, of the tensors that the loss takes.

    The chosen tensors are frozen: they need no gradient.  A loss of logits takes one tensor, so it
    gets no such question."""
    names = {"weight": "output.weight", "bias": "output.bias"}
    tensors = [names.get(name, name) for name in layouts.of(adapter).tensors]
    for count in range(1, len(tensors)):
        for frozen in combinations(tensors, count):
            title = f"no gradient of {' and '.join(frozen)}"
            # draw 18: no other question has these random numbers
            yield Question(title=title, shapes=RAGGED, draw=18, frozen=frozen)


class Verdict(NamedTuple):
    """Hold what is wrong with an answer."""

    limits: Allowed
    wrong: list[Judged]  # the errors above these limits, the worst first
    # the largest error of a loss that is off by little in float32 and right in float64, else None
    imprecise: float | None = None


def verdict(
    adapter: Adapter,
    device: torch.device,
    question: Question,
    answer: Answer,
    run: Run = run_together,
) -> Verdict:
    """Return what is wrong with the answer to a question.

    A loss in float32 that is off by little, and right in float64, is not wrong: to tell this, the
    question is asked again in float64.

    run: runs steps with their factors, and returns their losses."""
    dtype = question.dtype or adapter.settings.dtype
    limits = answer.allowed(adapter, dtype)
    wrong = failing(answer, limits)
    if wrong and dtype == "float32" and "float64" in adapter.dtypes:
        loosened = limits.imprecise()
        if not failing(answer, loosened) and is_right_in_float64(adapter, device, question, run):
            return Verdict(loosened, wrong=[], imprecise=max(line.error for line in wrong))
    return Verdict(limits, wrong)


def is_right_in_float64(
    adapter: Adapter, device: torch.device, question: Question, run: Run
) -> bool:
    """Ask a question in float64; return whether there are answers, and all are right."""
    double = adapter.but(settings=replace(adapter.settings, dtype="float64"))
    is_right = [
        not failing(answer, answer.allowed(double, "float64"))
        for _, answer in answers(double, device, [question], run)
    ]
    return bool(is_right) and all(is_right)


def scopes_of(adapter: Adapter, question: Question) -> tuple[str, ...]:
    """Return the scopes in which a question is asked: those of the loss, with three exceptions, of
    which the first that applies counts.

    - Sines, and a factor for each utterance: only the first scope.
    - Trained or scaled logits in half precision: only "loss", so none for a loss without it.
    - Frozen leaves: only the last scope, the step."""
    scopes: tuple[str, ...] = layouts.of(adapter).scopes
    if question.logits == "sine" or question.is_weighted:
        return scopes[:1]
    is_sharp = question.logits == "trained" or bool(question.largest)
    if is_sharp and is_half(adapter.settings.dtype):
        # In a step the joiner's own rounding is larger than the error of the loss.
        return tuple(scope for scope in scopes if scope == "loss")
    return scopes[-1:] if question.frozen else scopes


def answers(
    adapter: Adapter, device: torch.device, asked: Sequence[Question], run: Run = run_together
) -> Iterator[tuple[Question, Answer]]:
    """Yield (question, answer) for each question in each of its scopes.

    The question is the one that was asked: `of_dtype` may have changed it.  A question is left out
    in a scope in two cases: it needs the loss of each utterance, and the adapter returns only their
    sum; or it has `may_refuse`, and the loss raises an error.

    run: as in `answer`.
    """
    for question in asked:
        asked_adapter = adapter.but(reduction="none") if question.is_weighted else adapter
        question = of_dtype(question, adapter.settings.dtype)
        # NotOfEach: a user's function, or an adapter's own `loss`, returned the sum of the losses.
        suppressed = Exception if question.may_refuse else NotOfEach
        for scope in scopes_of(adapter, question):
            with contextlib.suppress(suppressed):
                yield question, answer(asked_adapter, question, device, scope, run=run)


def answer(
    adapter: Adapter,
    question: Question,
    device: torch.device,
    scope: str,
    factors: Factors = (),
    run: Run = run_together,
) -> Answer:
    """Return the answer to a question about a small batch.

    Args:
        factors: that multiply the losses; () for those of the question.
        run: runs steps with their factors, and returns their losses.
    """
    make_steps = partial(ready, adapter, question, device, scope, run)
    return ask(make_steps, scope, factors or factors_of(question), run)


def ready(
    adapter: Adapter,
    question: Question,
    device: torch.device,
    scope: str,
    run: Run = run_together,
) -> tuple[Adapter, Joiner, list[LossStep]]:
    """Return the adapter as the question needs it, the joiner, and the steps, not yet run: one for
    each loss.

    If the question has an earlier call, `run` runs that call, of other utterances, with the same
    adapter and joiner."""
    adjusted, model, batches = made(adapter, question, device)
    if question.earlier:
        before = Question(shapes=question.earlier, draw=question.draw + 1)
        _, _, (earlier,) = made(adapter, before, device)
        run([prepare(adjusted, model, earlier, scope)], [ONE])
    if question.logits == "sine":
        steps = [of_sines(adjusted, question, model, batches[0], scope)]
    else:
        scale_weights(question, model, batches[0])
        set_up_leaves(adjusted, question, model, batches)
        steps = [prepare(adjusted, model, batch, scope) for batch in batches]
    # `set_up_leaves` has filled only the padding of what the joiner takes.  This fills that of the
    # logits, which `prepare` makes, and that of the leaves of sines.
    for step in steps:
        fill_padding(adjusted, question, step.batch, step.leaves)
    return adjusted, model, steps


def adapted(adapter: Adapter, question: Question) -> Adapter:
    """Return a copy of the adapter that has the settings and the blank of a question, and does not
    prune: the range of a pruned loss is widened to all of U."""
    is_sine = question.logits == "sine"
    settings = replace(
        adapter.settings,
        vocab_size=question.V,
        encoder_dim=question.D,
        logits="random" if is_sine else question.logits,  # `of_sines` has the sines
        durations=question.durations or adapter.settings.durations,
        sigma=adapter.settings.sigma if question.sigma is None else question.sigma,
    )
    longest = max(U for _, U in question.shapes)
    # The U + 1 cells of a frame, and those that the question adds to the padding.
    adjusted = adapter.but(settings=settings, prune_range=longest + question.slack[1] + 1)
    if question.blank is not None:
        adjusted.blank = question.blank
    if is_sine:
        # In scope "loss" the sines are the logits, and D has no use.  In scope "step" they fill the
        # outputs and the output layer, whatever D is: a loss that has the step alone gets a square
        # layer.
        D = 1 if "loss" in layouts.of(adapter).scopes else adjusted.outputs(question.V)
        adjusted.settings = replace(settings, encoder_dim=D)
    return adjusted


def made(
    adapter: Adapter, question: Question, device: torch.device
) -> tuple[Adapter, Joiner, list[Batch]]:
    """Return the adapter as the question needs it, the joiner, and the batch of each loss.

    With `in_flight` there are two losses.  The second batch has other random numbers, and the
    utterances' lengths in reverse order."""
    dtype = getattr(torch, question.dtype or adapter.settings.dtype)
    adjusted = adapted(adapter, question)
    settings = adjusted.settings
    batches = []
    for number in range(2 if question.in_flight else 1):
        key: tuple[int, ...] = (settings.seed, question.draw + OTHER_DRAW * number)
        if question.logits == "sine":  # then only the targets are random: the same for all seeds
            key = (SINE_KEY, *inputs.padded_sizes(question.shapes))
        batch = inputs.make_batch(
            question.shapes[::-1] if number else question.shapes,
            vocab_size=question.V,
            encoder_dim=settings.encoder_dim,
            device=device,
            dtype=dtype,
            key=key,
            source=inputs.source_of(settings),
        )
        relabel(question, batch)
        batches.append(batch)
    return adjusted, layouts.of(adjusted).model(device, dtype), batches


def relabel(question: Question, batch: Batch) -> None:
    """Change targets and lengths of a batch as a question asks.

    Targets equal to the question's blank become 0.  Columns of targets are added, as many as
    `slack` says.  The question's `entry` overwrites numbers of the targets or the lengths."""
    # The targets are drawn from [1, V), for the blank 0.  Under another blank 0 is a target.
    if question.blank:
        batch.targets.masked_fill_(batch.targets == question.blank, 0)
    not_blank = 0 if question.blank else 1
    # The second number of `slack` is of targets; `of_sines` adds both to its leaves.
    batch.targets = torch.nn.functional.pad(batch.targets, (0, question.slack[1]), value=not_blank)
    if question.entry:
        name, index, value = question.entry
        getattr(batch, name)[index] = value


def of_sines(
    adapter: Adapter, question: Question, model: Joiner, batch: Batch, scope: str
) -> LossStep:
    """Return a step whose leaves hold the numbers largest * sin(0.7 k), k = 0, 1, 2, ..., the same
    on every machine.  The first leaf has the first numbers, the last leaf the last.

    In scope "loss" the only leaf is the logits.  In scope "step" the leaves replace the outputs of
    `batch`, and the weight and bias of `model.output`.  Of the question, `largest` is 1 if it is
    None; `slack` makes the padding longer; `minus_inf` is a symbol whose logits or bias become
    -inf; `integers` is the dtype of the integers that the loss takes."""
    N, T, U = inputs.padded_sizes(question.shapes)
    T += question.slack[0]
    U += question.slack[1]
    output = model.output
    sizes: list[tuple[int, ...]] = [(N, T, U + 1, adapter.outputs(question.V))]
    if scope == "step":
        D = output.weight.size(1)
        sizes = [(N, T, D), (N, U + 1, D), tuple(output.weight.shape), tuple(output.bias.shape)]
    counts = [math.prod(size) for size in sizes]
    sines = torch.sin(0.7 * torch.arange(sum(counts), dtype=torch.float64))
    numbers = (question.largest or 1.0) * sines
    leaves = [part.view(size).to(output.weight) for size, part in zip(sizes, numbers.split(counts))]
    if question.minus_inf is not None:
        logits_or_bias = leaves[-1]
        logits_or_bias[..., question.minus_inf] = -math.inf
    if scope == "step":
        batch.encoder_out, batch.decoder_out = (leaf.requires_grad_() for leaf in leaves[:2])
        output.weight.data, output.bias.data = leaves[2:]
    logits = leaves[0] if scope == "loss" else None
    step = prepare(adapter, model, batch, scope, logits)
    # `forward` reads `step.leaves` when it is called, since a check of conformance may put other
    # tensors into `step.leaves`.
    layout = layouts.of(adapter)
    step.forward = lambda: layout.of_leaves(step.leaves, batch, step.prepared)
    if question.integers:
        cast_integers(step.prepared, getattr(torch, question.integers))
    return step


def cast_integers(prepared: Any, dtype: torch.dtype) -> None:
    """Give each attribute of `prepared` that is a tensor of integers another dtype."""
    for name, value in vars(prepared).items():
        if isinstance(value, torch.Tensor) and not value.is_floating_point():
            setattr(prepared, name, value.to(dtype))


def fill_padding(
    adapter: Adapter, question: Question, batch: Batch, leaves: Mapping[str, torch.Tensor]
) -> None:
    """Fill the padding of the leaves with the garbage of a question, if it has any.

    leaves: by name; those without padding stay."""
    if question.garbage is None:
        return
    with torch.no_grad():
        for name, regions in layouts.of(adapter).padding(batch.shapes).items():
            if name in leaves:
                for region in regions:
                    leaves[name][region] = question.garbage


def reached_by_padding(adapter: Adapter, device: torch.device) -> list[str]:
    """Ask the question that `first` returns, with NaN in the padding; return the names of the
    results that are not finite.

    "loss" is the name of the loss; the name of a leaf stands for its gradient."""
    question = first(adapter).but(garbage=math.nan)
    _, _, (step,) = ready(adapter, question, device, layouts.of(adapter).scopes[0])
    results = {"loss": step.run(), **step.gradients()}
    return [
        name
        for name, values in results.items()
        if values is not None and not values.isfinite().all()
    ]
