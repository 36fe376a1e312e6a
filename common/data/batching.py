"""Which utterances share a batch, and which batches are measured.

Two ways, both common in training: a fixed number of utterances in file order, or sorted by length and filled up to a
number of frames.  A batch is rows of the shape file; common.losses.inputs makes tensors of it.  numpy only.

A cell is one (t, u) of the output lattice: an utterance has T * (U + 1) useful ones, a batch N * max T * (max U + 1)
padded ones.
"""

from __future__ import annotations

from typing import Dict, List, Optional, Sequence, Tuple

import numpy as np

from common.core.errors import UserError
from common.data.streams import uniform64
from common.records.schema import Totals

MODES = ("first", "longest", "random", "spread")


class Batches:
    """A sequence of batches.  ``batches[i]`` is an int32 array (N, 2), columns T and U, in the order of the batch;
    ``utterances`` are those of all batches, one batch after the other.  shapes: (utterances, 2), the shape file; order:
    rows of it, batch after batch; bounds: batch i is ``order[bounds[i]:bounds[i + 1]]``; too_long: rows of utterances
    of more than max_frames, longest first."""

    def __init__(self, shapes: np.ndarray, order: np.ndarray, bounds: np.ndarray, too_long: Sequence[int] = ()):
        self.utterances = np.asarray(shapes, dtype=np.int32).take(order, axis=0)
        self._order = order
        self._bounds = bounds
        self.too_long = list(too_long)

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def __getitem__(self, index: int) -> np.ndarray:
        return self.utterances[self._slice(index)]

    def rows(self, index: int) -> np.ndarray:
        """Return the rows in the shape file of the utterances of batch `index`: int64 (N,), counted from 0."""
        return self._order[self._slice(index)]

    def cells(self, index: int) -> Tuple[int, int]:
        """Return the useful and padded cells of batch `index`."""
        description = self.describe(index)
        return description["useful_cells"], description["padded_cells"]

    def describe(self, index: int, prune_range: Optional[int] = None) -> Dict[str, int]:
        """Return batch `index` as the ``environment`` record has it; with `prune_range`, also the cells of so many
        symbols per frame."""
        frames, tokens = self[index].astype(np.int64).T
        numbers = {"index": range(len(self))[index], "N": len(frames), "T_max": frames.max(), "U_max": tokens.max()}
        numbers["useful_cells"] = (frames * (tokens + 1)).sum()
        numbers["padded_cells"] = len(frames) * frames.max() * (tokens.max() + 1)
        numbers.update(frames=frames.sum(), tokens=tokens.sum())
        numbers["one_symbol_cells"] = np.maximum(frames * (tokens + 1) - tokens**2, 0).sum()
        if prune_range is not None:
            numbers["pruned_cells"] = (frames * np.minimum(tokens + 1, prune_range)).sum()
        return {key: int(value) for key, value in numbers.items()}

    def all_cells(self) -> Tuple[np.ndarray, np.ndarray]:
        """Return the useful and padded cells of every batch, each int64 (batches,)."""
        if not len(self):
            return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
        frames, tokens = self.utterances.astype(np.int64).T
        starts = self._bounds[:-1]
        useful = np.add.reduceat(frames * (tokens + 1), starts)
        return useful, np.diff(self._bounds) * self.longest() * (np.maximum.reduceat(tokens, starts) + 1)

    def longest(self) -> np.ndarray:
        """Return the largest T of every batch, int64 (batches,)."""
        if not len(self):
            return np.zeros(0, dtype=np.int64)
        return np.maximum.reduceat(self.utterances[:, 0].astype(np.int64), self._bounds[:-1])

    def totals(self) -> Totals:
        """Return totals of all batches."""
        frames = self.utterances[:, 0].astype(np.int64)
        useful, padded = self.all_cells()
        return Totals(
            utterances=len(frames),
            frames=int(frames.sum()),
            T_max=int(frames.max()),
            batches=len(self),
            mean_log_useful_share=float(np.log(useful / padded).mean()),
        )

    def warning(self) -> Optional[str]:
        """Return a line about utterances that are too long, each a batch of its own; None when there are none."""
        if not self.too_long:
            return None
        row, count = self.too_long[0], len(self.too_long)
        return (  # the order is longest first, so the first batch holds the longest
            f"{count} utterance{'s' if count > 1 else ''} longer than --max-frames, each a batch of its own; "
            f"the longest has {self[0][0, 0]} frames (row {row}, counted from 0)"
        )

    def _slice(self, index: int) -> slice:
        index = range(len(self))[index]  # raises IndexError
        return slice(self._bounds[index], self._bounds[index + 1])


def fixed_size(shapes: np.ndarray, batch_size: int) -> Batches:
    """Return batches of `batch_size` utterances in file order; the last one may be short.  shapes: (utterances, 2),
    columns T and U. Raises UserError for a batch size below 1."""
    if batch_size < 1:
        raise UserError(f"--batch-size {batch_size}: a batch needs at least 1 utterance")
    count = len(shapes)
    bounds = np.append(np.arange(0, count, batch_size, dtype=np.int64), count)
    return Batches(shapes, np.arange(count, dtype=np.int64), bounds)


def max_frames(shapes: np.ndarray, max_frames: int) -> Batches:
    """Return batches of utterances sorted by T, then U, longest first, each filled while its sum of T stays within
    `max_frames`.  T and U move as pairs, and equal ones keep their file order.  A longer utterance is a batch of its
    own (see ``Batches.too_long``).  shapes: (utterances, 2).  Raises UserError for a number below 1."""
    if max_frames < 1:
        raise UserError(f"--max-frames {max_frames}: a batch needs at least 1 frame")
    frames, tokens = np.asarray(shapes).astype(np.int64).T
    order = np.lexsort((-tokens, -frames))
    frames = frames[order]
    total = np.cumsum(frames)
    # first the end of a batch that starts at i, for every i at once; then from batch to batch
    ends = np.searchsorted(total, total - frames + max_frames, side="right")
    ends = np.maximum(ends, np.arange(1, len(frames) + 1)).tolist()
    bounds = [0]
    while bounds[-1] < len(ends):
        bounds.append(ends[bounds[-1]])
    return Batches(shapes, order, np.asarray(bounds, dtype=np.int64), order[frames > max_frames].tolist())


def select(batches: Batches, mode: str, count: int, seed: int, round_number: int = 1) -> List[int]:
    """Return the indices of the batches to measure in a round: `count` of them, or all where there are no more.

    mode: ``first`` (file or creation order), ``longest`` (most padded cells first), ``random`` (seeded), ``spread``
    (seeded: sorted by T and padded cells, longest first, cut into `count` equal parts, one each).  The last two draw
    other batches in every round (from 1); random ones repeat only when all were drawn.  Raises UserError for another
    mode or a count < 1."""
    if mode not in MODES:
        raise UserError(f"--batches {mode}: choose one of {', '.join(MODES)}")
    if count < 1:
        raise UserError(f"{count} batches asked for: measure at least 1")
    available = len(batches)
    count = min(count, available)
    if mode == "first":
        return list(range(count))
    if mode == "random":
        drawn = np.argsort(uniform64(seed, available), kind="stable")
        return drawn[np.arange((round_number - 1) * count, round_number * count) % max(available, 1)].tolist()
    padded = batches.all_cells()[1]
    if mode == "longest":
        return np.argsort(-padded, kind="stable")[:count].tolist()
    by_length = np.lexsort((-padded, -batches.longest()))
    edges = np.arange(count + 1) * available // max(count, 1)
    places = uniform64(seed, round_number * count)[(round_number - 1) * count :]
    picks = edges[:-1] + (places * np.diff(edges)).astype(np.int64)
    return by_length[picks].tolist()


def heaviest(batches: Batches, indices: Optional[Sequence[int]] = None) -> List[int]:
    """Return the batches of `indices` (None: all) that need the most memory: the one with the most padded cells, and
    the one with the most useful cells, which packed losses use; one index where they are the same."""
    among = np.arange(len(batches)) if indices is None else np.asarray(indices)
    return list(dict.fromkeys(int(among[cells[among].argmax()]) for cells in batches.all_cells()[::-1]))


def lightest(batches: Batches, indices: Sequence[int]) -> int:
    """Return the batch of `indices` with the fewest padded cells."""
    return min(indices, key=lambda index: batches.cells(index)[1])
