"""Ask a loss for its answer, and compare it with the float64 oracle: the same way on small batches
and at size.

The oracle computes some frames at a time, so it needs no second tensor of the size of the logits.
A pruned loss is compared on the cells in its own ranges.  Each leaf is judged by itself:
encoder_out's gradient is a thousandth as long as the weight's.

An entry of a symbol that is not the target is a posterior over V, far below the largest entry.  So
differences are also summed: over each frame, each u and each symbol, over each row of other
tensors, and over the whole, as the factor that fits best.  And the gradient of a cell sums to 0
over V.

`Sketch` is for the process that is timed: some random sums of each leaf's gradient tell how far it
is off as a whole, and all losses of a round share those of the right one.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from rnnt_bench.core.text import finite
from rnnt_bench.data.shapes import uniform
from rnnt_bench.losses import layouts, oracle, rounding
from rnnt_bench.losses.adapter import Adapter
from rnnt_bench.losses.cells import Cells, Frames, Gradients, StepCells, largest
from rnnt_bench.losses.inputs import OUTPUTS, Joiner
from rnnt_bench.losses.oracle import relative_error
from rnnt_bench.losses.rounding import Allowed
from rnnt_bench.losses.step import LossStep, changed, fingerprints, leaves_of, run_together

#: Words for a sum over the gradient of the logits; other sums are over the rows of a tensor.
SUMMED = {
    "frame": "the gradient of a frame",
    "u": "the gradient of a target's position (u)",
    "symbol": "the gradient of a symbol",
    "cell": "the sum over V of a cell's gradient",
}

#: An utterance: its log-likelihood, and the derivatives (T, U+2, P) of the parts of each cell (see
#: topologies.py).
Lattice = tuple[float, torch.Tensor]
#: What the losses of steps are multiplied by: of each step () or (N,).
Factors = Sequence[torch.Tensor]
Run = Callable[[list[LossStep], Factors], list[torch.Tensor]]
Ready = Callable[[], tuple[Adapter, Joiner, list[LossStep]]]
ONE = torch.ones((), dtype=torch.float64)


#: Behind the names of the outputs of the second loss in flight.
OTHER = " of the other loss"


def called(name: str, number: int) -> str:
    """Return the name of a leaf of the step of this number among those that are run together."""
    return name + OTHER if number and name in OUTPUTS else name


@dataclass
class Leaf:
    """Collect the errors of the gradient of a leaf, part by part."""

    worst: float = 0.0  # largest difference
    largest: float = 0.0  # largest magnitude of the right gradient
    product: float = 0.0  # of difference and right gradient
    square: float = 0.0  # of the right gradient
    distance: float = 0.0  # square of the difference
    missing: bool = False
    furthest: str = ""  # where it is furthest off, in words

    @property
    def error(self) -> float:
        """Return the largest error over the largest right magnitude."""
        return self.worst / max(self.largest, rounding.TINY)

    @property
    def factor(self) -> float:
        """Return the factor that fits best as a multiple of the right gradient: rounding hardly
        moves it."""
        return 1 + self.product / self.square if self.largest > rounding.TINY else 1.0


class Errors:
    """Collects the errors of gradients: of `leaves`, and of `sums` (the largest share of the right
    sum)."""

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter
        self.leaves: dict[str, Leaf] = defaultdict(Leaf)
        self.sums: dict[str, float] = defaultdict(float)
        self.by_u = self.by_symbol = torch.zeros(0)
        self.padding: float | None = None  # largest gradient there; None where there is no padding

    def note(
        self,
        name: str,
        gradient: torch.Tensor | None,
        right: torch.Tensor,
        where: Callable[[tuple[int, ...]], str] = lambda at: f"entry {[*at]}",
    ) -> torch.Tensor:
        """Note a part of a gradient; return |gradient - right|, float64, infinite if the gradient
        is missing.

        where: returns the place of an entry of the part in words."""
        leaf = self.leaves[name]
        leaf.square += float((right * right).sum())
        leaf.largest = max(leaf.largest, largest(right))
        if gradient is None:
            leaf.missing, leaf.worst = True, math.inf
            return torch.full_like(right, math.inf)
        gradient = gradient.detach()
        difference = gradient.double() - right
        leaf.product += float((difference * right).sum())
        leaf.distance += float((difference * difference).sum())
        difference.abs_()
        worst = largest(difference)
        if worst > leaf.worst:
            leaf.worst = worst
            furthest = int(difference.nan_to_num(nan=math.inf).argmax())
            at = tuple(int(index) for index in np.unravel_index(furthest, difference.shape))
            leaf.furthest = (
                f"{where(at)}: {float(gradient[at]):.4g}, expected {float(right[at]):.4g}"
            )
        return difference

    def note_sums(self, over: str, errors: torch.Tensor, sizes: torch.Tensor) -> None:
        """Note sums of differences and the right sums of the same shape, which were summed over
        `over`."""
        least = max(rounding.FLOOR * sizes.mean().item(), rounding.TINY)
        self.sums[over] = max(self.sums[over], largest(errors / sizes.clamp(min=least)))

    def note_leaf(self, name: str, gradient: torch.Tensor | None, right: torch.Tensor) -> None:
        """Note the gradient of a whole leaf."""
        difference = self.note(name, gradient, right)
        if right.dim() > 1:
            self.note_sums(name, difference.sum(-1), right.abs().sum(-1))

    def note_cells(
        self,
        cells: Cells,
        n: int,
        frames: Frames,
        gradient: torch.Tensor | None,
        right: torch.Tensor,
        derivatives: torch.Tensor,
    ) -> None:
        """Note the gradient of the logits of some frames of an utterance.

        The size to compare a sum with is the posterior of its cells; of a symbol, the sum of its
        terms before they cancel."""
        lattice = self.adapter.lattice
        T, U = cells.batch.shapes[n]

        def where(at: tuple[int, ...]) -> str:
            cell = f"t {frames.begin + at[0]}, u {int(frames.u[at[:2]])}"
            return f"utterance {n + 1} (T {T}, U {U}), {cell}, symbol {at[2]}"

        difference = self.note("given", gradient, right, where)
        if gradient is None:
            return
        both = torch.stack([difference.sum(2), lattice.posterior(derivatives)])
        self.note_sums("frame", *both.sum(2))
        of_cell = gradient.detach().double().sum(2) - right.sum(2)
        self.note_sums("cell", of_cell.abs(), both[1])
        if frames.begin == 0:
            self.by_u = right.new_zeros(2, U + 2)
        if n == frames.begin == 0:
            self.by_symbol = right.new_zeros(2, cells.width)
        self.by_u.index_add_(1, frames.u.flatten(), both.flatten(1))
        self.by_symbol += torch.stack([difference.sum((0, 1)), right.sum((0, 1))])
        columns = lattice.columns(frames.target, self.adapter.blank, right.size(2))
        self.by_symbol[1].index_add_(0, columns.flatten(), 2 * derivatives.flatten())
        if frames.end < T:
            return
        self.note_sums("u", *self.by_u[:, : U + 1])
        if n == len(cells.batch.shapes) - 1:
            self.note_sums("symbol", *self.by_symbol)

    def note_padding(self, shapes: Sequence[tuple[int, int]], gradients: Gradients) -> None:
        """Note the gradients of a step in the padding, which must be 0."""
        regions = layouts.of(self.adapter).padding(shapes)
        for name, gradient in gradients.items():
            leaf = self.leaves[name]
            for region in regions.get(name, ()):
                worst = 0.0 if gradient is None else largest(gradient[region])
                self.padding = max(worst, self.padding or 0.0)
                if name == "given" and worst > leaf.worst:  # others are compared whole
                    leaf.worst = worst
                    leaf.furthest = (
                        f"the padding of utterance {region[0] + 1}: {worst:.4g}, expected 0"
                    )


class Sketch:
    """Keep random sums of gradients: the mean square of those of a difference is its square length,
    give or take a third.

    `seed` is drawn after the last timed step.  A sum is g . d, where d has a random sign for each
    row of the leaf times a normal number for each column; `sums` has COUNT of them by leaf,
    `squares` the square length."""

    COUNT = 24

    def __init__(self, seed: int):
        self.seed = seed
        self.sums: dict[str, torch.Tensor] = {}
        self.squares: dict[str, float] = defaultdict(float)

    def note(self, name: str, values: torch.Tensor | None, *part: int) -> None:
        """Add a part of a gradient.  part: its utterance and first frame, the same as those of the
        right one."""
        sums = self.sums.setdefault(name, torch.zeros(self.COUNT, dtype=torch.float64))
        if values is not None:
            rows = values.detach().double().reshape(-1, values.size(-1))
            products = rows @ self._signs(rows.size(1), name).to(rows)
            sums += (products * self._signs(len(rows), name, *part).to(rows)).sum(0).cpu()
            self.squares[name] += float(rows.square().sum())

    def note_leaf(self, name: str, gradient: torch.Tensor | None, right: torch.Tensor) -> None:
        """Note the right gradient of a whole leaf."""
        self.note(name, right)

    def note_cells(
        self,
        cells: Cells,
        n: int,
        frames: Frames,
        gradient: torch.Tensor | None,
        right: torch.Tensor,
        derivatives: torch.Tensor,
    ) -> None:
        """Note the right gradient of the logits of some frames of an utterance."""
        self.note("given", right, n, frames.begin)

    def _signs(self, count: int, name: str, *part: int) -> torch.Tensor:
        """Return random signs (count, COUNT), float64."""
        key = (self.seed, *name.encode(), len(part), *part)
        is_positive = torch.from_numpy(uniform(count * self.COUNT, *key) < 0.5)
        return is_positive.view(count, self.COUNT) * 2.0 - 1

    def errors(self, right: Mapping[str, Sequence[float]]) -> dict[str, float]:
        """Return, by leaf, the length of the difference to the right gradient over the length of
        that.

        right: of each leaf the length, then the sums; of one that is not there 0."""
        result = {}
        for name, sums in self.sums.items():
            length, *expected = right.get(name, [0.0] * (1 + self.COUNT))
            difference = sums - torch.tensor(expected, dtype=torch.float64)
            error = float(difference.square().mean().sqrt()) / max(length, rounding.TINY)
            result[name] = math.inf if math.isnan(error) else error
        return result


class Right:
    """Make the right losses and gradients of steps that are run together.

    Sums along paths are float64; `dtype` is of the joiner and of the gradients of logits.
    `cells` are of each step; `losses` (N,) of the utterances of each, once they have been compared;
    `score` is the largest magnitude of the logits.
    """

    def __init__(
        self,
        adapter: Adapter,
        model: Joiner,
        scope: str,
        steps: Sequence[LossStep],
        factors: Factors,
        dtype: torch.dtype = torch.float64,
    ):
        self.adapter, self.layout = adapter, layouts.of(adapter)
        self.trains_beside = self.layout.approximate and scope == "step"
        self.model = copy.deepcopy(model).to(dtype)
        self.cells: list[Cells] = []
        for step, factor in zip(steps, factors):
            gradients = step.gradients()
            if "given" in step.leaves:
                kind: type[Cells] = Cells
                leaves = step.leaves
            else:
                leaves = leaves_of(self.model, step.batch)
                for name in OUTPUTS:
                    output = leaves[name]
                    leaves[name] = (
                        output.detach().to(dtype, copy=True).requires_grad_(output.requires_grad)
                    )
                if step is not steps[-1]:  # the gradients of the weights are those of all steps
                    gradients = {name: gradients[name] for name in OUTPUTS}
                kind = StepCells
            cells = kind(self.layout, step.batch, step.prepared, leaves, gradients)
            cells.dtype = dtype
            cells.factors = factor.expand(len(step.batch.shapes)).tolist()
            self.cells.append(cells)
        self.losses: list[torch.Tensor] = []

    @property
    def score(self) -> float:
        return max(cells.score for cells in self.cells)

    def log_probs(self, cells: Cells, n: int) -> torch.Tensor:
        """Return the parts (T, U+1, P) of the cells of an utterance on the CPU; -inf where a range
        leaves a cell out."""
        T, U = cells.batch.shapes[n]
        lattice = self.adapter.lattice
        values = torch.full((T, U + 2, 2 + lattice.extra), -math.inf, dtype=torch.float64)
        for frames in cells.frames(n):
            parts = lattice.parts(frames.logits, frames.target, self.adapter.blank).cpu().double()
            columns = frames.u.cpu().unsqueeze(2).expand_as(parts)
            values[frames.begin : frames.end].scatter_(1, columns, parts)
        return values[:, : U + 1]

    def lattices(self, in_float32: bool = False) -> tuple[list[list[Lattice]], float]:
        """Return the lattices of each step, and the largest error of a derivative that is summed in
        float32 or 0.

        The derivatives have one column more than cells, for cells of a range that are beyond the
        last target.
        """
        every: list[list[Lattice]] = []
        error = most = 0.0
        for cells in self.cells:
            every.append([])
            for n in range(len(cells.batch.shapes)):
                values = self.log_probs(cells, n)
                likelihood, derivatives = oracle.of_parts(values, self.adapter.lattice)
                if in_float32:
                    narrow = oracle.of_parts(values, self.adapter.lattice, np.float32)[1]
                    error = max(error, largest(narrow - derivatives))
                    most = max(most, largest(derivatives))
                widened = torch.nn.functional.pad(derivatives, (0, 0, 0, 1))
                every[-1].append((likelihood, widened.to(cells.batch.targets.device)))
            likelihoods = [likelihood for likelihood, _ in every[-1]]
            self.losses.append(-torch.tensor(likelihoods, dtype=torch.float64))
        return every, error / max(most, rounding.TINY)

    def beside(self, cells: Any, n: int) -> float:
        """Return what a step adds to the loss of the lattice of an utterance; its gradient goes to
        the leaves."""
        if not self.trains_beside:
            return 0.0
        single, (T, U) = cells.batch.utterance(n), cells.batch.shapes[n]
        single.encoder_out = cells.leaves["encoder_out"][n : n + 1, :T]
        single.decoder_out = cells.leaves["decoder_out"][n : n + 1, : U + 1]
        losses: Any = self.layout.trained_beside(self.model, single)
        if losses.requires_grad and cells.gradients:
            (losses.sum() * cells.factors[n]).backward()
        return float(losses.detach().sum())

    def compare(self, every: Sequence[Sequence[Lattice]], into: Errors | Sketch) -> None:
        """Give all gradients to `into`, part by part; add to the losses what a step adds to those
        of the lattice."""
        adapter = self.adapter
        for number, cells in enumerate(self.cells):
            for n, (_, by_cell) in enumerate(every[number]):
                for frames in cells.frames(n) if cells.gradients else ():
                    columns = frames.u.unsqueeze(2).expand(-1, -1, by_cell.size(2))
                    derivatives = (
                        by_cell[frames.begin : frames.end].gather(1, columns).to(frames.logits)
                    )
                    right = oracle.cell_gradient(
                        frames.logits, frames.target, derivatives, adapter.blank, adapter.lattice
                    )
                    if isinstance(cells, StepCells):
                        cells.last.backward(right * cells.factors[n])
                    else:
                        gradient = cells.computed(n, frames)
                        into.note_cells(cells, n, frames, gradient, right, derivatives)
                self.losses[number][n] += self.beside(cells, n)
            if isinstance(cells, StepCells):
                for name, gradient in cells.gradients.items():
                    leaf = cells.leaves[name]
                    if leaf.grad is not None:  # a loss may not use all of the joiner
                        into.note_leaf(called(name, number), gradient, leaf.grad)

    def sketch(self, seed: int) -> Sketch:
        """Return the sketch of the right gradients."""
        result = Sketch(seed)
        self.compare(self.lattices()[0], result)
        return result

    def sketch_of_loss(self, seed: int) -> Sketch:
        """Return the sketch of the gradients that the loss computed."""
        result = Sketch(seed)
        for number, cells in enumerate(self.cells):
            if isinstance(cells, StepCells):
                for name, gradient in cells.gradients.items():
                    result.note(called(name, number), gradient)
                continue
            for n in range(len(cells.batch.shapes)):
                for frames in cells.frames(n):
                    result.note("given", cells.computed(n, frames), n, frames.begin)
        return result


@dataclass
class Answer:
    """Hold the answer of a loss and that of the oracle."""

    shapes: list[tuple[int, int]]  # (T, U) of every utterance
    score: float  # largest magnitude of the logits
    losses: torch.Tensor  # of the steps, or of the utterances, float64
    rights: torch.Tensor  # the oracle's
    of_utterances: torch.Tensor  # the oracle's losses of all utterances
    lattices: list[Lattice]  # of the first step
    of_float32: float  # largest error of a derivative that is summed in float32
    errors: Errors
    overwritten: list[str]  # inputs that the loss wrote over
    given: dict[str, torch.Tensor]  # the loss and the gradients of the last step

    @property
    def loss_error(self) -> float:
        return relative_error(self.losses, self.rights)

    @property
    def grad_error(self) -> float:
        return max(leaf.error for leaf in self.errors.leaves.values())

    @property
    def slope_error(self) -> float:
        errors = [abs(leaf.factor - 1) for leaf in self.errors.leaves.values()]
        return max(error if math.isfinite(error) else math.inf for error in errors)

    def allowed(self, adapter: Adapter, dtype: str, places: float = rounding.PLACES) -> Allowed:
        """Return how far a right loss may be off."""
        return rounding.allowed(
            dtype,
            self.shapes,
            self.score,
            float(self.of_utterances.abs().max()),
            right=float(self.rights.abs().max()),
            largest=max(leaf.largest for leaf in self.errors.leaves.values()),
            places=places,
            negligible=adapter.negligible,
        )


def ask(
    ready: Ready,
    scope: str,
    factors: Factors | None = None,
    in_float32: bool = False,
    run: Run = run_together,
) -> Answer:
    """Run steps, and compare losses and gradients with the oracle; not the gradients where a loss
    is infinite.

    Args:
        ready: returns the adapter, the joiner and the steps, with the same numbers each time; it is
            called again where the loss may have written over them.
        factors: of each step, () of its loss or (N,) of its losses; None: 1.
        in_float32: whether to tell the error of sums in float32.
        run: runs the steps, and returns their losses.
    """
    adapter, model, steps = ready()
    factors = factors or [ONE] * len(steps)
    before = [fingerprints(step.inputs()) for step in steps]
    losses = run(steps, factors)
    overwritten = {
        name for step, digests in zip(steps, before) for name in changed(digests, step.inputs())
    }
    computed: list[Any] = [step.gradients() for step in steps]
    if scope == "loss" or overwritten:
        steps.clear()  # they hold as much memory as the new ones will
        _, model, steps = ready()
        for step, gradients in zip(steps, computed):
            step.computed = gradients
    right = Right(adapter, model, scope, steps, factors)
    errors = Errors(adapter)
    every, of_float32 = right.lattices(in_float32)
    if torch.cat(right.losses).isfinite().all():
        right.compare(every, errors)
        for step, gradients in zip(steps, computed):
            errors.note_padding(step.batch.shapes, gradients)
    rights = [
        expected if loss.numel() > 1 else expected.sum()
        for loss, expected in zip(losses, right.losses)
    ]
    return Answer(
        shapes=[shape for step in steps for shape in step.batch.shapes],
        score=right.score,
        losses=torch.cat([loss.cpu().double().reshape(-1) for loss in losses]),
        rights=torch.cat([loss.reshape(-1) for loss in rights]),
        of_utterances=torch.cat(right.losses),
        lattices=every[0],
        of_float32=of_float32,
        errors=errors,
        overwritten=sorted(overwritten),
        given={"loss": losses[-1], **computed[-1]},
    )


class Judged(NamedTuple):
    """Hold an error, which is wrong above `most` and imprecise above `precise`."""

    what: str
    error: float
    most: float
    precise: float = math.inf
    leaf: str = ""


def judge(answer: Answer, limits: Allowed) -> list[Judged]:
    """Return every error beside what is allowed of it."""
    judged = [Judged("loss", answer.loss_error, limits.loss, limits.precise_loss)]
    for name, leaf in answer.errors.leaves.items():
        what = gradient_of(name)
        by_a_factor = abs(leaf.factor - 1)
        judged += [
            Judged(what, leaf.error, limits.gradient, limits.precise_gradient, name),
            Judged(f"{what} by a factor", by_a_factor, limits.slope, leaf=name),
        ]
    for name, error in answer.errors.sums.items():
        if name in SUMMED:
            judged.append(Judged(f"{SUMMED[name]} in sum", error, limits.sums, leaf="given"))
        else:
            what = f"a row of the {gradient_of(name)} in sum"
            judged.append(Judged(what, error, limits.rows, limits.sums, name))
    return judged


def failing(answer: Answer, limits: Allowed) -> list[Judged]:
    """Return the errors above what is allowed: of the loss, then of the leaf that is furthest off,
    and so on."""

    def order(line: Judged) -> float:
        return -finite(answer.errors.leaves[line.leaf].error) if line.leaf else -math.inf

    return sorted(
        (line for line in judge(answer, limits) if not line.error <= line.most), key=order
    )


def gradient_of(name: str) -> str:
    return "gradient" if name == "given" else f"gradient of {name}"
