"""Compare pairs of runs: time, memory and errors, each with a verdict and its reason.

Only runs that measured the same on the same kind of machine are a pair; else an error names what
differs. Time is judged over rounds, which are paired where both sides ran beside each other. Rounds
of two separate runs cannot show whether the machine changed between them; the rows whose code did
not change can (see control.py). All intervals of one comparison hold together with 95%
(Bonferroni)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from rnnt_bench.analysis import control, groups, logs, ratios, standing
from rnnt_bench.analysis.row import SCOPES, Row
from rnnt_bench.core import errors, statistics, text
from rnnt_bench.core.called import command
from rnnt_bench.records import schema, store

#: The process's peak (VmHWM) differs by some percent between two runs of the same code.
PROCESS_TOLERANCE = 0.1
#: Errors of rounding vary with the order of a sum. So errors differ only if the larger one is more
#: than ERROR_FACTOR times the other, and above ERROR_FLOOR, which is well above the rounding of
#: float32.
ERROR_FACTOR, ERROR_FLOOR = 10.0, 1e-6


# Pairs.


@dataclass(frozen=True, eq=False)
class Pair:
    """Hold the two runs that are compared."""

    baseline: Row
    new: Row

    @property
    def name(self) -> str:
        """Return "k2" for two runs of one loss, or "k2 against torchaudio"."""
        if self.is_one_loss:
            return self.new.name
        return f"{self.new.name} against {self.baseline.name}"

    @property
    def is_one_loss(self) -> bool:
        return self.baseline.name == self.new.name


@dataclass(frozen=True)
class Sides:
    """Hold the runs of two measurements.

    Attributes:
        pairs: those to compare
        gone: runs that only the baseline has
        added: runs that only the new side has
    """

    pairs: list[Pair]
    gone: Sequence[Row] = ()
    added: Sequence[Row] = ()

    def label(self, run: Row) -> str:
        """Return the name by which messages call a run outside the pairs: its implementation. If a
        pair has a run of the same implementation, it is the name of the run's folder."""
        is_in_pair = any(run.name in (pair.baseline.name, pair.new.name) for pair in self.pairs)
        return run.folder.name if is_in_pair else run.name


def read_runs(path: Path) -> list[Row]:
    """Return the runs with records at or under `path`, those of sweeps too. Warn of those that
    cannot be read.

    Raises UserError where none can be read."""
    log = logs.read([path], all_runs=True, traces=False)
    # A row that cannot be read has no records, so its header has no name.
    runs = [row for row in [*log.rows, *log.swept] if row.header.name]
    unreadable = [row.reason for row in log.rows if row.unreadable]
    if not runs:
        advice = f"{path}: no {schema.FILE_NAME} in it of runs that were timed; name one"
        raise errors.UserError(unreadable[0] if unreadable else advice)
    for reason in unreadable:
        store.warn(f"{reason}; left out")
    return runs


def two_sides(baseline: Path, new: Path, only: Sequence[str] = ()) -> Sides:
    """Return the runs of two paths, in pairs of one implementation and the same settings, and those
    without a partner.

    Without `only`, a single run on each side is a pair, even of two implementations. Raises
    UserError where nothing can be paired.

    Args:
        only: names of the implementations to compare; () for all
    """
    before, after = (
        groups.newest_of_each(read_runs(path), _measure_the_same) for path in (baseline, new)
    )
    if len(before) == len(after) == 1 and not only:
        return Sides([checked_pair(before[0], after[0])])
    names = list(dict.fromkeys(run.name for run in [*before, *after]))
    if only:
        unknown = [name for name in only if name not in names]
        if unknown:
            raise errors.UserError(
                f"--only {','.join(unknown)}: not in {baseline} or {new}; there are {', '.join(map(text.plain, names))}"
            )
        before = [run for run in before if run.name in only]
        after = [run for run in after if run.name in only]
    pairs = [pair for name in names for pair in _pairs_of(name, before, after)]
    if not pairs:
        sides = ((baseline, before), (new, after))
        names_by_side = (
            f"{path} has {', '.join(text.plain(run.name) for run in runs) or 'none'}"
            for path, runs in sides
        )
        raise errors.UserError(f"no implementation is in both: {'; '.join(names_by_side)}")
    compared = [run for pair in pairs for run in (pair.baseline, pair.new)]
    gone, added = ([run for run in side if run not in compared] for side in (before, after))
    return Sides(pairs, gone, added)


def _measure_the_same(run: Row, other: Row) -> bool:
    return run.name == other.name and not groups.differences(run, other)


def _pairs_of(name: str, before: Sequence[Row], after: Sequence[Row]) -> list[Pair]:
    """Return the pairs of an implementation's runs that measured the same; [] if a side has no run
    of it.

    Raises UserError, which names the differences, where both sides have runs but none fit."""
    before = [run for run in before if run.name == name]
    after = [run for run in after if run.name == name]
    if not before or not after:
        return []
    fitting = [
        Pair(first, other)
        for first in before
        for other in after
        if not groups.differences(first, other)
    ]
    if fitting:
        return fitting
    # No two fit, so this raises, and names the differences of the newest two.
    return [checked_pair(groups.newest_first(before)[0], groups.newest_first(after)[0])]


def within(log: Path, baseline: str, new: str) -> Pair:
    """Return the pair of two implementations in a log folder.

    It is from the newest run that measured both with equal settings.  Without such a run, it is the
    newest row of each.

    Raises UserError where one is missing, or they were measured with other settings."""
    runs = groups.newest_first(read_runs(log))
    before = [run for run in runs if run.name == baseline]
    after = [run for run in runs if run.name == new]
    for name, side in ((baseline, before), (new, after)):
        if not side:
            names = ", ".join(sorted({text.plain(run.name) for run in runs}))
            raise errors.UserError(f"{log}: no run of {name} in it; there are {names}")
    for first in before:
        for other in after:
            is_same_run = first.header.run_id == other.header.run_id
            if is_same_run and not groups.differences(first, other):
                return checked_pair(first, other)
    return checked_pair(before[0], after[0])


def checked_pair(baseline: Row, new: Row) -> Pair:
    """Return the pair of two rows.  Raises UserError, which names the differences, if the two were
    measured in different ways or, as two losses, under different versions of torch."""
    different = groups.differences(baseline, new)
    advice = "run both with the same flags on the same machine"
    known_torch = baseline.torch and new.torch
    if baseline.loss != new.loss and known_torch and baseline.torch != new.torch:
        different.append(f"torch {baseline.torch} / {new.torch}")
        advice = "a ratio would be that of the torches too: measure both under one, as "
        advice += f"{command('run')} --only k2,fast_rnnt@k2 does"
    if different:
        reasons = "; ".join(map(text.plain, different))
        raise errors.UserError(
            f"{baseline.folder} and {new.folder} are not comparable: {reasons}; {advice}"
        )
    return Pair(baseline, new)


# Changes.


class MemoryChange(NamedTuple):
    """Hold how the memory of a scope changed.

    Attributes:
        verdict: "less", "more", "same" or "unclear"
        ratio: new_mb over baseline_mb
        baseline_mb, new_mb: highest peak of each side over the batches that both have; without such
            batches, over its own
        counter: field of the memory record that holds the new side's peak
        batches: number of the batches that both have
    """

    verdict: str
    reason: str
    ratio: float | None = None
    baseline_mb: float | None = None
    new_mb: float | None = None
    counter: str | None = None
    batches: int = 0

    def as_json(self) -> schema.Record:
        """Return the fields of the change in the JSON of a comparison; peaks are in MB."""
        return {
            "verdict": self.verdict,
            "reason": self.reason,
            "ratio": self.ratio,
            "baseline": self.baseline_mb,
            "new": self.new_mb,
            "counter": self.counter,
            "batches": self.batches,
        }


class ErrorChange(NamedTuple):
    """Hold how the errors changed.

    Attributes:
        verdict: "better", "worse", "same", "wrong" or "unclear"
        baseline, new: loss_error, grad_error and approximation_gap, as in the correctness record
    """

    verdict: str
    reason: str
    baseline: Mapping[str, float | None]
    new: Mapping[str, float | None]


@dataclass
class Change:
    """Hold what changed between the runs of a pair.

    Attributes:
        time, memory: by scope
        changed: differences of the code, as "torch 2.10.0 -> 2.11.0"
    """

    pair: Pair
    margins: ratios.Margins
    time: dict[str, standing.Standing]
    memory: dict[str, MemoryChange]
    errors: ErrorChange
    changed: list[str]

    def as_json(self) -> schema.Record:
        """Return the entry of the pair in the JSON of a comparison."""
        return {
            "name": self.pair.name,
            "baseline": _origin_json(self.pair.baseline),
            "new": _origin_json(self.pair.new),
            "tolerance": self.margins.tolerance,
            "confidence": self.margins.confidence,
            "time": {
                scope: {**time.as_json(), **time.judged_json()} for scope, time in self.time.items()
            },
            "memory": {scope: memory.as_json() for scope, memory in self.memory.items()},
            "errors": self.errors._asdict(),
            "changed": self.changed,
        }


def _origin_json(run: Row) -> schema.Record:
    """Return what JSON says of one side: which run it is, and of which code."""
    header, environment = run.header, run.environment
    return {
        "name": run.name,
        "file": str(run.results),
        "status": run.status,
        "reason": run.reason,
        "run_id": header.run_id,
        "started": header.started,
        "kind": header.kind,
        "git_revision": header.git_revision,
        "git_dirty": header.git_dirty,
        "torch": environment.torch,
        "implementation_version": environment.implementation_version,
        "python": environment.python,
    }


def compare(
    pairs: Sequence[Pair], scopes: Sequence[str] = SCOPES, tolerance: float = statistics.TOLERANCE
) -> list[Change]:
    """Return what changed in each pair; the intervals of all times hold together with 95%.

    Args:
        scopes: those whose times and memory are compared
        tolerance: largest change of time or memory that does not matter (0.02: 2%)
    """
    sides = [(pair.baseline, pair.new) for pair in pairs]
    judged_times = sum(
        bool(baseline.median_ms(scope) and new.median_ms(scope))
        for baseline, new in sides
        for scope in scopes
    )
    margins = ratios.Margins(tolerance, statistics.confidence_of_each(judged_times))
    standings = {scope: control.standings(sides, scope, margins) for scope in scopes}
    changes = []
    for index, pair in enumerate(pairs):
        time = {scope: standings[scope][index] for scope in scopes}
        memory = {scope: _memory_change(pair, scope, tolerance) for scope in scopes}
        changes.append(Change(pair, margins, time, memory, _error_change(pair), _changed(pair)))
    return changes


#: Verdict on a ratio of times -> verdict on the same ratio of peaks.
OF_MEMORY = {"faster": "less", "slower": "more", "same": "same"}


def _memory_change(pair: Pair, scope: str, tolerance: float) -> MemoryChange:
    """Compare the highest peak of each side over the batches that both have: this peak decides
    whether a batch fits. If no batch has peaks on both sides, or if a highest peak is 0, the
    verdict is "unclear".

    tolerance: as in `compare`; at least PROCESS_TOLERANCE counts where a peak is not an
    allocator's."""
    before_peaks = pair.baseline.peaks_of(scope)
    after_peaks = pair.new.peaks_of(scope)
    batches = before_peaks.keys() & after_peaks.keys()
    if not batches:
        sides = {"the baseline": before_peaks, "the new side": after_peaks}
        absent = [side for side, peaks in sides.items() if not peaks]
        # Where none is absent, both sides have peaks, but of different batches.
        reason = f"no peaks of the memory pass for {' and '.join(absent) or 'a batch of both'}"
        before_mb, after_mb = (
            max((peak.mb for peak in peaks.values()), default=None) for peaks in sides.values()
        )
        return MemoryChange("unclear", reason, baseline_mb=before_mb, new_mb=after_mb)
    # Peaks are compared by their MB, the first field.
    before = max(before_peaks[batch] for batch in batches)
    after = max(after_peaks[batch] for batch in batches)
    counter = f"{after.counter}_bytes"
    if not before.mb or not after.mb:
        return MemoryChange(
            "unclear",
            "a peak of 0",
            baseline_mb=before.mb,
            new_mb=after.mb,
            counter=counter,
            batches=len(batches),
        )
    ratio = after.mb / before.mb
    # Allocators count exactly, the resident peak of a process does not.
    source = "the allocator's own count"
    if {before.counter, after.counter} & {"process", "device_used"}:
        tolerance = max(tolerance, PROCESS_TOLERANCE)
        source = "the resident peak of one process each"
    # The ratio stands for both ends of its interval, so the verdict is never "unclear".
    verdict = OF_MEMORY[statistics.verdict(ratio, ratio, tolerance)]
    reason = f"{abs(ratio - 1):.1%} {verdict} memory"
    if verdict == "same":
        reason = f"the ratio, {ratio:.3f}, is within {standing.percent(tolerance)}"
    return MemoryChange(
        verdict, f"{reason} ({source})", ratio, before.mb, after.mb, counter, len(batches)
    )


def _error_change(pair: Pair) -> ErrorChange:
    """Compare the errors at the measured size; if a side has none at this size, compare the errors
    on small batches."""
    records = pair.baseline.checked, pair.new.checked
    are_at_size = all(record.at_size for record in records)
    sides = []
    for record in records:
        # The errors of the record itself are those on small batches.
        judged = record.at_size if are_at_size else record
        side = {key: getattr(judged, key) for key in ("loss_error", "grad_error")}
        sides.append({**side, "approximation_gap": record.approximation_gap})
    before, after = sides
    verdict, reason = _error_verdict(*records, before, after)
    return ErrorChange(verdict, reason, before, after)


def _error_verdict(
    baseline: schema.Correctness,
    new: schema.Correctness,
    before: Mapping[str, float | None],
    after: Mapping[str, float | None],
) -> tuple[str, str]:
    """Return (verdict, reason) on the errors of two sides.

    Args:
        baseline, new: records of the correctness pass
        before, after: "loss_error" and "grad_error" of the baseline and of the new side, at sizes
            that can be compared; None counts as 0
    """
    for record, side in ((baseline, "the baseline"), (new, "the new side")):
        if record.ok is None:
            return "unclear", f"{side} was not checked against the oracle (the correctness pass)"
    if not new.ok:
        return "wrong", f"the new side is further from the oracle than {new.tolerance}"
    if not baseline.ok:
        reason = (
            f"the baseline is further from the oracle than {baseline.tolerance}, the new is not"
        )
        return "better", reason
    verdicts = set()
    reasons = []
    for key, name in (("loss_error", "loss"), ("grad_error", "gradient")):
        old_error = before[key] or 0.0
        new_error = after[key] or 0.0
        smaller, larger = sorted((old_error, new_error))
        if larger > max(ERROR_FLOOR, ERROR_FACTOR * smaller):
            verdicts.add("worse" if new_error > old_error else "better")
            reasons.append(f"{name} error {old_error:.1e}, now {new_error:.1e}")
    if not reasons:
        return "same", "both are right, with errors of the same order"
    verdict = verdicts.pop() if len(verdicts) == 1 else "unclear"
    return verdict, "; ".join(reasons) + " (both are right)"


def _changed(pair: Pair) -> list[str]:
    """Return the recorded differences of code and environment, as "torch 2.10.0 -> 2.11.0"; for two
    different losses only the difference of torch."""
    baseline, new = pair.baseline, pair.new
    before, after = baseline.environment, new.environment
    torch = ("torch", before.torch, after.torch)
    values = [torch]
    sides = {}
    if pair.is_one_loss:
        values = [
            ("revision", baseline.header.git_revision, new.header.git_revision),
            torch,
            ("version", before.implementation_version, after.implementation_version),
            ("Python", before.python, after.python),
        ]
        sides = {"baseline": baseline, "new side": new}
    # The first 20 of the 40 letters of a git revision tell it apart.
    changed = [
        f"{label} {str(old)[:20]} -> {str(current)[:20]}"
        for label, old, current in values
        if old != current
    ]
    dirty = [side for side, run in sides.items() if run.header.git_dirty]
    if dirty:
        changed.append(f"uncommitted changes in the {' and the '.join(dirty)}")
    return changed


# What fails a comparison with a limit.


def regressions(changes: Sequence[Change], allowed: float) -> list[str]:
    """Return a sentence for each pair whose new run failed while its baseline did not, and for each
    time that is gone or surely grew.

    allowed: growth that passes (0.02: 2%)
    """
    reasons = []
    for change in changes:
        new = change.pair.new
        name = change.pair.name
        if new.status != "ok" and change.pair.baseline.status == "ok":
            reasons.append(f"{name}: was measured at the baseline, now {new.status}: {new.reason}")
        for scope, time in change.time.items():
            if time.lost:
                reasons.append(f"{name} {scope}: was timed at the baseline, has no times now")
            if time.low is not None and _surely_grew(time, allowed):
                reasons.append(f"{name} {scope}: slower by at least {100 * (time.low - 1):.1f}%")
    return reasons


def _surely_grew(time: standing.Standing, allowed: float) -> bool:
    """Tell whether the whole interval of a time is above the growth that is allowed, and no doubt
    is noted."""
    return time.low is not None and not time.doubt and time.low > 1 + allowed


def undecided(changes: Sequence[Change], allowed: float) -> list[str]:
    """Return a sentence for each time that may have grown by more than is allowed, though not
    surely.

    allowed: growth that passes (0.02: 2%)
    """
    reasons = []
    for change in changes:
        for scope, time in change.time.items():
            reason = _why_undecided(time, allowed)
            if reason:
                reasons.append(f"{change.pair.name} {scope}: {reason}")
    return reasons


def _why_undecided(time: standing.Standing, allowed: float) -> str:
    """Return why it is open whether a time grew by more than is allowed.

    Return "" if it surely did, if it surely did not, and if the times have no ratio."""
    if time.ratio is None or _surely_grew(time, allowed):
        return ""
    if time.high is None:
        return time.doubt or time.reason
    # A time whose whole interval is within the limit surely did not grow, unless a doubt withholds
    # any verdict. The machine's day (the doubt "uncontrolled") is no such doubt here: it only
    # explains a difference.
    withheld = any(doubt.withholds and doubt.kind != "uncontrolled" for doubt in time.doubts)
    if time.high <= 1 + allowed and not withheld:
        return ""
    return time.doubt or f"it may have grown by up to {100 * (time.high - 1):.1f}%"


def missing_runs(sides: Sides) -> list[str]:
    """Return a sentence on the runs that ended well at the baseline and that the new side lacks, in
    a list; [] where there are none."""
    names = list(dict.fromkeys(sides.label(run) for run in sides.gone if run.status == "ok"))
    if not names:
        return []
    compared = list(dict.fromkeys(pair.baseline.name for pair in sides.pairs))
    advice = f"where that is meant, compare with --only {','.join(compared)}, or the run folders that both have"
    return [f"{', '.join(names)}: measured at the baseline, not there any more; {advice}"]
