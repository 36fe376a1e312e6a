"""Choose the ends and ticks of an axis that shows small values and ones a hundred times larger."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, floor, log, log10
from typing import List, Optional, Sequence

#: An axis is logarithmic when its largest value is more than so many times the smallest.
WIDE = 20.0
#: An axis of bars is cut when the longest bar is more than LONG times the shortest, and one is more than GAP times the
#: next shorter one.
LONG, GAP = 8.0, 4.0


def cut(ends: Sequence[float]) -> Optional[float]:
    """Return where to cut an axis of bars: just above most bars where a few (one, or a third) are far longer; None
    where all can be shown."""
    ordered = sorted(ends)
    few = ordered[-1 - max(1, len(ordered) // 3) :]  # and the one before them
    below = [smaller for smaller, larger in zip(few, few[1:]) if larger > GAP * smaller]
    return 1.15 * below[0] if below and ordered[-1] > LONG * ordered[0] else None


@dataclass(frozen=True)
class Span:
    """Hold the ends of an axis of points."""

    low: float
    high: float
    logarithmic: bool

    def share(self, value: float) -> float:
        """Return the position of a value between the ends, 0 to 1."""
        if self.logarithmic:
            return log(value / self.low) / log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    @property
    def ticks(self) -> List[float]:
        """Return 1, 2 and 5 times each power of ten, for a logarithmic axis; 1 to 9 times it where that gives fewer
        than three."""
        powers = range(floor(log10(self.low)), ceil(log10(self.high)) + 1)
        for steps in ((1, 2, 5), range(1, 10)):
            every = [of * 10.0**power for power in powers for of in steps]
            ticks = [tick for tick in every if self.low <= tick <= self.high]
            if len(ticks) > 2:
                break
        return ticks

    @property
    def words(self) -> List[str]:
        """Return the ticks as plain numbers."""
        return [f"{tick:.12g}" for tick in self.ticks]


def logarithmic(values: Sequence[float]) -> Span:
    """Return a logarithmic axis that shows these positive values with some room beside them."""
    return Span(min(values) / 1.4, 1.6 * max(values), True)


def span(values: Sequence[float]) -> Span:
    """Return an axis for these positive values, with some room beside them: from zero, or logarithmic where they differ
    too much."""
    return logarithmic(values) if max(values) > WIDE * min(values) else Span(0.0, 1.15 * max(values), False)
