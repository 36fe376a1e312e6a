"""From utterances (text, feature frames) to rows of a shape file (T, U), counting those left out: shard by shard."""

from __future__ import annotations

import io
import json
import math
from collections import Counter
from dataclasses import astuple, dataclass
from typing import BinaryIO, Callable, List, Optional, Sequence

import numpy as np

from common.core.errors import UserError
from common.data.shapes import LARGEST, subsampled
from common.data.sources import bpe
from common.data.sources.manifests import Reader, Utterance
from common.data.sources.shards import Shard

#: Seconds: durations are of whole samples, and speeds divide them.
ROUNDING = 1e-4


def lines(shard: Shard) -> List[str]:
    """Its entries: JSON as they came, or an array of the text, frames and seconds of an utterance."""
    return [one if isinstance(one, str) else json.dumps(astuple(one)) for _, one in shard.entries]


@dataclass(frozen=True)
class Kept:
    """Which rows stay.  factor: of the subsampling, after which an utterance must have a frame; empty: those without
    text too; shortest, longest: seconds, of the audio at the speed of the row; None: any."""

    factor: int
    empty: bool = False
    shortest: Optional[float] = None
    longest: Optional[float] = None


@dataclass
class Read:
    """Utterances of a shard.  used: int64, the rows of the reader's recordings that were met."""

    utterances: List[Utterance]
    counts: Counter
    used: np.ndarray


@dataclass
class Part:
    """What a shard gives: for each speed int32 (rows, 3), columns T, U and feature frames; the rest as in Read."""

    rows: List[np.ndarray]
    counts: Counter
    used: np.ndarray

    def content(self) -> bytes:
        """As an npz file."""
        stream = io.BytesIO()
        np.savez(stream, *self.rows, counts=np.array(json.dumps(self.counts)), used=self.used)
        return stream.getvalue()

    @staticmethod
    def of(stream: BinaryIO) -> Part:
        """Of what `content` gave.  A damaged one can raise anything."""
        with np.load(stream, allow_pickle=False) as found:
            rows = [found[f"arr_{at}"] for at in range(len(found.files) - 2)]
            return Part(rows, Counter(json.loads(str(found["counts"]))), found["used"])


def joined(parts: Sequence[Part]) -> Part:
    """The part of a shard, of those of its pieces."""
    counts: Counter = Counter()
    for part in parts:
        counts.update(part.counts)
    rows = [np.concatenate(of_speed) for of_speed in zip(*(part.rows for part in parts))]
    return Part(rows, counts, np.unique(np.concatenate([part.used for part in parts])))


def read_shard(reader: Optional[Reader], shard: Shard) -> Read:
    """Utterances of the entries of a shard.  reader: None where they are utterances."""
    counts: Counter = Counter()
    if reader is None:
        return Read([utterance for _, utterance in shard], counts, np.zeros(0, dtype=np.int64))
    reader.used.clear()
    utterances = [reader.utterance(number, line, counts) for number, line in shard]
    return Read(utterances, counts, np.array(sorted(reader.used), dtype=np.int64))


@dataclass
class Work:
    """The work that makes rows of a shard, whatever process it is done in.  reader: as of `read_shard`; model: a
    SentencePiece model."""

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
    """Rows of the utterances at each speed (see `Part`).  What is left out is counted; an utterance that is kept
    without text has U = 0."""
    some = [utterance for utterance in utterances if utterance.text or kept.empty]
    empty = sum(not utterance.text for utterance in utterances)
    counts["kept_without_text" if kept.empty else "left_out_without_text"] = empty
    tokens = np.array(count_tokens([utterance.text for utterance in some]), dtype=np.int64)
    frames = np.array([utterance.frames for utterance in some], dtype=np.int64).reshape(-1, len(speeds))
    seconds = np.array([utterance.seconds for utterance in some])
    return [_kept(tokens, at, seconds / speed, kept, counts) for at, speed in zip(frames.T, speeds)]


def _kept(tokens: np.ndarray, frames: np.ndarray, lasts: np.ndarray, kept: Kept, counts: Counter) -> np.ndarray:
    """Rows of utterances that last so many seconds at one speed."""
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
    """The error where no row is left."""
    read, short = counts["utterances_read"], counts["rows_left_out_as_too_short"]
    empty = counts["without_supervision"] + counts["with_empty_text"]
    others = counts["rows_below_min_duration"] + counts["rows_above_max_duration"]
    outside = f", {others} rows are not between --min-duration and --max-duration" if others else ""
    return f"no utterance is left: of {read} read, {empty} have no text, {short} rows are too short{outside}"
