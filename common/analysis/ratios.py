"""Estimate the ratio of two losses' times, with its interval, from times by round and batch.

A round is a fresh process of each loss. There are two designs:

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

#: With fewer batches, or fewer than FEWEST_ROUNDS rounds, a ratio is of the measured batches, and
#: not of the whole file.
FEWEST_BATCHES = 10


class Padding(NamedTuple):
    """Hold x = -log(useful cells / padded cells): of each batch, and its mean over the whole
    file."""

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
        batches: number of batches that both sides have; where rounds have batches of their own, the
            sum of these numbers over the rounds
        baseline, new: time of each round, the geometric mean over its batches
        error: standard error of the ratio's logarithm; None where the rounds are too few for one
        freedom: degrees of freedom of the error
        of_file: whether it is the ratio over all batches of the shape file
        least, most: range of the ratio over the measured batches, where rounds have batches of
            their own; else None
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

    @property
    def has_own_batches(self) -> bool:
        """Return whether the rounds have batches of their own."""
        return self.least is not None  # only the ratio of such rounds has `least` and `most`


class Factor(NamedTuple):
    """Hold a factor with its interval."""

    factor: float
    low: float
    high: float

    @classmethod
    def around(cls, logarithm: float, half_width: float) -> Factor:
        """Return the factor with this logarithm. half_width: half the width of the logarithm's
        interval."""
        return cls(
            math.exp(logarithm), math.exp(logarithm - half_width), math.exp(logarithm + half_width)
        )


class Estimate(NamedTuple):
    """Hold an estimate of the logarithm of a ratio.

    Attributes:
        error: standard error; None where the rounds are too few for one
        freedom: degrees of freedom of the error
    """

    logarithm: float
    error: float | None
    freedom: float

    def ratio(
        self, confidence: float, baseline: Sequence[float], new: Sequence[float], batches: int
    ) -> Ratio:
        """Return the ratio, with Student's t for its interval.

        Args:
            confidence: that of the interval, such as 0.95
            baseline, new: the time of each round
            batches: number of batches that both sides have
        """
        low = high = None
        if self.error is not None:
            half_width = student_t(confidence, self.freedom) * self.error
            _, low, high = Factor.around(self.logarithm, half_width)
        return Ratio(
            math.exp(self.logarithm),
            low,
            high,
            batches,
            baseline=tuple(baseline),
            new=tuple(new),
            error=self.error,
            freedom=self.freedom,
        )


def ratio(
    baseline: Rounds,
    new: Rounds,
    together: bool,
    confidence: float = 0.95,
    padding: Padding | None = None,
) -> tuple[Ratio | None, bool]:
    """Return (new / baseline, whether the rounds of the two sides are paired). The ratio is None if
    the sides have no batch in common.

    Args:
        together: whether both sides were measured in one run, round by round
        confidence: of the ratio's interval
        padding: of the batches; None if it is not known. Only `own_batches_ratio` uses it: it needs
            the padding to estimate the ratio over all batches of the file.
    """
    if have_own_batches(baseline) or have_own_batches(new):
        return own_batches_ratio(baseline, new, confidence, padding), together
    if together and any(name in new for name in baseline):
        return paired_ratio(baseline, new, confidence), True
    return independent_ratio(baseline, new, confidence), False


def without_load(
    sides: Sequence[Mapping[Any, Round]], loaded: Collection[Any]
) -> tuple[list[Mapping[Any, Round]], bool]:
    """Return (the rounds to compare of each side, whether some of these ran beside other load).

    Rounds beside other load are left out. Each of them is left out of all sides, whatever its times
    are: a choice by times would shift the ratio. Where fewer than FEWEST_ROUNDS rounds would remain
    on a side, all rounds stay.

    Args:
        sides: name of a round -> its times, for each side
        loaded: names of the rounds beside other load, on any side
    """
    # Load only matters in the rounds that count: the common ones or, without any, all.
    counting = set.intersection(*map(set, sides)) or set().union(*sides)
    if counting.isdisjoint(loaded):
        return list(sides), False
    quiet: list[Mapping[Any, Round]] = [
        {name: batches for name, batches in side.items() if name not in loaded} for side in sides
    ]
    if min(map(len, quiet)) >= FEWEST_ROUNDS:
        return quiet, False
    return list(sides), True


def have_own_batches(rounds: Rounds) -> bool:
    """Tell whether rounds have batches of their own: no batch is in all rounds. With a short shape
    file a batch may be in several rounds."""
    return len(rounds) > 1 and not set.intersection(*map(set, rounds.values()))


def own_batches_ratio(
    baseline: Rounds, new: Rounds, confidence: float = 0.95, padding: Padding | None = None
) -> Ratio | None:
    """Return new / baseline of sides whose rounds have batches of their own. A batch counts in a
    round if both sides measured it in that round; the ratio is None if no batch counts.

    If the padding of all these batches is known, and the rounds and batches are enough, the ratio
    is over all batches of the file, by `regression`. Else it is over the measured batches, from the
    mean of each round."""
    shared: dict[Any, list[Any]] = {}  # round -> the batches that both sides measured in it
    for name, batches in baseline.items():
        batches_of_both = [batch for batch in batches if batch in new.get(name, ())]
        if batches_of_both:
            shared[name] = batches_of_both
    if not shared:
        return None
    padding = padding or Padding({}, 0.0)  # known of no batch
    # Where the padding of a batch is not known, x is 0, and not used: there is no regression then.
    rounds = [
        [
            Pair(
                padding.of_batch.get(batch, 0.0), math.log(new[name][batch] / baseline[name][batch])
            )
            for batch in batches
        ]
        for name, batches in shared.items()
    ]
    pairs = [pair for of_round in rounds for pair in of_round]
    is_padding_known = padding.of_batch.keys() >= set().union(*shared.values())
    of_file = is_padding_known and len(rounds) >= FEWEST_ROUNDS and len(pairs) >= FEWEST_BATCHES
    if of_file:
        estimate = regression(rounds, padding.mean)
    else:
        estimate = _over_rounds([fmean(pair.y for pair in of_round) for of_round in rounds])
    ratios = [math.exp(pair.y) for pair in pairs]
    before = [_mean(baseline[name], batches) for name, batches in shared.items()]
    after = [_mean(new[name], batches) for name, batches in shared.items()]
    result = estimate.ratio(confidence, before, after, len(pairs))
    return result._replace(of_file=of_file, least=min(ratios), most=max(ratios))


def _mean(times: Batches, batches: Collection[Any]) -> float:
    """Return the geometric mean of the times of some batches."""
    return geometric_mean([times[batch] for batch in batches])


def _over_rounds(logarithms: Sequence[float]) -> Estimate:
    """Return the mean of the rounds' logarithms of the ratio, as an estimate."""
    rounds = len(logarithms)
    error = math.sqrt(variance(logarithms) / rounds) if rounds > 1 else None
    return Estimate(fmean(logarithms), error, rounds - 1)


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
        """Return the line; where all x are equal, its slope is 0 and its `squares` are set to 1."""
        x = fmean(pair.x for pair in pairs)
        y = fmean(pair.y for pair in pairs)
        squares = math.fsum((pair.x - x) ** 2 for pair in pairs) or 1.0
        slope = math.fsum((pair.x - x) * (pair.y - y) for pair in pairs) / squares
        return cls(x, y, slope, squares)

    def at(self, x: float) -> float:
        """Return y of the line at `x`."""
        return self.y + self.slope * (x - self.x)

    def residual(self, pair: Pair) -> float:
        """Return by how much the y of a pair is above the line, negative for below."""
        return pair.y - self.at(pair.x)


def regression(rounds: Sequence[Sequence[Pair]], x: float) -> Estimate:
    """Return an estimate of y at `x`: the line of least squares through all pairs gives y, and the
    rounds are the clusters that give its error."""
    pairs = [pair for of_round in rounds for pair in of_round]
    line = Line.through(pairs)
    variances = [_cluster_variance(of_round, x, line, len(pairs)) for of_round in rounds]
    # A line has two parameters, so it takes two degrees of freedom from the batches.
    freedom = min(len(rounds) - 1, len(pairs) - 2)
    return Estimate(line.at(x), math.sqrt(math.fsum(variances)), freedom)


#: A smaller share of a variance is what rounding leaves of 0.
NO_SHARE = 1e-9


def _cluster_variance(pairs: Sequence[Pair], x: float, line: Line, count: int) -> float:
    """Return what the pairs of one round add to the variance of the line's y at `x`.

    This y is a weighted sum of the y of all `count` pairs. A round adds the square of the weighted
    sum of its residuals. The round pulls the line towards itself, so its residuals come out too
    small. Therefore the square is divided by a share: how much of the variance of the round's
    weighted sum is left in the residuals (Bell and McCaffrey 2002). If nothing is left, the square
    stays as it is."""
    distances = [pair.x - line.x for pair in pairs]
    weights = [1 / count + (x - line.x) * distance / line.squares for distance in distances]
    residual = math.fsum(weight * line.residual(pair) for weight, pair in zip(weights, pairs))
    # If the y of each pair had variance 1, `whole` would be the variance of the weighted sum. The
    # line's mean and its slope take a part each, and the residuals have what is left.
    whole = math.fsum(weight**2 for weight in weights)
    by_mean = math.fsum(weights) ** 2 / count
    slopes = math.fsum(weight * distance for weight, distance in zip(weights, distances))
    by_slope = slopes**2 / line.squares
    left = whole - by_mean - by_slope
    if left <= NO_SHARE * whole:
        return residual**2
    return residual**2 * (whole / left)


def paired_ratio(baseline: Rounds, new: Rounds, confidence: float = 0.95) -> Ratio | None:
    """Return the ratio new / baseline of two sides that were measured together: in each round their
    processes ran one after the other, so other load met both.

    The ratio is over the rounds that both sides have, and over the batches that both have in all of
    these rounds; it is None if there is no such batch. A mean that skips the batches where one side
    failed would flatter that side."""
    rounds = [name for name in baseline if name in new]
    before, after, batches = _round_times(
        [baseline[name] for name in rounds], [new[name] for name in rounds]
    )
    if not batches:
        return None
    estimate = _over_rounds(
        [math.log(new_time / old_time) for old_time, new_time in zip(before, after)]
    )
    return estimate.ratio(confidence, before, after, batches)


def independent_ratio(baseline: Rounds, new: Rounds, confidence: float = 0.95) -> Ratio | None:
    """Return new / baseline of two runs whose rounds all have the same batches, by Welch's t on the
    logarithms of the rounds' times; None without a common batch.

    What changes for a whole run (other load, another clock) is in the ratio but not in its
    interval; `over_control` takes it out."""
    before, after, batches = _round_times(list(baseline.values()), list(new.values()))
    if not batches:
        return None
    sides = [log_values(before), log_values(after)]
    error = None  # a side of one round has no variance
    freedom = 1.0  # without an error nothing reads it
    if min(map(len, sides)) > 1:
        variances = [variance(side) / len(side) for side in sides]
        total = sum(variances)
        error = math.sqrt(total)
        # Without any variance the interval has the width 0, whatever the shares are.
        shares = [part / total if total else 0.5 for part in variances]
        # By Welch and Satterthwaite.
        freedom = 1 / sum(share**2 / (len(side) - 1) for share, side in zip(shares, sides))
    estimate = Estimate(fmean(sides[1]) - fmean(sides[0]), error, freedom)
    return estimate.ratio(confidence, before, after, batches)


def _round_times(
    baseline: Sequence[Batches], new: Sequence[Batches]
) -> tuple[list[float], list[float], int]:
    """Return the mean times of the rounds of `baseline`, those of `new`, and the number of common
    batches: those that all rounds of both sides have.

    Each mean is over the common batches.  Without a common batch return ([], [], 0).

    baseline, new: the times of each round"""
    if not baseline or not new:
        return [], [], 0
    batches = set.intersection(*map(set, [*baseline, *new]))
    if not batches:
        return [], [], 0
    before = [_mean(times, batches) for times in baseline]
    after = [_mean(times, batches) for times in new]
    return before, after, len(batches)


#: With fewer rounds a line through them says nothing.
FEWEST_ROUNDS_OF_A_DRIFT = 4


def drift(by_round: Sequence[float], confidence: float = 0.95) -> Factor | None:
    """Return by what factor a ratio changes from the first round to the last; None for fewer than
    FEWEST_ROUNDS_OF_A_DRIFT rounds.

    The factor is that of a line through the logarithms of the rounds' ratios. Student's t of the
    line's slope gives the interval.

    by_round: the ratio of each round, in the order of time
    """
    count = len(by_round)
    if count < FEWEST_ROUNDS_OF_A_DRIFT:
        return None
    pairs = [Pair(number, value) for number, value in enumerate(log_values(by_round))]
    line = Line.through(pairs)
    squares = math.fsum(line.residual(pair) ** 2 for pair in pairs)
    half_width = student_t(confidence, count - 2) * math.sqrt(squares / (count - 2) / line.squares)
    steps = count - 1  # from the first round to the last
    return Factor.around(steps * line.slope, steps * half_width)


#: The state of a machine on a day (clock, memory) moves the times of all rows, of some more than of
#: others. Fewer unchanged rows do not tell how much rows differ in that.
FEWEST_CONTROLS = 3


class Control(NamedTuple):
    """Hold how the times of unchanged rows (whose code is the same in two runs) moved between these
    runs: the machine's part in a ratio of the runs.

    Attributes:
        log_mean, log_variance: mean and variance of the logarithms of their ratios
        noise: mean of the squares of their standard errors
        rows: their number
        least, most: range of their ratios
    """

    log_mean: float
    log_variance: float
    noise: float
    rows: int
    least: float
    most: float

    def slowdown(self, confidence: float = 0.95) -> Factor:
        """Return the factor by which the machine was slower in the new run, from all these rows."""
        half_width = student_t(confidence, self.rows - 1) * math.sqrt(self.log_variance / self.rows)
        return Factor.around(self.log_mean, half_width)

    def as_json(self) -> Mapping[str, float]:
        """Return the fields for JSON: "ratio", the factor of `slowdown`, with its interval "low" to
        "high"; the number of unchanged "rows"; the "least" and the "most" of their ratios."""
        slowdown = self.slowdown()
        return {
            "ratio": slowdown.factor,
            "low": slowdown.low,
            "high": slowdown.high,
            "rows": self.rows,
            "least": self.least,
            "most": self.most,
        }


def control(unchanged: Sequence[Ratio]) -> Control | None:
    """Return the control from the ratios of unchanged rows; None if fewer than FEWEST_CONTROLS of
    them have an interval."""
    errors = [ratio.error for ratio in unchanged if ratio.error is not None]
    if len(errors) < FEWEST_CONTROLS:
        return None
    values = [ratio.ratio for ratio in unchanged if ratio.error is not None]
    logarithms = log_values(values)
    noise = fmean(error**2 for error in errors)
    log_variance = variance(logarithms)
    return Control(
        log_mean=fmean(logarithms),
        log_variance=log_variance,
        noise=noise,
        rows=len(values),
        least=min(values),
        most=max(values),
    )


def over_control(ratio: Ratio, control: Control, confidence: float) -> Ratio:
    """Return the ratio of a row of two separate runs, divided by the geometric mean of those
    of the unchanged rows. A ratio without an interval gets none here.

    Three variances add up. The first is the variance between rows: the machine moves the times of
    some more than of others. The second is the variance of the mean of the unchanged rows.
    `row_variance` is the sum of these two. The third, `round_variance`, is by how much the rounds
    of this row scatter more than those of the unchanged rows. The degrees of freedom are those of a
    sum of variances (Satterthwaite 1946)."""
    if ratio.error is None:
        return ratio._replace(ratio=ratio.ratio / math.exp(control.log_mean))
    row_variance = control.log_variance * (1 + 1 / control.rows)
    round_variance = max(ratio.error**2 - control.noise, 0.0)
    total = row_variance + round_variance
    freedom = control.rows - 1.0
    if total:
        freedom = total**2 / (
            row_variance**2 / (control.rows - 1) + round_variance**2 / ratio.freedom
        )
    estimate = Estimate(math.log(ratio.ratio) - control.log_mean, math.sqrt(total), freedom)
    return estimate.ratio(confidence, ratio.baseline, ratio.new, ratio.batches)


class Margins(NamedTuple):
    """Hold the largest change that does not count (0.02: 2%), and the confidence of each
    interval."""

    tolerance: float = TOLERANCE
    confidence: float = CONFIDENCE


@dataclass(frozen=True, eq=False, kw_only=True)
class Evidence:
    """Hold what a verdict on two rows rests on.

    Attributes:
        margins: by which the verdict is made
        ratio: None for the baseline itself, and where the two have no batch or round in common
        paired: whether their rounds ran beside each other
        beside_load: whether too few rounds are without other load for a verdict
        control: how unchanged rows moved between the same two separate runs; None if the two rows
            are of one run, or too few rows are unchanged
        rounds: number of rounds of the baseline and of the new side
        busy: shares of the samples of the baseline and of the new side that ran beside other load
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
        """Return the ratio that the verdict judges: that over the control, if there is one."""
        if self.ratio is None or self.control is None:
            return self.ratio
        return over_control(self.ratio, self.control, self.margins.confidence)

    @property
    def by_round(self) -> list[float]:
        """Return the ratio of each round in the order of time.

        Sides of one run are paired, round by round.  Rounds of two separate runs belong together
        only where rounds have batches of their own: then both are over the same batches.  In all
        other cases the list is empty."""
        ratio = self.ratio
        if ratio is None or not (self.paired or ratio.has_own_batches):
            return []
        return [after / before for before, after in zip(ratio.baseline, ratio.new)]
