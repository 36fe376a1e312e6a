"""Compute quantiles, confidence intervals and verdicts from samples.

Samples of one process share its luck (memory layout, clock, neighbours), so they are not
independent.  So an interval is over rounds, each a fresh process, and never over the samples of one
process.  Times are skewed and ratios multiply, so intervals are computed on their logarithms.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean, median, variance
from typing import Any


def quantile(values: Sequence[float], fraction: float) -> float:
    """Return a quantile, interpolated linearly between two samples as numpy does (type 7).

    fraction: 0.5 is the median.  Raises ValueError without values."""
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    position = (len(ordered) - 1) * fraction
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


@dataclass(frozen=True)
class Summary:
    """Summarize samples of several batches.

    Attributes:
        median: the mean over batches of each batch's median.
        p20, p80: `median` times the 20th and 80th percentile of sample / median of its batch.  So
            batches of different sizes do not count as spread.  None if no batch has two samples.
        n: the number of samples."""

    median: float
    p20: float | None = None
    p80: float | None = None
    n: int = 0


def describe(batches: Mapping[Any, Sequence[float]]) -> Summary | None:
    """Return the summary of some samples; None if there are none.

    batches: the samples of each batch."""
    medians = {batch: median(values) for batch, values in batches.items() if values}
    if not medians:
        return None
    center = fmean(medians.values())
    relative: list[float] = []  # each sample over the median of its batch
    for batch, middle in medians.items():
        if len(batches[batch]) > 1 and middle:
            relative += [value / middle for value in batches[batch]]
    count = sum(map(len, batches.values()))
    if not relative:
        return Summary(center, n=count)
    return Summary(
        center,
        p20=center * quantile(relative, 0.2),
        p80=center * quantile(relative, 0.8),
        n=count,
    )


#: Intervals of Simpson's rule in `student_t`, and most steps of Newton's method there.
PANELS = 200
NEWTON_STEPS = 50


@cache
def student_t(confidence: float, freedom: float) -> float:
    """Return the t for which a value of Student's t distribution is in -t..t with probability
    `confidence`.

    Substitutes t = sqrt(freedom) tan(angle), which makes the density cos(angle) ** (freedom - 1).
    The integral from 0 to the angle, by Simpson's rule, must be the share `confidence` of the
    integral from 0 to pi / 2 (`whole`).  Newton's method finds the angle.  It is at most
    `highest`: t is tan(confidence pi / 2) with one degree of freedom, and smaller with more.

    freedom: degrees of freedom, at least 1."""
    whole = (
        math.sqrt(math.pi) / 2 * math.exp(math.lgamma(freedom / 2) - math.lgamma((freedom + 1) / 2))
    )
    highest = math.atan(math.tan(confidence * math.pi / 2) / math.sqrt(freedom))
    angle = 0.0
    for _ in range(NEWTON_STEPS):
        density = [math.cos(angle * step / PANELS) ** (freedom - 1) for step in range(PANELS + 1)]
        weighted = (
            density[0] + density[-1] + 4 * math.fsum(density[1::2]) + 2 * math.fsum(density[2:-1:2])
        )
        integral = weighted * angle / (3 * PANELS)
        change = (confidence * whole - integral) / density[-1]
        angle = min(angle + change, highest)  # rounding may put a step beyond it
        if change < 1e-14 * angle:  # no more than rounding
            break
    return math.sqrt(freedom) * math.tan(angle)


def interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float] | None:
    """Return the confidence interval (low, high) of a geometric mean, by Student's t on logarithms.

    None for fewer than two values; with two or three it is wide.

    values: positive and independent, such as one of each round."""
    if len(values) < 2:
        return None
    logarithms = log_values(values)
    center = fmean(logarithms)
    half = student_t(confidence, len(values) - 1) * math.sqrt(variance(logarithms) / len(values))
    return math.exp(center - half), math.exp(center + half)


#: Probability that all intervals of a table, or of a comparison, hold together.
CONFIDENCE = 0.95


def confidence_of_each(count: int) -> float:
    """Return the confidence that each of `count` intervals needs (Bonferroni's correction).

    Then all of them hold together with CONFIDENCE."""
    return 1 - (1 - CONFIDENCE) / max(count, 1)


#: Change of a time that does not matter, unless --tolerance says otherwise: 2%.
TOLERANCE = 0.02


def verdict(low: float | None, high: float | None, tolerance: float = 0.0) -> str:
    """Judge a ratio of times, new / baseline, by its interval.

    "faster", "slower": the whole interval is beyond the tolerance.  "same": the whole is within it.
    "unclear": neither holds, or there is no interval.

    tolerance: with 0.02 the ratios from 1 / 1.02 to 1.02 are within the tolerance."""
    if low is None or high is None:
        return "unclear"
    if high < 1 / (1 + tolerance):
        return "faster"
    if low > 1 + tolerance:
        return "slower"
    return "same" if low >= 1 / (1 + tolerance) and high <= 1 + tolerance else "unclear"


def log_values(values: Sequence[float]) -> list[float]:
    """Return the natural logarithms of values.  Raises ValueError if there are no values, or if a
    value is 0 or less."""
    if not values or min(values) <= 0:
        raise ValueError("positive values are needed")
    return [math.log(value) for value in values]
