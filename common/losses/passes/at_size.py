"""Loss and gradient of a measured batch, at the run's own N, T, U and V, against the float64 reference.

The correctness pass judges small batches cell by cell; this finds what goes wrong only at size: an index that
overflows, a block that is left out, sums that lose their digits.  Scope "loss", for what each layout takes: the
reference makes log-probabilities of some frames at a time, keeps those of the arcs, walks the lattice in plain loops,
and makes the gradient of some frames at a time, so that it needs no second tensor of the logits' size.  A pruned loss
is judged on the cells in its own ranges.
"""

from __future__ import annotations

import math
from typing import Any, Dict, Iterator, List, Optional, Tuple

import torch

from common.losses import reference
from common.losses import work as works
from common.losses.work import Work

#: JSON has no infinity: what is not finite is written as this.
UNBOUNDED = 1e300
#: Elements of the logits that are in float64 at a time.
CHUNK = 1 << 23
#: Units in the last place that sums as large as the loss may lose.
LOST_PLACES = 4


class Cells:
    """What a loss was given, and the gradient it found, by utterance and frames.

    scores: leaf of scope "loss" in one of the layouts of common.losses.adapter.Adapter; gradient: likewise, of the same
    shape; ranges: (N, T, S) symbols that a pruned loss kept.
    """

    def __init__(self, layout: str, work: Work, gradient: torch.Tensor):
        self.layout, self.batch, self.scores, self.gradient = layout, work.batch, work.logits.detach(), gradient
        self.ranges = getattr(work.prepared, "ranges", None) if layout == "pruned" else None
        self.N, self.U = self.batch.targets.shape
        if layout == "packed":
            sizes = [T * (U + 1) for T, U in self.batch.shapes]
            self.begins = [sum(sizes[:n]) for n in range(self.N)]
        if layout == "additive":
            from common.losses import additive

            self.am, self.lm = additive.parts(self.scores, self.N, self.U)
            self.am_gradient, self.lm_gradient = additive.parts(gradient, self.N, self.U)

    def logits(self, n: int, begin: int, end: int) -> torch.Tensor:
        """(frames, U_n+1 or S, V) float64."""
        _, U = self.batch.shapes[n]
        if self.layout == "additive":
            return self.am[n, begin:end, None].double() + self.lm[n, None, : U + 1].double()
        return self._of(self.scores, n, begin, end).double()

    def _of(self, tensor: torch.Tensor, n: int, begin: int, end: int) -> torch.Tensor:
        _, U = self.batch.shapes[n]
        if self.layout == "packed":
            at = self.begins[n]
            return tensor[at + begin * (U + 1) : at + end * (U + 1)].view(end - begin, U + 1, -1)
        return tensor[n, begin:end] if self.layout == "pruned" else tensor[n, begin:end, : U + 1]

    def symbols(self, n: int, begin: int, end: int) -> torch.Tensor:
        """(frames, U_n+1 or S): the u of each of these cells."""
        _, U = self.batch.shapes[n]
        if self.ranges is not None:
            return self.ranges[n, begin:end].long()
        return torch.arange(U + 1, device=self.scores.device).expand(end - begin, U + 1)

    def spans(self, n: int) -> Iterator[Tuple[int, int]]:
        """(begin, end) of some frames at a time."""
        T, U = self.batch.shapes[n]
        frames = max(1, CHUNK // ((U + 1) * self.scores.size(-1)))
        return ((begin, min(begin + frames, T)) for begin in range(0, T, frames))

    def compare(self, n: int, begin: int, end: int, right: torch.Tensor) -> Iterator[Tuple[torch.Tensor, torch.Tensor]]:
        """(gradient, right one) of what these frames tell of, from the `right` one of their cells."""
        if self.layout == "additive":
            self.lm_right[: right.size(1)] += right.sum(0)
            yield self.am_gradient[n, begin:end], right.sum(1)
            if end == self.batch.shapes[n][0]:
                yield self.lm_gradient[n], self.lm_right
        else:
            yield self._of(self.gradient, n, begin, end), right

    def begin(self, n: int) -> None:
        if self.layout == "additive":
            self.lm_right = torch.zeros_like(self.lm[n], dtype=torch.float64)

    def padding(self, n: int) -> List[float]:
        """Largest gradients where there is nothing but padding."""
        T, U = self.batch.shapes[n]
        if self.layout == "packed":
            return []
        if self.layout == "additive":
            return [_largest(self.am_gradient[n, T:])]
        outside = [_largest(self.gradient[n, T:])]
        return outside if self.layout == "pruned" else [*outside, _largest(self.gradient[n, :T, U + 1 :])]


def _largest(values: torch.Tensor) -> float:
    """The largest magnitude; infinite where one is not a number."""
    found = values.abs().max().item() if values.numel() else 0.0
    return math.inf if found != found else found


def arcs(cells: Cells, n: int, blank: int) -> Tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of blank (T, U+1) and of the next target (T, U) on the CPU; -inf where a range leaves a cell
    out."""
    T, U = cells.batch.shapes[n]
    blanks = torch.full((T, U + 2), -math.inf, dtype=torch.float64)
    labels = torch.full((T, U + 2), -math.inf, dtype=torch.float64)
    for begin, end in cells.spans(n):
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


def judge(cells: Cells, topology: str, blank: int) -> Tuple[float, float, float]:
    """(summed loss that is right, largest error of the gradient over its largest magnitude, what the sums along a path
    may come to: see `check`)."""
    total, sums, worst, largest = 0.0, 0.0, 0.0, 0.0
    score = _largest(cells.scores)
    for n, (T, U) in enumerate(cells.batch.shapes):
        blanks, labels = arcs(cells, n, blank)
        likelihood, *derivatives = reference.lattice(blanks.tolist(), labels.tolist(), T, U, topology)
        total, sums = total - likelihood, max(sums, -LOST_PLACES * likelihood + (T + U) * score)
        # two columns more: of the target after the last one, and of the cells of a range beyond the last target
        d_blank, d_label = (_widened(values, T, U + 2).to(cells.scores.device) for values in derivatives)
        cells.begin(n)
        for begin, end in cells.spans(n):
            log_probs, symbols, index = _frames(cells, n, begin, end)
            where = symbols.clamp(max=U + 1)
            of_blank, of_label = (values[begin:end].gather(1, where) for values in (d_blank, d_label))
            right = reference.cell_gradient(log_probs, of_blank, of_label, index, blank)
            for mine, theirs in cells.compare(n, begin, end, right):
                worst, largest = max(worst, _largest(mine.double() - theirs)), max(largest, _largest(theirs))
        worst = max([worst, *cells.padding(n)])
    return total, worst / max(largest, 1e-30), sums


def _widened(values: List[List[float]], T: int, columns: int) -> torch.Tensor:
    """(T, columns) float64, with zeros after what is there."""
    found = torch.tensor(values, dtype=torch.float64).view(T, -1)
    return torch.nn.functional.pad(found, (0, columns - found.size(1)))


def check(context, tolerance: float, utterances: Optional[int] = None) -> Dict[str, Any]:
    """The ``at_size`` of the ``correctness`` record (see common.results.records): of the measured batch with the most
    padded cells, or of its first `utterances`.  `context`: common.running.worker.Context.

    tolerance: relative, of the loss, and of the gradient where sums are short.  A posterior is the exponential of such
    a sum, so an error of the sum is a relative error of the gradient: on top of the tolerance it may be as large as the
    rounding of the longest sums (LOST_PLACES of the loss's own size, and one of a score for each of the T + U steps).
    float16 and bfloat16 are to be summed in float32.
    """
    adapter, batches = context.adapter, context.all_batches
    index = max(context.batches, key=lambda batch: batches.cells(batch)[1])

    def prepared() -> Work:
        return works.prepare(adapter, context.model, context.make_batch(index, 0, utterances), "loss")

    work = prepared()
    actual = float(work.run())
    gradient = work.logits.grad
    work = prepared()  # the loss may have overwritten its logits
    expected, grad_error, sums = judge(Cells(adapter.layout, work, gradient), adapter.topology, adapter.blank)
    loss_error = abs(actual - expected) / max(abs(expected), 1e-30)
    summed_in = torch.float64 if context.dtype == torch.float64 else torch.float32
    allowed = tolerance + torch.finfo(summed_in).eps * sums
    return {
        "batch": index,
        "N": len(work.batch.shapes),
        "T_max": max(T for T, _ in work.batch.shapes),
        "U_max": max(U for _, U in work.batch.shapes),
        "loss_error": finite(loss_error),
        "grad_error": finite(grad_error),
        "grad_tolerance": allowed,
        "ok": loss_error <= tolerance and grad_error <= allowed,
    }


def finite(value: float) -> float:
    """An error as it is written."""
    return value if value < UNBOUNDED else UNBOUNDED
