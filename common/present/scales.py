"""Choose the ends and ticks of an axis that shows small values and ones a hundred times larger."""

from __future__ import annotations

from math import ceil, floor, log10
from typing import List, NamedTuple, Sequence

#: An axis is logarithmic when its largest value is more than so many times the smallest.
WIDE = 20.0


class Span(NamedTuple):
    """Hold the ends of an axis of points."""

    low: float
    high: float
    logarithmic: bool

    @property
    def ticks(self) -> List[float]:
        """Return 1, 2 and 5 times each power of ten; 1 to 9 times it where that gives fewer than three."""
        powers = range(floor(log10(self.low)), ceil(log10(self.high)) + 1)
        for steps in ((1, 2, 5), range(1, 10)):
            every = [of * 10.0**power for power in powers for of in steps]
            ticks = [tick for tick in every if self.low <= tick <= self.high]
            if len(ticks) > 2:
                break
        return ticks


def logarithmic(values: Sequence[float]) -> Span:
    """Return a logarithmic axis that shows these positive values with some room beside them."""
    return Span(min(values) / 1.4, 1.6 * max(values), True)


def span(values: Sequence[float]) -> Span:
    """Return an axis for these positive values, with some room beside them: from zero, or logarithmic where they differ
    too much."""
    return logarithmic(values) if max(values) > WIDE * min(values) else Span(0.0, 1.15 * max(values), False)
