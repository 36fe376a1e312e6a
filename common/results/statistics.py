"""Numbers from samples: quantiles, intervals over rounds, paired ratios, verdicts.  Values in, plain data out.

Samples of one process share its luck (memory layout, clock, neighbours), so they are not independent: an interval is
over rounds, each a fresh process, and never over the samples of one.  Times are positive and skewed, ratios multiply;
both are averaged and bounded on the logarithm.
"""

from __future__ import annotations

import math
from typing import Any, Dict, Hashable, List, Mapping, Optional, Sequence, Tuple

# Two-sided 95% points of Student's t for 1 to 30 degrees of freedom; beyond, the last is used (wider, so safe).
_T_95 = (
    12.706,
    4.303,
    3.182,
    2.776,
    2.571,
    2.447,
    2.365,
    2.306,
    2.262,
    2.228,
    2.201,
    2.179,
    2.160,
    2.145,
    2.131,
    2.120,
    2.110,
    2.101,
    2.093,
    2.086,
    2.080,
    2.074,
    2.069,
    2.064,
    2.060,
    2.056,
    2.052,
    2.048,
    2.045,
    2.042,
)


def quantile(values: Sequence[float], fraction: float) -> float:
    """The `fraction` (0..1) quantile, linear between the two nearest samples (type 7, as numpy and R do by default)."""
    if not values:
        raise ValueError("no values")
    if not 0 <= fraction <= 1:
        raise ValueError(f"not a fraction: {fraction}")
    ordered = sorted(values)
    place = (len(ordered) - 1) * fraction
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def median(values: Sequence[float]) -> float:
    return quantile(values, 0.5)


def mean(values: Sequence[float]) -> float:
    if not values:
        raise ValueError("no values")
    return math.fsum(values) / len(values)


def describe(values: Sequence[float]) -> Optional[Dict[str, float]]:
    """{median, p20, p80, n}; None without values."""
    if not values:
        return None
    return {"median": median(values), "p20": quantile(values, 0.2), "p80": quantile(values, 0.8), "n": len(values)}


def geometric_mean(values: Sequence[float]) -> float:
    """Of positive values; ValueError otherwise."""
    return math.exp(mean(_logarithms(values)))


def interval(values: Sequence[float]) -> Optional[Tuple[float, float]]:
    """95% interval (low, high) of the geometric mean of independent positive values, one per round (its median, say).

    Student's t on the logarithms: right for few rounds, and wide for two or three, as it should be.  None for fewer
    than two values, which tell nothing about their spread.
    """
    if len(values) < 2:
        return None
    logarithms = _logarithms(values)
    center = mean(logarithms)
    variance = math.fsum((value - center) ** 2 for value in logarithms) / (len(logarithms) - 1)
    half = _T_95[min(len(logarithms) - 1, len(_T_95)) - 1] * math.sqrt(variance / len(logarithms))
    return math.exp(center - half), math.exp(center + half)


def interval_of_rounds(rounds: Mapping[Hashable, Sequence[float]]) -> Optional[Tuple[float, float]]:
    """95% interval over rounds from each round's samples: ``interval`` of the rounds' medians."""
    return interval([median(samples) for samples in rounds.values() if samples])


Rounds = Mapping[Hashable, Mapping[Hashable, Sequence[float]]]  # round -> batch -> samples


def paired_ratio(baseline: Rounds, new: Rounds) -> Optional[Dict[str, Any]]:
    """How many times the baseline's time the new one takes, batch by batch: below 1 is faster.

    Per round, the geometric mean over batches of the ratio of the two medians; over rounds, the geometric mean of
    these with its 95% interval.  Only rounds both have and only batches that both have in every such round are used,
    since a mean that skips the batches one of them died on flatters it.  Returns {ratio, low, high, rounds, batches},
    low and high None with fewer than two rounds; None when nothing pairs.
    """
    rounds = [name for name in baseline if name in new]
    if not rounds:
        return None
    batches = set.intersection(*(set(side[name]) for name in rounds for side in (baseline, new)))
    if not batches:
        return None
    ratios = [
        geometric_mean([median(new[name][batch]) / median(baseline[name][batch]) for batch in batches])
        for name in rounds
    ]
    low, high = interval(ratios) or (None, None)
    return {"ratio": geometric_mean(ratios), "low": low, "high": high, "rounds": len(rounds), "batches": len(batches)}


def verdict(low: Optional[float], high: Optional[float], tolerance: float = 0.0) -> str:
    """ "faster", "slower", "same" or "unclear" for the interval of a ratio new / baseline.

    tolerance: the change that does not matter, 0.02 for 2%.  Same means the whole interval is within it, faster and
    slower that the whole interval is beyond it; whatever straddles a border, or has no interval, is unclear.
    """
    if tolerance < 0:
        raise ValueError(f"negative tolerance: {tolerance}")
    if low is None or high is None:
        return "unclear"
    if high < 1 / (1 + tolerance):
        return "faster"
    if low > 1 + tolerance:
        return "slower"
    if low >= 1 / (1 + tolerance) and high <= 1 + tolerance:
        return "same"
    return "unclear"


def _logarithms(values: Sequence[float]) -> List[float]:
    if not values or min(values) <= 0:
        raise ValueError("positive values are needed")
    return [math.log(value) for value in values]
