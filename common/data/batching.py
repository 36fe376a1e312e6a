"""Which utterances share a batch, and which batches a run measures.

Two ways, both common in training: a fixed number of utterances in file order, or sorted by length
and filled up to a number of frames.  A batch is rows of the shape file; rnnt_bench.losses.inputs
makes tensors of it.  numpy only.

Other lengths are rules on the rows of the shape file, applied once, before batches are made: a
stronger front end, another vocabulary, long form, or one T and one U for all.  They are estimates:
generate_shape_info.py counts the tokens of a real vocabulary and the frames of a real front end.
Each timing round has batches of its own (--batches random or spread), or all rounds have the same
(first, longest).

A cell is one (t, u) of the output lattice: an utterance has T * (U + 1) useful ones, a batch N *
max T * (max U + 1) padded ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rnnt_bench.core import text
from rnnt_bench.core.called import command
from rnnt_bench.core.errors import UserError
from rnnt_bench.core.settings import Settings
from rnnt_bench.data import shapes
from rnnt_bench.records.schema import Totals


class Batches:
    """A sequence of batches.  ``batches[i]`` is int32 (N, 2), columns T and U; ``utterances`` are
    those of all batches. It is made of the rows of the shape file; order: their numbers, batch
    after batch; bounds: batch i is ``order[bounds[i]:bounds[i + 1]]``; too_long: rows of utterances
    of more than max_frames, longest first."""

    def __init__(
        self,
        utterances: np.ndarray,
        order: np.ndarray,
        bounds: np.ndarray,
        too_long: Sequence[int] = (),
    ):
        self.utterances = np.asarray(utterances, dtype=np.int32).take(order, axis=0)
        self._order = order
        self._bounds = bounds
        self.too_long = list(too_long)

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def __getitem__(self, index: int) -> np.ndarray:
        return self.utterances[self._slice(index)]

    def rows(self, index: int) -> np.ndarray:
        """Return the rows of batch `index` in the shape file: int64 (N,), counted from 0."""
        return self._order[self._slice(index)]

    def describe(self, index: int, prune_range: int | None = None) -> dict[str, int]:
        """Return batch `index` as records have it; prune_range: also the cells of so many symbols
        per frame."""
        T, U = self[index].astype(np.int64).T
        cells = T * (U + 1)
        numbers = {
            "index": range(len(self))[index],
            "N": len(T),
            "T_max": T.max(),
            "U_max": U.max(),
            "useful_cells": cells.sum(),
            "padded_cells": len(T) * T.max() * (U.max() + 1),
            "frames": T.sum(),
            "tokens": U.sum(),
            "one_symbol_cells": np.maximum(cells - U**2, 0).sum(),
        }
        if prune_range is not None:
            numbers["pruned_cells"] = (T * np.minimum(U + 1, prune_range)).sum()
        return {key: int(value) for key, value in numbers.items()}

    def all_cells(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the useful and padded cells of every batch, each int64 (batches,)."""
        T, U = self.utterances.astype(np.int64).T
        starts = self._bounds[:-1]
        useful = np.add.reduceat(T * (U + 1), starts)
        most_tokens = np.maximum.reduceat(U, starts)
        return useful, np.diff(self._bounds) * self.longest() * (most_tokens + 1)

    def longest(self) -> np.ndarray:
        """Return the largest T of every batch, int64 (batches,)."""
        return np.maximum.reduceat(self.utterances[:, 0].astype(np.int64), self._bounds[:-1])

    def totals(self) -> Totals:
        """Return the counts of all batches, and the mean logarithm of the useful share of their
        cells."""
        T = self.utterances[:, 0].astype(np.int64)
        useful, padded = self.all_cells()
        share = float(np.log(useful / padded).mean())
        return Totals(len(T), int(T.sum()), int(T.max()), len(self), share)

    def _slice(self, index: int) -> slice:
        index = range(len(self))[index]  # raises IndexError
        return slice(self._bounds[index], self._bounds[index + 1])


def fixed_size(utterances: np.ndarray, batch_size: int) -> Batches:
    """Return batches of `batch_size` utterances (utterances, 2) in file order; the last one may be
    short."""
    count = len(utterances)
    bounds = np.append(np.arange(0, count, batch_size, dtype=np.int64), count)
    return Batches(utterances, np.arange(count, dtype=np.int64), bounds)


def max_frames(utterances: np.ndarray, max_frames: int, padded: bool = False) -> Batches:
    """Return batches of utterances (utterances, 2) sorted by T, then U, longest first.

    Each is filled while its sum of T stays within `max_frames`, or, if `padded`, its utterances
    times its longest T.  Equal ones keep their file order; a longer utterance is a batch of its
    own."""
    T, U = np.asarray(utterances).astype(np.int64).T
    order = np.lexsort((-U, -T))
    T = T[order]
    starts = np.arange(len(T))
    # ends[i] is the end of a batch that starts at i
    if padded:
        ends = np.minimum(starts + max_frames // T, len(T))
    else:
        total = np.cumsum(T)
        ends = np.searchsorted(total, total - T + max_frames, side="right")
    ends = np.maximum(ends, starts + 1).tolist()
    bounds = [0]
    while bounds[-1] < len(T):
        bounds.append(ends[bounds[-1]])
    too_long = order[T > max_frames].tolist()
    return Batches(utterances, order, np.asarray(bounds, dtype=np.int64), too_long)


def select(batches: Batches, mode: str, count: int, seed: int, round_number: int = 1) -> list[int]:
    """Return the indices of the batches to measure in a round: `count` of them, or all where there
    are no more.

    mode: ``first`` (file or creation order), ``longest`` (most padded cells first), ``random``
    (seeded), ``spread`` (seeded: sorted by T and padded cells, longest first, cut into `count`
    equal parts, one each).  The last two draw other batches in every round (from 1); random ones
    repeat only when all were drawn."""
    available = len(batches)
    count = min(count, available)
    if mode == "first":
        return list(range(count))
    begin = (round_number - 1) * count
    if mode == "random":
        order = np.argsort(shapes.uniform64(seed, available), kind="stable")
        return order[np.arange(begin, begin + count) % available].tolist()
    padded = batches.all_cells()[1]
    if mode == "longest":
        return np.argsort(-padded, kind="stable")[:count].tolist()
    by_length = np.lexsort((-padded, -batches.longest()))
    edges = np.arange(count + 1) * available // count
    shares = shapes.uniform64(seed, begin + count)[begin:]
    return by_length[edges[:-1] + (shares * np.diff(edges)).astype(np.int64)].tolist()


def heaviest(batches: Batches, indices: Sequence[int] | None = None) -> list[int]:
    """Return the batches of `indices` (None: all) that need the most memory: the one with the most
    padded cells, and the one with the most useful cells, which packed losses use; one index where
    they are the same."""
    candidates = range(len(batches)) if indices is None else indices
    useful, padded = batches.all_cells()
    return list(dict.fromkeys(max(candidates, key=cells.__getitem__) for cells in (padded, useful)))


def lightest(batches: Batches, indices: Sequence[int]) -> int:
    """Return the batch of `indices` with the fewest padded cells."""
    _, padded = batches.all_cells()
    return min(indices, key=padded.__getitem__)


#: Subsampling of shape_info.pt, and of every shape file whose provenance names no other.
SUBSAMPLING = 4


def load(settings: Settings, round_number: int | None = None) -> tuple[Batches, list[int]]:
    """Return all batches of the shape file, with the durations and variations of the settings, and
    the indices of those that are measured in a round (None: in all rounds).  Raises UserError."""
    path = Path(settings.shape_file)
    factor = shapes.subsampling(path)
    subsampling = settings.subsampling
    # A file whose frames are subsampled by another factor is used as it is.
    if factor not in (None, SUBSAMPLING):
        if subsampling not in (factor, SUBSAMPLING):
            raise UserError(
                f"--subsampling {subsampling}: the frames of {path} are at x{factor} already, as the file beside it "
                f"says; make one with {command('shapes')} --subsampling-factor 4 or leave the flag out"
            )
        subsampling = SUBSAMPLING
    utterances = between(
        shapes.load(path),
        shapes.frame_shift(path),
        factor or SUBSAMPLING,
        settings.min_duration,
        settings.max_duration,
    )
    lengths = {
        key: getattr(settings, key) for key in ("token_scale", "concatenate", "frames", "tokens")
    }
    batches = in_batches(vary(utterances, subsampling=subsampling, **lengths), settings)
    return batches, selected(batches, settings, round_number)


def in_batches(utterances: np.ndarray, settings: Settings) -> Batches:
    """Return the batches of utterances (utterances, 2) that the settings ask for."""
    if settings.sort_utterance:
        return max_frames(utterances, settings.max_frames, settings.max_frames_padded)
    return fixed_size(utterances, settings.batch_size)


def warnings(batches: Batches, chosen: Sequence[int], settings: Settings) -> list[str]:
    """Return a line for each surprise in the batches of a run."""
    lines = []
    if batches.too_long:  # the longest is first, as in the batches
        lines.append(
            f"{text.count(len(batches.too_long), 'utterance')} longer than --max-frames, each a batch of its own; "
            f"the longest has {batches[0][0, 0]} frames (row {batches.too_long[0]}, counted from 0)"
        )
    flag = f"--num-batches {settings.num_batches}"
    if len(chosen) < settings.num_batches:
        lines.append(f"{flag}: there are no more than {len(chosen)}, and all are measured")
    elif settings.own_batches and len(batches) < settings.num_batches * settings.rounds:
        lines.append(
            f"{flag}: there are {len(batches)} batches for {settings.rounds} rounds, so rounds share some"
        )
    return lines


def selected(batches: Batches, settings: Settings, round_number: int | None = None) -> list[int]:
    """Return the indices of the measured batches of a round; without one, of all rounds, each
    once."""
    if not settings.own_batches:
        round_number = 1
    rounds = range(1, settings.rounds + 1) if round_number is None else [round_number]
    indices: dict[int, None] = {}
    for number in rounds:
        chosen = select(batches, settings.batches, settings.num_batches, settings.seed, number)
        indices.update(dict.fromkeys(chosen))
    return list(indices)


def vary(
    utterances: np.ndarray,
    subsampling: int = SUBSAMPLING,
    token_scale: float = 1.0,
    concatenate: int = 1,
    frames: int | None = None,
    tokens: int | None = None,
) -> np.ndarray:
    """Return rows of other lengths, int32 (rows, 2), columns T and U.  The arguments apply in this
    order:

    Args:
        utterances: (utterances, 2), columns T and U at x4.
        concatenate: so many successive rows become one, with the sums of T and of U; the last group
          may be smaller.
        subsampling: T frames at x4 are at least 4 T + 3 feature frames, which go through the front
            end of shapes.subsampled; at least 1.
        token_scale: factor of U, rounded half to even; U >= 1 gives at least 1.
        frames, tokens: this T, this U, for every row.
    """
    rows = np.asarray(utterances, dtype=np.int64)
    if concatenate > 1:
        rows = np.add.reduceat(rows, np.arange(0, len(rows), concatenate), axis=0)
    T, U = rows.T
    if subsampling != SUBSAMPLING:
        T = np.maximum(shapes.subsampled(SUBSAMPLING * T + 3, subsampling), 1)
    if token_scale != 1:
        U = np.maximum(np.rint(U * token_scale), np.minimum(U, 1))
    if frames is not None:
        T = np.full_like(T, frames)
    if tokens is not None:
        U = np.full_like(U, tokens)
    longest = max(T.max(), U.max())
    if longest > shapes.LARGEST:
        raise UserError(
            f"an utterance of {longest:.0f} frames or tokens: at most {shapes.LARGEST} can be; "
            "take a smaller --concatenate, --token-scale, --frames or --tokens"
        )
    return np.stack([T, U], axis=1).astype(np.int32)


def between(
    utterances: np.ndarray,
    frame_shift: float,
    factor: int,
    shortest: float | None,
    longest: float | None,
) -> np.ndarray:
    """Return the rows (utterances, 2) of at least `shortest` and at most `longest` seconds (None:
    any).  T frames at x4 may be of up to three more feature frames than are counted, so the seconds
    are right to 0.03."""
    if shortest is None and longest is None:
        return utterances
    frames = shapes.feature_frames(np.asarray(utterances[:, 0], dtype=np.int64), factor)
    kept = np.ones(len(frames), dtype=bool)
    if shortest is not None:  # bounds are frames, since 0.01 s has no exact float
        kept &= frames >= round(shortest / frame_shift) - (factor - 1)
    if longest is not None:
        kept &= frames <= round(longest / frame_shift)
    if not kept.any():
        raise UserError(
            f"--min-duration, --max-duration: no utterance is left of {len(utterances)}, "
            f"which have {frames.min() * frame_shift:.2f} to {frames.max() * frame_shift:.2f} s"
        )
    return utterances[kept]
