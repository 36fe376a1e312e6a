"""Loss and gradient of a measured batch, at the run's own N, T, U and V, against the float64 oracle.

The correctness pass judges small batches cell by cell.  This finds errors that only a large batch shows: an index that
overflows, a block that is left out, sums that lose their digits.  The oracle makes log-probabilities of some frames
at a time, keeps those of the arcs, walks the lattice in plain loops, and makes the gradient of some frames at a time,
so it needs no second tensor of the size of the logits.  A pruned loss is judged on the cells in its own ranges.  Scope
"loss"; of a layout that has none, scope "step" with the gradients of outputs and weights.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any, Dict, Iterator, List, Optional, Tuple

import torch

from common.core.units import finite
from common.losses import oracle
from common.losses.layouts import table
from common.losses.layouts.cells import Cells, largest

#: Elements of the logits that are in float64 at a time.
CHUNK = 1 << 23
#: Units in the last place that sums as large as the loss may lose.
LOST_PLACES = 4


class Errors:
    """Of gradients, tensor by tensor: the largest error over the largest magnitude that is right."""

    def __init__(self) -> None:
        self.worst: Dict[str, float] = defaultdict(float)
        self.largest: Dict[str, float] = defaultdict(float)

    def note(self, name: str, error: float, right: float = 0.0) -> None:
        self.worst[name] = max(self.worst[name], error)
        self.largest[name] = max(self.largest[name], right)

    def relative(self) -> float:
        return max(worst / max(self.largest[name], 1e-30) for name, worst in self.worst.items())


def spans(cells: Cells, n: int) -> Iterator[Tuple[int, int]]:
    """(begin, end) of some frames of an utterance at a time."""
    T, U = cells.batch.shapes[n]
    frames = max(1, CHUNK // ((U + 1) * cells.width))
    return ((begin, min(begin + frames, T)) for begin in range(0, T, frames))


def arcs(cells: Cells, n: int, blank: int) -> Tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of blank (T, U+1) and of the next target (T, U) on the CPU; -inf where a range leaves a cell
    out."""
    T, U = cells.batch.shapes[n]
    blanks = torch.full((T, U + 2), -math.inf, dtype=torch.float64)
    labels = torch.full((T, U + 2), -math.inf, dtype=torch.float64)
    for begin, end in spans(cells, n):
        log_probs, symbols, index = _frames(cells, n, begin, end)
        where = symbols.clamp(max=U + 1).cpu()
        blanks[begin:end].scatter_(1, where, log_probs[..., blank].cpu())
        labels[begin:end].scatter_(1, where, log_probs.gather(2, index.unsqueeze(2)).squeeze(2).cpu())
    return blanks[:, : U + 1], labels[:, :U]


def _frames(cells: Cells, n: int, begin: int, end: int) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(log-probabilities (frames, cells, V), u of each cell, index of the target that follows it or of any)."""
    log_probs, symbols = cells.logits(n, begin, end).log_softmax(-1), cells.symbols(n, begin, end)
    targets = torch.nn.functional.pad(cells.batch.targets[n].long(), (0, 2))
    return log_probs, symbols, targets[symbols.clamp(max=cells.U)]


def judge(cells: Cells, topology: str, blank: int) -> Tuple[float, float, float, int]:
    """(summed loss that is right, relative error of the gradient, size of the longest sums along a path: see `check`,
    cells that a gradient needs)."""
    total, errors, likelihoods, needed = 0.0, Errors(), [], 0
    for n, (T, U) in enumerate(cells.batch.shapes):
        blanks, labels = arcs(cells, n, blank)
        likelihood, *derivatives = oracle.lattice(blanks.tolist(), labels.tolist(), T, U, topology)
        total -= likelihood
        likelihoods.append(likelihood)
        # two columns more: of the target after the last one, and of the cells of a range beyond the last target
        d_blank, d_label = (_widened(values, T, U + 2).to(cells.batch.targets.device) for values in derivatives)
        needed += oracle.needed_cells(d_blank, d_label, cells.batch.encoder_out.dtype)
        for begin, end in spans(cells, n):
            log_probs, symbols, index = _frames(cells, n, begin, end)
            where = symbols.clamp(max=U + 1)
            of_blank, of_label = (values[begin:end].gather(1, where) for values in (d_blank, d_label))
            right = oracle.cell_gradient(log_probs, of_blank, of_label, index, blank)
            for name, found, expected in cells.compare(n, begin, end, right):
                errors.note(name, largest(found.double() - expected), largest(expected))
        for name, found, expected in cells.compare_rest(n):
            errors.note(name, largest(found.double() - expected), largest(expected))
        for name, found in cells.padding(n):
            errors.note(name, largest(found))
    score = cells.largest_score()
    sums = [(T + U) * score - LOST_PLACES * one for (T, U), one in zip(cells.batch.shapes, likelihoods)]
    return total, errors.relative(), max(sums), needed


def _widened(values: List[List[float]], T: int, columns: int) -> torch.Tensor:
    """(T, columns) float64, with zeros after what is there."""
    found = torch.tensor(values, dtype=torch.float64).view(T, -1)
    return torch.nn.functional.pad(found, (0, columns - found.size(1)))


def check(context, tolerance: float, utterances: Optional[int] = None) -> Dict[str, Any]:
    """The ``at_size`` of the ``correctness`` record (see common.records.schema): of the measured batch with the most
    padded cells, or of its first `utterances`.  `context`: common.losses.context.Context.

    tolerance: relative, of the loss, and of the gradient where sums are short.  A posterior is the exponential of a sum
    along a path, so an error of the sum is a relative error of the gradient: on top of the tolerance it may be as large
    as the rounding of the longest sums (LOST_PLACES of the loss's own size, and one of a score for each of the T + U
    steps).  float16 and bfloat16 are to be summed in float32.
    """
    adapter, batches = context.adapter, context.all_batches
    layout, index = table.of(adapter), max(context.batches, key=lambda batch: batches.cells(batch)[1])
    scope = layout.scopes[0]
    step = context.step(scope, index, utterances=utterances)
    actual, gradients = float(step.run()), step.gradients()
    step = context.step(scope, index, utterances=utterances)  # the loss may have overwritten its logits
    cells = layout.cells(step.batch, step.prepared, step.leaves, gradients)
    expected, grad_error, sums, needed = judge(cells, adapter.topology, adapter.blank)
    loss_error = abs(actual - expected) / max(abs(expected), 1e-30)
    summed_in = torch.float64 if context.dtype == torch.float64 else torch.float32
    allowed = tolerance + torch.finfo(summed_in).eps * sums
    return {
        "batch": index,
        "N": len(step.batch.shapes),
        "T_max": max(T for T, _ in step.batch.shapes),
        "U_max": max(U for _, U in step.batch.shapes),
        "loss_error": finite(loss_error),
        "grad_error": finite(grad_error),
        "grad_tolerance": allowed,
        "useful_cells": sum(T * (U + 1) for T, U in step.batch.shapes),
        "needed_cells": needed,
        "ok": loss_error <= tolerance and grad_error <= allowed,
    }
