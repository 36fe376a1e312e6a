"""Which runs are compared with which: two sides read from disk, paired by implementation and settings.

A pair is only made of runs that measured the same thing on the same kind of machine; what differs otherwise is named
in the error.  Leaves out what the pairs say (comparison).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple

from common.analysis import measured
from common.analysis.groups import grouped
from common.analysis.row import Row
from common.analysis.search import is_search
from common.core.errors import UserError
from common.core.paths import not_there
from common.core.settings import SETTINGS
from common.core.text import plain
from common.records import schema, store
from common.records.schema import Batch, Line


@dataclass(frozen=True, eq=False)
class Pair:
    baseline: Row
    new: Row

    @property
    def name(self) -> str:
        return self.new.name if self.one_loss else f"{self.new.name} against {self.baseline.name}"

    @property
    def one_loss(self) -> bool:
        """Is it one implementation on both sides?"""
        return self.baseline.name == self.new.name

    @property
    def together(self) -> bool:
        """Were both sides measured in the rounds of one run, in alternation?"""
        return self.baseline.run_id == self.new.run_id


@dataclass(frozen=True)
class Sides:
    """What two measurements have in common, and what they have not: runs of the baseline that the new side has none
    for (gone), runs of the new side alone (added)."""

    pairs: List[Pair]
    gone: Sequence[Row] = ()
    added: Sequence[Row] = ()

    def label(self, run: Row) -> str:
        """An implementation's name, or its folder's where the implementation was compared with other settings."""
        compared = any(run.name in (pair.baseline.name, pair.new.name) for pair in self.pairs)
        return run.folder.name if compared else run.name


def conditions(run: Row) -> Dict[str, Any]:
    """Everything that has to agree with a run it is compared with; None for what is not known or does not apply."""
    known, machine = run.configuration, run.header.machine
    shapes = known["shape_file_sha256"]
    return {
        **{setting.label: known.get(key) for key, setting in SETTINGS.items() if setting.label},
        "shape file": shapes and f"sha256 {shapes[:12]}",
        "batches": _batches(run.batches),
        "device name": run.device_name if run.device != "cpu" else None,
        "machine": machine.cpu and f"{machine.cpu}, {machine.cores} cores",
    }


def _batches(batches: Sequence[Batch]) -> Optional[str]:
    """The same words only for the same batches."""
    if not batches:
        return None
    useful, padded = sum(one.useful_cells for one in batches), sum(one.padded_cells for one in batches)
    return f"{len(batches)} from {batches[0].index} on of {useful} cells ({padded} padded)"


def differences(one: Row, other: Row) -> List[str]:
    """What two runs cannot be compared for, as "dtype float32 / float64"; what one of them does not know is no
    difference."""
    mine, theirs = conditions(one), conditions(other)
    return [
        f"{label} {mine[label]} / {theirs[label]}"
        for label in mine
        if mine[label] is not None and theirs.get(label) is not None and mine[label] != theirs[label]
    ]


def read_runs(path: Path) -> List[Row]:
    """The runs at or under `path`: a results.jsonl, a run folder or a log folder.  Raises UserError where there is none
    or one cannot be read."""
    problem = not_there(path)
    if problem:
        raise UserError(f"{path}: {problem}; name a log folder, a run folder or a {schema.FILE_NAME}")
    if os.path.isdir(path):
        found = sorted(
            Path(folder) / schema.FILE_NAME for folder, _, names in os.walk(path) if schema.FILE_NAME in names
        )
    else:
        found = [path]
    if not found:
        raise UserError(f"{path}: no {schema.FILE_NAME} in it; name a folder that a benchmark wrote")
    read = list(_readable(found))
    runs = [measured.row(records, file.parent, file.name, traces=False) for file, records in read]
    runs = [run for run in runs if not is_search(run.header)]
    if not runs:
        raise UserError(f"{path}: holds only what --find-largest wrote; name a folder with runs that were timed")
    return runs


def _readable(files: Sequence[Path]) -> Iterator[Tuple[Path, List[Line]]]:
    """The records of each file; one that cannot be read costs a warning where it is not the only one.  Raises
    UserError where none can be read."""
    failed: List[UserError] = []
    for file in files:
        try:
            yield file, store.read_run(file)[1]
        except UserError as error:
            failed.append(error)
    if len(failed) == len(files):
        raise failed[0]
    for one in failed:
        store.warn(f"{one}; left out")


def _newest_of_each(runs: Sequence[Row]) -> List[Row]:
    """Of several runs of one implementation that measured the same, the newest."""
    newest_first = sorted(runs, key=_age, reverse=True)
    same = grouped(newest_first, lambda kept, run: run.name == kept[0].name and not differences(run, kept[0]))
    return sorted((kept[0] for kept in same), key=lambda run: run.results)


def two_sides(baseline: Path, new: Path, only: Sequence[str] = ()) -> Sides:
    """Pairs of two paths, of the implementations of these names where some are given.

    One run on each side is a pair whatever the names.  Raises UserError where nothing is on both sides, and where an
    implementation is but was measured otherwise.
    """
    before, after = (_newest_of_each(read_runs(path)) for path in (baseline, new))
    if len(before) == len(after) == 1 and not only:
        return Sides([checked(before[0], after[0])])
    there = list(dict.fromkeys(run.name for run in [*before, *after]))
    unknown = [name for name in only if name not in there]
    if unknown:
        raise UserError(
            f"--only {','.join(unknown)}: not in {baseline} or {new}; there are {', '.join(map(plain, there))}"
        )
    before, after = ([run for run in side if not only or run.name in only] for side in (before, after))
    pairs: List[Pair] = []
    for name in there:
        mine = [run for run in before if run.name == name]
        theirs = [run for run in after if run.name == name]
        fitting = [Pair(one, other) for one in mine for other in theirs if not differences(one, other)]
        pairs += fitting or ([checked(_newest(mine), _newest(theirs))] if mine and theirs else [])
    compared = [id(run) for pair in pairs for run in (pair.baseline, pair.new)]
    gone, added = ([run for run in side if id(run) not in compared] for side in (before, after))
    if not pairs:
        sides = ((baseline, gone), (new, added))
        held = (f"{path} has {', '.join(plain(run.name) for run in runs) or 'none'}" for path, runs in sides)
        raise UserError(f"no implementation is in both: {'; '.join(held)}")
    return Sides(pairs, gone, added)


def within(log: Path, baseline: str, new: str) -> List[Pair]:
    """The pair of two implementations of one log folder: of the newest run that has both, else the newest of each.

    Raises UserError when one is not there or they were measured otherwise.
    """
    found = read_runs(log)
    sides = [[run for run in found if run.name == name] for name in (baseline, new)]
    for name, side in zip((baseline, new), sides):
        if not side:
            there = ", ".join(dict.fromkeys(plain(run.name) for run in found))
            raise UserError(f"{log}: no run of {name} in it; there are {there}")
    pairs = [Pair(one, other) for one in sides[0] for other in sides[1]]
    together = [pair for pair in pairs if pair.together and not differences(pair.baseline, pair.new)]
    if together:
        return [max(together, key=lambda pair: _age(pair.baseline))]
    return [checked(_newest(sides[0]), _newest(sides[1]))]


def checked(one: Row, other: Row) -> Pair:
    """The pair, or UserError with what differs."""
    different = differences(one, other)
    if different:
        raise UserError(
            f"{one.folder} and {other.folder} are not comparable: "
            f"{'; '.join(map(plain, different))}; "
            "run both with the same flags on the same machine"
        )
    return Pair(one, other)


def _newest(runs: Sequence[Row]) -> Row:
    return max(runs, key=_age)


def _age(run: Row) -> str:
    return run.started or ""
