"""Judge a loss on small batches, on which it must be right before it is timed.

The ragged batch, and each of its utterances alone; frames and targets in multiples of 16, where kernels have blocks;
logits of a trained model, and beyond what exp() takes; an upstream gradient that is not 1, and one for each
utterance.  Leaves out the corner cases, which `rnnt-bench check` asks.
"""

from __future__ import annotations

import contextlib
import copy
import math
from dataclasses import replace
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import torch

from common.losses import fingerprint, inputs
from common.losses.adapter import Adapter
from common.losses.inputs import Batch
from common.losses.joiner import Joiner
from common.losses.layouts import table
from common.losses.oracle import TOLERANCE
from common.losses.passes import answers, diagnosis
from common.losses.passes.answers import Answer
from common.losses.step import NotOfEach, prepare

#: (T, U) of each utterance.
Shapes = List[Tuple[int, int]]
#: Ragged in both, T = 1 and U = 0 among them.
SHAPES: Shapes = [(11, 5), (7, 4), (9, 2), (1, 0)]
BLOCKS: Shapes = [(32, 8), (16, 15), (17, 14), (48, 3)]
RAGGED: Shapes = [(9, 4), (6, 5), (8, 1)]
#: Sizes of the joiner, and of that with logits "trained".
RANDOM: Dict[str, Any] = {"vocab_size": 17, "encoder_dim": 24}
TRAINED: Dict[str, Any] = {"vocab_size": 101, "encoder_dim": 128}
#: Largest difference of a slope to 1 (see Answer.slopes), beside the rounding of the likelihood.  In half precision
#: each entry is rounded by up to 4e-3 (bfloat16) or 5e-4 (float16), and the gradient of a bias has few entries.
SLOPE_TOLERANCE = {"float32": 1e-5, "float64": 1e-9, "float16": 2e-3, "bfloat16": 1e-2}
#: Logits whose exponential is infinite in float32, or 0 where they are negative.
LARGEST_SCORE = 100.0
#: Factors of the loss, as gradient accumulation, AMP and a loss that is subtracted have, and of each utterance.
UPSTREAM, WEIGHTS = (-2.0,), (2.0, -1.0, 0.5)


class Case(NamedTuple):
    """A small batch and how the loss is asked on it."""

    name: str  # what is special about it, in words; "" for nothing
    shapes: Shapes
    draw: int  # number of the draw of random inputs
    logits: str = "random"  # or "trained"
    largest: Optional[float] = None  # the largest logit, see Layout.score_up_to
    upstream: Sequence[float] = ()  # one factor of the summed loss, or one for each utterance
    frozen: str = ""  # "joiner" or "outputs" (of encoder and decoder): what needs no gradient


def ragged(adapter: Adapter) -> Shapes:
    """Return the shapes of the first case, without an utterance that the loss refuses."""
    return [(T, max(U, adapter.fewest_targets)) for T, U in SHAPES]


def again(adapter: Adapter) -> Case:
    """Return the case that is asked after all others, to catch a loss that reuses results for the same shapes."""
    return Case("other numbers in the first batch's shapes", ragged(adapter), 11)


def cases(adapter: Adapter) -> Iterator[Case]:
    """Yield the cases of a loss; in a simulator, which would take hours, the ragged batch and its utterances alone."""
    shapes = ragged(adapter)
    yield Case("", shapes, 0)
    for n, (T, U) in enumerate(shapes):
        if U > 0:  # some losses refuse a batch with no target at all: the conformance cases ask for that
            yield Case("", [(T, U)], n + 1)
    if adapter.simulated:
        return
    yield Case("", BLOCKS, 5)
    yield Case(f"a loss times {UPSTREAM[0]:g}", RAGGED, 6, upstream=UPSTREAM)
    yield Case("a factor for each utterance", RAGGED, 7, upstream=WEIGHTS)
    for frozen in ("joiner", "outputs"):
        yield Case(f"frozen {frozen}", RAGGED, 12, frozen=frozen)
    yield Case("logits of a trained model", BLOCKS, 8, logits="trained")
    yield Case(f"logits of up to {LARGEST_SCORE:g}", RAGGED, 9, largest=LARGEST_SCORE)
    yield Case(f"logits of at most -{LARGEST_SCORE:g}", RAGGED, 10, largest=-LARGEST_SCORE)


class Checked(NamedTuple):
    """The errors of a loss over several cases."""

    loss_error: float  # the largest relative error over the cases with plain logits
    grad_error: float  # likewise
    slope_error: float  # the largest difference of a slope from 1, where rounding is small
    wrong: str  # what is wrong in words, "" if nothing is


def check(
    adapter: Adapter, device: torch.device, dtype: torch.dtype, asked: Optional[Sequence[Case]] = None
) -> Checked:
    """Return the errors over all cases and scopes, and what is wrong in the first that fails.

    A case of a single utterance comes before one of a batch, since it tells its author more.

    asked: the cases; None: those of `cases`.
    """
    plain, slopes, wrong = [(0.0, 0.0)], [0.0], []
    for case, answer in answered(adapter, device, dtype, list(cases(adapter)) if asked is None else asked):
        if case.logits == "random" and case.largest is None:
            plain.append(answer.errors)
        if case.largest is None:
            slopes.append(answer.slope_error)
        limits = tolerances(case, answer, adapter)
        errors = (*answer.errors, answer.slope_error)
        if answer.changed or not all(error <= limit for error, limit in zip(errors, limits)):
            words = diagnosis.in_words(case.shapes, answer, *limits)
            wrong.append((len(case.shapes) > 1, f"with {case.name}: {words}" if case.name else words))
    first = min(wrong, key=lambda each: each[0])[1] if wrong else ""  # min keeps the first of equals
    return Checked(max(loss for loss, _ in plain), max(gradient for _, gradient in plain), max(slopes), first)


def tolerances(case: Case, answer: Answer, adapter: Adapter) -> Tuple[float, float, float]:
    """Return the largest errors of the loss, of a gradient and of a slope that rounding and neglected cells explain."""
    dtype = adapter.settings.dtype
    eps = torch.finfo(torch.float64 if dtype == "float64" else torch.float32).eps
    score = 3 * abs(case.largest) if case.largest else 10.0
    sums = [(T + U) * score for T, U in case.shapes]
    summed = eps * max(float(loss.abs()) for loss in answer.losses)
    rounding = eps * max(sums) if case.largest else 0.0
    neglected = adapter.negligible * max(T * (U + 1) for T, U in case.shapes)
    base = TOLERANCE[dtype]
    loss = base + eps * sum(sums) / max(abs(float(answer.right)), 1e-30)
    beside = rounding + summed + neglected
    return loss, base + beside, SLOPE_TOLERANCE[dtype] + beside


def answered(
    adapter: Adapter, device: torch.device, dtype: torch.dtype, asked: Sequence[Case]
) -> Iterator[Tuple[Case, Answer]]:
    """Yield the answer of each case in each scope that it is asked in."""
    for case in asked:
        scopes = table.of(adapter).scopes
        if (case.logits == "trained" or case.largest) and dtype in (torch.float16, torch.bfloat16):
            scopes = tuple(scope for scope in scopes if scope == "loss")  # the joiner's own rounding is larger
        elif case.frozen:
            scopes = ("step",)
        factors = torch.tensor(case.upstream, dtype=torch.float64) if case.upstream else None
        of_each = factors is not None and len(factors) > 1
        for scope in scopes[:1] if of_each else scopes:
            wide, model, batch = given(adapter, case, device, dtype)  # anew: the loss may have written over another's
            batches = [batch]
            if of_each and "none" in adapter.reductions:
                wide.reduction = "none"
                with contextlib.suppress(NotOfEach):  # an adapter's own `loss` may always return the sum
                    yield case, answers.answer(wide, model, batches, scope, factors)
                    continue
            if of_each:
                wide.reduction = adapter.reduction
                batches = [answers.utterance(batch, n) for n in range(len(batch.shapes))]
            yield case, answers.answer(wide, model, batches, scope, factors)


def given(adapter: Adapter, case: Case, device: torch.device, dtype: torch.dtype) -> Tuple[Adapter, Joiner, Batch]:
    """Return (the adapter with its range widened to all of U, the joiner, the batch) of a case."""
    small = copy.copy(adapter)
    sizes = TRAINED if case.logits == "trained" else RANDOM
    small.settings = replace(adapter.settings, **sizes, logits=case.logits, amp=None, compile=False)
    model = table.of(small).model(device, dtype)
    batch = inputs.make_batch(
        case.shapes,
        **sizes,
        device=device,
        dtype=dtype,
        key=(small.settings.seed, case.draw),
        source=inputs.source_of(small.settings),
    )
    for leaf in {"": (), "joiner": model.parameters(), "outputs": (batch.encoder_out, batch.decoder_out)}[case.frozen]:
        leaf.requires_grad_(False)
    if case.largest is not None:
        table.of(small).score_up_to(case.largest, model, batch)
    return small.widened(max(U for _, U in case.shapes)), model, batch


def repeated(adapter: Adapter, device: torch.device, dtype: torch.dtype) -> Tuple[List[str], List[str]]:
    """Ask the first case twice more, the last time with NaN in its padding; return two lists of names.

    The first is which of loss and gradients have other bits when they are asked for again; the second is "loss", or the
    tensors whose gradient is not finite, where the padding holds NaN.
    """
    found = []
    for padding in (0.0, 0.0, math.nan):
        wide, model, batch = given(adapter, next(cases(adapter)), device, dtype)
        if padding:
            with torch.no_grad():
                for n, (T, U) in enumerate(batch.shapes):
                    batch.encoder_out[n, T:] = batch.decoder_out[n, U + 1 :] = padding
        step = prepare(wide, model, batch, table.of(wide).scopes[0])
        found.append({"loss": step.run(), **step.gradients()})
    first, again, reached = found
    differing = fingerprint.changed(fingerprint.fingerprints(first), again)
    return differing, [name for name, values in reached.items() if values is not None and not values.isfinite().all()]
