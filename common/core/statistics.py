"""Numbers from samples: quantiles, intervals over rounds, paired ratios, verdicts.  Values in, plain data out.

Samples of one process share its luck (memory layout, clock, neighbours), so they are not independent: an interval is
over rounds, each a fresh process, and never over the samples of one.  Times are positive and skewed, ratios multiply;
both are averaged and bounded on the logarithm.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Dict, Hashable, List, Mapping, NamedTuple, Optional, Sequence, Tuple


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


@cache
def student_t(confidence: float, freedom: float) -> float:
    """The t that Student's distribution with `freedom` >= 1 degrees exceeds, on both sides together, with probability
    1 - `confidence`.

    With t = sqrt(freedom) tan(angle) the density is cos(angle) ** (freedom - 1): Simpson's rule and bisection do, from
    the point of one degree, tan(confidence * pi / 2), downwards.
    """
    if not 0 < confidence < 1 or freedom < 1:
        raise ValueError(f"no such point: confidence {confidence}, {freedom} degrees of freedom")
    whole = math.sqrt(math.pi) / 2 * math.exp(math.lgamma(freedom / 2) - math.lgamma((freedom + 1) / 2))
    low, high, panels = 0.0, math.atan(math.tan(confidence * math.pi / 2) / math.sqrt(freedom)), 200
    for _ in range(50):
        angle = (low + high) / 2
        heights = [math.cos(angle * place / panels) ** (freedom - 1) for place in range(panels + 1)]
        area = heights[0] + heights[-1] + 4 * math.fsum(heights[1::2]) + 2 * math.fsum(heights[2:-1:2])
        if area * angle / (3 * panels) < confidence * whole:
            low = angle
        else:
            high = angle
    return math.sqrt(freedom) * math.tan(low)


def interval(values: Sequence[float], confidence: float = 0.95) -> Optional[Tuple[float, float]]:
    """Interval (low, high) of the geometric mean of independent positive values, one per round (its median, say).

    Student's t on the logarithms: right for few rounds, and wide for two or three, as it should be.  None for fewer
    than two values, which tell nothing about their spread.
    """
    if len(values) < 2:
        return None
    logarithms = _logarithms(values)
    center = mean(logarithms)
    half = student_t(confidence, len(values) - 1) * math.sqrt(_variance(logarithms) / len(values))
    return math.exp(center - half), math.exp(center + half)


def interval_of_rounds(rounds: Mapping[Hashable, Sequence[float]]) -> Optional[Tuple[float, float]]:
    """95% interval over rounds from each round's samples: ``interval`` of the rounds' medians."""
    return interval([median(samples) for samples in rounds.values() if samples])


#: The change of a time that does not matter, unless the user says otherwise: 2%.
TOLERANCE = 0.02

Batches = Mapping[Hashable, Sequence[float]]  # batch -> samples
Rounds = Mapping[Hashable, Batches]  # round -> batch -> samples


class Ratio(NamedTuple):
    """How many times the baseline's time the new side takes: below 1 is faster.

    low, high: the interval over rounds, None where the rounds are too few for one.  batches: how many were on both
    sides in every round.  baseline, new: each round's time, the geometric mean over batches of its medians, in the unit
    of the samples.  error: standard error of the ratio's logarithm, None like the interval.
    """

    ratio: float
    low: Optional[float]
    high: Optional[float]
    batches: int
    baseline: Tuple[float, ...]
    new: Tuple[float, ...]
    error: Optional[float]


def paired_ratio(baseline: Rounds, new: Rounds, confidence: float = 0.95) -> Optional[Ratio]:
    """New / baseline where a round's two processes ran beside each other, so that what disturbed one met the other too.

    Only rounds both have and only batches that both have in every such round are used, since a mean that skips the
    batches one of them died on flatters it.  One ratio per round, the interval over these.  None when nothing pairs.
    """
    rounds = [name for name in baseline if name in new]
    before, after, batches = _round_times([baseline[name] for name in rounds], [new[name] for name in rounds])
    if not batches:
        return None
    logarithms = [math.log(two / one) for one, two in zip(before, after)]
    error = math.sqrt(_variance(logarithms) / len(rounds)) if len(rounds) > 1 else None
    return _ratio(mean(logarithms), error, len(rounds) - 1, confidence, before, after, batches)


def independent_ratio(baseline: Rounds, new: Rounds, confidence: float = 0.95) -> Optional[Ratio]:
    """New / baseline of two runs whose rounds have nothing to do with each other: Welch's t on the logarithms of the
    rounds' times.  Batches as in `paired_ratio`.

    What changed for a whole run (another load, another clock) is in the ratio and not in the interval.
    """
    before, after, batches = _round_times(list(baseline.values()), list(new.values()))
    if not batches:
        return None
    sides = [_logarithms(before), _logarithms(after)]
    error, freedom = None, 1.0
    if min(map(len, sides)) > 1:
        parts = [_variance(side) / len(side) for side in sides]
        error = math.sqrt(sum(parts))
        shares = [(part / sum(parts) if error else 0.5) ** 2 / (len(side) - 1) for part, side in zip(parts, sides)]
        freedom = 1 / sum(shares)
    return _ratio(mean(sides[1]) - mean(sides[0]), error, freedom, confidence, before, after, batches)


def ratio(baseline: Rounds, new: Rounds, together: bool, confidence: float = 0.95) -> Tuple[Optional[Ratio], bool]:
    """(New / baseline, was it paired?): `paired_ratio` where both were measured in one run (`together`) and have rounds
    in common, else `independent_ratio`."""
    paired = together and any(name in new for name in baseline)
    return (paired_ratio if paired else independent_ratio)(baseline, new, confidence), paired


def _round_times(baseline: Sequence[Batches], new: Sequence[Batches]) -> Tuple[List[float], List[float], int]:
    """The time of each round of both sides over the batches that all of them have, and how many these are."""
    if not baseline or not new:
        return [], [], 0
    batches = set.intersection(*(set(one) for one in [*baseline, *new]))
    before, after = (
        [geometric_mean([median(one[batch]) for batch in batches]) for one in side] if batches else []
        for side in (baseline, new)
    )
    return before, after, len(batches)


def _ratio(
    center: float,
    error: Optional[float],
    freedom: float,
    confidence: float,
    baseline: Sequence[float],
    new: Sequence[float],
    batches: int,
) -> Ratio:
    low = high = None
    if error is not None:
        half = student_t(confidence, freedom) * error
        low, high = math.exp(center - half), math.exp(center + half)
    return Ratio(math.exp(center), low, high, batches, tuple(baseline), tuple(new), error)


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


def _variance(values: Sequence[float]) -> float:
    center = mean(values)
    return math.fsum((value - center) ** 2 for value in values) / (len(values) - 1)
