"""From utterances (text, feature frames) to rows of a shape file (T, U), counting those left out: shard by shard."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Callable, List, Optional, Sequence

import numpy as np

from common.core.errors import UserError
from common.data.shapes import LARGEST, subsampled
from common.data.sources import bpe
from common.data.sources.manifests import Reader, Utterance
from common.data.sources.shards import Shard

#: Seconds: durations are of whole samples, and speeds divide them.
ROUNDING = 1e-4


@dataclass(frozen=True)
class Kept:
    """Says which rows stay.

    factor: of the subsampling, after which an utterance must have a frame; empty: keep those without text too;
    shortest, longest: seconds of audio at the speed of the row; None: any.
    """

    factor: int
    empty: bool = False
    shortest: Optional[float] = None
    longest: Optional[float] = None


@dataclass
class Read:
    """Utterances of a shard.  used: int64, the rows of the reader's recordings that they are of."""

    utterances: List[Utterance]
    counts: Counter
    used: np.ndarray


@dataclass
class Part:
    """Rows of a shard: for each speed int32 (rows, 3), columns T, U and feature frames.  counts, used: see Read."""

    rows: List[np.ndarray]
    counts: Counter
    used: np.ndarray


def read_shard(reader: Optional[Reader], shard: Shard) -> Read:
    """Return the utterances of the entries of a shard.  reader: None where the entries are utterances."""
    counts: Counter = Counter()
    if reader is None:
        return Read([utterance for _, utterance in shard], counts, np.zeros(0, dtype=np.int64))
    reader.used.clear()
    utterances = [reader.utterance(number, line, counts) for number, line in shard]
    return Read(utterances, counts, np.array(sorted(reader.used), dtype=np.int64))


@dataclass
class Work:
    """Makes rows of a shard, in whatever process.  reader: see `read_shard`; model: a SentencePiece model."""

    reader: Optional[Reader]
    model: bytes
    kept: Kept
    speeds: Sequence[float]

    def __call__(self, shard: Shard) -> Part:
        read = read_shard(self.reader, shard)
        rows = table(read.utterances, bpe.counter(self.model), self.kept, read.counts, self.speeds)
        return Part(rows, read.counts, read.used)


def table(
    utterances: Sequence[Utterance],
    count_tokens: Callable[[List[str]], List[int]],
    kept: Kept,
    counts: Counter,
    speeds: Sequence[float] = (1.0,),
) -> List[np.ndarray]:
    """Return the rows of the utterances at each speed (see `Part`), and count in `counts` what is left out.  An
    utterance that is kept without text has U = 0."""
    some = [utterance for utterance in utterances if utterance.text or kept.empty]
    empty = sum(not utterance.text for utterance in utterances)
    counts["kept_without_text" if kept.empty else "left_out_without_text"] = empty
    tokens = np.array(count_tokens([utterance.text for utterance in some]), dtype=np.int64)
    frames = np.array([utterance.frames for utterance in some], dtype=np.int64).reshape(-1, len(speeds))
    seconds = np.array([utterance.seconds for utterance in some])
    return [_kept(tokens, at, seconds / speed, kept, counts) for at, speed in zip(frames.T, speeds)]


def _kept(tokens: np.ndarray, frames: np.ndarray, lasts: np.ndarray, kept: Kept, counts: Counter) -> np.ndarray:
    """Return the rows that stay at one speed, at which the utterances last `lasts` seconds."""
    rows = np.stack([subsampled(frames, kept.factor), tokens, frames], axis=1)
    enough = rows[:, 0] >= 1
    counts["rows_left_out_as_too_short"] += int((~enough).sum())
    for key, bound, fits in (
        ("rows_below_min_duration", kept.shortest, lasts >= (kept.shortest or 0.0) - ROUNDING),
        ("rows_above_max_duration", kept.longest, lasts <= (kept.longest or math.inf) + ROUNDING),
    ):
        if bound is not None:
            counts[key] += int((enough & ~fits).sum())
            enough &= fits
    rows = rows[enough]
    counts["rows"] += len(rows)
    if len(rows) and rows.max() > LARGEST:
        raise UserError(f"an utterance has {rows.max()} frames, more than a shape file can hold ({LARGEST})")
    return rows.astype(np.int32)


def why_none(counts: Counter) -> str:
    """Return the error message where no row is left."""
    read, short = counts["utterances_read"], counts["rows_left_out_as_too_short"]
    empty = counts["without_supervision"] + counts["with_empty_text"]
    others = counts["rows_below_min_duration"] + counts["rows_above_max_duration"]
    outside = f", {others} rows are not between --min-duration and --max-duration" if others else ""
    return f"no utterance is left: of {read} read, {empty} have no text, {short} rows are too short{outside}"
