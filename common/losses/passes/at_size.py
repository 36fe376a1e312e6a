"""Judge loss and gradients of a measured batch, at the run's own N, T, U and V, against the float64 oracle.

Finds errors that only a large batch shows: an index that overflows, a block that is left out, sums that lose their
digits.  The oracle computes some frames at a time, so it needs no second tensor of the size of the logits.  A pruned
loss is judged on the cells in its own ranges.

Both scopes: the gradient of the loss's inputs, and the step's gradients of outputs and weights; of a pruned loss
trained with a simple loss only those of the joiner's weights, in which the simple loss has no part.

An entry of a symbol that is not the target is a posterior over V, far below the largest entry.  So differences are also
summed over each frame, each u and each symbol, and over each row of other tensors, and compared with what belongs
there.  And the gradient of a cell sums to 0 over V.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Dict, Iterator, List, Optional, Sequence, Tuple

import torch

from common.core.text import UNBOUNDED, finite
from common.data.batching import heaviest, lightest
from common.losses import fingerprint, oracle
from common.losses.adapter import Adapter
from common.losses.layouts import table
from common.losses.layouts.cells import Cells, largest
from common.losses.passes import diagnosis
from common.losses.passes.small_batches import SLOPE_TOLERANCE
from common.losses.step import LossStep
from common.records.schema import AtSize

#: Elements of the logits that are converted to float64 at a time.
CHUNK = 1 << 23
#: Units in the last place that sums as large as the loss may lose.
LOST_PLACES = 4
#: An error is located if it is more than this share of the largest entry.
OFF = 1e-4
#: Largest sum of differences over a frame, a symbol, ... as a share of the right sum, where sums are short.
SUM_TOLERANCE = {"float32": 1e-2, "float64": 1e-7, "float16": 1e-1, "bfloat16": 1e-1}
#: A right sum counts as at least this share of the mean one, since rounding may exceed a smaller sum.
FLOOR = 0.1

#: An utterance: its log-likelihood, and the derivatives (T, U+2, P) of the parts of each cell (see topologies.py).
Lattice = Tuple[float, torch.Tensor]


class Errors:
    """Collects the errors of gradients, part by part.

    Its results are `entries` and `slopes` by name of the tensor, and `sums` by what the differences are summed over
    ("frame", "u", "symbol"; "cell" for the sum over V; or the tensor whose rows are summed): the largest share of the
    right sum.
    """

    def __init__(self) -> None:
        self.worst: Dict[str, float] = defaultdict(float)
        self.largest: Dict[str, float] = defaultdict(float)
        self.sums: Dict[str, float] = defaultdict(float)
        self.products: Dict[str, float] = defaultdict(float)
        self.squares: Dict[str, float] = defaultdict(float)
        self.furthest: Optional[Tuple[int, str]] = None  # number of an utterance, and the cell and values in words

    def note(self, name: str, gradient: Optional[torch.Tensor], right: torch.Tensor) -> torch.Tensor:
        """Note a part of a gradient; return |gradient - right|, float64, infinite if the gradient is missing."""
        self.squares[name] += float((right * right).sum())
        if gradient is None:
            difference = torch.full_like(right, math.inf)
        else:
            difference = gradient.double() - right
            self.products[name] += float((difference * right).sum())
            difference.abs_()
        self.worst[name] = max(self.worst[name], largest(difference))
        self.largest[name] = max(self.largest[name], largest(right))
        return difference

    def locate(self, n: int, begin: int, symbols: torch.Tensor, gradient: torch.Tensor, right: torch.Tensor) -> None:
        """Keep where the gradient of an utterance is furthest off.

        Args:
            n: the utterance.
            begin: first of the frames.
            symbols: (frames, cells), the u of each cell.
            gradient, right: (frames, cells, V), the loss's and the right gradient.
        """
        frames, cells, V = right.shape
        worst = int((gradient.double() - right).abs_().argmax())
        at = worst // (cells * V), worst // V % cells, worst % V
        values = f"{float(gradient[at]):.4g}, expected {float(right[at]):.4g}"
        self.furthest = n, f"gradient at t {begin + at[0]}, u {int(symbols[at[:2]])}, symbol {at[2]}: {values}"

    def note_sums(self, over: str, errors: torch.Tensor, sizes: torch.Tensor) -> None:
        """Note sums of differences and the right sums of the same shape, which were summed over `over`."""
        least = max(FLOOR * sizes.mean().item(), 1e-30)
        self.sums[over] = max(self.sums[over], largest(errors / sizes.clamp(min=least)))

    @property
    def entries(self) -> Dict[str, float]:
        """Return, by tensor, the largest error over the largest right magnitude."""
        return {name: worst / max(self.largest[name], 1e-30) for name, worst in self.worst.items()}

    @property
    def slopes(self) -> Dict[str, float]:
        """Return, by tensor, how far the factor that fits best as a multiple of the right gradient is from 1."""
        return {name: abs(self.products[name]) / square for name, square in self.squares.items() if square > 0}


class Marginals:
    """Sums the differences of the logits' gradient, and the sizes to compare them with, by frame, u and symbol.

    The size of a cell is its posterior; that of a symbol is the sum of its terms before they cancel.
    """

    def __init__(self, cells: Cells, adapter: Adapter):
        where = cells.batch.targets.device
        self.adapter, self.symbols = adapter, torch.zeros(2, cells.width, dtype=torch.float64, device=where)
        self.frames: List[torch.Tensor] = []
        self.cells: List[torch.Tensor] = []
        self.targets = torch.zeros(2, cells.U + 2, dtype=torch.float64, device=where)

    def add(self, gradient, right, difference, derivatives, target, where) -> None:
        """Add some frames.

        Args:
            gradient, right, difference: (frames, cells, V), the gradient that is judged, the right one, and the
                magnitude of their difference.
            derivatives: (frames, cells, P), of the parts of the cells.
            target, where: (frames, cells), the next target and the u of each cell.
        """
        topology = self.adapter.lattice
        both = torch.stack([difference.sum(2), topology.posterior(derivatives)])
        self.frames.append(both.sum(2))
        self.cells.append(torch.stack([(gradient.double().sum(2) - right.sum(2)).abs(), both[1]]).flatten(1))
        self.targets.index_add_(1, where.flatten(), both.flatten(1))
        self.symbols += torch.stack([difference.sum((0, 1)), right.sum((0, 1))])
        columns = topology.columns(target, self.adapter.blank, right.size(2))
        self.symbols[1].index_add_(0, columns.flatten(), 2 * derivatives.flatten())

    def end(self, errors: Errors, U: int) -> None:
        """Note the sums of an utterance of U targets, and start the next one."""
        errors.note_sums("frame", *torch.cat(self.frames, 1))
        errors.note_sums("cell", *torch.cat(self.cells, 1))
        errors.note_sums("u", *self.targets[:, : U + 1])
        self.frames, self.cells = [], []
        self.targets.zero_()


def spans(cells: Cells, n: int) -> Iterator[Tuple[int, int]]:
    """Yield (begin, end) of some frames of an utterance at a time, at most CHUNK elements."""
    T, U = cells.batch.shapes[n]
    frames = max(1, CHUNK // ((U + 1) * cells.width))
    return ((begin, min(begin + frames, T)) for begin in range(0, T, frames))


def parts(cells: Cells, n: int, adapter: Adapter) -> torch.Tensor:
    """Return the parts (T, U+1, P) of the cells of an utterance on the CPU; -inf where a range leaves a cell out."""
    T, U = cells.batch.shapes[n]
    size = 2 + adapter.lattice.extra
    values = torch.full((T, U + 2, size), -math.inf, dtype=torch.float64)
    for begin, end in spans(cells, n):
        logits, symbols, target = _frames(cells, n, begin, end)
        where = symbols.clamp(max=U + 1).cpu().unsqueeze(2).expand(-1, -1, size)
        values[begin:end].scatter_(1, where, adapter.lattice.parts(logits, target, adapter.blank).cpu())
    return values[:, : U + 1]


def _frames(cells: Cells, n: int, begin: int, end: int) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the logits (frames, cells, V), the u, and the next target (or any symbol) of each cell of some frames."""
    symbols = cells.symbols(n, begin, end)
    targets = torch.nn.functional.pad(cells.batch.targets[n].long(), (0, 2))
    return cells.logits(n, begin, end), symbols, targets[symbols.clamp(max=cells.U)]


def lattices(cells: Cells, adapter: Adapter) -> List[Lattice]:
    """Return the lattice of each utterance.

    The derivatives have one column more than cells, for cells of a range that are beyond the last target.
    """
    result: List[Lattice] = []
    for n in range(len(cells.batch.shapes)):
        likelihood, derivatives = oracle.of_parts(parts(cells, n, adapter), adapter.lattice)
        widened = torch.nn.functional.pad(derivatives, (0, 0, 0, 1))
        result.append((likelihood, widened.to(cells.batch.targets.device)))
    return result


def compare(cells: Cells, known: Sequence[Lattice], adapter: Adapter, errors: Errors) -> None:
    """Note the errors of all gradients that `cells` has."""
    marginals = Marginals(cells, adapter)
    for n, (_, U) in enumerate(cells.batch.shapes):
        _, of_cells = known[n]
        for begin, end in spans(cells, n):
            logits, symbols, target = _frames(cells, n, begin, end)
            where = symbols.clamp(max=U + 1)
            derivatives = of_cells[begin:end].gather(1, where.unsqueeze(2).expand(-1, -1, of_cells.size(2)))
            right = oracle.cell_gradient(logits, target, derivatives, adapter.blank, adapter.lattice)
            for name, gradient, expected in cells.compare(n, begin, end, right):
                before = errors.worst[name]
                difference = errors.note(name, gradient, expected)
                limit = max(before, OFF * errors.largest[name])
                if cells.by_cell and gradient is not None and errors.worst[name] > limit:
                    errors.locate(n, begin, symbols, gradient, expected)
                if cells.by_cell:
                    marginals.add(gradient, expected, difference, derivatives, target, where)
                else:
                    errors.note_sums(name, difference.sum(-1), expected.abs().sum(-1))
        if cells.by_cell:
            marginals.end(errors, U)
        for name, gradient, expected in cells.compare_rest(n):
            difference = errors.note(name, gradient, expected)
            if expected.dim() > 1:
                errors.note_sums(name, difference.sum(-1), expected.abs().sum(-1))
        for name, outside in cells.padding(n):
            errors.worst[name] = max(errors.worst[name], largest(outside))
    if cells.by_cell:
        errors.note_sums("symbol", *marginals.symbols)


def check(context, tolerance: float, utterances: Optional[int] = None) -> Tuple[AtSize, str]:
    """Judge the measured batch with the most padded cells, that with the fewest if the loss loops over cells in Python.

    Returns its errors, and what is wrong in words.

    A posterior is the exponential of a sum along a path, so an error of the sum is a relative error of the gradient.
    Beyond the tolerance it may be as large as the rounding of the longest sums: LOST_PLACES of the loss's own size, and
    one of a score for each of the T + U steps.  float16 and bfloat16 must be summed in float32.

    Where scores cancel, the loss and the gradient may be near 0 and smaller than the rounding of a score at each step,
    and of a posterior.  An error that only this explains is not wrong, but ``imprecise``.

    Args:
        context: common.losses.context.Context.
        tolerance: largest relative error of the loss, and of the gradient where sums are short.
        utterances: judge only so many of the batch.
    """
    adapter, measured = context.adapter, (context.all_batches, context.batches)
    layout, index = table.of(adapter), lightest(*measured) if context.loops_in_python else heaviest(*measured)[0]
    errors, (first, *others) = Errors(), layout.scopes
    earlier = {} if context.loops_in_python else _digests(context.step(first, index, utterances=utterances))
    loss, cells, overwritten, differing = _answer(context, layout, first, index, utterances, earlier)
    known = lattices(cells, adapter)
    compare(cells, known, adapter, errors)
    shapes, score = cells.batch.shapes, cells.largest_score()
    right, left = -sum(likelihood for likelihood, _ in known), max(errors.largest.values())
    for scope in others:
        del cells  # before the other scope takes as much
        _, cells, changed, _ = _answer(context, layout, scope, index, utterances)
        overwritten = sorted({*overwritten, *changed})
        if layout.approximate:  # equal arcs may give other ranges on a GPU
            known = lattices(cells, adapter)
        compare(cells, known, adapter, errors)
    magnitude = max(abs(right), 1e-30)
    eps = torch.finfo(torch.float64 if context.dtype == torch.float64 else torch.float32).eps
    scores = [(T + U) * score for T, U in shapes]
    rounding = eps * max(sum_ - LOST_PLACES * likelihood for sum_, (likelihood, _) in zip(scores, known))
    short, sums = tolerance + rounding, SUM_TOLERANCE[context.settings.precision] + 2 * rounding
    left = min(max(left, 1e-30), 1.0)  # of posteriors of up to 1 where they cancel
    lost = LOST_PLACES * eps / left
    neglected = adapter.negligible * max(T * (U + 1) for T, U in shapes)
    beside = lost + rounding * (1 / left - 1) + neglected
    posteriors = [adapter.lattice.posterior(derivatives) for _, derivatives in known]
    result = AtSize(
        batch=index,
        N=len(shapes),
        T_max=max(T for T, _ in shapes),
        U_max=max(U for _, U in shapes),
        useful_cells=sum(T * (U + 1) for T, U in shapes),
        needed_cells=sum(oracle.needed_cells(of_cells, context.dtype) for of_cells in posteriors),
        loss_error=finite(abs(loss - right) / magnitude),
        loss_tolerance=finite(tolerance + eps * sum(scores) / magnitude),
        grad_error=finite(max(errors.entries.values())),
        grad_tolerance=short + beside,
        grad_errors={name: finite(error) for name, error in errors.entries.items()},
        sum_errors={name: finite(error) for name, error in errors.sums.items()},
        sum_tolerance=sums,
        row_tolerance=sums + 10 * lost / FLOOR,  # a row adds up several
        slope_errors={name: finite(error) for name, error in errors.slopes.items()},
        slope_tolerance=SLOPE_TOLERANCE[context.settings.precision] + rounding + beside,
        overwritten=overwritten,
        differing=differing,
    )
    rows = max((error for name, error in result.sum_errors.items() if name not in SUMMED), default=0.0)
    limits = ((result.loss_error, tolerance), (result.grad_error, short + neglected), (rows, sums))
    imprecise = [error for error, limit in limits if error > limit]
    result.ok = not wrong(result)
    if not result.ok:
        return result, _where(loss, right, errors, shapes, result.loss_tolerance)
    result.imprecise = max(imprecise, default=None)
    return result, ""


def _where(loss: float, right: float, errors: Errors, shapes: Sequence[Tuple[int, int]], tolerance: float) -> str:
    """Return in words whether the loss is off, and which cell's gradient is furthest off."""
    reasons = []
    if not abs(loss - right) <= tolerance * max(abs(right), 1e-30):
        reasons.append(f"loss {loss:.6g}, expected {right:.6g}{diagnosis.guess(loss, right, shapes)}")
    if errors.furthest is not None:
        n, words = errors.furthest
        reasons.append(f"furthest off in utterance {n + 1} (T {shapes[n][0]}, U {shapes[n][1]}), {words}")
    return "; ".join(reasons)


def _answer(
    context, layout, scope: str, index: int, utterances: Optional[int], earlier: Optional[Dict[str, bytes]] = None
) -> Tuple[float, Cells, List[str], List[str]]:
    """Take one step and return its loss, its gradients beside what it was given, and two lists of names.

    The first names the inputs that it overwrote, the second what of loss and gradients has other bits than in
    `earlier`, the digests of the same step.
    """
    step = context.step(scope, index, utterances=utterances)
    before = fingerprint.fingerprints(step.inputs())
    actual, gradients = step.run(), step.gradients()
    changed = fingerprint.changed(before, step.inputs())
    differing = fingerprint.changed(earlier or {}, {"loss": actual, **gradients})
    cells = layout.step_cells if scope == "step" else layout.cells
    if scope == "loss" or changed:
        step = context.step(scope, index, utterances=utterances)  # as it was before the loss wrote over it
    return float(actual), cells(step.batch, step.prepared, step.leaves, gradients), changed, differing


def _digests(step: LossStep) -> Dict[str, bytes]:
    """Run a step and return the digests of its loss and gradients, to see whether it answers the same when repeated."""
    return fingerprint.fingerprints({"loss": step.run(), **step.gradients()})


#: Words for a sum that is wrong, by what differences are summed over; other keys are names of tensors.
SUMMED = {
    "frame": "the gradient of a frame",
    "u": "the gradient of a target's position (u)",
    "symbol": "the gradient of a symbol",
    "cell": "the sum over V of a cell's gradient",
}


def wrong(judged: AtSize) -> List[str]:
    """Return what is wrong on a measured batch, a line each."""
    errors = [("loss", judged.loss_error, judged.loss_tolerance)]
    for name, error in judged.grad_errors.items():
        errors.append(("gradient" if name == "given" else f"gradient of {name}", error, judged.grad_tolerance))
    for name, error in judged.sum_errors.items():
        what = SUMMED.get(name, f"a row of the gradient of {name}")
        most = judged.sum_tolerance if name in SUMMED else judged.row_tolerance
        errors.append((f"{what} in sum", error, most))
    lines = [f"{what} {size(error)}, {most:.0e} is allowed" for what, error, most in errors if not error <= most]
    for name, error in judged.slope_errors.items():
        if not error <= judged.slope_tolerance and not lines:
            what = "gradient" if name == "given" else f"gradient of {name}"
            lines.append(f"{what} is wrong by a factor, {size(error)}, {judged.slope_tolerance:.0e} is allowed")
    if judged.overwritten:
        lines.insert(0, f"it overwrites {', '.join(judged.overwritten)}")
    return lines


def size(error: float) -> str:
    """Return a relative error in words."""
    return "not finite" if error >= UNBOUNDED else f"off by {error:.1e}"
