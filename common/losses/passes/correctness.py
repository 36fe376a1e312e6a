"""Judge loss and gradient on small batches (small_batches.py) against the float64 oracle: the correctness pass.

Both scopes: the gradient of what the loss is given, and the step's gradients of encoder_out, decoder_out and every
weight.  A pruned loss is judged with its range widened to all of U, where it must be exact; the record also has its gap
to the exact loss at the run's own range.  A loss that passes is then judged on a measured batch and on one as long as
the longest of the shape file.  At last it is judged on a small one again.

The measured batch has the run's own N, T, U and V.  It shows errors that only a large batch has: an index that
overflows, a block that is left out, sums that lose their digits, results kept from other numbers of the same shape.
The oracle computes some frames at a time, so it needs no second tensor of the size of the logits.  A pruned loss is
judged on the cells in its own ranges; in scope "step", where a simple loss has a part in the others, only on the
gradients of the joiner's weights.

An entry of a symbol that is not the target is a posterior over V, far below the largest entry.  So differences are also
summed: over each frame, each u and each symbol, over each row of other tensors, and over the whole, as the factor that
fits best.  And the gradient of a cell sums to 0 over V.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, replace
from statistics import median
from typing import Dict, Iterator, List, NamedTuple, Optional, Sequence, Set, Tuple

import numpy as np
import torch

from rnnt_bench.core.errors import WrongResult
from rnnt_bench.core.text import UNBOUNDED, finite
from rnnt_bench.data import batching
from rnnt_bench.losses import layouts, oracle, rounding
from rnnt_bench.losses.adapter import Adapter
from rnnt_bench.losses.cells import Cells, largest
from rnnt_bench.losses.passes import small_batches
from rnnt_bench.losses.rounding import Allowed
from rnnt_bench.losses.step import changed, fingerprints
from rnnt_bench.records.schema import AtSize, Correctness

#: Elements of the logits that are converted to float64 at a time.
CHUNK = 1 << 23
#: A fifth of the error that right float32 losses of short sums have at most.
LEAST_ROUNDING = 2e-5
#: Words for a sum over the gradient of the logits; other sums are over the rows of a tensor.
SUMMED = {
    "frame": "the gradient of a frame",
    "u": "the gradient of a target's position (u)",
    "symbol": "the gradient of a symbol",
    "cell": "the sum over V of a cell's gradient",
}
#: Errors that the message names; the record has all.
MOST_WRONG = 2

#: An utterance: its log-likelihood, and the derivatives (T, U+2, P) of the parts of each cell (see topologies.py).
Lattice = Tuple[float, torch.Tensor]
#: Some frames of an utterance: the first, the one after the last, logits (frames, cells, V), u and next target of each.
Frames = Tuple[int, int, torch.Tensor, torch.Tensor, torch.Tensor]


class Errors:
    """Collects errors of gradients part by part: `entries`, `sums` (largest share of the right sum) and `slopes`."""

    def __init__(self) -> None:
        by_name: List[Dict[str, float]] = [defaultdict(float) for _ in range(5)]
        self.worst, self.largest, self.sums, self.products, self.squares = by_name
        self.furthest = ""  # where the gradient of the logits is furthest off, in words

    def note(self, name: str, gradient: Optional[torch.Tensor], right: torch.Tensor) -> torch.Tensor:
        """Note a part of a gradient; return |gradient - right|, float64, infinite if the gradient is missing."""
        self.squares[name] += float((right * right).sum())
        if gradient is None:
            difference = torch.full_like(right, math.inf)
        else:
            difference = gradient.detach().double() - right
            self.products[name] += float((difference * right).sum())
            difference.abs_()
        self.worst[name] = max(self.worst[name], largest(difference))
        self.largest[name] = max(self.largest[name], largest(right))
        return difference

    def note_sums(self, over: str, errors: torch.Tensor, sizes: torch.Tensor) -> None:
        """Note sums of differences and the right sums of the same shape, which were summed over `over`."""
        least = max(rounding.FLOOR * sizes.mean().item(), 1e-30)
        self.sums[over] = max(self.sums[over], largest(errors / sizes.clamp(min=least)))

    @property
    def entries(self) -> Dict[str, float]:
        """Return, by tensor, the largest error over the largest right magnitude."""
        return {name: worst / max(self.largest[name], 1e-30) for name, worst in self.worst.items()}

    @property
    def slopes(self) -> Dict[str, float]:
        """Return, by tensor, how far the factor that fits best as a multiple of the right gradient is from 1."""
        return {name: abs(self.products[name]) / square for name, square in self.squares.items() if square > 0}


def frames(cells: Cells, n: int) -> Iterator[Frames]:
    """Yield some frames of an utterance at a time, at most CHUNK elements."""
    T, U = cells.batch.shapes[n]
    targets = torch.nn.functional.pad(cells.batch.targets[n].long(), (0, 2))
    count = max(1, CHUNK // ((U + 1) * cells.width))
    for begin in range(0, T, count):
        end = min(begin + count, T)
        symbols = cells.symbols(n, begin, end)
        target = targets[symbols.clamp(max=len(targets) - 2)]
        yield begin, end, cells.logits(n, begin, end), symbols.clamp(max=U + 1), target


def parts(cells: Cells, n: int, adapter: Adapter) -> torch.Tensor:
    """Return the parts (T, U+1, P) of the cells of an utterance on the CPU; -inf where a range leaves a cell out."""
    T, U = cells.batch.shapes[n]
    size = 2 + adapter.lattice.extra
    values = torch.full((T, U + 2, size), -math.inf, dtype=torch.float64)
    for begin, end, logits, where, target in frames(cells, n):
        places = where.cpu().unsqueeze(2).expand(-1, -1, size)
        values[begin:end].scatter_(1, places, adapter.lattice.parts(logits, target, adapter.blank).cpu())
    return values[:, : U + 1]


def lattices(cells: Cells, adapter: Adapter) -> Tuple[List[Lattice], float]:
    """Return the lattice of each utterance, and the largest error of a derivative that is summed in float32.

    The derivatives have one column more than cells, for cells of a range that are beyond the last target.
    """
    result: List[Lattice] = []
    rounding = most = 0.0
    for n in range(len(cells.batch.shapes)):
        values = parts(cells, n, adapter)
        likelihood, derivatives = oracle.of_parts(values, adapter.lattice)
        narrow = oracle.of_parts(values, adapter.lattice, np.float32)[1]
        rounding, most = max(rounding, largest(narrow - derivatives)), max(most, largest(derivatives))
        widened = torch.nn.functional.pad(derivatives, (0, 0, 0, 1))
        result.append((likelihood, widened.to(cells.batch.targets.device)))
    return result, rounding / max(most, 1e-30)


def compare(cells: Cells, known: Sequence[Lattice], adapter: Adapter, errors: Errors) -> None:
    """Note the errors of all gradients that `cells` has.

    The size to compare a sum with is the posterior of its cells; of a symbol, the sum of its terms before they cancel.
    """
    lattice, device = adapter.lattice, cells.batch.targets.device
    by_symbol = torch.zeros(2, cells.width, dtype=torch.float64, device=device)
    for n, ((T, U), (_, of_cells)) in enumerate(zip(cells.batch.shapes, known)):
        by_u = torch.zeros(2, U + 2, dtype=torch.float64, device=device)
        for begin, end, logits, where, target in frames(cells, n):
            derivatives = of_cells[begin:end].gather(1, where.unsqueeze(2).expand(-1, -1, of_cells.size(2)))
            right = oracle.cell_gradient(logits, target, derivatives, adapter.blank, lattice)
            for name, gradient, _ in cells.compare(n, begin, end, right):  # of the logits, where they have one
                before = errors.worst[name]
                difference = errors.note(name, gradient, right)
                if gradient is None:
                    continue
                gradient = gradient.detach()
                if errors.worst[name] > before:
                    at = small_batches.position(difference)
                    values = f"{float(gradient[at]):.4g}, expected {float(right[at]):.4g}"
                    cell = f"t {begin + at[0]}, u {int(where[at[:2]])}, symbol {at[2]}"
                    errors.furthest = f"utterance {n + 1} (T {T}, U {U}), gradient at {cell}: {values}"
                both = torch.stack([difference.sum(2), lattice.posterior(derivatives)])
                errors.note_sums("frame", *both.sum(2))
                errors.note_sums("cell", (gradient.double().sum(2) - right.sum(2)).abs(), both[1])
                by_u.index_add_(1, where.flatten(), both.flatten(1))
                by_symbol += torch.stack([difference.sum((0, 1)), right.sum((0, 1))])
                columns = lattice.columns(target, adapter.blank, right.size(2))
                by_symbol[1].index_add_(0, columns.flatten(), 2 * derivatives.flatten())
        if cells.by_cell:
            errors.note_sums("u", *by_u[:, : U + 1])
        for name, gradient, expected in cells.compare_rest(n):
            difference = errors.note(name, gradient, expected)
            if expected.dim() > 1:
                errors.note_sums(name, difference.sum(-1), expected.abs().sum(-1))
        for outside in cells.padding(n):
            errors.worst["given"] = max(errors.worst["given"], largest(outside))
    if cells.by_cell:
        errors.note_sums("symbol", *by_symbol)


@dataclass
class Compared:
    """A batch that was compared with the oracle in every scope; what is not of errors is of the first scope."""

    index: int
    shapes: List[Tuple[int, int]]
    score: float  # largest magnitude of the logits
    loss: float
    lattices: List[Lattice]
    of_float32: float  # largest error of a derivative that is summed in float32
    largest: float  # magnitude of the largest entry of the right gradients
    differing: List[str]  # what has other bits in a second step
    errors: Errors
    overwritten: Set[str]  # inputs that a step wrote over

    @property
    def right(self) -> float:
        """Return the oracle's loss."""
        return -sum(likelihood for likelihood, _ in self.lattices)

    @property
    def loss_error(self) -> float:
        return abs(self.loss - self.right) / max(abs(self.right), 1e-30)


def compare_at_size(context, utterances: Optional[int] = None) -> Compared:
    """Compare the measured batch with the most padded cells, that with the fewest if the loss loops over cells in
    Python, or its first `utterances`."""
    adapter, layout, measured = context.adapter, layouts.of(context.adapter), (context.all_batches, context.batches)
    index = batching.lightest(*measured) if context.loops_in_python else batching.heaviest(*measured)[0]
    errors, overwritten = Errors(), set()
    compared: Optional[Compared] = None
    for scope in layout.scopes:
        cells, loss, written, differing = _answer(context, layout, scope, index, utterances)
        if compared is None or layout.approximate:  # equal arcs may give other ranges on a GPU
            right, of_float32 = lattices(cells, adapter)
        compare(cells, right, adapter, errors)
        overwritten.update(written)
        if compared is None:
            compared = Compared(
                index=index,
                shapes=cells.batch.shapes,
                score=cells.score,
                loss=loss,
                lattices=right,
                of_float32=of_float32,
                largest=max(errors.largest.values()),
                differing=differing,
                errors=errors,
                overwritten=overwritten,
            )
        del cells  # before the other scope takes as much
    assert compared is not None
    return compared


class Judged(NamedTuple):
    """An error of a measured batch: wrong above `most`, imprecise above `precise`."""

    what: str
    error: float
    most: float
    precise: float = math.inf


def judge(compared: Compared, limits: Allowed) -> List[Judged]:
    """Return every error of a batch beside what is allowed of it."""
    errors = compared.errors
    judged = [Judged("loss", compared.loss_error, limits.loss, limits.precise_loss)]
    for name, error in errors.entries.items():
        judged.append(Judged(small_batches.of(name), error, limits.gradient, limits.precise_gradient))
    for name, error in errors.sums.items():
        if name in SUMMED:
            judged.append(Judged(f"{SUMMED[name]} in sum", error, limits.sums))
        else:
            judged.append(Judged(f"a row of the {small_batches.of(name)} in sum", error, limits.rows, limits.sums))
    for name, error in errors.slopes.items():
        judged.append(Judged(f"{small_batches.of(name)} by a factor", error, limits.slope))
    return judged


def check_at_size(context, utterances: Optional[int] = None, places: float = rounding.PLACES) -> Tuple[AtSize, str]:
    """Judge a measured batch (`compare_at_size`); return its errors, and what is wrong in words.

    An error that only rounding explains which is large beside sums that cancel is not wrong, but ``imprecise``.

    Args:
        utterances: judge only so many of the batch.
        places: units in the last place that sums as large as the loss may lose, see `rounding.allowed`.
    """
    adapter, compared = context.adapter, compare_at_size(context, utterances)
    shapes, right = compared.shapes, compared.right
    limits = rounding.allowed(
        context.settings.dtype,
        shapes,
        compared.score,
        max(abs(likelihood) for likelihood, _ in compared.lattices),
        right=right,
        largest=compared.largest,
        places=places,
        negligible=adapter.negligible,
    )
    judged = judge(compared, limits)
    wrong = [line for line in judged if not line.error <= line.most]
    posteriors = [adapter.lattice.posterior(derivatives) for _, derivatives in compared.lattices]
    result = AtSize(
        batch=compared.index,
        N=len(shapes),
        T_max=max(T for T, _ in shapes),
        U_max=max(U for _, U in shapes),
        useful_cells=sum(T * (U + 1) for T, U in shapes),
        needed_cells=sum(oracle.needed_cells(of_cells, context.dtype) for of_cells in posteriors),
        loss_error=finite(compared.loss_error),
        loss_tolerance=limits.loss,
        grad_error=finite(max(compared.errors.entries.values())),
        grad_tolerance=limits.gradient,
        reference_error=max(compared.of_float32, LEAST_ROUNDING) if context.settings.dtype == "float32" else None,
        errors={line.what: finite(line.error) for line in judged},
        differing=compared.differing,
        ok=not wrong and not compared.overwritten,
    )
    if result.ok:
        result.imprecise = max((line.error for line in judged if line.error > line.precise), default=None)
        return result, ""
    words = [f"{line.what} {size(line.error)}, {line.most:.0e} is allowed" for line in wrong]
    if compared.overwritten:
        words.insert(0, f"it overwrites {', '.join(sorted(compared.overwritten))}")
    del words[MOST_WRONG:]
    if wrong and wrong[0].what == "loss":
        guess = small_batches.guess(compared.loss, right, shapes)
        words.append(f"loss {compared.loss:.6g}, expected {right:.6g}{guess}")
    if compared.errors.furthest:
        words.append(f"furthest off in {compared.errors.furthest}")
    return result, f"on a measured batch ({small_batches.sizes(shapes)}): {'; '.join(words)}"


def _answer(context, layout, scope: str, index: int, utterances: Optional[int]) -> Tuple[Cells, float, List[str], List]:
    """Return a step's cells, its loss, the inputs that it overwrote, and what has other bits than in an earlier step.

    It comes after steps on these and on other numbers of the same shapes; a loss that loops in Python takes one step
    alone.
    """
    earlier: Dict[str, bytes] = {}
    for repeat in () if context.loops_in_python else (1, 0, 1):
        step = context.step(scope, index, repeat, utterances)
        answer = {"loss": step.run(), **step.gradients()}
        if repeat == 0:
            earlier = fingerprints(answer)
        del step, answer
    step = context.step(scope, index, utterances=utterances)
    before = fingerprints(step.inputs())
    actual, gradients = step.run(), step.gradients()
    overwritten = changed(before, step.inputs())
    differing = changed(earlier, {"loss": actual, **gradients})
    if scope == "loss" or overwritten:
        step = context.step(scope, index, utterances=utterances)  # as it was before the loss wrote over it
    cells = layout.step_cells if scope == "step" else layout.cells
    return cells(step.batch, step.prepared, step.leaves, gradients), float(actual), overwritten, differing


def size(error: float) -> str:
    return "not finite" if error >= UNBOUNDED else f"off by {error:.1e}"


# The pass.

#: Utterances whose gap to the exact loss is measured, half a second each.
GAP_UTTERANCES = 20
#: Nats; a difference between smaller losses is rounding.
SMALLEST_LOSS = 1e-6
#: Targets of a batch as long as the longest of the file, where no measured one is: few, so that it takes little.
LONG_U = 4


def approximation_gap(context) -> Optional[float]:
    """Return the median (loss - exact loss) / exact loss of a pruned loss over some of the run's utterances.

    Each alone and in float64: it is the gap of the method and not of the dtype.  None if the exact losses are almost 0.
    """
    adapter, double = context.adapter, replace(context, dtype=torch.float64)
    layout = layouts.of(adapter)
    model, gaps = layout.model(context.device, torch.float64), []
    every = [(batch, n) for batch in context.batches for n, (_, U) in enumerate(context.all_batches[batch]) if U > 0]
    for batch, n in every[:: math.ceil(len(every) / GAP_UTTERANCES) or 1]:
        alone = small_batches.utterance(double.make_batch(batch), n)
        prepared = adapter.prepare(alone)
        with torch.no_grad():
            loss = float(layout.loss(layout.given(model, alone, prepared), alone, prepared))
            exact = float(layout.right(model.logits(alone), alone).sum())
        if exact > SMALLEST_LOSS:
            gaps.append(finite((loss - exact) / exact))
    return median(sorted(gaps)) if gaps else None


def run(context) -> Iterator[Correctness]:
    """Yield one ``correctness`` record of a subject.Context; raise WrongResult, in words, after one that is not ok."""
    adapter, device, dtype, settings = context.adapter, context.device, context.dtype, context.settings
    layout, tolerance = layouts.of(adapter), rounding.PRECISIONS[settings.dtype].error
    small = small_batches.check(adapter, device, dtype)
    (loss_error, loss_tolerance), (grad_error, grad_tolerance), (slope_error, slope_tolerance) = small[:3]
    gap = approximation_gap(context) if layout.approximate else None
    wrong, at_its_size = small.wrong, None
    differing: List[str] = []
    reached: List[str] = []
    if not wrong and not adapter.simulated:  # a simulator would take hours
        at_its_size, wrong = check_at_size(context)
        T = int(context.all_batches.longest().max())
        if not wrong and T > max(at_its_size.T_max, 2 * LONG_U) and not context.loops_in_python:
            long = batching.fixed_size(np.array([(T, LONG_U), (T - 1, LONG_U - 1), (T // 2, LONG_U - 2)]), 3)
            context_of_long = replace(context, all_batches=long, batches=[0])
            places = rounding.PLACES + T // rounding.FRAMES_A_PLACE
            wrong = check_at_size(context_of_long, places=places)[1]
        if not wrong:
            wrong = small_batches.check(adapter, device, dtype, [small_batches.again(adapter)]).wrong
            differing, reached = small_batches.repeated(adapter, device, dtype)
            differing = sorted({*differing, *at_its_size.differing})
    elif wrong and not max(loss_error, grad_error) <= tolerance:
        sizes = [size(finite(error)) for error in (loss_error, grad_error)]
        wrong = f"loss {sizes[0]}, gradient {sizes[1]}; {tolerance:.0e} is allowed; {wrong}"
    yield Correctness(
        loss_error=finite(loss_error),
        loss_tolerance=finite(loss_tolerance),
        grad_error=finite(grad_error),
        grad_tolerance=finite(grad_tolerance),
        slope_error=finite(slope_error),
        slope_tolerance=finite(slope_tolerance),
        tolerance=tolerance,
        ok=not wrong,
        approximation_gap=gap,
        approximation_gaps={settings.logits: gap} if layout.approximate else None,
        at_size=at_its_size,
        differing=differing,
        reached_by_padding=reached,
        fewest_frames=adapter.fewest_frames,
        fewest_targets=adapter.fewest_targets,
        note="approximate; judged with its range widened to all of U" if layout.approximate else "",
    )
    if wrong:
        raise WrongResult(wrong)
