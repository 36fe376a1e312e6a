"""Compare pairs of runs: time, memory and errors, each with a verdict and its reason.

Only runs that measured the same thing on the same kind of machine are a pair; an error names what differs otherwise.
Time is judged over rounds (see standing.py): paired where the rounds of both sides ran beside each other, else as two
independent groups.  All intervals of one comparison hold together with 95% (Bonferroni), so that a comparison of many
rows raises no more false alarms than one of a single row.  The rounds of two separate runs cannot show whether the
machine changed between them.  The tolerance, the drift within each run and the load beside each sample guard against
that.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from common.analysis import measured
from common.analysis.groups import differences, newest_first, newest_of_each
from common.analysis.row import PEAKS, SCOPES, Row
from common.analysis.standing import Margins, Standing, percent, stand
from common.core import statistics
from common.core.errors import UserError
from common.core.files import not_there
from common.core.implementations import BY_NAME, IMPLEMENTATIONS
from common.core.statistics import TOLERANCE
from common.core.text import plain
from common.records import schema, store
from common.records.schema import Line, Record

#: The process's peak (VmHWM) differs by some percent between two runs of the same code.
PROCESS_TOLERANCE = 0.1
#: Rounding differs with the order of a sum: a change is another order of magnitude, well above float32's rounding.
ERROR_FACTOR, ERROR_FLOOR = 10.0, 1e-6


# Pairs.


@dataclass(frozen=True, eq=False)
class Pair:
    """Hold two runs that measured the same."""

    baseline: Row
    new: Row

    @property
    def name(self) -> str:
        return self.new.name if self.one_loss else f"{self.new.name} against {self.baseline.name}"

    @property
    def one_loss(self) -> bool:
        """Tell whether both sides are of one implementation."""
        return self.baseline.name == self.new.name

    @property
    def together(self) -> bool:
        """Tell whether both sides were measured in alternation, in the rounds of one run."""
        return self.baseline.run_id == self.new.run_id


@dataclass(frozen=True)
class Sides:
    """Hold the runs of two measurements.

    Attributes:
        pairs: runs that both sides have.
        gone: runs of the baseline that the new side lacks.
        added: runs that only the new side has.
    """

    pairs: List[Pair]
    gone: Sequence[Row] = ()
    added: Sequence[Row] = ()

    def label(self, run: Row) -> str:
        """Return the name of a run's implementation, or that of its folder where a pair has another run of the
        implementation."""
        compared = any(run.name in (pair.baseline.name, pair.new.name) for pair in self.pairs)
        return run.folder.name if compared else run.name


def read_runs(path: Path) -> List[Row]:
    """Return the runs at or under `path`: a results.jsonl, a run folder or a log folder.

    Raises UserError where there is none or one cannot be read.
    """
    problem = not_there(path)
    if problem:
        raise UserError(f"{path}: {problem}; name a log folder, a run folder or a {schema.FILE_NAME}")
    files = store.files_named(schema.FILE_NAME, path) if os.path.isdir(path) else [path]
    if not files:
        raise UserError(f"{path}: no {schema.FILE_NAME} in it; name a folder that a benchmark wrote")
    runs = [measured.row(records, file.parent, traces=False) for file, records in list(_readable(files))]
    runs = [run for run in runs if not run.largest]
    if not runs:
        raise UserError(f"{path}: holds only what --find-largest wrote; name a folder with runs that were timed")
    return runs


def _readable(files: Sequence[Path]) -> Iterator[Tuple[Path, List[Line]]]:
    """Return the records of each file; warn about a file that cannot be read as long as others can.

    Raises UserError where none can be read.
    """
    failed: List[UserError] = []
    for file in files:
        try:
            yield file, store.read_run(file)[1]
        except UserError as error:
            failed.append(error)
    if len(failed) == len(files):
        raise failed[0]
    for problem in failed:
        store.warn(f"{problem}; left out")


def two_sides(baseline: Path, new: Path, only: Sequence[str] = ()) -> Sides:
    """Return the runs of two paths in pairs.  only: names of the implementations to pair; none for all.

    A single run on each side is a pair whatever the names.  Raises UserError where nothing is on both sides, and where
    an implementation is on both but was measured with other settings.
    """
    before, after = (
        newest_of_each(read_runs(path), lambda one, other: one.name == other.name and not differences(one, other))
        for path in (baseline, new)
    )
    if len(before) == len(after) == 1 and not only:
        return Sides([checked(before[0], after[0])])
    names = list(dict.fromkeys(run.name for run in [*before, *after]))
    unknown = [name for name in only if name not in names]
    if unknown:
        raise UserError(
            f"--only {','.join(unknown)}: not in {baseline} or {new}; there are {', '.join(map(plain, names))}"
        )
    before, after = ([run for run in side if not only or run.name in only] for side in (before, after))
    pairs: List[Pair] = []
    for name in names:
        mine = [run for run in before if run.name == name]
        theirs = [run for run in after if run.name == name]
        fitting = [Pair(first, other) for first in mine for other in theirs if not differences(first, other)]
        pairs += fitting or ([checked(newest_first(mine)[0], newest_first(theirs)[0])] if mine and theirs else [])
    compared = [id(run) for pair in pairs for run in (pair.baseline, pair.new)]
    gone, added = ([run for run in side if id(run) not in compared] for side in (before, after))
    if not pairs:
        sides = ((baseline, gone), (new, added))
        held = (f"{path} has {', '.join(plain(run.name) for run in runs) or 'none'}" for path, runs in sides)
        raise UserError(f"no implementation is in both: {'; '.join(held)}")
    return Sides(pairs, gone, added)


def within(log: Path, baseline: str, new: str) -> List[Pair]:
    """Return the pair of two implementations in a log folder: of the newest run that has both, else the newest run of
    each.

    Raises UserError where one is missing or they were measured with other settings.
    """
    runs = read_runs(log)
    sides = [[run for run in runs if run.name == name] for name in (baseline, new)]
    for name, side in zip((baseline, new), sides):
        if not side:
            names = ", ".join(dict.fromkeys(plain(run.name) for run in runs))
            raise UserError(f"{log}: no run of {name} in it; there are {names}")
    pairs = [Pair(first, other) for first in sides[0] for other in sides[1]]
    together = [pair for pair in pairs if pair.together and not differences(pair.baseline, pair.new)]
    if together:
        newest = max(together, key=lambda pair: pair.baseline.started or "")
        return [checked(newest.baseline, newest.new)]
    return [checked(newest_first(sides[0])[0], newest_first(sides[1])[0])]


def checked(baseline: Row, other: Row) -> Pair:
    """Return the pair; raise UserError, which names the differences, if it cannot be compared."""
    different, advice = differences(baseline, other), "run both with the same flags on the same machine"
    if baseline.loss != other.loss and baseline.torch and other.torch and baseline.torch != other.torch:
        different.append(f"torch {baseline.torch} / {other.torch}")
        advice = f"a ratio would be that of the torches too: {_under_one_torch(baseline, other)}"
    if different:
        raise UserError(
            f"{baseline.folder} and {other.folder} are not comparable: {'; '.join(map(plain, different))}; {advice}"
        )
    return Pair(baseline, other)


def _under_one_torch(*rows: Row) -> str:
    """Return which losses to run instead: one that runs under both torches, beside the one outside the main
    environment."""
    for row in reversed(rows):
        known = BY_NAME.get(row.loss)
        environment = row.name.partition("@")[2] or (known.environment if known else "main")
        control = next((each.name for each in IMPLEMENTATIONS if each.control and each.kind == row.kind), None)
        if environment != "main" and control and control != row.loss:
            pair = f"{row.name},{control}@{environment}"
            return f"compare {row.name} with {control}@{environment}, from ./benchmark_all.py --only {pair}"
    return "measure one of them under the other's torch too (NAME@ENVIRONMENT), and compare these two"


# Changes.


def side_json(run: Row) -> Record:
    """Return one of the two runs of a comparison as JSON has it."""
    status, reason = run.failure or ("ok", "")
    return {
        **{"file": str(run.results), "name": run.name, "run_id": run.run_id, "started": run.started},
        **{key: getattr(run.header, key) for key in ("git_revision", "git_dirty")},
        "kind": str(run.kind),
        **{key: getattr(run.environment, key) for key in ("torch", "implementation_version", "python")},
        **{"status": status, "reason": reason, "measured": is_measured(run)},
    }


def is_measured(run: Row) -> bool:
    """Return whether a run has anything to compare."""
    return bool(run.timed or run.peaks_mb or run.checked.loss_error is not None)


#: Fields of a standing in JSON.
TIME_KEYS = ("verdict", "reason", "doubt", "paired", "low", "high", "detectable")


def time_json(standing: Standing) -> Record:
    """Return the change of a time as JSON has it; ratio, low and high are None where there is none."""
    return {
        **{key: getattr(standing, key) for key in TIME_KEYS},
        "ratio": standing.times,
        "batches": standing.ratio.batches if standing.ratio else 0,
        **dict(zip(("baseline_ms", "new_ms"), standing.both_ms)),
        **dict(zip(("baseline_rounds", "new_rounds"), standing.rounds)),
        **dict(zip(("baseline_busy", "new_busy"), standing.busy)),
        "lost": standing.lost,
    }


class MemoryChange(NamedTuple):
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


class ErrorChange(NamedTuple):
    """Hold the relative errors of both sides against the float64 oracle by field of the record; None where they were
    not measured."""

    verdict: str
    reason: str
    baseline: Dict[str, Optional[float]]
    new: Dict[str, Optional[float]]


@dataclass
class Change:
    """Hold what changed between the two runs of a pair.

    Attributes:
        time, memory: by scope.
        changed: differences in the code and its environment, as "torch 2.10.0 -> 2.11.0".
    """

    pair: Pair
    margins: Margins
    time: Dict[str, Standing]
    memory: Dict[str, MemoryChange]
    errors: ErrorChange
    changed: List[str]

    @property
    def name(self) -> str:
        return self.pair.name

    def as_json(self) -> Record:
        """Return the change as JSON has it."""
        errors, pair = self.errors, self.pair
        sides = {f"{side}_{key}": value for side in ("baseline", "new") for key, value in getattr(errors, side).items()}
        return {
            **{"name": self.name, "baseline": side_json(pair.baseline), "new": side_json(pair.new)},
            **{"paired_rounds": pair.together, **self.margins._asdict()},
            "time": {scope: time_json(standing) for scope, standing in self.time.items()},
            "memory": {scope: change._asdict() for scope, change in self.memory.items()},
            "errors": {"verdict": errors.verdict, "reason": errors.reason, **sides},
            "changed": self.changed,
        }


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
    both = [pair.baseline.of(scope).ms and pair.new.of(scope).ms for pair in pairs for scope in scopes]
    confidence = statistics.confidence_of_each(sum(map(bool, both)))
    margins = Margins(tolerance, max(same or tolerance, tolerance), confidence)
    return [_change(pair, scopes, margins) for pair in pairs]


def _change(pair: Pair, scopes: Sequence[str], margins: Margins) -> Change:
    times = {scope: stand(pair.new, pair.baseline, scope, margins) for scope in scopes}
    peaks = {scope: _memory(pair, scope, margins.tolerance) for scope in scopes}
    keys = ("loss_error", "grad_error", "approximation_gap")
    errors = ({key: getattr(run.checked, key) for key in keys} for run in (pair.baseline, pair.new))
    return Change(pair, margins, times, peaks, ErrorChange(*_judged(pair), *errors), _changed(pair))


def _memory(pair: Pair, scope: str, tolerance: float) -> MemoryChange:
    """Compare the highest peaks over the batches, since these decide what fits: allocators count exactly, the process's
    resident peak does not."""
    sides = [run.peaks_mb.get(scope, {}) for run in (pair.baseline, pair.new)]
    for counter in PEAKS:
        before, after = (side.get(counter, {}) for side in sides)
        batches = set(before) & set(after)
        peaks = [max((side[batch] for batch in batches), default=0.0) for side in (before, after)]
        if min(peaks) > 0:
            ratio, source = peaks[1] / peaks[0], "the allocator's own count"
            if counter == "process":
                tolerance, source = max(tolerance, PROCESS_TOLERANCE), "the resident peak of one process each"
            verdict = statistics.verdict(ratio, ratio, tolerance)
            word = {"faster": "less", "slower": "more"}.get(verdict, "same")
            reason = f"{abs(ratio - 1):.1%} {word} memory ({source})"
            if word == "same":
                reason = f"the ratio, {ratio:.3f}, is within {percent(tolerance)} ({source})"
            return MemoryChange(word, reason, ratio, peaks[0], peaks[1], f"{counter}_bytes", len(batches))
    absent = [side for side, peaks_of in zip(("the baseline", "the new side"), sides) if not any(peaks_of.values())]
    reason = f"no peaks of the memory pass for {' and '.join(absent) or 'a batch of both'}"
    before_mb, after_mb = (next((max(side[of].values()) for of in PEAKS if side.get(of)), None) for side in sides)
    return MemoryChange("unclear", reason, None, before_mb, after_mb)


def _judged(pair: Pair) -> Tuple[str, str]:
    """Judge the errors of both sides against the float64 oracle; return verdict and reason."""
    baseline, new = pair.baseline.checked, pair.new.checked
    for record, side in ((baseline, "the baseline"), (new, "the new side")):
        if record.ok is None:
            return "unclear", f"{side} was not checked against the oracle (the correctness pass)"
    if not new.ok:
        return "wrong", f"the new side is further from the oracle than {new.tolerance}"
    if not baseline.ok:
        return "better", f"the baseline is further from the oracle than {baseline.tolerance}, the new is not"
    words = []
    for key, name in (("loss_error", "loss"), ("grad_error", "gradient")):
        before, after = getattr(baseline, key) or 0.0, getattr(new, key) or 0.0
        if max(before, after) > ERROR_FLOOR and max(before, after) > ERROR_FACTOR * min(before, after):
            words.append(("worse" if after > before else "better", f"{name} error {before:.1e}, now {after:.1e}"))
    if not words:
        return "same", "both are right, with errors of the same order"
    kinds = {word for word, _ in words}
    return (kinds.pop() if len(kinds) == 1 else "unclear"), "; ".join(text for _, text in words) + " (both are right)"


def _changed(pair: Pair) -> List[str]:
    """Return the recorded differences in the code and its environment, as "torch 2.10.0 -> 2.11.0"."""
    labels = {"git_revision": "revision", "torch": "torch", "implementation_version": "version", "python": "Python"}
    if not pair.one_loss:
        labels = {"torch": "torch"}
    before, after = side_json(pair.baseline), side_json(pair.new)
    both = [(label, str(before[key])[:20], str(after[key])[:20]) for key, label in labels.items()]
    changed = [f"{label} {first} -> {other}" for label, first, other in both if first != other]
    dirty = [word for word, side in (("baseline", before), ("new side", after)) if side["git_dirty"]]
    if pair.one_loss and dirty:
        changed.append(f"uncommitted changes in the {' and the '.join(dirty)}")
    return changed


# What follows from changes.


def regressions(rows: Sequence[Change], allowed: float) -> List[str]:
    """Return why a change must be refused, one sentence for each row with a regression.

    These are the rows whose time surely grew by more than `allowed` (0.02 for 2%), and those that could be measured at
    the baseline but not on the new side; see ``gone`` too.
    """
    reasons = []
    for row in rows:
        if row.pair.new.failure and not row.pair.baseline.failure:
            reasons.append(f"{row.name}: was measured at the baseline, now {row.pair.new.failure[0]}")
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
