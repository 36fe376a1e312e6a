"""A sweep on disk: one folder and one growing file for the runs of all cells (see common/records/schema.py)."""

from __future__ import annotations

import sys
import uuid
from pathlib import Path
from typing import Any, Mapping, Sequence, Tuple

from common.core import grid
from common.core.settings import Settings
from common.records import run, schema, store
from common.records.run import Run
from common.records.schema import Header, Line, Record, SweepHeader
from common.system.locks import Claim


class SweepRun(Run):
    """Records of one implementation in one cell, at the end of the sweep's file."""

    def __init__(self, sweep: SweepFile, cell: int, name: str, existing: Sequence[Line]):
        super().__init__(sweep.path, existing)
        self.cell, self.name = cell, name
        self.before = len(self.records)

    @property
    def touched(self) -> bool:
        """Tell whether this process added to it."""
        return len(self.records) > self.before

    def _line(self, record: Record) -> Record:
        return {**record, "cell": self.cell, "implementation": self.name}


class SweepFile:
    """The runs of a sweep by cell and implementation.  claim: the lock of its folder, held until `close`."""

    def __init__(self, path: Path, header: SweepHeader, runs: Mapping[Tuple[int, str], Sequence[Line]], claim: Claim):
        self.path, self.folder, self.claim = path, path.parent, claim
        self.header = header
        self.runs = {key: SweepRun(self, *key, existing) for key, existing in runs.items()}

    def open_run(self, cell: int, values: grid.Values, name: str, settings: Settings) -> SweepRun:
        """Write the header of a run, an implementation in a cell, and return the run."""
        if (cell, name) not in self.runs:
            opened = self.runs[cell, name] = SweepRun(self, cell, name, [])
            of = self.header
            extra = {"git_revision": of.git_revision, "git_dirty": of.git_dirty, "values": values}
            extra["machine"] = schema.as_written(of.machine)
            opened.add(run.header(name, settings, of.sweep_id, run.now(), extra))
        return self.runs[cell, name]

    def close(self) -> None:
        """Let other processes write into the folder."""
        self.claim.release()

    def discard_if_empty(self) -> None:
        """Remove the folder of a sweep that never measured anything."""
        if all(isinstance(record, Header) for each in self.runs.values() for record in each.records):
            self.close()
            run.remove(self.path)


def start(
    axes: Sequence[grid.Axis],
    shared: Record,
    names: Sequence[str],
    log_dir: Path,
) -> SweepFile:
    """Make a folder for a new sweep and return the sweep.  shared: the settings that all cells have in common; machine:
    where that is not this one."""
    grid_ = {axis.key: list(axis.values) for axis in axes}
    head = {"settings": shared, "names": list(names), "command": sys.argv, "started": run.now(), **run.origin()}
    header = {"record": "sweep", "schema": schema.SCHEMA, "sweep_id": uuid.uuid4().hex[:12], "grid": grid_, **head}
    claim = run.claim_folder(log_dir, "sweep-" + "_".join(grid.flag(axis.key) for axis in axes))
    path = claim.path.with_name(schema.SWEEP_FILE_NAME)
    try:
        store.append(path, [header])
    except store.NotWritten:
        claim.release()
        run.remove(path)
        raise
    typed = schema.typed(header)
    assert isinstance(typed, SweepHeader)
    return SweepFile(path, typed, {}, claim)


def resume(axes: Sequence[grid.Axis], shared: Record, log_dir: Path) -> SweepFile:
    """Return the newest sweep under `log_dir` of this grid, settings and machine.

    Raises UserError if there is none, or if it is being measured.
    """
    wanted = _identity({axis.key: axis.values for axis in axes}, shared)
    heads = run.earlier(log_dir, schema.SWEEP_FILE_NAME, SweepHeader)
    same = [path for head, path in heads if _identity(head.grid, head.settings) == wanted]
    if not same:
        words = f"no sweep of this grid with these settings under {log_dir}; leave the flag out"
        raise run.NothingToResume(f"--resume: {words}")
    with run.claim_again(same[-1]) as claim:
        return SweepFile(same[-1], *store.read_sweep(same[-1]), claim)


def _identity(axes: Mapping[str, Sequence[Any]], shared: Any) -> Any:
    """Return what is equal for sweeps of one grid, in the order of its keys, and equal settings."""
    return run.read_back([list(axes.items()), shared])
