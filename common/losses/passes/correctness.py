"""The correctness pass: loss and gradient on a small ragged batch against the float64 oracle.

Both scopes: the gradient of what the loss is given, and the step's gradients of encoder_out, decoder_out and every
weight.  A pruned loss is judged with its range widened to all of U, where it must be exact; the record also has its gap
to the exact loss at the run's own range, over the measured utterances, under random and under peaky logits.  Then a
loss that passes is judged on a measured batch at its own size (at_size.py).  Leaves out the corner cases, which
conformance.py asks: this pass decides whether a loss is timed.
"""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Tuple

import torch

from common.core import statistics
from common.core.errors import UserError
from common.core.settings import LOGITS
from common.core.text import UNBOUNDED, finite
from common.losses import inputs
from common.losses.adapter import Adapter
from common.losses.inputs import Batch
from common.losses.joiner import Joiner
from common.losses.layouts import table
from common.losses.oracle import TOLERANCE, relative_error
from common.losses.passes import at_size, diagnosis
from common.losses.step import leaves_of, prepare

#: (T, U) of each utterance.
Shapes = List[Tuple[int, int]]
#: Ragged in both, T = 1 and U = 0 among them.
SHAPES: Shapes = [(11, 5), (7, 4), (9, 2), (1, 0)]
VOCAB_SIZE, ENCODER_DIM = 17, 24
#: Of the measured batch with --find-largest, which has yet to find what size fits.
SEARCH_UTTERANCES = 2
#: Whose gap to the exact loss is measured, under the run's logits and under the other; each takes half a second.
GAP_UTTERANCES, OTHER_UTTERANCES = 40, 8
#: Of what is off on a measured batch, in words; the record has all, and the utterance follows.
MOST_WRONG = 2


class Answer(NamedTuple):
    """Of one step: the loss and the oracle's, and by name each gradient (None where it is missing) and the oracle's."""

    loss: torch.Tensor
    right: torch.Tensor
    gradients: Dict[str, Tuple[Optional[torch.Tensor], torch.Tensor]]

    @property
    def errors(self) -> Tuple[float, float]:
        """Of the loss, and the largest of any gradient.  A gradient that is missing is wrong."""
        errors = [math.inf if one is None else relative_error(one, right) for one, right in self.gradients.values()]
        return relative_error(self.loss, self.right), max(errors)


def loss_scope(adapter: Adapter, model: Joiner, batch: Batch) -> Answer:
    """Given logits.  Padded cells count: their gradient must be zero."""
    step = prepare(adapter, model, batch, "loss")
    leaf = step.given.detach().cpu().double().clone().requires_grad_()  # a copy: the loss may overwrite its logits
    actual = step.run()
    expected = table.of(adapter).expected(leaf, batch).sum()
    expected.backward()
    return Answer(actual, expected, {"given": (step.gradients()["given"], leaf.grad)})


def step_scope(adapter: Adapter, model: Joiner, batch: Batch) -> Answer:
    """The whole step."""
    step = prepare(adapter, model, batch, "step")
    actual = step.run()
    double_model = copy.deepcopy(model).cpu().double()
    double_batch = replace(
        batch,
        encoder_out=batch.encoder_out.detach().cpu().double().requires_grad_(),
        decoder_out=batch.decoder_out.detach().cpu().double().requires_grad_(),
        targets=batch.targets.cpu(),
    )
    double_model.zero_grad(set_to_none=True)
    expected = table.of(adapter).expected_step(double_model, double_batch)
    expected.backward()
    found = step.gradients()
    leaves = leaves_of(double_model, double_batch)  # an additive loss does not use the joiner: its weights get none
    gradients = {name: (found[name], of.grad) for name, of in leaves.items() if of.grad is not None}
    return Answer(actual, expected, gradients)


ANSWERS = {"loss": loss_scope, "step": step_scope}


def cases(fewest_targets: int) -> Iterator[Shapes]:
    """The ragged batch, then each utterance alone, so that the error of one cannot hide behind a larger one."""
    shapes = [(T, max(U, fewest_targets)) for T, U in SHAPES]
    yield shapes
    for T, U in shapes:
        if U > 0:  # some losses refuse a batch with no target at all: conformance.py asks for that
            yield [(T, U)]


def answers(adapter: Adapter, device: torch.device, dtype: torch.dtype) -> Iterator[Tuple[Shapes, Answer]]:
    """Of all cases in all scopes that the loss has."""
    small = copy.copy(adapter)
    sizes = {"vocab_size": VOCAB_SIZE, "encoder_dim": ENCODER_DIM}
    small.settings = replace(adapter.settings, **sizes, logits="random", amp=None, compile=False)
    layout = table.of(small)
    model = layout.model(device, dtype)
    for index, shapes in enumerate(cases(small.fewest_targets)):
        wide = small.widened(max(U for _, U in shapes))
        for scope in layout.scopes:
            batch = inputs.make_batch(
                shapes,
                vocab_size=VOCAB_SIZE,
                encoder_dim=ENCODER_DIM,
                device=device,
                dtype=dtype,
                key=(small.settings.seed, index),
            )
            yield shapes, ANSWERS[scope](wide, model, batch)


def check(adapter: Adapter, device: torch.device, dtype: torch.dtype) -> Tuple[float, float, str]:
    """Largest relative errors of loss and gradient over all cases and all scopes that the loss has, and what is wrong
    with the first of them that is, an utterance alone where one is."""
    tolerance = TOLERANCE[adapter.settings.dtype]
    errors, wrong = [], []
    for shapes, answer in answers(adapter, device, dtype):
        errors.append(answer.errors)
        if not max(answer.errors) <= tolerance:
            wrong.append((len(shapes), diagnosis.in_words(shapes, answer, tolerance)))
    first = min(wrong, key=lambda each: each[0])[1] if wrong else ""  # min keeps the first of equals
    return max(loss for loss, _ in errors), max(gradient for _, gradient in errors), first


def approximation_gaps(context) -> Dict[str, Optional[Dict[str, float]]]:
    """The gap of a pruned loss to the exact one (common.losses.layouts.pruned), by kind of logits: the median, lowest
    and highest over the run's utterances, each alone, or over some of them.

    In float64, so that it is the gap of the method and not of the dtype.  None where the run's sizes or recipe do not
    allow such logits, or the exact loss is almost 0 under them.
    """
    gaps: Dict[str, Optional[Dict[str, float]]] = dict.fromkeys(LOGITS)
    every = [(batch, n) for batch in context.batches for n, (_, U) in enumerate(context.shapes(batch)) if U > 0]
    for kind in LOGITS:
        if kind == "peaky" and context.settings.pruned_recipe == "benchmark-2022":
            continue
        adapter = copy.copy(context.adapter)
        adapter.settings = replace(context.settings, logits=kind, amp=None, compile=False)
        layout, double = table.of(adapter), replace(context, settings=adapter.settings, dtype=torch.float64)
        try:
            model = layout.model(context.device, torch.float64)
        except UserError:  # D is too small for peaky logits, which the user did not ask for
            continue
        most = GAP_UTTERANCES if kind == context.settings.logits else OTHER_UTTERANCES
        chosen = every[:: math.ceil(len(every) / most) or 1]
        found = [layout.gap(model, double.make_batch(batch, first=n, utterances=1)) for batch, n in chosen]
        known = sorted(gap if math.isfinite(gap) else UNBOUNDED for gap in found if gap is not None)
        if known:
            ends = {"lowest": known[0], "highest": known[-1], "utterances": len(known)}
            gaps[kind] = {"median": statistics.median(known), **ends}
    return gaps


def run(context) -> Iterator[Dict[str, Any]]:
    """One ``correctness`` record.  `context`: see common.losses.context.Context."""
    adapter = context.adapter
    loss_error, grad_error, wrong = check(adapter, context.device, context.dtype)
    tolerance = TOLERANCE[context.settings.dtype]
    layout = table.of(adapter)
    ranges = approximation_gaps(context) if layout.approximate else {}
    gaps = {kind: of and of["median"] for kind, of in ranges.items()} or None
    ok, found = loss_error <= tolerance and grad_error <= tolerance, None
    if ok and not adapter.simulated:  # a simulator would take hours
        few = SEARCH_UTTERANCES if context.settings.find_largest else None
        found = at_size.check(context, TOLERANCE[context.settings.precision], few)
        wrong = found.pop("where")
    context.wrong = wrong  # not of the record: the status says it
    ok = ok and (found is None or found["ok"])
    yield {
        "record": "correctness",
        "loss_error": finite(loss_error),
        "grad_error": finite(grad_error),
        "tolerance": tolerance,
        "ok": ok,
        "approximation_gap": gaps and gaps[context.settings.logits],
        "approximation_gaps": gaps,
        "gap_ranges": {kind: of for kind, of in ranges.items() if of},
        "at_size": found,
        "note": "approximate; judged with its range widened to all of U" if layout.approximate else "",
    }


def in_words(record: Dict[str, Any]) -> str:
    """How wrong a loss is, from a ``correctness`` record that is not ok."""
    found = record["at_size"]
    if found:
        where = f"on a measured batch (N {found['N']}, T {found['T_max']}, U {found['U_max']})"
        return f"{where}: {'; '.join(at_size.wrong(found)[:MOST_WRONG])}"
    sizes = [at_size.size(record[f"{what}_error"]) for what in ("loss", "grad")]
    return f"loss {sizes[0]}, gradient {sizes[1]}; {record['tolerance']:.0e} is allowed"
