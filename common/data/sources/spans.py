"""Finds stretches of audio by id: millions of recordings or features in 56 bytes each, which processes share."""

from __future__ import annotations

import hashlib
import math
from array import array
from dataclasses import dataclass
from typing import Any, Iterable, List, Optional, Tuple

import numpy as np

DIGEST = 16  # bytes of the hash of an id: two of 10^10 ids have the same one with a chance of 10^-19


@dataclass(frozen=True)
class Span:
    """A span of a recording: start and duration in s; num_frames and frame_shift (s) if it has features."""

    start: float
    seconds: float
    sampling_rate: float
    num_frames: Optional[int] = None
    frame_shift: Optional[float] = None


class Named:
    """Spans with their ids, packed: each is a digest of the id and five float64, with NaN for None."""

    def __init__(self) -> None:
        self.digests, self.numbers = bytearray(), array("d")

    def add(self, name: Any, span: Span) -> None:
        """Append a span.  Raises TypeError for a field that is no number."""
        of_features = (math.nan if value is None else value for value in (span.num_frames, span.frame_shift))
        self.numbers.extend(array("d", (span.start, span.seconds, span.sampling_rate, *of_features)))
        self.digests += _digest(name)


class Spans:
    """Spans by id.  len: how many ids there are; rows: how many spans."""

    def __init__(self, parts: Iterable[Named] = ()):
        digests, numbers = bytearray(), bytearray()
        for part in parts:
            digests += part.digests
            numbers += part.numbers.tobytes()
        keys = np.frombuffer(digests, dtype=f"S{DIGEST}")
        order = np.argsort(keys, kind="stable")
        self._keys = keys[order]
        self._numbers = np.frombuffer(numbers, dtype=np.float64).reshape(-1, 5)[order]

    @property
    def rows(self) -> int:
        return len(self._keys)

    def __len__(self) -> int:
        return int((self._keys[1:] != self._keys[:-1]).sum()) + bool(len(self._keys))

    def named(self, name: Any) -> Tuple[int, List[Span]]:
        """Return the row of the first span of the id `name`, and its spans in the order in which they came."""
        key = np.array(_digest(name), dtype=f"S{DIGEST}")
        first, end = (int(self._keys.searchsorted(key, side)) for side in ("left", "right"))
        return first, [_span(*numbers) for numbers in self._numbers[first:end].tolist()]


def _span(start: float, seconds: float, sampling_rate: float, num_frames: float, frame_shift: float) -> Span:
    rate = int(sampling_rate) if sampling_rate.is_integer() else sampling_rate
    frames = None if num_frames != num_frames else int(num_frames)
    return Span(start, seconds, rate, frames, None if frame_shift != frame_shift else frame_shift)


def _digest(name: Any) -> bytes:
    return hashlib.blake2b(repr(name).encode("utf-8", "surrogatepass"), digest_size=DIGEST).digest()
