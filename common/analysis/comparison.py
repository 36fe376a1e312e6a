"""Compare pairs of runs: time, memory and errors, each with a verdict and its reason.
Only runs that measured the same thing on the same kind of machine are a pair; an error names what differs otherwise.
Time is judged over rounds, which are paired where both sides ran beside each other. Rounds of two separate runs cannot
show whether the machine changed between them; the rows that did not change can (see control.py).
All intervals of one comparison hold together with 95% (Bonferroni)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Sequence

from rnnt_bench.analysis import control, groups, logs, ratios, standing
from rnnt_bench.analysis.row import SCOPES, Row
from rnnt_bench.core import errors, statistics, text
from rnnt_bench.core.called import command
from rnnt_bench.records import schema, store

#: The process's peak (VmHWM) differs by some percent between two runs of the same code.
PROCESS_TOLERANCE = 0.1
#: Rounding differs with the order of a sum: a change is another order of magnitude, well above float32's rounding.
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
    """Hold the runs of two measurements: pairs, runs that the new side lacks, and those that only it has."""

    pairs: List[Pair]
    gone: Sequence[Row] = ()
    added: Sequence[Row] = ()

    def label(self, run: Row) -> str:
        """Return the name of a run's implementation, or its folder's where a pair has another run of it."""
        compared = any(run.name in (pair.baseline.name, pair.new.name) for pair in self.pairs)
        return run.folder.name if compared else run.name


def read_runs(path: Path) -> List[Row]:
    """Return the timed runs at or under `path`. Raises UserError where none can be read; of some that cannot be it
    warns."""
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
    """Return the runs of two paths in pairs, of the implementations `only` alone, none for all. A single run on each
    side is a pair whatever the names. Raises UserError where nothing is on both sides, or with other settings."""
    before, after = (
        groups.newest_of_each(
            read_runs(path), lambda one, other: one.name == other.name and not groups.differences(one, other)
        )
        for path in (baseline, new)
    )
    if len(before) == len(after) == 1 and not only:
        return Sides([checked(before[0], after[0])])
    names = list(dict.fromkeys(run.name for run in [*before, *after]))
    unknown = [name for name in only if name not in names]
    if unknown:
        raise errors.UserError(
            f"--only {','.join(unknown)}: not in {baseline} or {new}; there are {', '.join(map(text.plain, names))}"
        )
    before, after = ([run for run in side if not only or run.name in only] for side in (before, after))
    pairs: List[Pair] = []
    for name in names:
        mine, theirs = ([run for run in side if run.name == name] for side in (before, after))
        fitting = [Pair(first, other) for first in mine for other in theirs if not groups.differences(first, other)]
        newest = [groups.newest_first(side)[0] for side in (mine, theirs) if side]
        pairs += fitting or ([checked(*newest)] if len(newest) == 2 else [])
    compared = [id(run) for pair in pairs for run in (pair.baseline, pair.new)]
    gone, added = ([run for run in side if id(run) not in compared] for side in (before, after))
    if not pairs:
        sides = ((baseline, gone), (new, added))
        held = (f"{path} has {', '.join(text.plain(run.name) for run in runs) or 'none'}" for path, runs in sides)
        raise errors.UserError(f"no implementation is in both: {'; '.join(held)}")
    return Sides(pairs, gone, added)


def within(log: Path, baseline: str, new: str) -> List[Pair]:
    """Return the pair of two implementations in a log folder: of the newest run that has both, else the newest of each.
    Raises UserError where one is missing or they were measured with other settings."""
    runs = groups.newest_first(read_runs(log))
    sides = [[run for run in runs if run.name == name] for name in (baseline, new)]
    for name, side in zip((baseline, new), sides):
        if not side:
            names = ", ".join(sorted({text.plain(run.name) for run in runs}))
            raise errors.UserError(f"{log}: no run of {name} in it; there are {names}")
    pairs = [(first, other) for first in sides[0] for other in sides[1] if first.header.run_id == other.header.run_id]
    together = [pair for pair in pairs if not groups.differences(*pair)]
    return [checked(*(together[0] if together else (sides[0][0], sides[1][0])))]


def checked(baseline: Row, other: Row) -> Pair:
    """Return the pair; raise UserError, which names the differences, if it cannot be compared."""
    different, advice = groups.differences(baseline, other), "run both with the same flags on the same machine"
    if baseline.loss != other.loss and baseline.torch and other.torch and baseline.torch != other.torch:
        different.append(f"torch {baseline.torch} / {other.torch}")
        advice = "a ratio would be that of the torches too: measure both under one, as "
        advice += f"{command('run')} --only k2,fast_rnnt@k2 does"
    if different:
        why = "; ".join(map(text.plain, different))
        raise errors.UserError(f"{baseline.folder} and {other.folder} are not comparable: {why}; {advice}")
    return Pair(baseline, other)


# Changes.


class Judged(NamedTuple):
    """Hold a change of memory, whose sides are the highest peaks in MB over the batches that both have, or of the
    errors, whose sides are {field of the record: relative error}."""

    verdict: str
    reason: str
    ratio: Optional[float] = None
    baseline: Any = None
    new: Any = None
    counter: Optional[str] = None
    batches: int = 0


@dataclass
class Change:
    """Hold what changed between the runs of a pair: by scope, and in the code, as "torch 2.10.0 -> 2.11.0"."""

    pair: Pair
    margins: ratios.Margins
    time: Dict[str, standing.Standing]
    memory: Dict[str, Judged]
    errors: Judged
    changed: List[str]

    def as_json(self) -> schema.Record:
        sides = {
            side: {
                **{"name": run.name, "file": str(run.results), "status": run.status, "reason": run.reason},
                **{key: getattr(run.header, key) for key in ("run_id", "started", "kind", "git_revision", "git_dirty")},
                **{key: getattr(run.environment, key) for key in ("torch", "implementation_version", "python")},
            }
            for side, run in (("baseline", self.pair.baseline), ("new", self.pair.new))
        }
        return {
            **{"name": self.pair.name, **sides, **self.margins._asdict()},
            "time": {scope: {**of.as_json(), **of.judged_json()} for scope, of in self.time.items()},
            "memory": {scope: change._asdict() for scope, change in self.memory.items()},
            **{"errors": self.errors._asdict(), "changed": self.changed},
        }


def compare(
    pairs: Sequence[Pair], scopes: Sequence[str] = SCOPES, tolerance: float = statistics.TOLERANCE
) -> List[Change]:
    both = [pair.baseline.times_of(scope).ms and pair.new.times_of(scope).ms for pair in pairs for scope in scopes]
    margins = ratios.Margins(tolerance, statistics.confidence_of_each(sum(map(bool, both))))
    sides = [(pair.baseline, pair.new) for pair in pairs]
    times = {scope: control.standings(sides, scope, margins) for scope in scopes}
    return [
        Change(
            pair,
            margins,
            {scope: times[scope][at] for scope in scopes},
            {scope: _memory(pair, scope, tolerance) for scope in scopes},
            _errors(pair),
            _changed(pair),
        )
        for at, pair in enumerate(pairs)
    ]


def _memory(pair: Pair, scope: str, tolerance: float) -> Judged:
    """Compare the highest peaks, which tables show too, over the batches that both have, since these decide what fits:
    allocators count exactly, the process's resident peak does not."""
    sides = [run.peaks_of(scope) for run in (pair.baseline, pair.new)]
    highest = [max(peaks.values(), default=None) for peaks in sides]
    batches = set.intersection(*map(set, sides))
    if not batches:
        absent = [side for side, peaks in zip(("the baseline", "the new side"), sides) if not peaks]
        reason = f"no peaks of the memory pass for {' and '.join(absent) or 'a batch of both'}"
        before_mb, after_mb = (peak and peak.mb for peak in highest)
        return Judged("unclear", reason, None, before_mb, after_mb)
    before, after = (max(peaks[batch] for batch in batches) for peaks in sides)
    counters = {before.counter, after.counter}
    if not before.mb or not after.mb:
        return Judged("unclear", "a peak of 0", None, before.mb, after.mb, after.counter, len(batches))
    ratio, source = after.mb / before.mb, "the allocator's own count"
    if counters & {"process", "device_used"}:
        tolerance, source = max(tolerance, PROCESS_TOLERANCE), "the resident peak of one process each"
    word = {"faster": "less", "slower": "more"}.get(statistics.verdict(ratio, ratio, tolerance), "same")
    near = f"the ratio, {ratio:.3f}, is within {standing.percent(tolerance)}"
    reason = near if word == "same" else f"{abs(ratio - 1):.1%} {word} memory"
    counter = f"{after.counter}_bytes"
    return Judged(word, f"{reason} ({source})", ratio, before.mb, after.mb, counter, len(batches))


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
            return judged("unclear", f"{side} was not checked against the oracle (the correctness pass)")
    if not new.ok:
        return judged("wrong", f"the new side is further from the oracle than {new.tolerance}")
    if not baseline.ok:
        return judged("better", f"the baseline is further from the oracle than {baseline.tolerance}, the new is not")
    words = []
    for key, name in (("loss_error", "loss"), ("grad_error", "gradient")):
        before, after = (side[key] or 0.0 for side in sides)
        if max(before, after) > ERROR_FLOOR and max(before, after) > ERROR_FACTOR * min(before, after):
            words.append(("worse" if after > before else "better", f"{name} error {before:.1e}, now {after:.1e}"))
    if not words:
        return judged("same", "both are right, with errors of the same order")
    kinds = {word for word, _ in words}
    reason = "; ".join(why for _, why in words) + " (both are right)"
    return judged(kinds.pop() if len(kinds) == 1 else "unclear", reason)


def _changed(pair: Pair) -> List[str]:
    """Return the recorded differences in the code and its environment, as "torch 2.10.0 -> 2.11.0"."""
    before, after = (
        {
            "revision": run.header.git_revision if pair.one_loss else None,
            "torch": run.environment.torch,
            "version": run.environment.implementation_version if pair.one_loss else None,
            "Python": run.environment.python if pair.one_loss else None,
        }
        for run in (pair.baseline, pair.new)
    )
    changed = [
        f"{label} {str(before[label])[:20]} -> {str(value)[:20]}"
        for label, value in after.items()
        if before[label] != value
    ]
    sides = {"baseline": pair.baseline, "new side": pair.new}
    dirty = [word for word, run in sides.items() if pair.one_loss and run.header.git_dirty]
    return [*changed, *([f"uncommitted changes in the {' and the '.join(dirty)}"] if dirty else [])]


def regressions(rows: Sequence[Change], allowed: float) -> List[str]:
    """Return a sentence for each row whose time surely grew by more than `allowed`, or that has no times any more."""
    reasons = []
    for row in rows:
        new, is_ok = row.pair.new, row.pair.baseline.status == "ok"
        if new.status != "ok" and is_ok:
            reasons.append(f"{row.pair.name}: was measured at the baseline, now {new.status}: {new.reason}")
        for scope, time in row.time.items():
            if time.lost:
                reasons.append(f"{row.pair.name} {scope}: was timed at the baseline, has no times now")
            if time.low is not None and not time.doubt and time.low > 1 + allowed:
                reasons.append(f"{row.pair.name} {scope}: slower by at least {100 * (time.low - 1):.1f}%")
    return reasons


def undecided(rows: Sequence[Change], allowed: float) -> List[str]:
    """Return a sentence for each row whose time may have grown by more than `allowed`, though not surely."""
    reasons = []
    for row in rows:
        for scope, time in row.time.items():
            if time.ratio is None or (not time.doubt and time.low is not None and time.low > 1 + allowed):
                continue
            # what is below the limit is no difference that a drift or the machine's day would have to explain
            is_withheld = not time.kinds.isdisjoint(("beside load", "few rounds", "busy"))
            is_above = time.high is None or time.high > 1 + allowed
            if is_withheld or (is_above and time.doubt) or time.high is None:
                reasons.append(f"{row.pair.name} {scope}: {time.doubt or time.reason}")
            elif time.high > 1 + allowed:
                reasons.append(f"{row.pair.name} {scope}: it may have grown by up to {100 * (time.high - 1):.1f}%")
    return reasons


def gone(sides: Sides) -> List[str]:
    compared = list(dict.fromkeys(pair.baseline.name for pair in sides.pairs))
    names = list(dict.fromkeys(sides.label(run) for run in sides.gone if run.status == "ok"))
    advice = f"where that is meant, compare with --only {','.join(compared)}, or the run folders that both have"
    return [f"{', '.join(names)}: measured at the baseline, not there any more; {advice}"] if names else []
