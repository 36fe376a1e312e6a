"""Compute quantiles, intervals over rounds and verdicts from samples.  Values in, plain data out.

Samples of one process share its luck (memory layout, clock, neighbours), so they are not
independent: an interval is over rounds, each a fresh process, and never over the samples of one.
Times are positive and skewed, ratios multiply; both are averaged and bounded on the logarithm.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean, median, variance
from typing import Any


def quantile(values: Sequence[float], fraction: float) -> float:
    """Return the `fraction` (0..1) quantile, linear between the two nearest samples (type 7, as
    numpy's)."""
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    position = (len(ordered) - 1) * fraction
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


@dataclass(frozen=True)
class Summary:
    """Samples of several batches: the mean over batches of each one's median, and their number.

    p20, p80: that mean times the 20th and 80th percentile of samples over the median of their own
    batch, so that batches of different size are no spread; None where no batch has two samples."""

    median: float
    p20: float | None = None
    p80: float | None = None
    n: int = 0


def describe(batches: Mapping[Any, Sequence[float]]) -> Summary | None:
    """Return the summary of samples by batch; None without any."""
    medians = {batch: median(values) for batch, values in batches.items() if values}
    if not medians:
        return None
    middle = fmean(medians.values())
    repeated = [batch for batch in medians if len(batches[batch]) > 1]
    shares = [
        value / medians[batch] for batch in repeated for value in batches[batch] if medians[batch]
    ]
    low, high = (middle * quantile(shares, part) if shares else None for part in (0.2, 0.8))
    return Summary(middle, low, high, sum(map(len, batches.values())))


@cache
def student_t(confidence: float, freedom: float) -> float:
    """Return the t that Student's distribution exceeds, on both sides together, with probability 1
    - `confidence`.

    With t = sqrt(freedom) tan(angle) the density is cos(angle) ** (freedom - 1): Simpson's rule and
    Newton's method do, from 0 up to the point of one degree, tan(confidence * pi / 2).
    """
    whole = (
        math.sqrt(math.pi) / 2 * math.exp(math.lgamma(freedom / 2) - math.lgamma((freedom + 1) / 2))
    )
    highest = math.atan(math.tan(confidence * math.pi / 2) / math.sqrt(freedom))
    angle = 0.0
    panels = 200
    for _ in range(50):
        heights = [math.cos(angle * step / panels) ** (freedom - 1) for step in range(panels + 1)]
        area = (
            heights[0] + heights[-1] + 4 * math.fsum(heights[1::2]) + 2 * math.fsum(heights[2:-1:2])
        )
        change = (confidence * whole - area * angle / (3 * panels)) / heights[-1]
        angle = min(angle + change, highest)
        if change < 1e-14 * angle:
            break
    return math.sqrt(freedom) * math.tan(angle)


def interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float] | None:
    """Return the interval (low, high) of the geometric mean of independent positive values, such as
    one per round.

    Student's t on the logarithms: right for few rounds, and wide for two or three.  None for fewer
    than two."""
    if len(values) < 2:
        return None
    logarithms = log_values(values)
    center = fmean(logarithms)
    half = student_t(confidence, len(values) - 1) * math.sqrt(variance(logarithms) / len(values))
    return math.exp(center - half), math.exp(center + half)


#: Probability that all intervals of a table, or of a comparison, hold together.
CONFIDENCE = 0.95


def confidence_of_each(count: int) -> float:
    """Return the confidence of each of `count` intervals that hold together with CONFIDENCE
    (Bonferroni)."""
    return 1 - (1 - CONFIDENCE) / max(count, 1)


#: Change of a time that does not matter, unless the user says otherwise: 2%.
TOLERANCE = 0.02


def verdict(low: float | None, high: float | None, tolerance: float = 0.0) -> str:
    """Return "faster", "slower", "same" or "unclear" for the interval of a ratio new / baseline.

    Same: the whole interval is within the tolerance (0.02: 2%); faster, slower: the whole is beyond
      it."""
    if low is None or high is None:
        return "unclear"
    if high < 1 / (1 + tolerance):
        return "faster"
    if low > 1 + tolerance:
        return "slower"
    return "same" if low >= 1 / (1 + tolerance) and high <= 1 + tolerance else "unclear"


def log_values(values: Sequence[float]) -> list[float]:
    if not values or min(values) <= 0:
        raise ValueError("positive values are needed")
    return [math.log(value) for value in values]
