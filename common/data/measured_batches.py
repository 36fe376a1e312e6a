"""The batches of a run: the utterances of its shape file, with the lengths, order and batch size of its settings.

Other lengths (a stronger front end, another vocabulary, long form, or one T and one U for all) are rules on the rows of
the shape file, applied once, before batches are made.  They are estimates: generate_shape_info.py counts the tokens of
a real vocabulary and the frames of a real front end.  Each timing round has batches of its own (--batches random or
spread), or all rounds have the same (first, longest).
"""

from __future__ import annotations

from pathlib import Path
from typing import List, Optional, Sequence, Tuple

import numpy as np

from common.core.errors import UserError
from common.core.settings import Settings
from common.data import batching, shapes
from common.data.batching import Batches
from common.data.shapes import LARGEST, feature_frames, subsampled

#: Subsampling of shape_info.pt, and of every shape file whose provenance names no other.
SUBSAMPLING = 4


def load(settings: Settings, round_number: Optional[int] = None) -> Tuple[Batches, List[int]]:
    """Return (all batches of the shape file, indices of the measured ones).

    Args:
        settings: of the run.
        round_number: whose batches; None: those of all rounds.

    Raises UserError.
    """
    batches = in_batches(load_utterances(settings), settings)
    return batches, select(batches, settings, round_number)


def load_utterances(settings: Settings) -> np.ndarray:
    """Return the utterances of the shape file with the durations and variations of the settings: int32 (utterances, 2),
    columns T and U. Raises UserError."""
    path = Path(settings.shape_file)
    known = shapes.known_factor(path)
    factor = check_subsampling(path, known, settings.subsampling)
    front_end = shapes.frame_shift(path), known or SUBSAMPLING
    utterances = between(shapes.load(path), *front_end, settings.min_duration, settings.max_duration)
    lengths = {key: getattr(settings, key) for key in ("token_scale", "concatenate", "frames", "tokens")}
    return vary(utterances, subsampling=factor, **lengths)


def in_batches(utterances: np.ndarray, settings: Settings) -> Batches:
    if settings.sort_utterance:
        return batching.max_frames(utterances, settings.max_frames)
    return batching.fixed_size(utterances, settings.batch_size)


def warnings(batches: Batches, selected: Sequence[int], settings: Settings) -> List[str]:
    """Return a line for each surprise in the batches of a run."""
    lines = [batches.warning()]
    available, wanted = len(batches), settings.num_batches
    if not settings.find_largest:  # which has sizes of its own
        if len(selected) < wanted:
            lines.append(f"--num-batches {wanted}: there are no more than {len(selected)}, and all are measured")
        elif settings.own_batches and available < wanted * settings.rounds:
            shared = f"there are {available} batches for {settings.rounds} rounds, so rounds share some"
            lines.append(f"--num-batches {wanted}: {shared}")
    return [line for line in lines if line]


def select(batches: Batches, settings: Settings, round_number: Optional[int] = None) -> List[int]:
    """Return the indices of the measured batches of a round; without one, of all rounds, each once."""
    if not settings.own_batches:
        round_number = 1
    rounds = range(1, settings.rounds + 1) if round_number is None else [round_number]
    how = settings.batches, settings.num_batches, settings.seed
    return list(dict.fromkeys(index for number in rounds for index in batching.select(batches, *how, number)))


def vary(
    shapes: np.ndarray,
    *,
    subsampling: int = SUBSAMPLING,
    token_scale: float = 1.0,
    concatenate: int = 1,
    frames: Optional[int] = None,
    tokens: Optional[int] = None,
) -> np.ndarray:
    """Return rows of other lengths, int32 (rows, 2), columns T and U; the defaults change nothing.

    The arguments apply in this order.

    Args:
        shapes: (utterances, 2), columns T and U at x4.
        concatenate: each group of so many successive rows becomes one, with the sums of T and of U; the last group may
            be smaller.
        subsampling: T frames at x4 are at least 4 T + 3 feature frames, which go through the front end of
            shapes.subsampled; at least 1.  8 is a third convolution of icefall's, (T - 1) // 2; 6 is ESPnet's,
            (2 T - 1) // 3.
        token_scale: factor of U, rounded half to even; U >= 1 gives at least 1.
        frames, tokens: this T, this U, for every row.

    Raises UserError for an utterance longer than a shape file can hold.
    """
    rows = np.asarray(shapes, dtype=np.int64)
    if concatenate > 1:
        rows = np.add.reduceat(rows, np.arange(0, len(rows), concatenate), axis=0)
    T, U = rows.T
    if subsampling != SUBSAMPLING:
        T = np.maximum(subsampled(SUBSAMPLING * T + 3, subsampling), 1)
    if token_scale != 1:
        U = np.maximum(np.rint(U * token_scale), np.minimum(U, 1))
    T = T if frames is None else np.full_like(T, frames)
    U = U if tokens is None else np.full_like(U, tokens)
    longest = max(T.max(), U.max())
    if longest > LARGEST:
        advice = "take a smaller --concatenate, --token-scale, --frames or --tokens"
        raise UserError(f"an utterance of {longest:.0f} frames or tokens: at most {LARGEST} can be; {advice}")
    return np.stack([T, U], axis=1).astype(np.int32)


def between(
    shapes: np.ndarray, frame_shift: float, factor: int, shortest: Optional[float], longest: Optional[float]
) -> np.ndarray:
    """Return the rows (utterances, 2) of at least `shortest` and at most `longest` seconds (None: any).

    T encoder frames at x`factor` are at least factor * T + factor - 1 feature frames of `frame_shift` seconds each; at
    x4 they are up to three more, so the seconds are right to 0.03.  Raises UserError where no utterance is left.
    """
    if shortest is None and longest is None:
        return shapes
    frames = feature_frames(np.asarray(shapes[:, 0], dtype=np.int64), factor)
    # in frames, since 0.01 s has no exact float
    kept = frames >= (0 if shortest is None else round(shortest / frame_shift) - (factor - 1))
    kept &= frames <= (np.inf if longest is None else round(longest / frame_shift))
    if not kept.any():
        ends = f"{frames.min() * frame_shift:.2f} to {frames.max() * frame_shift:.2f} s"
        raise UserError(f"--min-duration, --max-duration: no utterance is left of {len(shapes)}, which have {ends}")
    return np.ascontiguousarray(shapes[kept])


def check_subsampling(path: object, known: Optional[int], wanted: int) -> int:
    """Return the factor for `vary` if the provenance of the shape file `path` says `known` (None: nothing).

    A file of another factor than 4 can be used as it is, never be turned into a third: UserError.
    """
    if known in (None, SUBSAMPLING):
        return wanted
    if wanted in (known, SUBSAMPLING):
        return SUBSAMPLING
    words = f"the frames of {path} are at x{known} already, as the file beside it says"
    advice = "make one with generate_shape_info.py --subsampling-factor 4 or leave the flag out"
    raise UserError(f"--subsampling {wanted}: {words}; {advice}")
