"""Compare the times of two rows: a ratio with its interval, a verdict in a word, and its reason in
a sentence.

Tables rank each row against the fastest of its kind, and `compare` judges each new run against its
baseline; both call `stand`.

Each kind is ranked by itself, since an approximation that is faster is not the faster loss. Losses
under another torch than most are ranked by themselves, too, since a ratio to them would be that of
the torches as well. Rows with status ok are ranked. So are rows whose run was interrupted but whose
loss is right; their complete rounds count. The intervals of a kind hold together for all pairs of
its rows, since any row could have come out as the fastest.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean, median
from typing import NamedTuple

from rnnt_bench.analysis import ratios
from rnnt_bench.analysis.doubts import CALM, Doubt, about_ratio, is_busy, load_of
from rnnt_bench.analysis.ratios import Margins
from rnnt_bench.analysis.row import Row
from rnnt_bench.core import implementations, statistics, text
from rnnt_bench.records.schema import Record
from rnnt_bench.setup.interpreters import version_numbers

#: The verdict where too few rounds are free of other load.
BESIDE_LOAD = "beside load"
#: Noise does not explain a ratio this large, even without an interval. A loss that loops in Python
#: may have such a ratio.
FAR = 3.0
#: Other load beside one of two rows does not explain a ratio this large.
BEYOND_LOAD = 10.0

USUAL = Margins()


@dataclass(frozen=True, eq=False)
class Standing(ratios.Evidence):
    """Hold how the time of a row stands against that of a baseline, with the evidence.

    Attributes:
        row: the one that is judged
        baseline: the one that it is judged against; in tables the fastest row of its kind
        scope: "step" or "loss", whose times are compared
    """

    row: Row
    baseline: Row
    scope: str

    @property
    def is_fastest(self) -> bool:
        """Tell whether this is the standing of the fastest row: its baseline is the row itself."""
        return self.row is self.baseline

    @property
    def factor(self) -> float | None:
        """Return the row's time over the baseline's; None where nothing can be compared."""
        if self.is_fastest:
            return 1.0
        return self.ratio.ratio if self.ratio else None

    @property
    def over_control(self) -> float | None:
        """Return the ratio divided by that of unchanged rows, which is `judged` where there is a
        control; None without a ratio or control."""
        return self.judged.ratio if self.judged and self.control else None

    @property
    def low(self) -> float | None:
        """Return the lower end of the judged ratio's interval; None without an interval."""
        return self.judged.low if self.judged else None

    @property
    def high(self) -> float | None:
        """Return the upper end of the judged ratio's interval; None without an interval."""
        return self.judged.high if self.judged else None

    @cached_property
    def doubts(self) -> list[Doubt]:
        """Return why a difference cannot be believed, whatever its interval is; [] where it can."""
        return about_ratio(self)

    @property
    def kinds(self) -> set[str]:
        """Return the kinds of the doubts about this standing."""
        return {doubt.kind for doubt in self.doubts}

    @property
    def doubt(self) -> str:
        """Return the sentence of the first doubt; "" without doubts."""
        return self.doubts[0].words if self.doubts else ""

    @cached_property
    def verdict(self) -> str:
        """Return "fastest", "faster", "slower", "same", "unclear" or BESIDE_LOAD.

        BESIDE_LOAD comes before all others.  "faster" or "slower": the whole interval is beyond the
        tolerance, and there is no doubt.  "same": the whole interval is within the tolerance, and
        no doubt withholds a verdict.  "unclear": none of these holds."""
        if self.beside_load:
            return BESIDE_LOAD
        if self.is_fastest:
            return "fastest"
        word = self._by_interval()
        if self.doubts and (word != "same" or any(doubt.withholds for doubt in self.doubts)):
            return "unclear"
        return word

    def _by_interval(self) -> str:
        """Return the verdict that the interval alone would give."""
        return statistics.verdict(self.low, self.high, self.margins.tolerance)

    @property
    def reason(self) -> str:
        """Return a sentence on the verdict, without its full stop: the difference, then the first
        doubt, or whether the interval is within the tolerance.

        Without a ratio it says why there is none, and beside other load it is the doubt alone."""
        ratio = self.judged
        if ratio is None:
            return self._nothing_to_compare()
        if self.beside_load:
            return self.doubt
        direction = "more" if ratio.ratio > 1 else "less"
        difference = f"{abs(ratio.ratio - 1):.1%} {direction} time"
        if self.control:
            difference += f" over {self.control.rows} rows that did not change"
        # The interval gives a verdict, but a doubt withholds it.
        is_doubted = self.verdict == "unclear" and self._by_interval() != "unclear"
        # These doubts say what to measure, so they are of use even if the interval is unclear too.
        has_advice = not self.kinds.isdisjoint(("few rounds", "uncontrolled"))
        if ratio.low is None or ratio.high is None or is_doubted or has_advice:
            return f"{difference}, but {self.doubt}"
        return self._reason_of_interval(difference, _span(ratio.low, ratio.high))

    def _reason_of_interval(self, difference: str, span: str) -> str:
        """Return whether the interval is within the tolerance, as one sentence, which begins with
        the difference unless the verdict is "same".

        If the verdict is "unclear", the sentence says what would narrow the interval.

        Args:
            difference: "2.1% more time"
            span: the interval in words, "+1.0% to +3.2%"
        """
        tolerance = percent(self.margins.tolerance)
        load = load_of(self) if is_busy(self) else ""
        if self.verdict == "unclear":
            # The first of these that applies helps most.
            if load:
                advice = f"{load}: {CALM}"
            elif self.control:
                advice = "measure both in one run to narrow it"
            else:
                advice = "more --rounds would narrow it"
            return f"{difference}, but the interval, {span}, reaches over the tolerance of {tolerance}; {advice}"
        if self.verdict == "same":
            reason = f"the interval, {span}, is within the {tolerance} that count as the same"
        else:
            reason = f"{difference}; the interval, {span}, is beyond the tolerance of {tolerance}"
        return f"{reason}; {load}" if load else reason

    def _nothing_to_compare(self) -> str:
        """Return why there is no ratio: which side was not timed, or that no batch is on both."""
        baseline_rounds, new_rounds = self.rounds
        if baseline_rounds and new_rounds:
            return "no batch was timed on both sides in every round"
        row, side = self.row, "the new side"
        if not baseline_rounds:
            row, side = self.baseline, "the baseline"
        cause = "its run did not measure them"
        if row.status != "ok":
            cause = f"{row.status}: {row.reason}"
        return f"{side} has no {self.scope} times; {cause}"

    @property
    def both_ms(self) -> tuple[float | None, float | None]:
        """Return the times in ms of (baseline, row): each is the mean of the median times of the
        batches that both have. (None, None) without a ratio."""
        if self.ratio is None:
            return None, None
        before = _medians(self.baseline, self.scope)
        after = _medians(self.row, self.scope)
        shared = before.keys() & after.keys()
        return fmean(before[batch] for batch in shared), fmean(after[batch] for batch in shared)

    @property
    def lost(self) -> bool:
        """Tell whether the row lost its times: the baseline has times, and the row has none, though
        it ended well and its settings ask for them."""
        settings = self.row.header.settings
        was_asked = "timing" in (settings.passes or ()) and self.scope in (settings.scopes or ())
        baseline_rounds, new_rounds = self.rounds
        return was_asked and bool(baseline_rounds) and not new_rounds and self.row.status == "ok"

    @property
    def may_be_as_fast(self) -> bool:
        """Tell whether noise or other load may explain all of the difference to the baseline."""
        factor = self.factor or 1.0  # without a ratio, nothing tells that the row is slower
        if self.beside_load:
            return factor < BEYOND_LOAD
        if self.verdict == "slower":
            return False
        if self.low is not None and self._by_interval() != "slower":
            return True  # whatever the factor is: the interval reaches down to the tolerance
        # Without an interval, or with a slower one that is in doubt, only the factor tells.
        return factor < FAR

    def as_json(self) -> Record:
        """Return the fields that the JSON of tables has of the standing.

        "fastest" is the name of its baseline, "ratio" its `factor`, and "rounds" the number of
        rounds of its Ratio. "batches", "least", "most" and "of_file" are fields of that Ratio."""
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
        """Return the fields that the JSON of `compare` has in addition to those of `as_json`."""
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


def _medians(row: Row, scope: str) -> dict[int, float]:
    """Return batch -> the median time of its samples in ms."""
    by_batch = text.gathered((sample.batch, sample.ms) for sample in row.samples_of(scope))
    return {batch: median(times) for batch, times in by_batch.items()}


def _span(low: float, high: float) -> str:
    """Return an interval in words: "+1.0% to +3.2%", or "2.1 to 12.5 times the baseline" if
    percentages would be long.

    low, high: the ends of the interval, as ratios of a time to the baseline's."""
    if high < 10:
        return f"{low - 1:+.1%} to {high - 1:+.1%}"
    return f"{low:.3g} to {high:.4g} times the baseline"


def percent(fraction: float) -> str:
    """Return "2%" for 0.02."""
    return f"{100 * fraction:.3g}%"


def stand(row: Row, baseline: Row, scope: str, margins: Margins = USUAL) -> Standing:
    """Return how a row stands against a baseline.

    Rounds beside other load are left out if enough other rounds remain.

    Args:
        scope: "step" or "loss"
        margins: the tolerance and the confidence of the verdict
    """
    # The rounds of one run alternate between its implementations.
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
    """Return the standings of rows against the fastest row: first that of the fastest row itself,
    then those of the others, sorted by their ratio.

    Rows that cannot be compared have none; [] if no row can. The first standing is `beside_load` if
    other load may have changed which row is the fastest."""
    timed = [row for row in rows if row.is_comparable and row.times_of(scope).medians]
    if not timed:
        return []
    # The times decide which rows are compared, so the intervals of all pairs must hold together.
    pairs = len(timed) * (len(timed) - 1) // 2
    margins = Margins(confidence=statistics.confidence_of_each(pairs))
    # A row that was timed on fewer batches than others cannot be the fastest.  The batches of
    # all its rounds count.
    counts = [len(set().union(*row.times_of(scope).medians.values())) for row in timed]
    whole = [row for row, count in zip(timed, counts) if count == max(counts)]
    # All are compared with one row, here the first: the smallest ratio to it is the fastest's.
    fastest = min(whole, key=lambda row: _order(stand(row, whole[0], scope, margins)))
    others = [stand(row, fastest, scope, margins) for row in timed if row is not fastest]
    others.sort(key=_order)
    rivals = [other for other in others if other.may_be_as_fast]
    withheld = fastest.is_beside_load(scope) or any(rival.beside_load for rival in rivals)
    first = Standing(fastest, fastest, scope, margins=margins, beside_load=withheld)
    return [first, *others]


def _order(standing: Standing) -> float:
    """Return the ratio, by which rows are sorted; those without one come last."""
    return standing.ratio.ratio if standing.ratio else math.inf


class UsedTorch(NamedTuple):
    """Hold which torch a row used.

    Attributes:
        version: "2.11.0"; "" where it is not known
        mkl_as_intel: whether its MKL took the path for Intel's processors
    """

    version: str
    mkl_as_intel: bool

    @classmethod
    def of(cls, row: Row) -> UsedTorch:
        return cls(row.torch, bool(row.environment.mkl_as_intel))


def set_apart(rows: Sequence[Row]) -> None:
    """Set `other_torch` of all rows: words for a row whose torch, or whose path of MKL, is not that
    of most losses; "" for the others."""
    measured = [row for row in rows if row.torch and row.is_measured]
    # Rows that were asked for under a condition, such as "fast_rnnt@k2", do not vote.
    voters = [row for row in measured if row.loss == row.name] or measured
    votes = Counter(map(UsedTorch.of, voters))
    # If several have the most votes, the newest torch wins, and of the same torch MKL's Intel path.
    usual = max(
        votes,
        key=lambda torch: (votes[torch], version_numbers(torch.version), torch),
        default=UsedTorch("", False),
    )
    for row in rows:
        torch = UsedTorch.of(row)
        parts = []
        if torch.version and torch.version != usual.version:
            parts.append(f"under torch {torch.version}")
        if torch.version and torch.mkl_as_intel != usual.mkl_as_intel:
            # MKL on its path for Intel multiplies as fast as the processor can.  "torch's own
            # products" are those of MKL on its usual path.
            if torch.mkl_as_intel:
                parts.append("with torch's products at the processor's rate")
            else:
                parts.append("with torch's own products")
        row.other_torch = " and ".join(parts)


def rank_times(group: Sequence[Row]) -> None:
    """Set `other_torch` and the standings of the rows of one configuration.

    The standings are `against_fastest` (by the step, or by the loss for a row without a step),
    `loss_against_fastest` and `with_fast_products`; None for a row that is not ranked."""
    set_apart(group)
    for row in group:
        row.against_fastest = row.loss_against_fastest = row.with_fast_products = None
    # Only rows of the same kind and torch are ranked together.
    for ranked in text.gathered(((row.kind, row.other_torch), row) for row in group).values():
        for standing in standings(ranked, "loss"):
            standing.row.against_fastest = standing.row.loss_against_fastest = standing
        # Where a row has a standing by the step, that takes the place of the one by the loss.
        for standing in standings(ranked, "step"):
            standing.row.against_fastest = standing
    _compare_controls(group)


def _compare_controls(group: Sequence[Row]) -> None:
    """Set `with_fast_products` of rows: how the control of the row stands against the control of
    the fastest row. It stays None for the fastest row, and where one of the two is missing.

    Here a control is the row of the same loss under FAST_MKL, with torch's products at the
    processor's rate. `Standing.control` is something else: how unchanged rows moved."""
    ok = [row for row in group if row.is_comparable]
    controls = {row.loss: row for row in ok if row.name == f"{row.loss}@{implementations.FAST_MKL}"}
    for row in group:
        standing = row.against_fastest
        if standing is None or standing.is_fastest:
            continue
        control = controls.get(row.name)
        of_fastest = controls.get(standing.baseline.name)
        if control and of_fastest:
            row.with_fast_products = stand(control, of_fastest, standing.scope, standing.margins)


def drifts(rows: Sequence[Row]) -> list[tuple[Standing, ratios.Factor]]:
    """Return the standings whose ratio surely changes along the rounds, each with the factor from
    the first round to the last. With statistics.CONFIDENCE, all these intervals hold at once."""
    ranked = [row.against_fastest for row in rows if row.against_fastest]
    compared = [standing for standing in ranked if standing.paired and standing.by_round]
    confidence = statistics.confidence_of_each(len(compared))
    drifting = [(standing, ratios.drift(standing.by_round, confidence)) for standing in compared]
    return [
        (standing, drift)
        for standing, drift in drifting
        if drift and (drift.low > 1 or drift.high < 1)
    ]
