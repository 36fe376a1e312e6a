"""When to stop: warm-up and sampling rules as pure functions of what was measured so far.  Times in nanoseconds.

No clock is read here: callers pass durations, tests pass made-up ones.
"""

from __future__ import annotations

import math
from statistics import stdev
from typing import Dict, List, Sequence, Tuple

from common.results import statistics

#: Two successive warm-up samples that agree within this are taken for stable.
WARM_UP_TOLERANCE = 0.10
WARM_UP_MAX_SAMPLES = 10
#: Warm-up may take this part of the time cap of a scope.
WARM_UP_SHARE = 0.25


def warmed_up(durations: Sequence[int], max_seconds: float) -> Tuple[bool, str]:
    """(stop warming up?, why) after these warm-up samples of one and the same batch."""
    if not durations:
        return False, ""
    if len(durations) >= 2:
        last, before = durations[-1], durations[-2]
        if abs(last - before) <= WARM_UP_TOLERANCE * min(last, before):
            return True, "stable"
    if len(durations) >= WARM_UP_MAX_SAMPLES:
        return True, "sample cap"
    if sum(durations) >= WARM_UP_SHARE * max_seconds * 1e9:
        return True, "time cap"
    return False, ""


def relative_half_width(samples: Dict[int, List[int]]) -> float:
    """Half-width of the 95% interval of the median, as a fraction, over samples grouped by batch.

    Each sample is divided by the median of its batch, so that batches of different sizes do not count as spread.  The
    standard error of a median of normal samples is 1.253 sigma / sqrt(n); sigma is the standard deviation, which
    outliers raise: noisy samples make for more of them, up to the caps.  Infinite while no batch was measured twice.
    """
    relative = []
    for durations in samples.values():
        if len(durations) >= 2:
            middle = statistics.median(durations)
            relative += [duration / middle for duration in durations]
    if not relative:
        return math.inf
    return 1.96 * 1.253 * stdev(relative) / math.sqrt(len(relative))


#: Sweeps over all batches before the spread is believed: fewer samples can agree by chance.
MIN_SWEEPS_FOR_SPREAD = 3


def enough(
    samples: Dict[int, List[int]], batches: int, spread: float, max_samples: int, max_seconds: float
) -> Tuple[bool, str]:
    """(stop sampling?, why): the wanted spread or a cap, at the end of a sweep, so that every batch counts alike.

    Asked before each sample.
    """
    count = sum(len(durations) for durations in samples.values())
    if count == 0 or count % batches:
        return False, ""
    if count >= max_samples:
        return True, "sample cap"
    if sum(sum(durations) for durations in samples.values()) >= max_seconds * 1e9:
        return True, "time cap"
    if count >= MIN_SWEEPS_FOR_SPREAD * batches and relative_half_width(samples) <= spread:
        return True, "spread"
    return False, ""
