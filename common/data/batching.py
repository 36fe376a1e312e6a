"""Make batches of the utterances of a shape file, and choose those that a run measures.

Batches are formed in two ways, both common in training: a fixed number of utterances in file order,
or utterances sorted by length, up to a number of frames.  A batch is rows (T, U) of the shape file;
rnnt_bench.losses.inputs makes tensors of it.  Each timing round has batches of its own (--batches
random or spread), or all rounds have the same (first or longest).

Before that, `vary` may change the lengths, as another front end, another vocabulary or long form
would.  These are estimates: generate_shape_info.py counts the tokens of a real vocabulary and the
frames of a real front end.

A cell is one (t, u) of the output lattice.  An utterance has T (U + 1) useful cells, a batch of N
utterances N max(T) (max(U) + 1) padded cells.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from rnnt_bench.core import text
from rnnt_bench.core.called import command
from rnnt_bench.core.errors import UserError
from rnnt_bench.core.settings import Settings
from rnnt_bench.data import shapes
from rnnt_bench.records.schema import Totals


class Batches:
    """Hold all batches.  ``batches[i]`` is int32 (N, 2), columns T and U.

    Args:
        utterances: (utterances, 2), the rows of the shape file.
        order: the numbers of these rows, batch after batch.
        bounds: batch i has the rows ``order[bounds[i]:bounds[i + 1]]``.
        too_long: the numbers of rows that alone have more than --max-frames, longest first.

    The attribute `utterances` has the rows of all batches in the order of the batches."""

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
        """Return the numbers of a batch's rows in the shape file, from 0: int64 (N,)."""
        return self._order[self._slice(index)]

    def describe(self, index: int, prune_range: int | None = None) -> dict[str, int]:
        """Return the sizes of a batch as records have them (records.schema.Batch).

        prune_range: symbols that a pruned loss keeps for each frame; None: no "pruned_cells"."""
        T, U = self[index].astype(np.int64).T
        cells = T * (U + 1)
        # A path with at most one symbol a frame cannot meet U^2 of the cells: those with u > t, and
        # those with too few frames left for the rest of the targets.
        one_symbol_cells = np.maximum(cells - U**2, 0)
        numbers = {
            "index": range(len(self))[index],
            "N": len(T),
            "T_max": T.max(),
            "U_max": U.max(),
            "useful_cells": cells.sum(),
            "padded_cells": len(T) * T.max() * (U.max() + 1),
            "frames": T.sum(),
            "tokens": U.sum(),
            "one_symbol_cells": one_symbol_cells.sum(),
        }
        if prune_range is not None:
            numbers["pruned_cells"] = (T * np.minimum(U + 1, prune_range)).sum()
        return {key: int(value) for key, value in numbers.items()}

    def all_cells(self) -> tuple[np.ndarray, np.ndarray]:
        """Return (useful cells, padded cells) of every batch, both int64 (batches,): the number of
        cells without padding, and with it."""
        T, U = self.utterances.astype(np.int64).T
        starts = self._bounds[:-1]
        useful = np.add.reduceat(T * (U + 1), starts)
        most_tokens = np.maximum.reduceat(U, starts)
        return useful, np.diff(self._bounds) * self.longest() * (most_tokens + 1)

    def longest(self) -> np.ndarray:
        """Return the largest T of every batch, int64 (batches,)."""
        return np.maximum.reduceat(self.utterances[:, 0].astype(np.int64), self._bounds[:-1])

    def totals(self) -> Totals:
        """Return the totals over all batches, for a record: numbers of utterances, frames and
        batches, the longest T, and the mean over batches of log(useful cells / padded cells)."""
        T = self.utterances[:, 0].astype(np.int64)
        useful, padded = self.all_cells()
        mean_log_share = float(np.log(useful / padded).mean())
        return Totals(len(T), int(T.sum()), int(T.max()), len(self), mean_log_share)

    def _slice(self, index: int) -> slice:
        """Return the places of a batch's rows in `utterances` and in `_order`."""
        index = range(len(self))[index]  # raises IndexError; -1 is the last
        return slice(self._bounds[index], self._bounds[index + 1])


def fixed_size(utterances: np.ndarray, batch_size: int) -> Batches:
    """Return batches of `batch_size` utterances in file order; the last one may have fewer.

    utterances: (utterances, 2), columns T and U."""
    count = len(utterances)
    bounds = np.append(np.arange(0, count, batch_size, dtype=np.int64), count)
    return Batches(utterances, np.arange(count, dtype=np.int64), bounds)


def max_frames(utterances: np.ndarray, max_frames: int, padded: bool = False) -> Batches:
    """Return batches of utterances sorted by T, then U, longest first.

    Utterances of one length keep their file order.  A batch is filled up to `max_frames`; an
    utterance with more frames is a batch of its own.

    utterances: (utterances, 2), columns T and U; padded: whether padding counts, so that a batch of
    N utterances has N max(T) frames; else it has the sum of T."""
    T, U = np.asarray(utterances).astype(np.int64).T
    order = np.lexsort((-U, -T))
    T = T[order]
    starts = np.arange(len(T))
    # A batch that starts at utterance i of the order ends before utterance ends[i].
    if padded:  # T[i] is the largest T of that batch
        ends = np.minimum(starts + max_frames // T, len(T))
    else:
        total = np.cumsum(T)
        before = total - T  # the frames in front of the batch
        ends = np.searchsorted(total, before + max_frames, side="right")
    ends = np.maximum(ends, starts + 1).tolist()  # a batch has an utterance, however long
    bounds = [0]
    while bounds[-1] < len(T):
        bounds.append(ends[bounds[-1]])
    too_long = order[T > max_frames].tolist()
    return Batches(utterances, order, np.asarray(bounds, dtype=np.int64), too_long)


def select(batches: Batches, mode: str, count: int, seed: int, round_number: int = 1) -> list[int]:
    """Return the indices of the batches that a round measures.

    Args:
        mode: a value of --batches.  "first": in the order of the batches.  "longest": those with
            the most padded cells.  "random": drawn without repetition over all rounds, until all
            were drawn, and then in the same order again.  "spread": sorted by longest T and
            padded cells and cut into `count` equal parts, with one drawn of each part.
        count: the number of batches; all are measured if there are fewer.
        seed: the seed of "random" and "spread".
        round_number: counts from 1."""
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
    # A batch is drawn of each part: from its first one on, by a share in [0, 1) of its length.
    edges = np.arange(count + 1) * available // count
    shares = shapes.uniform64(seed, begin + count)[begin:]
    drawn = edges[:-1] + (shares * np.diff(edges)).astype(np.int64)
    return by_length[drawn].tolist()


def heaviest(batches: Batches, indices: Sequence[int] | None = None) -> list[int]:
    """Return the one or two batches that need the most memory.

    The first has the most cells, padding included.  The second has the most cells without padding,
    which are all that packed losses make logits for.  If both are the same batch, return it once.

    indices: the batches to choose from; None for all."""
    candidates = range(len(batches)) if indices is None else indices
    useful, padded = batches.all_cells()
    most_padded = max(candidates, key=padded.__getitem__)
    most_useful = max(candidates, key=useful.__getitem__)
    return [most_padded] if most_padded == most_useful else [most_padded, most_useful]


def lightest(batches: Batches, indices: Sequence[int]) -> int:
    """Return the index, among `indices`, of the batch with the fewest cells, padding included."""
    _, padded = batches.all_cells()
    return min(indices, key=padded.__getitem__)


#: Subsampling of shape_info.pt, and of every shape file whose provenance names no other.
SUBSAMPLING = 4


def load(settings: Settings, round_number: int | None = None) -> tuple[Batches, list[int]]:
    """Return all batches of the shape file, and the indices of those that a round measures.

    The settings decide which utterances stay, how their lengths change, and how batches are formed.
    Raises UserError.

    round_number: from 1; None for the batches of all rounds."""
    path = Path(settings.shape_file)
    factor = shapes.subsampling(path) or SUBSAMPLING
    subsampling = settings.subsampling
    # Frames at x4 can be changed to any factor; frames at another factor stay as they are.  So the
    # flag must name that factor or be 4, its default; and `vary` gets 4, which changes no frames.
    if factor != SUBSAMPLING:
        if subsampling not in (factor, SUBSAMPLING):
            raise UserError(
                f"--subsampling {subsampling}: the frames of {path} are at x{factor} already, as the file beside it "
                f"says; make one with {command('shapes')} --subsampling-factor 4 or leave the flag out"
            )
        subsampling = SUBSAMPLING
    utterances = between(
        shapes.load(path),
        shapes.frame_shift(path),
        factor,
        settings.min_duration,
        settings.max_duration,
    )
    varied = vary(
        utterances,
        subsampling,
        settings.token_scale,
        settings.concatenate,
        settings.frames,
        settings.tokens,
    )
    batches = in_batches(varied, settings)
    return batches, selected(batches, settings, round_number)


def in_batches(utterances: np.ndarray, settings: Settings) -> Batches:
    """Form batches of utterances, (utterances, 2), as the settings say."""
    if settings.sort_utterance:
        return max_frames(utterances, settings.max_frames, settings.max_frames_padded)
    return fixed_size(utterances, settings.batch_size)


def warnings(batches: Batches, chosen: Sequence[int], settings: Settings) -> list[str]:
    """Return a line for each thing that a user may not expect of the batches of a run.

    chosen: the indices of the batches that the run measures."""
    lines = []
    if batches.too_long:
        # The first batches are these utterances, the longest first, so batches[0] is the (T, U) of
        # the longest.
        lines.append(
            f"{text.count(len(batches.too_long), 'utterance')} longer than --max-frames, each a batch of its own; "
            f"the longest has {batches[0][0, 0]} frames (row {batches.too_long[0]}, counted from 0)"
        )
    flag = f"--num-batches {settings.num_batches}"
    if len(chosen) < settings.num_batches:
        lines.append(f"{flag}: there are no more than {len(chosen)}, and all are measured")
    # Rounds with batches of their own need that many in all.
    elif settings.own_batches and len(batches) < settings.num_batches * settings.rounds:
        lines.append(
            f"{flag}: there are {len(batches)} batches for {settings.rounds} rounds, so rounds share some"
        )
    return lines


def selected(batches: Batches, settings: Settings, round_number: int | None = None) -> list[int]:
    """Return the indices of the batches that a round of a run measures.

    round_number: counts from 1; None: return the batches of all rounds, each once."""
    rounds: Iterable[int] = range(1, settings.rounds + 1)
    if not settings.own_batches:
        rounds = [1]  # all rounds have the same batches
    elif round_number is not None:
        rounds = [round_number]
    indices = [
        index
        for number in rounds
        for index in select(batches, settings.batches, settings.num_batches, settings.seed, number)
    ]
    return list(dict.fromkeys(indices))


def vary(
    utterances: np.ndarray,
    subsampling: int = SUBSAMPLING,
    token_scale: float = 1.0,
    concatenate: int = 1,
    frames: int | None = None,
    tokens: int | None = None,
) -> np.ndarray:
    """Return utterances of other lengths: int32 (rows, 2), columns T and U.

    Raises UserError for a T or U above the largest int32.

    Args, applied in this order:
        utterances: (utterances, 2), columns T and U at x4.
        concatenate: this many successive rows become one, with the sums of T and of U.  Fewer rows
            may be left for the last one.
        subsampling: the factor of a front end (shapes.subsampled).  The new T is the number of
            frames, at least 1, that this front end makes of the fewest feature frames of which x4
            makes the old T.
        token_scale: factor of U, rounded half to even; U >= 1 stays at least 1.
        frames, tokens: replace every T, every U; None leaves them.
    """
    rows = np.asarray(utterances, dtype=np.int64)
    if concatenate > 1:
        rows = np.add.reduceat(rows, np.arange(0, len(rows), concatenate), axis=0)
    T, U = rows.T
    if subsampling != SUBSAMPLING:
        features = shapes.feature_frames(T, SUBSAMPLING)
        T = np.maximum(shapes.subsampled(features, subsampling), 1)
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
    """Return the rows of utterances whose duration is between two bounds, both included.

    `factor` numbers of feature frames give the same T.  A row is kept if any of them is within the
    bounds.  So at x4, with a frame shift of 0.01 s, the bounds are exact to 0.03 s.  Raises
    UserError if no row is left.

    Args:
        utterances: (utterances, 2), columns T and U.
        frame_shift: seconds between feature frames.
        factor: subsampling of T.
        shortest, longest: the bounds in seconds; None for no bound."""
    if shortest is None and longest is None:
        return utterances
    T = np.asarray(utterances[:, 0], dtype=np.int64)
    fewest_frames = shapes.feature_frames(T, factor)
    kept = np.ones(len(T), dtype=bool)
    # The bounds are compared as frames, which are exact; 0.01 s is no exact float.
    if shortest is not None:
        most_frames = fewest_frames + factor - 1
        kept &= most_frames >= round(shortest / frame_shift)
    if longest is not None:
        kept &= fewest_frames <= round(longest / frame_shift)
    if not kept.any():
        seconds = fewest_frames * frame_shift
        raise UserError(
            f"--min-duration, --max-duration: no utterance is left of {len(utterances)}, "
            f"which have {seconds.min():.2f} to {seconds.max():.2f} s"
        )
    return utterances[kept]
