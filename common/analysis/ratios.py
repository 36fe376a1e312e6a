"""Estimate the ratio of two losses' times, with its interval, from times by round and batch.

A round is a fresh process of each loss.  There are two designs:

- Each round has batches of its own, drawn at random from the shape file (--batches random or
  spread).  The ratio is that over all batches of the file.  Padding explains most of how two losses
  differ between batches.  So the estimate is a regression of log(ratio) on x = -log(useful cells /
  padded cells), at the mean of x over the file, which is known exactly.  The interval is Student's
  t over rounds, with rounds as clusters (Liang and Zeger 1986; Cameron and Miller 2015).
  docs/method.md tells how often it holds the truth.
- All rounds have the same batches (--batches first or longest, and older results).  The ratio is
  that of these batches in this run, and the interval is over rounds.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean, geometric_mean, variance
from typing import Any, NamedTuple, TypeVar

from rnnt_bench.core.settings import FEWEST_ROUNDS
from rnnt_bench.core.statistics import CONFIDENCE, TOLERANCE, log_values, student_t

Batches = Mapping[Any, float]  # batch -> time, the median of its samples
Rounds = Mapping[Any, Batches]  # round -> batch -> time
Round = TypeVar("Round")

#: With fewer rounds, or fewer batches, a ratio says something of the measured batches only.
FEWEST_BATCHES = 10


class Padding(NamedTuple):
    """Hold the padding x = -log(useful cells / padded cells) of each batch, and its mean over all
    of the file."""

    of_batch: Mapping[Any, float]
    mean: float


class Pair(NamedTuple):
    """Hold one batch in one round.  x: its padding; y: log(new time / baseline time)."""

    x: float
    y: float


class Ratio(NamedTuple):
    """Hold the new side's time over the baseline's.

    Attributes:
        low, high: ends of its interval; None where the rounds are too few for one
        batches: how many both sides have
        baseline, new: time of each round, the geometric mean over its batches
        error: standard error of the ratio's logarithm
        freedom: degrees of freedom of the error
        of_file: whether it is the ratio over all batches of the shape file
        least, most: range over the measured batches
    """

    ratio: float
    low: float | None
    high: float | None
    batches: int
    baseline: tuple[float, ...]
    new: tuple[float, ...]
    error: float | None
    freedom: float
    of_file: bool = False
    least: float | None = None
    most: float | None = None

    @classmethod
    def around(
        cls,
        center: float,
        error: float | None,
        freedom: float,
        confidence: float,
        baseline: Sequence[float],
        new: Sequence[float],
        batches: int,
    ) -> Ratio:
        """Return the ratio whose logarithm is `center`, with Student's t for its interval."""
        low = high = None
        if error is not None:
            half = student_t(confidence, freedom) * error
            low = math.exp(center - half)
            high = math.exp(center + half)
        return cls(
            math.exp(center), low, high, batches, tuple(baseline), tuple(new), error, freedom
        )


def ratio(
    baseline: Rounds,
    new: Rounds,
    together: bool,
    confidence: float = 0.95,
    padding: Padding | None = None,
) -> tuple[Ratio | None, bool]:
    """Return (ratio of new to baseline, whether rounds are paired); None where no batch is on both
    sides.

    Args:
        together: whether both were measured in one run, round by round.
        padding: of the batches, with which rounds that have batches of their own give the ratio
          over all of the file.
    """
    if have_own_batches(baseline) or have_own_batches(new):
        # this ratio is of rounds that both sides have: no other needs to be looked for
        return own_batches_ratio(baseline, new, confidence, padding), together
    paired = together and any(name in new for name in baseline)
    estimate = paired_ratio if paired else independent_ratio
    return estimate(baseline, new, confidence), paired


def without_load(
    sides: Sequence[Mapping[Any, Round]], loaded: Collection[Any]
) -> tuple[list[Mapping[Any, Round]], bool]:
    """Return each side's rounds without those beside other load, and whether load is left in them.

    loaded: the names of the rounds that one of the rows ran beside other load.  Such a round is
    left out of all sides, whatever its times are, since a choice by times would shift the ratio.
    Where fewer than FEWEST_ROUNDS would be left on a side, all rounds stay."""
    # rounds that all sides have are compared in pairs, else each side's own
    compared = set.intersection(*map(set, sides)) or set().union(*sides)
    if compared.isdisjoint(loaded):
        return list(sides), False
    quiet: list[Mapping[Any, Round]] = [
        {name: batches for name, batches in side.items() if name not in loaded} for side in sides
    ]
    if min(map(len, quiet)) >= FEWEST_ROUNDS:
        return quiet, False
    return list(sides), True


def have_own_batches(rounds: Rounds) -> bool:
    """Tell whether each round has batches of its own: none is in all rounds, though a short file
    may repeat some."""
    return len(rounds) > 1 and not set.intersection(*map(set, rounds.values()))


def own_batches_ratio(
    baseline: Rounds, new: Rounds, confidence: float = 0.95, padding: Padding | None = None
) -> Ratio | None:
    """Return new / baseline over rounds that have batches of their own, the same on both sides.
    With enough rounds and batches and known padding it is the ratio over all batches of the file;
    else that of the batches that both sides have, with an interval over rounds."""
    x = padding.of_batch if padding else {}
    before: list[float] = []
    after: list[float] = []
    rounds: list[list[Pair]] = []
    is_padding_known = padding is not None
    for name in baseline:
        batches = [batch for batch in baseline[name] if batch in new.get(name, ())]
        if batches:
            before.append(_mean(baseline[name], batches))
            after.append(_mean(new[name], batches))
            pairs = [
                Pair(x.get(batch, 0.0), math.log(new[name][batch] / baseline[name][batch]))
                for batch in batches
            ]
            rounds.append(pairs)
            is_padding_known &= x.keys() >= set(batches)
    if not rounds:
        return None
    pairs = [pair for pairs in rounds for pair in pairs]
    of_file = is_padding_known and len(rounds) >= FEWEST_ROUNDS and len(pairs) >= FEWEST_BATCHES
    freedom = len(rounds) - 1
    if padding and of_file:
        center, error = regression(rounds, padding.mean)
        freedom = min(freedom, len(pairs) - 2)  # a line takes two of the batches
    else:
        center, error = _over_rounds([fmean(pair.y for pair in pairs) for pairs in rounds])
    result = Ratio.around(center, error, freedom, confidence, before, after, len(pairs))
    ratios = [math.exp(pair.y) for pair in pairs]
    return result._replace(of_file=of_file, least=min(ratios), most=max(ratios))


def _mean(times: Batches, batches: Collection[Any]) -> float:
    """Return the geometric mean of the times of some batches."""
    return geometric_mean([times[batch] for batch in batches])


def _over_rounds(values: Sequence[float]) -> tuple[float, float | None]:
    """Return (mean of the rounds' values, its standard error; None of one round)."""
    return fmean(values), math.sqrt(variance(values) / len(values)) if len(values) > 1 else None


class Line(NamedTuple):
    """Hold the line of least squares through some pairs.

    Attributes:
        x, y: means over the pairs, a point of the line
        squares: sum of the squares of the distances in x to that point
    """

    x: float
    y: float
    slope: float
    squares: float

    @classmethod
    def through(cls, pairs: Sequence[Pair]) -> Line:
        """Return the line; its slope is 0 where all x are equal."""
        x = fmean(pair.x for pair in pairs)
        y = fmean(pair.y for pair in pairs)
        squares = math.fsum((pair.x - x) ** 2 for pair in pairs) or 1.0
        return cls(
            x, y, math.fsum((pair.x - x) * (pair.y - y) for pair in pairs) / squares, squares
        )

    def residual(self, pair: Pair) -> float:
        return pair.y - self.y - self.slope * (pair.x - self.x)


def regression(rounds: Sequence[Sequence[Pair]], x: float) -> tuple[float, float | None]:
    """Return (y at `x` by least squares, its standard error with rounds as clusters).

    This y is a weighted sum of the pairs' y.  Its variance is the sum over rounds of the square of
    the round's weighted residuals.  A round pulls the line towards itself, so its residuals come
    out too small; the square is divided by the share of its variance that the line leaves (Bell and
    McCaffrey 2002)."""
    pairs = [pair for pairs in rounds for pair in pairs]
    line = Line.through(pairs)
    variances = []
    for pairs_of_round in rounds:
        distances = [pair.x - line.x for pair in pairs_of_round]
        weights = [
            1 / len(pairs) + (x - line.x) * distance / line.squares for distance in distances
        ]
        residual = math.fsum(
            weight * line.residual(pair) for weight, pair in zip(weights, pairs_of_round)
        )
        # variance of the sum, where that of a pair is 1
        whole = math.fsum(weight**2 for weight in weights)
        by_mean = math.fsum(weights) ** 2 / len(pairs)
        by_slope = (
            math.fsum(weight * distance for weight, distance in zip(weights, distances)) ** 2
            / line.squares
        )
        left = whole - by_mean - by_slope
        variances.append(residual**2 * (whole / left if left > 1e-9 * whole else 1.0))
    return line.y + line.slope * (x - line.x), math.sqrt(math.fsum(variances))


def paired_ratio(baseline: Rounds, new: Rounds, confidence: float = 0.95) -> Ratio | None:
    """Return new / baseline of rounds whose two processes ran one after the other, so that other
    load met both. Uses only rounds on both sides, and only batches that both have in every such
    round: a mean that skips the batches where one side failed flatters that side."""
    rounds = [name for name in baseline if name in new]
    before, after, batches = _round_times(
        [baseline[name] for name in rounds], [new[name] for name in rounds]
    )
    if not batches:
        return None
    center, error = _over_rounds(
        [math.log(new_time / old_time) for old_time, new_time in zip(before, after)]
    )
    return Ratio.around(center, error, len(rounds) - 1, confidence, before, after, batches)


def independent_ratio(baseline: Rounds, new: Rounds, confidence: float = 0.95) -> Ratio | None:
    """Return new / baseline of two runs whose rounds all have the same batches: Welch's t on the
    logarithms of the rounds' times. A change that lasts for a whole run (other load, another clock)
    is in the ratio and not in the interval, see `over_control`."""
    before, after, batches = _round_times(list(baseline.values()), list(new.values()))
    if not batches:
        return None
    sides = [log_values(before), log_values(after)]
    error = None
    freedom = 1.0
    if min(map(len, sides)) > 1:
        variances = [variance(side) / len(side) for side in sides]
        total = sum(variances)
        error = math.sqrt(total)
        shares = [
            (part / total if total else 0.5) ** 2 / (len(side) - 1)
            for part, side in zip(variances, sides)
        ]
        freedom = 1 / sum(shares)
    center = fmean(sides[1]) - fmean(sides[0])
    return Ratio.around(center, error, freedom, confidence, before, after, batches)


def _round_times(
    baseline: Sequence[Batches], new: Sequence[Batches]
) -> tuple[list[float], list[float], int]:
    """Return the (baseline, new) time of each round over the batches that all rounds share, and
    their number."""
    if not baseline or not new:
        return [], [], 0
    batches = set.intersection(*map(set, [*baseline, *new]))
    if not batches:
        return [], [], 0
    before, after = ([_mean(times, batches) for times in side] for side in (baseline, new))
    return before, after, len(batches)


class Drift(NamedTuple):
    """Hold the factor by which a ratio changes from the first round to the last, with its
    interval."""

    factor: float
    low: float
    high: float


#: With fewer rounds a line through them says nothing.
FEWEST_ROUNDS_OF_A_DRIFT = 4


def drift(by_round: Sequence[float], confidence: float = 0.95) -> Drift | None:
    """Return how a ratio changes along the line through the logarithms of its rounds, with
    Student's t of the slope."""
    count = len(by_round)
    if count < FEWEST_ROUNDS_OF_A_DRIFT:
        return None
    pairs = [Pair(number, value) for number, value in enumerate(log_values(by_round))]
    line = Line.through(pairs)
    squares = math.fsum(line.residual(pair) ** 2 for pair in pairs)
    half = student_t(confidence, count - 2) * math.sqrt(squares / (count - 2) / line.squares)
    return Drift(
        *(
            math.exp((count - 1) * slope)
            for slope in (line.slope, line.slope - half, line.slope + half)
        )
    )


#: Fewer rows do not show how far rows move apart between two runs.
FEWEST_CONTROLS = 3


class Control(NamedTuple):
    """Hold by what the rows moved that did not change between two runs: the machine's part in a
    ratio of them.

    Attributes:
        center, spread: mean and variance of the logarithms of their ratios
        noise: mean of the squares of their standard errors
        rows: their number
        least, most: range of their ratios
    """

    center: float
    spread: float
    noise: float
    rows: int
    least: float
    most: float

    def together(self, confidence: float = 0.95) -> tuple[float, float, float]:
        """Return (ratio of all of them, its interval low, high): how much slower the machine
        was."""
        half = student_t(confidence, self.rows - 1) * math.sqrt(self.spread / self.rows)
        return math.exp(self.center), math.exp(self.center - half), math.exp(self.center + half)

    def as_json(self) -> Mapping[str, float]:
        """Return the ratio of the rows, its interval, their number and their range."""
        ratio, low, high = self.together()
        return {
            "ratio": ratio,
            "low": low,
            "high": high,
            "rows": self.rows,
            "least": self.least,
            "most": self.most,
        }


def control(unchanged: Sequence[Ratio]) -> Control | None:
    """Return what rows that did not change tell of two runs; None of fewer than FEWEST_CONTROLS
    with an interval."""
    errors = [ratio.error for ratio in unchanged if ratio.error is not None]
    if len(errors) < FEWEST_CONTROLS:
        return None
    values = [ratio.ratio for ratio in unchanged if ratio.error is not None]
    logarithms = log_values(values)
    noise = fmean(error**2 for error in errors)
    spread = variance(logarithms)
    return Control(fmean(logarithms), spread, noise, len(values), min(values), max(values))


def over_control(ratio: Ratio, control: Control, confidence: float) -> Ratio:
    """Return the ratio of a row of two separate runs over that of the rows that did not change.

    Three errors add up.  Rows differ from each other: a random effect of each row and run.  The mean
    of the others has an error.  The rounds of this row may scatter more than theirs.  The degrees of
    freedom are those of a sum of two variances (Satterthwaite 1946)."""
    if ratio.error is None:
        return ratio._replace(ratio=ratio.ratio / math.exp(control.center))
    row_variance = control.spread * (1 + 1 / control.rows)
    round_variance = max(ratio.error**2 - control.noise, 0.0)
    total = row_variance + round_variance
    freedom = control.rows - 1.0
    if total:
        freedom = total**2 / (
            row_variance**2 / (control.rows - 1) + round_variance**2 / ratio.freedom
        )
    center = math.log(ratio.ratio) - control.center
    error = math.sqrt(total)
    return Ratio.around(
        center, error, freedom, confidence, ratio.baseline, ratio.new, ratio.batches
    )


class Margins(NamedTuple):
    """Hold how large a change must be to count (0.02: 2%), and the confidence of each interval."""

    tolerance: float = TOLERANCE
    confidence: float = CONFIDENCE


@dataclass(frozen=True, eq=False, kw_only=True)
class Evidence:
    """Hold what a verdict on two rows rests on; pairs have the baseline first.

    Attributes:
        margins: by which the verdict is made
        ratio: None for the baseline itself, and where the two have no batch or round in common
        paired: whether their rounds ran beside each other
        beside_load: whether too few rounds are without other load for a verdict
        control: what the unchanged rows of the same two separate runs moved by
        rounds: number of rounds of each side
        busy: share of each side's samples that ran beside other load
    """

    margins: Margins = Margins()
    ratio: Ratio | None = None
    paired: bool = True
    beside_load: bool = False
    control: Control | None = None
    rounds: tuple[int, int] = (0, 0)
    busy: tuple[float, float] = (0.0, 0.0)

    @cached_property
    def judged(self) -> Ratio | None:
        """Return the ratio that the verdict is of: two separate runs' over their control, if
        any."""
        if self.ratio is None or self.control is None:
            return self.ratio
        return over_control(self.ratio, self.control, self.margins.confidence)

    @property
    def by_round(self) -> list[float]:
        """Return the ratio of each round in the order of time; empty where rounds were not
        paired."""
        ratio = self.ratio
        if ratio is None or len(ratio.baseline) != len(ratio.new):
            return []
        return [after / before for before, after in zip(ratio.baseline, ratio.new)]
