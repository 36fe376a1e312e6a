"""Fit how the time of a loss grows with the size of a batch: a power of the size, with its interval.

The fit is the least squares line through the logarithms of the batches' median times over those of their sizes, over
all batches of all rounds.  Its interval is Student's t over rounds, which are the clusters (see
common.analysis.ratios).  It holds for each size, not for all sizes together.
"""

from __future__ import annotations

import math
from typing import List, Mapping, NamedTuple, Optional

from common.analysis.ratios import FEWEST_ROUNDS, Pair, regression
from common.core.statistics import CONFIDENCE, student_t

FEWEST_SIZES = 3
STEPS = 24  # of the line
LARGEST = 700.0  # whose exponential is a float


class At(NamedTuple):
    """Hold the line at one size: the time in ms, and the ends of its 95% interval."""

    size: float
    ms: float
    low: float
    high: float


def line(rounds: Mapping[str, Mapping[str, float]], size_of: Mapping[str, int]) -> Optional[List[At]]:
    """Return the line from the smallest size to the largest.  rounds: round -> batch -> median ms; size_of: of each
    batch.  None where there are fewer than three rounds or three sizes."""
    known = [
        [Pair(math.log(size_of[batch]), math.log(ms)) for batch, ms in medians.items() if ms > 0 and size_of.get(batch)]
        for medians in rounds.values()
    ]
    known = [pairs for pairs in known if pairs]
    sizes = {pair.x for pairs in known for pair in pairs}
    if len(known) < FEWEST_ROUNDS or len(sizes) < FEWEST_SIZES:
        return None
    reach, begin, width = student_t(CONFIDENCE, len(known) - 1), min(sizes), max(sizes) - min(sizes)
    points = []
    for x in (begin + width * step / STEPS for step in range(STEPS + 1)):
        y, error = regression(known, x)
        half = reach * (error or 0.0)
        points.append(At(*(math.exp(min(end, LARGEST)) for end in (x, y, y - half, y + half))))
    return points
