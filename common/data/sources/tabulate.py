"""From utterances (text, feature frames) to rows of a shape file (T, U), counting those left out."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from dataclasses import dataclass
from itertools import islice
from typing import Callable, Iterable, List, Optional, Sequence, Tuple

import numpy as np

from common.core.errors import UserError
from common.data.shapes import LARGEST, subsampled
from common.data.sources.manifests import Utterance

TokenCounter = Callable[[List[str]], List[int]]
AT_ONCE = 1000  # utterances: fast enough for the tokenizer, and little memory
#: Seconds: durations are of whole samples, and speeds divide them.
ROUNDING = 1e-4


@dataclass(frozen=True)
class Kept:
    """Which rows stay.  factor: of the subsampling, after which an utterance must have a frame; empty: those without
    text too; shortest, longest: seconds, of the audio at the speed of the row; None: any."""

    factor: int
    empty: bool = False
    shortest: Optional[float] = None
    longest: Optional[float] = None


def table(
    utterances: Iterable[Utterance],
    count_tokens: TokenCounter,
    kept: Kept,
    counts: Counter,
    speeds: Sequence[float] = (1.0,),
) -> Tuple[np.ndarray, np.ndarray]:
    """Rows int32 (utterances * speeds, 2), and the feature frames of each: all utterances at the first speed, then all
    at the next, as in icefall.  What is left out is counted; an utterance that is kept without text has U = 0.  Raises
    UserError where no row is left."""
    frames_at: List[array] = [array("q") for _ in speeds]
    tokens, seconds = array("q"), array("d")
    source = iter(utterances)
    while chunk := list(islice(source, AT_ONCE)):
        if not kept.empty:
            chunk = [utterance for utterance in chunk if utterance.text]
        tokens.extend(count_tokens([utterance.text for utterance in chunk]))
        seconds.extend(utterance.seconds for utterance in chunk)
        for at, frames in zip(frames_at, zip(*(utterance.frames for utterance in chunk))):
            at.extend(frames)
    empty = counts["without_supervision"] + counts["with_empty_text"]
    counts["kept_without_text" if kept.empty else "left_out_without_text"] = empty
    every = np.array([one for frames in frames_at for one in frames], dtype=np.int64)
    rows = np.stack([subsampled(every, kept.factor), np.tile(tokens, len(frames_at)).astype(np.int64)], axis=1)
    enough = rows[:, 0] >= 1
    counts["rows_left_out_as_too_short"] = int((~enough).sum())
    lasts = np.concatenate([np.array(seconds) / speed for speed in speeds])
    for key, bound, fits in (
        ("rows_below_min_duration", kept.shortest, lasts >= (kept.shortest or 0.0) - ROUNDING),
        ("rows_above_max_duration", kept.longest, lasts <= (kept.longest or math.inf) + ROUNDING),
    ):
        if bound is not None:
            counts[key] = int((enough & ~fits).sum())
            enough &= fits
    rows = rows[enough]
    counts["rows"] = len(rows)
    if not len(rows):
        read, short = counts["utterances_read"], counts["rows_left_out_as_too_short"]
        others = counts["rows_below_min_duration"] + counts["rows_above_max_duration"]
        outside = f", {others} rows are not between --min-duration and --max-duration" if others else ""
        why = f"of {read} read, {empty} have no text, {short} rows are too short{outside}"
        raise UserError(f"no utterance is left: {why}")
    every = every[enough]
    if max(rows.max(), every.max()) > LARGEST:
        raise UserError(f"an utterance has {every.max()} frames, more than a shape file can hold ({LARGEST})")
    return rows.astype(np.int32), every.astype(np.int32)
