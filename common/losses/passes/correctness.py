"""The correctness pass: loss and gradient on a small ragged batch against the float64 reference.

Both scopes: the gradient of given logits, and the step's gradients of encoder_out, decoder_out and every weight.  A
pruned loss is judged with its range widened to all of U, where it must be exact, and tells its gap at the run's own
range on the first measured utterance, under random and under peaky logits.  Then, of those that pass, a measured batch
at its own size (measured_size.py).  Leaves out the corners (see conformance.py): this pass asks whether a time is worth
printing.
"""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any, Dict, Iterator, List, Optional, Tuple

import torch

from common.errors import UserError
from common.losses import inputs, peaky, pruned
from common.losses import work as works
from common.losses.adapter import Adapter
from common.losses.inputs import Batch
from common.losses.joiner import Joiner
from common.passes import measured_size
from common.passes.measured_size import UNBOUNDED, finite
from common.settings import LOGITS

#: (T, U): ragged in both, T = 1 and U = 0 among them.
SHAPES = [(11, 5), (7, 4), (9, 2), (1, 0)]
VOCAB_SIZE, ENCODER_DIM = 17, 24
#: Largest relative error that passes.  float16 and bfloat16 carry 3 and 2 digits through joiner and loss.
TOLERANCE = {"float32": 1e-4, "float64": 1e-9, "float16": 2e-2, "bfloat16": 1e-1}
#: Of a measured batch, with --find-largest: what size fits is still to be found.
SEARCH_UTTERANCES = 2


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest absolute difference over the largest expected magnitude; infinite where a value is not finite."""
    actual = actual.detach().cpu().double()
    expected = expected.detach().cpu().double()
    difference = (actual - expected).abs().max().item() if expected.numel() else 0.0
    if difference != difference:
        return float("inf")
    return difference / max(expected.abs().max().item() if expected.numel() else 0.0, 1e-30)


def loss_scope_errors(adapter: Adapter, model: Joiner, batch: Batch) -> Tuple[float, float]:
    """(loss error, gradient error) given logits.  Padded cells count: their gradient must be zero."""
    work = works.prepare(adapter, model, batch, "loss")
    leaf = work.logits.detach().cpu().double().clone().requires_grad_()  # a copy: the loss may overwrite its logits
    actual = work.run()
    expected = adapter.expected(leaf, batch).sum()
    expected.backward()
    return relative_error(actual, expected), relative_error(work.logits.grad, leaf.grad)


def step_scope_errors(adapter: Adapter, model: Joiner, batch: Batch) -> Tuple[float, float]:
    """(loss error, largest gradient error) of the whole step."""
    work = works.prepare(adapter, model, batch, "step")
    actual = work.run()
    double_model = copy.deepcopy(model).cpu().double()
    double_batch = replace(
        batch,
        encoder_out=batch.encoder_out.detach().cpu().double().requires_grad_(),
        decoder_out=batch.decoder_out.detach().cpu().double().requires_grad_(),
        targets=batch.targets.cpu(),
    )
    double_model.zero_grad(set_to_none=True)
    expected = adapter.expected_step(double_model, double_batch)
    expected.backward()
    pairs = [(batch.encoder_out, double_batch.encoder_out), (batch.decoder_out, double_batch.decoder_out)]
    pairs += list(zip(model.parameters(), double_model.parameters()))
    # an additive loss does without the joiner, whose weights get no gradient from it
    errors = [relative_error(mine.grad, theirs.grad) for mine, theirs in pairs if theirs.grad is not None]
    return relative_error(actual, expected), max(errors)


def cases(fewest_targets: int) -> Iterator[List[Tuple[int, int]]]:
    """The ragged batch, then its utterances alone, so that no error of one hides behind another's."""
    shapes = [(T, max(U, fewest_targets)) for T, U in SHAPES]
    yield shapes
    for T, U in shapes:
        if U > 0:  # a batch with no target at all is a corner that some losses refuse
            yield [(T, U)]


def check(adapter: Adapter, device: torch.device, dtype: torch.dtype) -> Tuple[float, float]:
    """Largest relative errors of loss and gradient over all cases and both scopes."""
    small = copy.copy(adapter)
    small.settings = replace(adapter.settings, vocab_size=VOCAB_SIZE, encoder_dim=ENCODER_DIM, logits="random")
    model = Joiner.of(small.settings, small.weights(device, dtype), device, dtype)
    errors = []
    for index, shapes in enumerate(cases(small.fewest_targets)):
        wide = small.widened(max(U for _, U in shapes))
        for scope_errors in (loss_scope_errors, step_scope_errors):
            batch = inputs.make_batch(
                shapes,
                vocab_size=VOCAB_SIZE,
                encoder_dim=ENCODER_DIM,
                device=device,
                dtype=dtype,
                key=(small.settings.seed, index),
            )
            errors.append(scope_errors(wide, model, batch))
    return max(loss for loss, _ in errors), max(gradient for _, gradient in errors)


def approximation_gaps(context) -> Dict[str, Optional[float]]:
    """Of a pruned loss, by kind of logits, on the run's first utterance: see `pruned.approximation_gap`.

    In float64, so that the gap is the method's and not the dtype's.  None where the run's sizes or recipe allow no such
    logits, or the loss is nothing under them.
    """
    gaps: Dict[str, Optional[float]] = dict.fromkeys(LOGITS)
    settings, first = context.settings, context.batches[0]
    for kind in LOGITS:
        if kind == "peaky" and settings.pruned_recipe == "benchmark-2022":
            continue
        adapter = copy.copy(context.adapter)
        adapter.settings = replace(settings, logits=kind)
        try:
            codes = peaky.codes_of(adapter.settings)
        except UserError:  # of a D too small: the user asked for random ones
            continue
        device, dtype = context.device, torch.float64
        model = Joiner.of(adapter.settings, adapter.weights(device, dtype), device, dtype)
        batch = inputs.make_batch(
            context.shapes(first)[:1],
            vocab_size=settings.vocab_size,
            encoder_dim=settings.encoder_dim,
            device=device,
            dtype=dtype,
            key=(settings.seed, first, 0),
            codes=codes,
        )
        gap = pruned.approximation_gap(adapter, model, batch)
        gaps[kind] = gap if gap is None or math.isfinite(gap) else UNBOUNDED
    return gaps


def run(context) -> Iterator[Dict[str, Any]]:
    """One ``correctness`` record.  `context`: see common.running.worker.Context."""
    adapter = context.adapter
    loss_error, grad_error = check(adapter, context.device, context.dtype)
    tolerance = TOLERANCE[context.settings.dtype]
    gaps = approximation_gaps(context) if adapter.kind == "pruned" else None
    note = "approximate; judged with its range widened to all of U" if adapter.kind == "pruned" else ""
    ok, at_size = loss_error <= tolerance and grad_error <= tolerance, None
    if ok and not adapter.simulated:  # thread by thread in Python, a simulator would take hours
        few = SEARCH_UTTERANCES if context.settings.find_largest else None
        at_size = measured_size.check(context, tolerance, few)
    yield {
        "record": "correctness",
        "loss_error": finite(loss_error),
        "grad_error": finite(grad_error),
        "tolerance": tolerance,
        "ok": ok and (at_size is None or at_size["ok"]),
        "approximation_gap": gaps and gaps[context.settings.logits],
        "approximation_gaps": gaps,
        "at_size": at_size,
        "note": note,
    }


def in_words(record: Dict[str, Any]) -> str:
    """How wrong a ``correctness`` record is that is not ok."""
    at_size = record["at_size"]
    wrong, allowed = (at_size or record), (at_size or {}).get("grad_tolerance", record["tolerance"])
    size = f" on a measured batch (N {wrong['N']}, T {wrong['T_max']}, U {wrong['U_max']})" if at_size else ""
    sizes = [_size(wrong[f"{what}_error"]) for what in ("loss", "grad")]
    limits = f"{record['tolerance']:.0e}" + (f" and {allowed:.0e} are" if at_size else " is")
    return f"loss {sizes[0]}, gradient {sizes[1]}{size}; {limits} allowed"


def _size(error: float) -> str:
    return "not finite" if error >= UNBOUNDED else f"off by {error:.1e}"
