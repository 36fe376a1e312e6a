"""Pair the runs of two sides on disk by implementation and settings, for comparison.py.

Pairs only runs that measured the same thing on the same kind of machine; an error names what differs otherwise.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Iterator, List, Sequence, Tuple

from common.analysis import measured
from common.analysis.folders import files_named
from common.analysis.identity import differences, newest_first, newest_of_each
from common.analysis.row import Row
from common.analysis.search import is_search
from common.core.errors import UserError
from common.core.paths import not_there
from common.core.text import plain
from common.records import schema, store
from common.records.schema import Line


@dataclass(frozen=True, eq=False)
class Pair:
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
    files = files_named(schema.FILE_NAME, path) if os.path.isdir(path) else [path]
    if not files:
        raise UserError(f"{path}: no {schema.FILE_NAME} in it; name a folder that a benchmark wrote")
    read = list(_readable(files))
    runs = [measured.row(records, file.parent, file.name, traces=False) for file, records in read]
    runs = [run for run in runs if not is_search(run.header)]
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


def _newest_of_each(runs: Sequence[Row]) -> List[Row]:
    """Return the newest of several runs of one implementation that measured the same."""
    return newest_of_each(runs, lambda one, other: one.name == other.name and not differences(one, other))


def two_sides(baseline: Path, new: Path, only: Sequence[str] = ()) -> Sides:
    """Return the runs of two paths in pairs.  only: names of the implementations to pair; none for all.

    A single run on each side is a pair whatever the names.  Raises UserError where nothing is on both sides, and where
    an implementation is on both but was measured with other settings.
    """
    before, after = (_newest_of_each(read_runs(path)) for path in (baseline, new))
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
        return [max(together, key=lambda pair: pair.baseline.started or "")]
    return [checked(newest_first(sides[0])[0], newest_first(sides[1])[0])]


def checked(baseline: Row, other: Row) -> Pair:
    """Return the pair; raise UserError, which names the differences, if it cannot be compared."""
    different = differences(baseline, other)
    if different:
        raise UserError(
            f"{baseline.folder} and {other.folder} are not comparable: "
            f"{'; '.join(map(plain, different))}; "
            "run both with the same flags on the same machine"
        )
    return Pair(baseline, other)
