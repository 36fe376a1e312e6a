"""How many times the time of one loss another takes: a ratio with its interval, from samples by round and batch.

A round is a fresh process of each loss.  There are two designs:

- Each round has batches of its own, drawn at random from the shape file (--batches random or spread).  Then rounds are
  independent draws of everything that varies (processes, batches, noise), and the ratio is that of all batches of the
  file.  Padding explains most of how two losses differ between batches: the logarithm of their ratio changes linearly
  with x = -log(useful cells / padded cells).  So the estimate is a regression on x, read at the mean of x over all
  batches of the file, which is known exactly.  The interval is Student's t over rounds, with the cluster-robust
  variance of the regression, rounds being the clusters (Liang and Zeger 1986; Cameron and Miller 2015).
  benchmarks/interval_coverage.py tests how often it holds the truth; docs/method.md has the table.
- All rounds have the same batches (--batches first or longest, and results older than the first design).  Then the
  ratio is that of these batches in this run, and the interval is over rounds.
"""

from __future__ import annotations

import math
from typing import Any, Collection, List, Mapping, NamedTuple, Optional, Sequence, Tuple, TypeVar

from common.core.statistics import geometric_mean, log_values, mean, median, student_t, variance

Batches = Mapping[Any, Sequence[float]]  # batch -> samples
Rounds = Mapping[Any, Batches]  # round -> batch -> samples
Round = TypeVar("Round")

#: With fewer rounds or batches a ratio says something of the measured batches only.
FEWEST_ROUNDS = 3
FEWEST_BATCHES = 10


class Padding(NamedTuple):
    """x = -log(useful cells / padded cells): of each measured batch, and its mean over all batches of the file."""

    of_batch: Mapping[Any, float]
    mean: float


class Pair(NamedTuple):
    """One batch in one round.  x: its padding; y: log(new time / baseline time)."""

    x: float
    y: float


class Ratio(NamedTuple):
    """Hold how many times the baseline's time the new side takes: below 1 is faster.

    low, high: the interval, None where the rounds are too few for one.  batches: how many were on both sides.
    baseline, new: each round's time, the geometric mean over batches of its medians, in the unit of the samples.
    error: standard error of the ratio's logarithm, with `freedom` degrees, None like the interval.  of_file: the ratio
    is that of all batches of the shape file, not of the measured ones alone.  least, most: range of the ratio over the
    measured batches.
    """

    ratio: float
    low: Optional[float]
    high: Optional[float]
    batches: int
    baseline: Tuple[float, ...]
    new: Tuple[float, ...]
    error: Optional[float]
    freedom: float
    of_file: bool = False
    least: Optional[float] = None
    most: Optional[float] = None


def ratio(
    baseline: Rounds, new: Rounds, together: bool, confidence: float = 0.95, padding: Optional[Padding] = None
) -> Tuple[Optional[Ratio], bool]:
    """Return (ratio of new to baseline, whether their rounds are paired), by the design of the two sides.

    together: both were measured in one run, round by round.  padding: of the batches, where it is known.  None where no
    batch was measured on both sides.
    """
    if own_batches(baseline) or own_batches(new):
        return own_batches_ratio(baseline, new, confidence, padding), together
    paired = together and any(name in new for name in baseline)
    return (paired_ratio if paired else independent_ratio)(baseline, new, confidence), paired


def without_load(
    sides: Sequence[Mapping[Any, Round]], loaded: Collection[Any]
) -> Tuple[List[Mapping[Any, Round]], bool]:
    """Return each side's rounds without those that ran beside other load, and whether load is left in them.

    A round is left out of all sides, by its name alone and whatever its times are.  Where fewer than FEWEST_ROUNDS
    would be left on a side, all rounds stay.

    Args:
        sides: round -> its times, of each row that is compared.
        loaded: names of the rounds that one of the rows ran beside other load.
    """
    shared = set.intersection(*map(set, sides)) or set().union(*sides)
    if shared.isdisjoint(loaded):
        return list(sides), False
    quiet: List[Mapping[Any, Round]] = [
        {name: times for name, times in side.items() if name not in loaded} for side in sides
    ]
    enough = min(map(len, quiet)) >= FEWEST_ROUNDS
    return (quiet, False) if enough else (list(sides), True)


def own_batches(rounds: Rounds) -> bool:
    """Return whether each round has batches of its own: no batch is in all of them, though some may share one of
    few."""
    return len(rounds) > 1 and not set.intersection(*map(set, rounds.values()))


def own_batches_ratio(
    baseline: Rounds, new: Rounds, confidence: float = 0.95, padding: Optional[Padding] = None
) -> Optional[Ratio]:
    """Return new / baseline of rounds that have batches of their own, the same on both sides.

    Over the batches that both sides have.  With enough rounds and batches, and their padding, it is the ratio over all
    batches of the file; else that of these batches, with an interval over rounds.
    """
    both = {name: [batch for batch in baseline[name] if batch in new[name]] for name in baseline if name in new}
    both = {name: batches for name, batches in both.items() if batches}
    if not both:
        return None
    before, after = (
        tuple(geometric_mean([median(side[name][batch]) for batch in batches]) for name, batches in both.items())
        for side in (baseline, new)
    )
    x = padding.of_batch if padding else {}
    rounds = [
        [
            Pair(x.get(batch, 0.0), math.log(median(new[name][batch]) / median(baseline[name][batch])))
            for batch in batches
        ]
        for name, batches in both.items()
    ]
    cells = [pair for pairs in rounds for pair in pairs]
    known = padding is not None and all(batch in x for batches in both.values() for batch in batches)
    of_file = known and len(rounds) >= FEWEST_ROUNDS and len(cells) >= FEWEST_BATCHES
    if padding is not None and of_file:
        center, error = regression(rounds, padding.mean)
    else:
        center, error = _over_rounds([mean([pair.y for pair in pairs]) for pairs in rounds])
    freedom = min(len(rounds) - 1, len(cells) - 2) if of_file else len(rounds) - 1  # a line takes two of the batches
    result = _ratio(center, error, freedom, confidence, before, after, len(cells))
    ratios = [math.exp(pair.y) for pair in cells]
    return result._replace(of_file=of_file, least=min(ratios), most=max(ratios))


def _over_rounds(values: Sequence[float]) -> Tuple[float, Optional[float]]:
    """Return (mean, its standard error); None for one round."""
    return mean(values), math.sqrt(variance(values) / len(values)) if len(values) > 1 else None


def regression(rounds: Sequence[Sequence[Pair]], x_mean: float) -> Tuple[float, Optional[float]]:
    """Return (y at `x_mean` by least squares, its standard error with rounds as clusters).

    rounds: at least two, with at least three pairs in all.  Where all x are equal there is no slope.  The line is drawn
    towards each round, so the residuals are too small: those of a round are widened by what the line owes to it (Bell
    and McCaffrey 2002, for the one number that is wanted).
    """
    cells = [pair for pairs in rounds for pair in pairs]
    count, x_center, y_center = len(cells), mean([pair.x for pair in cells]), mean([pair.y for pair in cells])
    squares = math.fsum((pair.x - x_center) ** 2 for pair in cells)
    slope = math.fsum((pair.x - x_center) * (pair.y - y_center) for pair in cells) / squares if squares else 0.0

    def variance_of(pairs: Sequence[Pair]) -> float:
        """Return the variance that a round adds."""
        away = [pair.x - x_center for pair in pairs]
        weights = [1 / count + ((x_mean - x_center) * x / squares if squares else 0.0) for x in away]
        residual = math.fsum(weight * (pair.y - y_center - slope * x) for weight, x, pair in zip(weights, away, pairs))
        whole = math.fsum(weight**2 for weight in weights)
        along = math.fsum(weight * x for weight, x in zip(weights, away)) ** 2 / squares if squares else 0.0
        left = whole - math.fsum(weights) ** 2 / count - along
        return residual**2 * (whole / left if left > 1e-9 * whole else 1.0)

    return y_center + slope * (x_mean - x_center), math.sqrt(math.fsum(map(variance_of, rounds)))


def paired_ratio(baseline: Rounds, new: Rounds, confidence: float = 0.95) -> Optional[Ratio]:
    """Return new / baseline of rounds whose two processes ran one after the other, so that other load met both.

    Only rounds both have and only batches that both have in every such round are used, since a mean that skips the
    batches one of them died on flatters it.  One ratio per round, the interval over these.  None when nothing pairs.
    """
    rounds = [name for name in baseline if name in new]
    before, after, batches = _round_times([baseline[name] for name in rounds], [new[name] for name in rounds])
    if not batches:
        return None
    center, error = _over_rounds([math.log(two / old) for old, two in zip(before, after)])
    return _ratio(center, error, len(rounds) - 1, confidence, before, after, batches)


def independent_ratio(baseline: Rounds, new: Rounds, confidence: float = 0.95) -> Optional[Ratio]:
    """Return new / baseline of two runs with independent rounds: Welch's t on the logarithms of the rounds' times.
    Batches as in `paired_ratio`.

    What changed for a whole run (another load, another clock) is in the ratio and not in the interval.
    """
    before, after, batches = _round_times(list(baseline.values()), list(new.values()))
    if not batches:
        return None
    sides = [log_values(before), log_values(after)]
    error, freedom = None, 1.0
    if min(map(len, sides)) > 1:
        parts = [variance(side) / len(side) for side in sides]
        error = math.sqrt(sum(parts))
        shares = [(part / sum(parts) if error else 0.5) ** 2 / (len(side) - 1) for part, side in zip(parts, sides)]
        freedom = 1 / sum(shares)
    return _ratio(mean(sides[1]) - mean(sides[0]), error, freedom, confidence, before, after, batches)


def _round_times(baseline: Sequence[Batches], new: Sequence[Batches]) -> Tuple[List[float], List[float], int]:
    """Return the time of each round of both sides over the batches that all rounds share, and the number of these
    batches."""
    if not baseline or not new:
        return [], [], 0
    batches = set.intersection(*(set(each) for each in [*baseline, *new]))
    before, after = (
        [geometric_mean([median(each[batch]) for batch in batches]) for each in side] if batches else []
        for side in (baseline, new)
    )
    return before, after, len(batches)


def _ratio(center: float, error: Optional[float], freedom: float, confidence: float, *of: Any) -> Ratio:
    """Return the ratio of a logarithm and its standard error.  of: its baseline, new and batches."""
    baseline, new, batches = of
    low = high = None
    if error is not None:
        half = student_t(confidence, freedom) * error
        low, high = math.exp(center - half), math.exp(center + half)
    return Ratio(math.exp(center), low, high, batches, tuple(baseline), tuple(new), error, freedom)


class Drift(NamedTuple):
    """By what factor a ratio changes from the first round to the last, with its interval."""

    factor: float
    low: float
    high: float

    @property
    def is_sure(self) -> bool:
        return self.low > 1 or self.high < 1


#: With fewer rounds a line through them says nothing.
FEWEST_ROUNDS_OF_A_DRIFT = 4


def drift(by_round: Sequence[float], confidence: float = 0.95) -> Optional[Drift]:
    """Return the change along a line through the logarithms of `by_round`, the ratios of rounds in the order of time;
    None for fewer than four rounds.  Student's t of the slope, rounds being independent."""
    count = len(by_round)
    if count < FEWEST_ROUNDS_OF_A_DRIFT:
        return None
    values = log_values(by_round)
    center, middle = mean(values), (count - 1) / 2
    squares = math.fsum((at - middle) ** 2 for at in range(count))
    slope = math.fsum((at - middle) * (value - center) for at, value in enumerate(values)) / squares
    rest = math.fsum((value - center - slope * (at - middle)) ** 2 for at, value in enumerate(values))
    half = student_t(confidence, count - 2) * math.sqrt(rest / (count - 2) / squares)
    return Drift(*(math.exp((count - 1) * change) for change in (slope, slope - half, slope + half)))


def scaled(ratio: Ratio, factor: float) -> Ratio:
    """Return the ratio, its interval and its range times `factor`; the sides' times stay as they are."""
    ends = {key: getattr(ratio, key) for key in ("ratio", "low", "high", "least", "most")}
    return ratio._replace(**{key: value * factor for key, value in ends.items() if value is not None})


def detectable(ratio: Ratio, tolerance: float, confidence: float, power: float = 0.8) -> Optional[float]:
    """Return the slowdown (0.12 for 12%) that would be called slower with the probability `power` at this spread; None
    if no slowdown would."""
    if ratio.error is None:
        return None
    reach = student_t(confidence, ratio.freedom) + student_t(2 * power - 1, ratio.freedom)
    return math.expm1(math.log1p(tolerance) + reach * ratio.error)


def rounds_to_detect(change: float, rounds: int, detected: float, tolerance: float) -> int:
    """Return how many rounds would show a slowdown of `change`, where so many `rounds` show one of `found` (see
    ``detectable``), the spread being as it is.  All are shares, 0.1 for 10%; change is above the tolerance."""
    reach = math.log((1 + detected) / (1 + tolerance)) / math.log((1 + change) / (1 + tolerance))
    return math.ceil(rounds * reach**2)
