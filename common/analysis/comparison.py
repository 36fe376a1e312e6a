"""Compare pairs of runs: time, memory and errors, each with a verdict and its reason, as plain data.

Time is judged over rounds: paired where the rounds of both sides ran beside each other, else as two independent
groups.  All intervals of one comparison hold together with 95% (Bonferroni), so that a comparison of many rows raises
no more false alarms than one of a single row.  The rounds of two separate runs cannot show whether the machine changed
between them.  The tolerance, the drift within each run and the load recorded beside each sample guard against that.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, Dict, List, Optional, Sequence, Tuple

from common.analysis import change_verdicts, ratios
from common.analysis.change_verdicts import Margins
from common.analysis.pairs import Pair, Sides
from common.analysis.row import PEAKS, SCOPES, Row
from common.core import statistics
from common.core.implementations import BY_NAME, IMPLEMENTATIONS
from common.core.statistics import TOLERANCE
from common.core.text import gathered, gathered_twice
from common.records.schema import Record


@dataclass
class Side:
    """Describe one of the two runs of a comparison.  measured: whether it has anything to compare."""

    file: str
    name: str
    run_id: Optional[str]
    started: Optional[str]
    git_revision: Optional[str]
    git_dirty: Optional[bool]
    kind: str
    torch: Optional[str]
    implementation_version: Optional[str]
    python: Optional[str]
    status: str
    reason: str
    measured: bool


@dataclass
class TimeChange:
    """Hold what changed in the times of one scope.

    Attributes:
        doubt: why a difference cannot be believed; "" where it can.
        paired: the rounds of both sides ran beside each other.
        ratio, low, high: new / baseline, and its interval; None where there is none.
        baseline_ms, new_ms: the mean of the medians of the batches that both have.
        detectable: the slowdown (0.12 for 12%) that these samples would detect four times in five.
        batches: how many both sides have.
        baseline_busy, new_busy: the share of the samples that ran beside other load.
        lost: the new side was to be timed and ended well, but has no times, and the baseline has.
    """

    verdict: str
    reason: str
    doubt: str = ""
    paired: bool = False
    ratio: Optional[float] = None
    low: Optional[float] = None
    high: Optional[float] = None
    baseline_ms: Optional[float] = None
    new_ms: Optional[float] = None
    detectable: Optional[float] = None
    batches: int = 0
    baseline_rounds: int = 0
    new_rounds: int = 0
    baseline_busy: float = 0.0
    new_busy: float = 0.0
    lost: bool = False


@dataclass
class MemoryChange:
    """Hold the highest peak of each side over the batches that both have, in MB (2**20 bytes).

    counter: which count of memory the peaks are of (see row.COUNTERS).
    """

    verdict: str
    reason: str
    ratio: Optional[float] = None
    baseline_mb: Optional[float] = None
    new_mb: Optional[float] = None
    counter: Optional[str] = None
    batches: int = 0


@dataclass
class ErrorChange:
    """Hold the relative errors of both sides against the float64 oracle; None where they were not measured."""

    ratio: ClassVar[None] = None
    verdict: str
    reason: str
    baseline_loss_error: Optional[float] = None
    baseline_grad_error: Optional[float] = None
    baseline_approximation_gap: Optional[float] = None
    new_loss_error: Optional[float] = None
    new_grad_error: Optional[float] = None
    new_approximation_gap: Optional[float] = None


@dataclass
class Change:
    """Hold what changed between the two runs of a pair.

    Attributes:
        time, memory: by scope.
        changed: differences in the code and its environment, as "torch 2.10.0 -> 2.11.0".
    """

    name: str
    baseline: Side
    new: Side
    paired_rounds: bool
    confidence: float
    tolerance: float
    same: float
    time: Dict[str, TimeChange]
    memory: Dict[str, MemoryChange]
    errors: ErrorChange
    changed: List[str]

    def as_json(self) -> Record:
        """Return the change as JSON has it."""
        return asdict(self)


def compare(
    pairs: Sequence[Pair],
    scopes: Sequence[str] = SCOPES,
    tolerance: float = TOLERANCE,
    same: Optional[float] = None,
) -> List[Change]:
    """Return the change of each pair.

    Args:
        pairs: of runs that measured the same.
        scopes: whose times and memory are compared.
        tolerance: the largest change that does not matter, 0.02 for 2%.
        same: times whose whole interval is within this are the same; None for the tolerance.
    """
    rounds = {(pair, scope): _both(pair, scope) for pair in pairs for scope in scopes}
    judged = sum(all(both) for both in rounds.values())
    confidence = statistics.confidence_of_each(judged)
    margins = Margins(tolerance, max(same or tolerance, tolerance), confidence)
    return [_change(pair, {scope: rounds[pair, scope] for scope in scopes}, margins) for pair in pairs]


def rounds_to_detect(rows: Sequence[Change], change: float) -> Optional[int]:
    """Return how many rounds would show a slowdown of `change` (0.1 for 10%) in each step time.

    Looks at the times of the loss where no step was timed.  None where the rounds are too few to estimate that.
    """
    for scope in SCOPES:
        times = [(row.time[scope], row.tolerance) for row in rows if scope in row.time]
        known = [(time.new_rounds, time.detectable, limit) for time, limit in times if time.detectable is not None]
        if known:
            return max(ratios.rounds_to_detect(change, *each) for each in known)
    return None


def regressions(rows: Sequence[Change], allowed: float) -> List[str]:
    """Return why a change must be refused, one sentence for each row with a regression.

    These are the rows whose time surely grew by more than `allowed` (0.02 for 2%), and those that could be measured at
    the baseline but not on the new side; see ``gone`` too.
    """
    reasons = []
    for row in rows:
        if row.new.status != "ok" and row.baseline.status == "ok":
            reasons.append(f"{row.name}: was measured at the baseline, now {row.new.status}")
        for scope, time in row.time.items():
            if time.lost:
                reasons.append(f"{row.name} {scope}: was timed at the baseline, has no times now")
            if time.low is not None and not time.doubt and time.low > 1 + allowed:
                reasons.append(f"{row.name} {scope}: slower by at least {100 * (time.low - 1):.1f}%")
    return reasons


def gone(sides: Sides) -> List[str]:
    """Return a sentence for each row that the baseline has and the new side lacks altogether."""
    runs = [run for run in sides.gone if run.failure is None]
    compared = list(dict.fromkeys(pair.baseline.name for pair in sides.pairs))
    whole = list(dict.fromkeys(run.name for run in runs if run.name not in compared))
    reasons = []
    if whole:
        reasons.append(
            f"{', '.join(whole)}: measured at the baseline, not there any more; where that is meant, compare with "
            f"--only {','.join(compared)}"
        )
    reasons += [
        f"{sides.label(run)}: measured at the baseline, {run.name} has no run with its settings any more; where that "
        "is meant, compare the run folders that both have"
        for run in runs
        if run.name in compared
    ]
    return reasons


Rounds = Dict[Any, Dict[Any, List[float]]]


def _both(pair: Pair, scope: str) -> Tuple[Rounds, Rounds]:
    return _rounds(pair.baseline, scope), _rounds(pair.new, scope)


def _rounds(run: Row, scope: str) -> Rounds:
    """Return milliseconds by round and batch."""
    return gathered_twice((sample.round, sample.batch, sample.ms) for sample in run.of_scope(scope))


def _change(pair: Pair, rounds: Dict[str, Tuple[Rounds, Rounds]], margins: Margins) -> Change:
    baseline, new = _side(pair.baseline), _side(pair.new)
    return Change(
        pair.name,
        baseline,
        new,
        pair.together,
        margins.confidence,
        margins.tolerance,
        margins.same,
        {scope: _time(pair, scope, *both, margins) for scope, both in rounds.items()},
        {scope: _memory(pair, scope, margins.tolerance) for scope in rounds},
        _errors(pair),
        _changed(baseline, new, pair.one_loss),
    )


def _side(run: Row) -> Side:
    status, reason = run.failure or ("ok", "")
    return Side(
        file=str(run.results),
        name=run.name,
        run_id=run.run_id,
        started=run.started,
        git_revision=run.header.git_revision,
        git_dirty=run.header.git_dirty,
        kind=str(run.kind),
        torch=run.torch_version,
        implementation_version=run.implementation_version,
        python=run.environment.python,
        status=status,
        reason=reason,
        measured=bool(run.timed or run.peaks_mb or run.correctness),
    )


def _without_load(pair: Pair, scope: str, before: Rounds, after: Rounds) -> Tuple[Rounds, Rounds, bool]:
    """Return (baseline, new, whether rounds beside other load remain), without such rounds where enough others are
    left."""
    # a round of a cluster is named with its device: "3 on node-1"
    loaded = [
        {name.partition(" ")[0] for name in run.loaded_rounds.get(scope, ())} for run in (pair.baseline, pair.new)
    ]
    if pair.together:
        sides, beside_load = ratios.without_load([before, after], loaded[0] | loaded[1])
        return dict(sides[0]), dict(sides[1]), beside_load
    ((old,), old_beside_load), ((new,), new_beside_load) = (
        ratios.without_load([side], names) for side, names in zip((before, after), loaded)
    )
    return dict(old), dict(new), old_beside_load or new_beside_load


def _time(pair: Pair, scope: str, before: Rounds, after: Rounds, margins: Margins) -> TimeChange:
    before, after, beside_load = _without_load(pair, scope, before, after)
    ratio, paired = ratios.ratio(before, after, pair.together, margins.confidence, pair.new.padding)
    busy = [_busy(run, scope) for run in (pair.baseline, pair.new)]
    change = TimeChange(
        "unclear",
        "",
        paired=paired,
        baseline_rounds=len(before),
        new_rounds=len(after),
        baseline_busy=busy[0],
        new_busy=busy[1],
    )
    if ratio is None:
        change.reason = _nothing_timed(pair, scope, before, after)
        change.lost = bool(before) and not after and pair.new.failure is None and _was_asked(pair.new, scope)
        return change
    doubt = _of_two_torches(pair) or change_verdicts.time_doubt(ratio, paired, busy)
    verdict, reason = change_verdicts.time(ratio, paired, margins, doubt, busy)
    detectable = change_verdicts.detectable(ratio, paired, margins.tolerance, margins.confidence, busy)
    if _of_two_torches(pair):  # nor are they known to be the same
        verdict, reason, detectable = change_verdicts.OTHER_TORCH, doubt, None
    elif beside_load:
        doubt = f"{change_verdicts.load(busy)}: {change_verdicts.CALM}"
        verdict, reason, detectable = change_verdicts.BESIDE_LOAD, doubt, None
    return replace(
        change,
        verdict=verdict,
        reason=reason,
        doubt=doubt,
        ratio=ratio.ratio,
        low=ratio.low,
        high=ratio.high,
        detectable=detectable,
        batches=ratio.batches,
        baseline_ms=_ms(before, after),
        new_ms=_ms(after, before),
        baseline_rounds=len(ratio.baseline),
        new_rounds=len(ratio.new),
    )


def _of_two_torches(pair: Pair) -> str:
    """Return why two losses cannot be judged, as each ran under a torch of its own; "" where they can."""
    baseline, other = pair.baseline, pair.new
    if baseline.loss == other.loss or baseline.torch == other.torch:
        return ""
    return (
        f"they ran under torch {baseline.torch} and {other.torch}, which is in the ratio too; {_under_one_torch(pair)}"
    )


def _under_one_torch(pair: Pair) -> str:
    """Return which losses to run instead: one that runs under both torches, beside the one outside the main
    environment."""
    for row in (pair.new, pair.baseline):
        known = BY_NAME.get(row.loss)
        environment = row.name.partition("@")[2] or (known.environment if known else "main")
        controls = [
            implementation.name
            for implementation in IMPLEMENTATIONS
            if implementation.control and implementation.kind == row.kind and implementation.name != row.loss
        ]
        if environment != "main" and controls:
            control = f"{controls[0]}@{environment}"
            return (
                f"compare {row.name} with {control}, which a run of all has: ./benchmark_all.py --only "
                f"{row.name},{control}, then ./compare.py --in log {control} {row.name}"
            )
    return f"measure one of them under the other's torch too ({pair.baseline.loss}@ENVIRONMENT), and compare these two"


def _ms(rounds: Rounds, others: Rounds) -> float:
    """Return the mean of the medians of the batches that both have."""
    common = {batch for batches in others.values() for batch in batches}
    times = gathered((batch, value) for of in rounds.values() for batch in of for value in of[batch] if batch in common)
    return statistics.mean([statistics.median(values) for values in times.values()])


def _nothing_timed(pair: Pair, scope: str, before: Rounds, after: Rounds) -> str:
    for run, side, rounds in ((pair.baseline, "the baseline", before), (pair.new, "the new side", after)):
        if not rounds:
            status, reason = run.failure or ("", "")
            return f"{side} has no {scope} times" + (
                f": {status}: {reason}" if status else "; its run did not measure them"
            )
    return "no batch was timed on both sides in every round"


def _was_asked(run: Row, scope: str) -> bool:
    asked = run.header.settings
    return "timing" in asked.get("passes", ()) and scope in asked.get("scopes", ())


def _busy(run: Row, scope: str) -> float:
    """Return the share of the samples that ran beside other load."""
    samples = run.of_scope(scope)
    return sum(sample.flagged for sample in samples) / max(len(samples), 1)


def _memory(pair: Pair, scope: str, tolerance: float) -> MemoryChange:
    """Compare the highest peaks over the batches, since these decide what fits."""
    sides = [run.peaks_mb.get(scope, {}) for run in (pair.baseline, pair.new)]
    for counter in PEAKS:
        before, after = (side.get(counter, {}) for side in sides)
        batches = set(before) & set(after)
        peaks = [max((side[batch] for batch in batches), default=0.0) for side in (before, after)]
        if min(peaks) > 0:
            ratio = peaks[1] / peaks[0]
            verdict, reason = change_verdicts.memory(ratio, counter, tolerance)
            return MemoryChange(verdict, reason, ratio, peaks[0], peaks[1], f"{counter}_bytes", len(batches))
    absent = [side for side, peaks_of in zip(("the baseline", "the new side"), sides) if not any(peaks_of.values())]
    reason = f"no peaks of the memory pass for {' and '.join(absent) or 'a batch of both'}"
    before_mb, after_mb = (next((max(side[of].values()) for of in PEAKS if side.get(of)), None) for side in sides)
    return MemoryChange("unclear", reason, None, before_mb, after_mb)


def _errors(pair: Pair) -> ErrorChange:
    sides = [run.correctness for run in (pair.baseline, pair.new)]
    verdict, reason = change_verdicts.errors(*sides)
    values = {
        f"{side}_{key}": getattr(record, key, None)
        for side, record in zip(("baseline", "new"), sides)
        for key in ("loss_error", "grad_error", "approximation_gap")
    }
    return ErrorChange(verdict, reason, **values)


def _changed(baseline: Side, new: Side, one_loss: bool) -> List[str]:
    """Return the recorded differences in the code and its environment, as "torch 2.10.0 -> 2.11.0"."""
    labels = {"git_revision": "revision", "torch": "torch", "implementation_version": "version", "python": "Python"}
    if not one_loss:
        labels = {"torch": "torch"}
    both = [(label, getattr(baseline, key), getattr(new, key)) for key, label in labels.items()]
    changed = [f"{label} {str(before)[:20]} -> {str(other)[:20]}" for label, before, other in both if before != other]
    dirty = [word for word, side in (("baseline", baseline), ("new side", new)) if side.git_dirty]
    if one_loss and dirty:
        changed.append(f"uncommitted changes in the {' and the '.join(dirty)}")
    return changed
