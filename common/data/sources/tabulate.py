"""From utterances (text, feature frames) to rows of a shape file (T, U), counting those left out."""

from __future__ import annotations

from array import array
from collections import Counter
from itertools import islice
from typing import Callable, Iterable, List, Tuple

import numpy as np

from common.core.errors import UserError
from common.data.shapes import LARGEST, subsampled
from common.data.sources.manifests import Utterance

TokenCounter = Callable[[List[str]], List[int]]
AT_ONCE = 1000  # utterances: fast enough for the tokenizer, and little memory


def table(
    utterances: Iterable[Utterance], count_tokens: TokenCounter, factor: int, keep_empty: bool, counts: Counter
) -> Tuple[np.ndarray, np.ndarray]:
    """Rows int32 (utterances * speeds, 2), and the feature frames of each: all utterances at the first speed, then all
    at the next, as in icefall.  Left out, and counted: utterances without text (unless `keep_empty`: then U = 0), and
    rows of utterances too short to have a frame after subsampling by `factor`.  Raises UserError where no row is left.
    """
    frames_at: List[array] = []
    tokens = array("q")
    source = iter(utterances)
    while chunk := list(islice(source, AT_ONCE)):
        if not keep_empty:
            chunk = [utterance for utterance in chunk if utterance.text]
        tokens.extend(count_tokens([utterance.text for utterance in chunk]))
        for speed, frames in enumerate(zip(*(utterance.frames for utterance in chunk))):
            if speed == len(frames_at):
                frames_at.append(array("q"))
            frames_at[speed].extend(frames)
    empty = counts["without_supervision"] + counts["with_empty_text"]
    counts["kept_without_text" if keep_empty else "left_out_without_text"] = empty
    every = np.array([one for frames in frames_at for one in frames], dtype=np.int64)
    rows = np.stack([subsampled(every, factor), np.tile(tokens, len(frames_at)).astype(np.int64)], axis=1)
    enough = rows[:, 0] >= 1
    counts["rows_left_out_as_too_short"] = int((~enough).sum())
    rows = rows[enough]
    counts["rows"] = len(rows)
    if not len(rows):
        read, short = counts["utterances_read"], counts["rows_left_out_as_too_short"]
        raise UserError(f"no utterance is left: of {read} read, {empty} have no text, {short} rows are too short")
    every = every[enough]
    if max(rows.max(), every.max()) > LARGEST:
        raise UserError(f"an utterance has {every.max()} frames, more than a shape file can hold ({LARGEST})")
    return rows.astype(np.int32), every.astype(np.int32)
