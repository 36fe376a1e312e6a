"""Decides which timing jobs are still worth their time.

Every loss gets three rounds.  One that took more than three times as long as the fastest of its kind in each of them
gets --slow-rounds; with --budget the others get as many as fit.  That the intervals of ratios still hold the truth is
shown by benchmarks/interval_coverage.py, which calls `is_far_behind` too.
"""

from __future__ import annotations

import math
import time
from typing import Callable, Dict, List, Mapping, Sequence

from common.core.settings import FEWEST_ROUNDS
from common.core.statistics import mean
from common.jobs.progress import Standing

#: Times the fastest's, in each of the first rounds.
FAR_BEHIND = 3.0


def is_far_behind(ratios: Sequence[float]) -> bool:
    """Tell from a loss's ratio to the fastest in each of the first rounds, in their order."""
    return len(ratios) >= FEWEST_ROUNDS and min(ratios[:FEWEST_ROUNDS]) > FAR_BEHIND


class Budget:
    """The time that a run may take, in seconds from now.  clock: returns monotonic seconds."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic):
        self.clock, self.ends = clock, clock() + seconds

    def left(self) -> float:
        """Return the seconds that are left, at least 0."""
        return max(self.ends - self.clock(), 0.0)

    def has_room(self, number: int, seconds: float) -> bool:
        """Tell whether round `number` is to begin, where it and what follows the rounds take `seconds`."""
        return number <= FEWEST_ROUNDS or seconds <= self.left()


def has_enough(name: str, rounds: int, standing: Standing) -> bool:
    """Tell whether a loss that is far behind has been timed in so many rounds."""
    ratios = ratios_by_round(name, standing)
    return len(ratios) >= rounds and is_far_behind(ratios)


def ratios_by_round(name: str, standing: Standing) -> Sequence[float]:
    """Return a loss's time over that of the fastest of its kind, round by round, over the batches that both have."""
    kind = standing.kind_of.get(name)
    rivals = {other: times for other, times in standing.ms.items() if standing.kind_of.get(other) == kind and times}
    if name not in rivals:
        return []
    fastest = min(rivals, key=lambda other: _level(rivals[other], rivals[name]))
    logs: Dict[int, List[float]] = {}
    for (number, batch), ms in rivals[name].items():
        if (number, batch) in rivals[fastest]:
            logs.setdefault(number, []).append(math.log(ms / rivals[fastest][number, batch]))
    return [math.exp(mean(logs[number])) for number in sorted(logs)]


def _level(times: Mapping[object, float], others: Mapping[object, float]) -> float:
    """Return the mean log(time) over the batches that both have; infinite where they have none."""
    common = [math.log(ms) for batch, ms in times.items() if batch in others]
    return mean(common) if common else math.inf
