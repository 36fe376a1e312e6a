"""Collect how far the gradients of a loss are from the right ones, part by part.

`Errors` is for a loss that is judged by itself: it has the largest error of each leaf, and where it
is.  A leaf is a tensor that gets a gradient: the logits ("given"), or outputs and weights.  Each
leaf is judged by itself, since encoder_out's gradient is a thousandth as long as the weight's.

An entry of a symbol that is not the target is a posterior over V, far below the largest entry.  So
differences are also summed: over each frame, each u and each symbol, and over each row of other
tensors.  A factor tells of the whole leaf, and the gradient of a cell must sum to 0 over V.

`Sketch` is for the process that is timed: random sums of each leaf's gradient tell how far it is
off as a whole, and all losses of a round share the random sums of the right one.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from rnnt_bench.data.shapes import uniform
from rnnt_bench.losses import layouts, rounding
from rnnt_bench.losses.adapter import Adapter
from rnnt_bench.losses.cells import Cells, Frames, Gradients, largest

Index = tuple[int, ...]


class Part(NamedTuple):
    """Hold the gradient of the logits of some frames of an utterance, and the right one."""

    cells: Cells
    frames: Frames
    computed: torch.Tensor | None  # (frames, cells, V), None if the loss made no gradient
    right: torch.Tensor  # (frames, cells, V)
    derivatives: torch.Tensor  # (frames, cells, P) of the log-likelihood by the parts of each cell

    def describe(self, index: Index) -> str:
        """Return where an entry of the gradient is, in words.

        index: (frame, cell, symbol) of the entry in `right`; frame 0 is `frames.begin`."""
        n = self.frames.n
        T, U = self.cells.batch.shapes[n]
        t = self.frames.begin + index[0]
        u = int(self.frames.u[index[:2]])
        return f"utterance {n + 1} (T {T}, U {U}), t {t}, u {u}, symbol {index[2]}"


@dataclass
class Leaf:
    """Collect the errors of the gradient of a leaf, part by part.

    An error is the difference of an entry to the right one.
    """

    worst: float = 0.0  # the largest magnitude of an error
    largest: float = 0.0  # the largest magnitude of the right gradient
    product: float = 0.0  # the sum of error times right gradient
    right_square: float = 0.0  # the sum of squares of the right gradient
    error_square: float = 0.0  # the sum of squares of the error
    missing: bool = False  # whether the loss left the leaf without a gradient
    furthest: str = ""  # where the error is the largest, in words

    @property
    def error(self) -> float:
        """Return the largest magnitude of an error, relative to that of the right gradient."""
        return self.worst / max(self.largest, rounding.TINY)

    @property
    def factor(self) -> float:
        """Return the factor by which the right gradient comes nearest to the gradient of the loss
        (least squares); 1 if the right gradient is 0.

        The gradient of the loss is right + error, so the factor is 1 plus that of the error alone.
        Rounding hardly changes it, since the errors of entries average out."""
        return 1 + self.product / self.right_square if self.largest > rounding.TINY else 1.0

    @property
    def beside_factor(self) -> float:
        """Return the norm of the error that `factor` leaves, relative to the right gradient's.

        What it leaves is orthogonal to the right gradient, so the squares of both errors add up."""
        square = self.error_square - (self.factor - 1) ** 2 * self.right_square
        return math.sqrt(max(square, 0.0) / max(self.right_square, rounding.TINY))

    def add(
        self,
        computed: torch.Tensor | None,
        right: torch.Tensor,
        describe: Callable[[Index], str] = lambda index: f"entry {[*index]}",
    ) -> torch.Tensor:
        """Add a part of the gradient; return |computed - right| in float64.

        Args:
            computed: the loss's gradient; None if the loss made none: then all errors are infinite.
            right: the right gradient.
            describe: returns in words where an entry of the part is.
        """
        self.right_square += float((right * right).sum())
        self.largest = max(self.largest, largest(right))
        if computed is None:
            self.missing = True
            self.worst = math.inf
            return torch.full_like(right, math.inf)
        computed = computed.detach()
        error = computed.double() - right
        self.product += float((error * right).sum())
        self.error_square += float((error * error).sum())
        error.abs_()
        worst = largest(error)
        if worst > self.worst:
            self.worst = worst
            furthest = int(error.nan_to_num(nan=math.inf).argmax())
            index = tuple(int(number) for number in np.unravel_index(furthest, error.shape))
            values = f"{float(computed[index]):.4g}, expected {float(right[index]):.4g}"
            self.furthest = f"{describe(index)}: {values}"
        return error


class Errors:
    """Collect the errors of the gradients of a loss.

    Attributes:
        leaves: the errors of each leaf
        sums: by what is summed over, a share: the largest of all such sums of errors, each over its
          scale (see `note_sums`).  Keys: a "frame", a "u", a "symbol", a "cell", or the name of a
          leaf, summed by row
        padding: the largest magnitude in the padding, None if there is no padding
    """

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter
        self.leaves: dict[str, Leaf] = defaultdict(Leaf)
        self.sums: dict[str, float] = defaultdict(float)
        self.padding: float | None = None
        # Sums over the cells so far, of one utterance by u and of the batch by symbol: row 0 of
        # errors, row 1 of their scales.  The first part gives them their shapes.
        self.by_u = torch.zeros(0)  # (2, a column for each u)
        self.by_symbol = torch.zeros(0)  # (2, a column for each symbol)

    def note_sums(self, over: str, errors: torch.Tensor, scales: torch.Tensor) -> None:
        """Keep the largest ratio of a sum of errors to its scale in `sums[over]`.

        Args:
            over: what is summed over, a key of `sums`.
            errors: sums of errors.
            scales: what each sum is compared with, of the same shape.  A scale below a small share
              of the mean scale counts as that share.
        """
        least = max(rounding.FLOOR * scales.mean().item(), rounding.TINY)
        self.sums[over] = max(self.sums[over], largest(errors / scales.clamp(min=least)))

    def note_leaf(self, name: str, computed: torch.Tensor | None, right: torch.Tensor) -> None:
        """Note the gradient of a whole leaf; unless it is a vector, also the sums of the magnitudes
        of its errors over each row.

        computed: as in `Leaf.add`."""
        error = self.leaves[name].add(computed, right)
        if right.dim() > 1:
            self.note_sums(name, errors=error.sum(-1), scales=right.abs().sum(-1))

    def note_cells(self, part: Part) -> None:
        """Note the gradient of the logits of some frames.  The parts of a batch must come in the
        order of its utterances and frames.

        A part without a gradient is noted in `leaves` alone."""
        error = self.leaves["given"].add(part.computed, part.right, part.describe)
        if part.computed is None:
            return
        # `error` is (frames, cells, V).  `sums` is (2, frames, cells): the errors of each cell, and
        # its posterior, their scale.
        posterior = self.adapter.lattice.posterior(part.derivatives)
        sums = torch.stack([error.sum(2), posterior])
        self.note_sums("frame", *sums.sum(2))
        # A cell's gradient adds up to 0 over V, so errors with their signs must cancel too.
        net_error = part.computed.detach().double().sum(2) - part.right.sum(2)
        self.note_sums("cell", net_error.abs(), posterior)
        self._note_by_u(part, sums)
        self._note_by_symbol(part, error)

    def _note_by_u(self, part: Part, sums: torch.Tensor) -> None:
        """Add the sums of a part to those of its utterance by u; note these after the last frame.

        sums (2, frames, cells): the errors of each cell, and what they are compared with."""
        T, U = part.cells.batch.shapes[part.frames.n]
        if part.frames.begin == 0:
            # column U + 1: the cells of a pruned range beyond the last target
            self.by_u = sums.new_zeros(2, U + 2)
        self.by_u.index_add_(1, part.frames.u.flatten(), sums.flatten(1))
        if part.frames.end == T:
            self.note_sums("u", *self.by_u[:, : U + 1])

    def _note_by_symbol(self, part: Part, error: torch.Tensor) -> None:
        """Add the errors (frames, cells, V) of a part by symbol; note them after the last utterance.

        right = posterior of the cell * probability of the symbol - derivative of the symbol's part.
        The errors are compared with the sum of both terms, the product and the derivative.  As the
        product is right + derivative, the sum is right + 2 * derivative.
        """
        n, begin, end = part.frames.n, part.frames.begin, part.frames.end
        shapes = part.cells.batch.shapes
        T, _ = shapes[n]
        if n == 0 and begin == 0:
            self.by_symbol = error.new_zeros(2, part.cells.width)
        errors, scales = self.by_symbol  # views: what is added to them is added to `by_symbol`
        errors += error.sum((0, 1))
        scales += part.right.sum((0, 1))
        # the column of V that the derivative of each part belongs to
        columns = self.adapter.lattice.columns(
            part.frames.target, self.adapter.blank, part.right.size(2)
        )
        scales.index_add_(0, columns.flatten(), 2 * part.derivatives.flatten())
        if n == len(shapes) - 1 and end == T:
            self.note_sums("symbol", errors, scales)

    def note_padding(self, shapes: Sequence[tuple[int, int]], gradients: Gradients) -> None:
        """Note the gradients of a step in the padding, which must be 0.

        In "given" they also count as errors of the leaf, since `note_cells` compares its cells and
        leaves out its padding."""
        regions = layouts.of(self.adapter).padding(shapes)
        for name, gradient in gradients.items():
            leaf = self.leaves[name]
            for region in regions.get(name, ()):
                worst = 0.0 if gradient is None else largest(gradient[region])
                self.padding = max(worst, self.padding or 0.0)
                # Other leaves were compared whole, by `note_leaf`.
                if name == "given" and worst > leaf.worst:
                    leaf.worst = worst
                    utterance = region[0] + 1  # region: (n, ...)
                    leaf.furthest = f"the padding of utterance {utterance}: {worst:.4g}, expected 0"


class Sketch:
    """Keep random sums of gradients, from which the length of a difference can be estimated.

    A random sum adds all entries of a gradient, each times the random sign of its row and that of
    its column.  The mean square of COUNT such sums is the square length of the gradient, give or
    take a third.  Two sketches of one seed have the same signs.  So the difference of their sums is
    a sketch of the difference of the gradients.

    Attributes:
        sums: (COUNT,) by leaf
        squares: the square length of the gradient by leaf
    """

    COUNT = 24

    def __init__(self, seed: int):
        self.seed = seed
        self.sums: dict[str, torch.Tensor] = {}
        self.squares: dict[str, float] = defaultdict(float)

    def note(self, name: str, values: torch.Tensor | None, *part: int) -> None:
        """Add a part of the gradient of a leaf to its sums.

        name: of the leaf; values: the gradient, None if there is none, which counts as 0; part: the
        utterance and the first frame of the part, no numbers for the whole leaf."""
        sums = self.sums.setdefault(name, torch.zeros(self.COUNT, dtype=torch.float64))
        if values is not None:
            rows = values.detach().double().reshape(-1, values.size(-1))
            column_signs = self._signs(rows.size(1), f"columns of {name}").to(rows)
            row_signs = self._signs(len(rows), name, *part).to(rows)
            # (rows, COUNT), summed over the rows: each entry has been multiplied by both its signs.
            sums += (rows @ column_signs * row_signs).sum(0).cpu()  # in place, so in self.sums
            self.squares[name] += float(rows.square().sum())

    def note_leaf(self, name: str, computed: torch.Tensor | None, right: torch.Tensor) -> None:
        """Note the right gradient of a whole leaf.

        `computed` is ignored: it is there since Errors.note_leaf takes it."""
        self.note(name, right)

    def note_cells(self, part: Part) -> None:
        """Note the right gradient of the logits of some frames."""
        self.note("given", part.right, part.frames.n, part.frames.begin)

    def _signs(self, count: int, name: str, *part: int) -> torch.Tensor:
        """Return random signs (count, COUNT), float64; the same for the same arguments and seed.

        name, part: the leaf and its part, as in `note`; for the signs of columns, which have no
        part, "columns of" the leaf: else rows and columns of a square leaf would have the same."""
        # The length keeps the numbers of a part apart from the bytes of a longer name.
        key = (self.seed, *name.encode(), len(part), *part)
        is_positive = torch.from_numpy(uniform(count * self.COUNT, *key) < 0.5)
        return is_positive.view(count, self.COUNT) * 2.0 - 1

    def numbers(self) -> dict[str, list[float]]:
        """Return by leaf a list: the length of the gradient, then its COUNT random sums."""
        return {
            name: [math.sqrt(self.squares[name]), *sums.tolist()]
            for name, sums in self.sums.items()
        }

    def errors(self, right: Mapping[str, Sequence[float]]) -> dict[str, float]:
        """Return by leaf the estimated length of the error, as a share of the length of the right
        gradient.  The share is infinite for a gradient with NaN.

        right: the `numbers` of the right sketch; a leaf that it lacks has the gradient 0."""
        result = {}
        for name, sums in self.sums.items():
            length, *expected = right.get(name, [0.0] * (1 + self.COUNT))
            difference = sums - torch.tensor(expected, dtype=torch.float64)
            error = float(difference.square().mean().sqrt()) / max(length, rounding.TINY)
            result[name] = math.inf if math.isnan(error) else error
        return result
