"""Compare pairs of runs: time, memory and errors, each with a verdict and its reason.
Only runs that measured the same thing on the same kind of machine are a pair; an error names what
differs otherwise. Time is judged over rounds, which are paired where both sides ran beside each
other. Rounds of two separate runs cannot show whether the machine changed between them; the rows
that did not change can (see control.py). All intervals of one comparison hold together with 95%
(Bonferroni)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rnnt_bench.analysis import control, groups, logs, ratios, standing
from rnnt_bench.analysis.row import SCOPES, Row
from rnnt_bench.core import errors, statistics, text
from rnnt_bench.core.called import command
from rnnt_bench.records import schema, store

#: The process's peak (VmHWM) differs by some percent between two runs of the same code.
PROCESS_TOLERANCE = 0.1
#: Rounding differs with the order of a sum: a change is another order of magnitude, well above
#: float32's rounding.
ERROR_FACTOR, ERROR_FLOOR = 10.0, 1e-6


# Pairs.


@dataclass(frozen=True, eq=False)
class Pair:
    baseline: Row
    new: Row

    @property
    def name(self) -> str:
        return self.new.name if self.one_loss else f"{self.new.name} against {self.baseline.name}"

    @property
    def one_loss(self) -> bool:
        return self.baseline.name == self.new.name


@dataclass(frozen=True)
class Sides:
    """Hold the runs of two measurements: pairs, runs that the new side lacks, and those that only
    it has."""

    pairs: list[Pair]
    gone: Sequence[Row] = ()
    added: Sequence[Row] = ()

    def label(self, run: Row) -> str:
        """Return the name of a run's implementation, or its folder's where a pair has another run
        of it."""
        compared = any(run.name in (pair.baseline.name, pair.new.name) for pair in self.pairs)
        return run.folder.name if compared else run.name


def read_runs(path: Path) -> list[Row]:
    """Return the timed runs at or under `path`. Raises UserError where none can be read; of some
    that cannot be it warns."""
    log = logs.read([path], all_runs=True, traces=False)
    runs = [row for row in [*log.rows, *log.swept] if row.header.name]
    unreadable = [row.reason for row in log.rows if row.unreadable]
    if not runs:
        advice = f"{path}: no {schema.FILE_NAME} in it of runs that were timed; name one"
        raise errors.UserError(next(iter(unreadable), advice))
    for reason in unreadable:
        store.warn(f"{reason}; left out")
    return runs


def two_sides(baseline: Path, new: Path, only: Sequence[str] = ()) -> Sides:
    """Return the runs of two paths in pairs, of the implementations `only` alone, none for all. A
    single run on each side is a pair whatever the names. Raises UserError where nothing is on both
    sides, or with other settings."""
    before, after = (
        groups.newest_of_each(read_runs(path), _measure_the_same) for path in (baseline, new)
    )
    if len(before) == len(after) == 1 and not only:
        return Sides([checked(before[0], after[0])])
    names = list(dict.fromkeys(run.name for run in [*before, *after]))
    unknown = [name for name in only if name not in names]
    if unknown:
        raise errors.UserError(
            f"--only {','.join(unknown)}: not in {baseline} or {new}; there are {', '.join(map(text.plain, names))}"
        )
    before, after = (
        [run for run in side if not only or run.name in only] for side in (before, after)
    )
    pairs: list[Pair] = []
    for name in names:
        mine, theirs = ([run for run in side if run.name == name] for side in (before, after))
        fitting = [
            Pair(first, other)
            for first in mine
            for other in theirs
            if not groups.differences(first, other)
        ]
        if mine and theirs and not fitting:
            fitting = [checked(groups.newest_first(mine)[0], groups.newest_first(theirs)[0])]
        pairs += fitting
    if not pairs:
        sides = ((baseline, before), (new, after))
        held = (
            f"{path} has {', '.join(text.plain(run.name) for run in runs) or 'none'}"
            for path, runs in sides
        )
        raise errors.UserError(f"no implementation is in both: {'; '.join(held)}")
    compared = [run for pair in pairs for run in (pair.baseline, pair.new)]
    gone, added = ([run for run in side if run not in compared] for side in (before, after))
    return Sides(pairs, gone, added)


def _measure_the_same(run: Row, other: Row) -> bool:
    return run.name == other.name and not groups.differences(run, other)


def within(log: Path, baseline: str, new: str) -> list[Pair]:
    """Return the pair of two implementations in a log folder: of the newest run that has both, else
    the newest of each. Raises UserError where one is missing or they were measured with other
    settings."""
    runs = groups.newest_first(read_runs(log))
    sides = [[run for run in runs if run.name == name] for name in (baseline, new)]
    for name, side in zip((baseline, new), sides):
        if not side:
            names = ", ".join(sorted({text.plain(run.name) for run in runs}))
            raise errors.UserError(f"{log}: no run of {name} in it; there are {names}")
    pairs = [
        (first, other)
        for first in sides[0]
        for other in sides[1]
        if first.header.run_id == other.header.run_id
    ]
    together = [pair for pair in pairs if not groups.differences(*pair)]
    return [checked(*(together[0] if together else (sides[0][0], sides[1][0])))]


def checked(baseline: Row, other: Row) -> Pair:
    """Return the pair; raise UserError, which names the differences, if it cannot be compared."""
    different = groups.differences(baseline, other)
    advice = "run both with the same flags on the same machine"
    if (
        baseline.loss != other.loss
        and baseline.torch
        and other.torch
        and baseline.torch != other.torch
    ):
        different.append(f"torch {baseline.torch} / {other.torch}")
        advice = "a ratio would be that of the torches too: measure both under one, as "
        advice += f"{command('run')} --only k2,fast_rnnt@k2 does"
    if different:
        why = "; ".join(map(text.plain, different))
        raise errors.UserError(
            f"{baseline.folder} and {other.folder} are not comparable: {why}; {advice}"
        )
    return Pair(baseline, other)


# Changes.


class Judged(NamedTuple):
    """Hold a change of memory or of the errors.

    Attributes:
        baseline, new: highest peak in MB over the batches that both have, or {field of the record:
          relative error}
        counter: field of the record that the peaks are of
        batches: number of those that both have
    """

    verdict: str
    reason: str
    ratio: float | None = None
    baseline: Any = None
    new: Any = None
    counter: str | None = None
    batches: int = 0


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
    memory: dict[str, Judged]
    errors: Judged
    changed: list[str]

    def as_json(self) -> schema.Record:
        return {
            "name": self.pair.name,
            "baseline": _origin_json(self.pair.baseline),
            "new": _origin_json(self.pair.new),
            "tolerance": self.margins.tolerance,
            "confidence": self.margins.confidence,
            "time": {
                scope: {**time.as_json(), **time.judged_json()} for scope, time in self.time.items()
            },
            "memory": {scope: memory._asdict() for scope, memory in self.memory.items()},
            "errors": self.errors._asdict(),
            "changed": self.changed,
        }


def _origin_json(run: Row) -> schema.Record:
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
    sides = [(pair.baseline, pair.new) for pair in pairs]
    timed = [
        scope
        for baseline, new in sides
        for scope in scopes
        if baseline.median_ms(scope) and new.median_ms(scope)
    ]
    margins = ratios.Margins(tolerance, statistics.confidence_of_each(len(timed)))
    standings = {scope: control.standings(sides, scope, margins) for scope in scopes}
    changes = []
    for index, pair in enumerate(pairs):
        time = {scope: standings[scope][index] for scope in scopes}
        memory = {scope: _memory(pair, scope, tolerance) for scope in scopes}
        changes.append(Change(pair, margins, time, memory, _errors(pair), _changed(pair)))
    return changes


def _memory(pair: Pair, scope: str, tolerance: float) -> Judged:
    """Compare the highest peaks, which tables show too, over the batches that both have, since
    these decide what fits: allocators count exactly, the process's resident peak does not."""
    sides = [run.peaks_of(scope) for run in (pair.baseline, pair.new)]
    batches = set.intersection(*map(set, sides))
    if not batches:
        absent = [side for side, peaks in zip(("the baseline", "the new side"), sides) if not peaks]
        reason = f"no peaks of the memory pass for {' and '.join(absent) or 'a batch of both'}"
        before_mb, after_mb = (
            max((peak.mb for peak in peaks.values()), default=None) for peaks in sides
        )
        return Judged("unclear", reason, None, before_mb, after_mb)
    before, after = (max(peaks[batch] for batch in batches) for peaks in sides)
    if not before.mb or not after.mb:
        return Judged(
            "unclear", "a peak of 0", None, before.mb, after.mb, after.counter, len(batches)
        )
    ratio = after.mb / before.mb
    source = "the allocator's own count"
    if {before.counter, after.counter} & {"process", "device_used"}:
        tolerance = max(tolerance, PROCESS_TOLERANCE)
        source = "the resident peak of one process each"
    verdict = {"faster": "less", "slower": "more"}.get(
        statistics.verdict(ratio, ratio, tolerance), "same"
    )
    reason = f"{abs(ratio - 1):.1%} {verdict} memory"
    if verdict == "same":
        reason = f"the ratio, {ratio:.3f}, is within {standing.percent(tolerance)}"
    counter = f"{after.counter}_bytes"
    return Judged(
        verdict, f"{reason} ({source})", ratio, before.mb, after.mb, counter, len(batches)
    )


def _errors(pair: Pair) -> Judged:
    """Judge the errors at the measured size, or on small batches where a side has no others."""
    baseline, new = pair.baseline.checked, pair.new.checked
    sides = []
    for record in (baseline, new):
        judged_at = record.at_size if baseline.at_size and new.at_size else record
        errors = {key: getattr(judged_at, key) for key in ("loss_error", "grad_error")}
        sides.append({**errors, "approximation_gap": record.approximation_gap})

    def judged(verdict: str, reason: str) -> Judged:
        return Judged(verdict, reason, None, sides[0], sides[1])

    for record, side in ((baseline, "the baseline"), (new, "the new side")):
        if record.ok is None:
            return judged(
                "unclear", f"{side} was not checked against the oracle (the correctness pass)"
            )
    if not new.ok:
        return judged("wrong", f"the new side is further from the oracle than {new.tolerance}")
    if not baseline.ok:
        return judged(
            "better",
            f"the baseline is further from the oracle than {baseline.tolerance}, the new is not",
        )
    verdicts = set()
    reasons = []
    for key, name in (("loss_error", "loss"), ("grad_error", "gradient")):
        before, after = (side[key] or 0.0 for side in sides)
        if max(before, after) > ERROR_FLOOR and max(before, after) > ERROR_FACTOR * min(
            before, after
        ):
            verdicts.add("worse" if after > before else "better")
            reasons.append(f"{name} error {before:.1e}, now {after:.1e}")
    if not reasons:
        return judged("same", "both are right, with errors of the same order")
    reason = "; ".join(reasons) + " (both are right)"
    return judged(verdicts.pop() if len(verdicts) == 1 else "unclear", reason)


def _changed(pair: Pair) -> list[str]:
    """Return the recorded differences in the code and its environment, as "torch 2.10.0 ->
    2.11.0"."""
    sides = {"baseline": pair.baseline, "new side": pair.new}
    values = [("torch", [run.environment.torch for run in sides.values()])]
    if pair.one_loss:
        values.insert(0, ("revision", [run.header.git_revision for run in sides.values()]))
        values.append(
            ("version", [run.environment.implementation_version for run in sides.values()])
        )
        values.append(("Python", [run.environment.python for run in sides.values()]))
    changed = [
        f"{label} {str(before)[:20]} -> {str(after)[:20]}"
        for label, (before, after) in values
        if before != after
    ]
    dirty = [side for side, run in sides.items() if pair.one_loss and run.header.git_dirty]
    if dirty:
        changed.append(f"uncommitted changes in the {' and the '.join(dirty)}")
    return changed


def regressions(changes: Sequence[Change], allowed: float) -> list[str]:
    """Return a sentence for each whose time surely grew by more than `allowed`, or that has no
    times any more."""
    reasons = []
    for change in changes:
        new = change.pair.new
        name = change.pair.name
        if new.status != "ok" and change.pair.baseline.status == "ok":
            reasons.append(f"{name}: was measured at the baseline, now {new.status}: {new.reason}")
        for scope, time in change.time.items():
            if time.lost:
                reasons.append(f"{name} {scope}: was timed at the baseline, has no times now")
            if time.low is not None and not time.doubt and time.low > 1 + allowed:
                reasons.append(f"{name} {scope}: slower by at least {100 * (time.low - 1):.1f}%")
    return reasons


def undecided(changes: Sequence[Change], allowed: float) -> list[str]:
    """Return a sentence for each change whose time may have grown by more than `allowed`, though
    not surely."""
    reasons = []
    for change in changes:
        for scope, time in change.time.items():
            if time.ratio is None or (
                not time.doubt and time.low is not None and time.low > 1 + allowed
            ):
                continue
            # What is below the limit is no difference that a drift or the machine's day would have
            # to explain.
            is_withheld = any(
                doubt.withholds and doubt.kind != "uncontrolled" for doubt in time.doubts
            )
            is_above = time.high is None or time.high > 1 + allowed
            if is_withheld or (is_above and time.doubt) or time.high is None:
                reasons.append(f"{change.pair.name} {scope}: {time.doubt or time.reason}")
            elif is_above:
                growth = f"{100 * (time.high - 1):.1f}%"
                reasons.append(f"{change.pair.name} {scope}: it may have grown by up to {growth}")
    return reasons


def gone(sides: Sides) -> list[str]:
    names = list(dict.fromkeys(sides.label(run) for run in sides.gone if run.status == "ok"))
    if not names:
        return []
    compared = list(dict.fromkeys(pair.baseline.name for pair in sides.pairs))
    advice = f"where that is meant, compare with --only {','.join(compared)}, or the run folders that both have"
    return [f"{', '.join(names)}: measured at the baseline, not there any more; {advice}"]
