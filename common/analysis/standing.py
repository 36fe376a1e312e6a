"""Compare the times of two rows: a ratio with its interval, a verdict in a word, and the reason in
a sentence.

Tables rank each row against the fastest of its kind, compare judges each new run against its
baseline; both by `stand`.

Kinds are ranked apart, since an approximation that is faster is not the faster loss.  So are losses
under another torch than most, since a ratio to them would be that of the torches too.  Only rows
with status ok are ranked, and interrupted ones over their complete rounds.  The intervals of a kind
hold together for all pairs of its rows, since any row could have come out as the fastest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean, median

from rnnt_bench.analysis import ratios
from rnnt_bench.analysis.doubts import CALM, Doubt, about_ratio, is_busy, load_of
from rnnt_bench.analysis.ratios import Margins
from rnnt_bench.analysis.row import Row
from rnnt_bench.core import implementations, statistics, text
from rnnt_bench.records.schema import Record

#: The verdict where too few rounds are free of other load.
BESIDE_LOAD = "beside load"
#: A ratio that no noise explains, where too few rounds give no interval: a loop in Python on one
#: batch.
FAR = 3.0
#: A ratio that other load beside one of two rows is not taken to explain.
BEYOND_LOAD = 10.0


USUAL = Margins()


@dataclass(frozen=True, eq=False)
class Standing(ratios.Evidence):
    """Hold how the time of a row stands against the baseline's, in tables the fastest of its kind.

    Attributes:
        row: the one that is judged
        baseline: the one that it is judged against
        scope: "step" or "loss", whose times are compared
    """

    row: Row
    baseline: Row
    scope: str

    @property
    def is_fastest(self) -> bool:
        return self.row is self.baseline

    @property
    def factor(self) -> float | None:
        """Return how many times the baseline's time the row takes; None where nothing can be
        compared."""
        if self.is_fastest:
            return 1.0
        return self.ratio.ratio if self.ratio else None

    @property
    def over_control(self) -> float | None:
        return self.judged.ratio if self.judged and self.control else None

    @property
    def low(self) -> float | None:
        return self.judged.low if self.judged else None

    @property
    def high(self) -> float | None:
        return self.judged.high if self.judged else None

    @cached_property
    def doubts(self) -> list[Doubt]:
        return about_ratio(self)

    @property
    def kinds(self) -> set[str]:
        """Return the kinds of its doubts."""
        return {doubt.kind for doubt in self.doubts}

    @property
    def doubt(self) -> str:
        """Return why a difference cannot be believed, whatever its interval is; "" where it can."""
        return self.doubts[0].words if self.doubts else ""

    @cached_property
    def verdict(self) -> str:
        """Return "fastest", "faster", "slower", "same", "unclear" or BESIDE_LOAD: beyond the
        tolerance is the whole interval and nothing raises a doubt, or "same": within it."""
        if self.beside_load:
            return BESIDE_LOAD
        if self.is_fastest:
            return "fastest"
        word = self._by_interval()
        if self.doubts and (word != "same" or self.doubts[0].withholds):
            return "unclear"
        return word

    def _by_interval(self) -> str:
        return statistics.verdict(self.low, self.high, self.margins.tolerance)

    @property
    def reason(self) -> str:
        """Return a sentence on the verdict, without its full stop: the difference, then the doubt
        that decides, or how the interval lies to the tolerance."""
        ratio = self.judged
        if ratio is None:
            return self._nothing_to_compare()
        if self.beside_load:
            return self.doubt
        difference = f"{abs(ratio.ratio - 1):.1%} {'more' if ratio.ratio > 1 else 'less'} time"
        if self.control:
            difference += f" over {self.control.rows} rows that did not change"
        is_doubted = self.verdict == "unclear" and self._by_interval() != "unclear"
        # they say what to measure, also where the interval leaves it open
        is_doubted |= not self.kinds.isdisjoint(("few rounds", "uncontrolled"))
        if ratio.low is None or ratio.high is None or is_doubted:
            return f"{difference}, but {self.doubt}"
        span = f"the interval, {_span(ratio.low, ratio.high)},"
        tolerance = percent(self.margins.tolerance)
        load = load_of(self) if is_busy(self) else ""
        # more rounds beside the same load are the second thing to try
        if self.verdict == "unclear":
            advice = "more --rounds would narrow it"
            if self.control:
                advice = "measure both in one run to narrow it"
            if load:
                advice = f"{load}: {CALM}"
            return f"{difference}, but {span} reaches over the tolerance of {tolerance}; {advice}"
        after = f"; {load}" if load else ""
        if self.verdict == "same":
            return f"{span} is within the {tolerance} that count as the same{after}"
        return f"{difference}; {span} is beyond the tolerance of {tolerance}{after}"

    def _nothing_to_compare(self) -> str:
        sides = ((self.baseline, "the baseline"), (self.row, "the new side"))
        for (row, side), rounds in zip(sides, self.rounds):
            if not rounds:
                why = f"{row.status}: {row.reason}"
                if row.status == "ok":
                    why = "its run did not measure them"
                return f"{side} has no {self.scope} times; {why}"
        return "no batch was timed on both sides in every round"

    @property
    def both_ms(self) -> tuple[float | None, float | None]:
        """Return the mean of the medians of the batches that both have, the baseline first."""
        if self.ratio is None:
            return None, None
        before, after = (
            text.gathered((sample.batch, sample.ms) for sample in row.samples_of(self.scope))
            for row in (self.baseline, self.row)
        )
        shared = before.keys() & after.keys()
        return fmean(median(before[batch]) for batch in shared), fmean(
            median(after[batch]) for batch in shared
        )

    @property
    def lost(self) -> bool:
        """Tell whether the row was to be timed and ended well, but has no times, and the baseline
        has."""
        asked = self.row.header.settings
        was_asked = "timing" in (asked.passes or ()) and self.scope in (asked.scopes or ())
        return was_asked and bool(self.rounds[0]) and not self.rounds[1] and self.row.status == "ok"

    @property
    def may_be_as_fast(self) -> bool:
        """Tell whether noise or other load may explain all of the difference to the fastest."""
        factor = self.factor or 1.0
        if self.beside_load:
            return factor < BEYOND_LOAD
        reaches_it = self.low is not None and self._by_interval() != "slower"
        return self.verdict != "slower" and (factor < FAR or reaches_it)

    def as_json(self) -> Record:
        ratio = self.ratio
        return {
            "scope": self.scope,
            "fastest": self.baseline.name,
            "is_fastest": self.is_fastest,
            "ratio": self.factor,
            "low": self.low,
            "high": self.high,
            "batches": ratio.batches if ratio else None,
            "least": ratio.least if ratio else None,
            "most": ratio.most if ratio else None,
            "rounds": len(ratio.new) if ratio else None,
            "of_file": bool(ratio and ratio.of_file),
            "by_round": self.by_round,
            "verdict": self.verdict,
            "paired": self.paired,
            "beside_load": self.beside_load,
        }

    def judged_json(self) -> Record:
        baseline_ms, new_ms = self.both_ms
        baseline_rounds, new_rounds = self.rounds
        baseline_busy, new_busy = self.busy
        return {
            "reason": self.reason,
            "doubt": self.doubt,
            "over_control": self.over_control,
            "lost": self.lost,
            "control": self.control.as_json() if self.control else None,
            "baseline_ms": baseline_ms,
            "new_ms": new_ms,
            "baseline_rounds": baseline_rounds,
            "new_rounds": new_rounds,
            "baseline_busy": baseline_busy,
            "new_busy": new_busy,
        }


def _span(low: float, high: float) -> str:
    """Return an interval in percent, or in times where the percentages would have four digits or
    more."""
    return (
        f"{low - 1:+.1%} to {high - 1:+.1%}"
        if high < 10
        else f"{low:.3g} to {high:.4g} times the baseline"
    )


def percent(fraction: float) -> str:
    return f"{100 * fraction:.3g}%"


def stand(row: Row, baseline: Row, scope: str, margins: Margins = USUAL) -> Standing:
    """Return how a row stands against another, without rounds beside other load where enough others
    are left."""
    # measured in alternation, in the rounds of one run
    together = row.header.run_id == baseline.header.run_id
    old, new = baseline.times_of(scope), row.times_of(scope)
    if together:
        # a round that met load on one side is left out on both
        (before, after), beside_load = ratios.without_load(
            [old.medians, new.medians], {*old.loaded, *new.loaded}
        )
    else:
        (before,), baseline_is_loaded = ratios.without_load([old.medians], old.loaded)
        (after,), row_is_loaded = ratios.without_load([new.medians], new.loaded)
        beside_load = baseline_is_loaded or row_is_loaded
    ratio, paired = ratios.ratio(before, after, together, margins.confidence, row.padding)
    rounds = (len(ratio.baseline), len(ratio.new)) if ratio else (len(before), len(after))
    return Standing(
        row,
        baseline,
        scope,
        margins=margins,
        ratio=ratio,
        paired=paired,
        beside_load=beside_load,
        rounds=rounds,
        busy=(baseline.busy_share(scope), row.busy_share(scope)),
    )


# Ranking.


def standings(rows: Sequence[Row], scope: str) -> list[Standing]:
    """Return the standings of the rows that can be compared: the fastest first, then the others by
    their ratio. The first is `beside_load` where other load may have changed which row is the
    fastest."""
    timed = [row for row in rows if row.is_comparable and row.times_of(scope).medians]
    if not timed:
        return []
    margins = Margins(confidence=statistics.confidence_of_each(len(timed) * (len(timed) - 1) // 2))
    counts = [
        len({batch for medians in row.times_of(scope).medians.values() for batch in medians})
        for row in timed
    ]
    # a few batches make none the fastest
    whole = [row for row, number in zip(timed, counts) if number == max(counts)]
    fastest = min(whole, key=lambda row: _size(stand(row, whole[0], scope, margins)))
    others = sorted(
        (stand(row, fastest, scope, margins) for row in timed if row is not fastest), key=_size
    )
    withheld = fastest.is_beside_load(scope) or any(
        other.beside_load for other in others if other.may_be_as_fast
    )
    first = Standing(fastest, fastest, scope, margins=margins, beside_load=withheld)
    return [first, *others]


def _size(standing: Standing) -> float:
    return standing.ratio.ratio if standing.ratio else math.inf


def set_apart(rows: Sequence[Row]) -> None:
    """Set `under` of rows whose torch, or the rate of whose products, is not the one that most
    losses have under no condition; of equals the newest torch is it."""
    measured = [row for row in rows if row.torch and row.is_measured]
    conditions = [_condition(row) for row in measured if row.loss == row.name]
    conditions = conditions or [_condition(row) for row in measured]
    usual_torch, usual_mkl = max(
        conditions,
        key=lambda condition: (conditions.count(condition), _numbers(condition[0]), condition),
        default=("", False),
    )
    for row in rows:
        torch, mkl_as_intel = _condition(row)
        parts = []
        if torch and torch != usual_torch:
            parts.append(f"under torch {torch}")
        if torch and mkl_as_intel != usual_mkl:
            whose = "products at the processor's rate" if mkl_as_intel else "own products"
            parts.append(f"with torch's {whose}")
        row.other_torch = " and ".join(parts)


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".") if part.isdigit()]


def _condition(row: Row) -> tuple[str, bool]:
    """Return the version of torch, and whether MKL takes the path that it takes on Intel's
    processors."""
    return row.torch, bool(row.environment.mkl_as_intel)


def rank_times(group: Sequence[Row]) -> None:
    """Set `against_fastest` of the rows of one configuration by the step, or by the loss for a row
    without a step."""
    set_apart(group)
    for row in group:
        row.against_fastest = row.loss_against_fastest = row.with_fast_products = None
    for ranked in text.gathered(((row.kind, row.other_torch), row) for row in group).values():
        for standing in standings(ranked, "loss"):
            standing.row.against_fastest = standing.row.loss_against_fastest = standing
        for standing in standings(ranked, "step"):
            standing.row.against_fastest = standing
    ok = [row for row in group if row.is_comparable]
    controls = {row.loss: row for row in ok if row.name == f"{row.loss}@{implementations.FAST_MKL}"}
    for row in group:
        standing = row.against_fastest
        if (
            standing
            and not standing.is_fastest
            and {row.name, standing.baseline.name} <= controls.keys()
        ):
            fastest = controls[standing.baseline.name]
            row.with_fast_products = stand(
                controls[row.name], fastest, standing.scope, standing.margins
            )


def drifts(rows: Sequence[Row]) -> list[tuple[Standing, ratios.Factor]]:
    """Return the rows whose ratio surely changes along the rounds; the intervals hold together for
    all of them."""
    ranked = [row.against_fastest for row in rows if row.against_fastest]
    compared = [standing for standing in ranked if standing.paired and standing.by_round]
    confidence = statistics.confidence_of_each(len(compared))
    drifting = [(standing, ratios.drift(standing.by_round, confidence)) for standing in compared]
    return [
        (standing, drift)
        for standing, drift in drifting
        if drift and (drift.low > 1 or drift.high < 1)
    ]
