"""A sweep on disk: one folder and one growing file for the runs of all cells (see common/results/records.py)."""

from __future__ import annotations

import json
import sys
import uuid
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from common import grid
from common.errors import UserError
from common.results import records
from common.results.records import Record
from common.running import machine, runs
from common.settings import ROOT, Settings
from common.setup.locks import Claim


class SweepRun(runs.Run):
    """Records of one implementation in one cell; each addition goes to the end of the sweep's file.  touched: by this
    process, not only by one that is resumed."""

    def __init__(self, sweep: SweepFile, cell: int, name: str, existing: Sequence[Record]):
        super().__init__(sweep.folder, existing)
        self.sweep, self.cell, self.name = sweep, cell, name
        self.touched = False

    def _keep(self, new: Sequence[Record]) -> None:
        self.touched = True
        about = {"cell": self.cell, "implementation": self.name}
        records.append(self.sweep.path, [{**_told_once(record), **about} for record in new])


def _told_once(record: Record) -> Record:
    """Without the distribution of the shape file, which nothing shows of a sweep and every cell would repeat."""
    return {key: value for key, value in record.items() if key != "shape_distribution"}


class SweepFile:
    """The runs of a sweep by cell and implementation.  claim: the lock of its folder, held until `close`."""

    def __init__(self, path: Path, found: Sequence[Record], claim: Claim):
        self.path, self.folder, self.claim = path, path.parent, claim
        self.header = found[0]
        self.runs: Dict[Tuple[int, str], SweepRun] = {}
        by_run: Dict[Tuple[int, str], List[Record]] = {}
        for record in found[1:]:
            by_run.setdefault((record["cell"], record["implementation"]), []).append(record)
        for (cell, name), existing in by_run.items():
            self.runs[cell, name] = SweepRun(self, cell, name, existing)

    def open_run(self, cell: int, values: grid.Cell, name: str, chosen: Settings) -> SweepRun:
        """The run of an implementation in a cell, with its header on disk."""
        if (cell, name) not in self.runs:
            run = self.runs[cell, name] = SweepRun(self, cell, name, [])
            about = {key: self.header[key] for key in ("git_revision", "git_dirty", "machine")}
            started = datetime.now(timezone.utc).isoformat(timespec="seconds")
            run.add({**runs.header(name, chosen, self.header["sweep_id"], started, about), "values": values})
        return self.runs[cell, name]

    def close(self) -> None:
        """Let other processes write into the folder."""
        self.claim.release()

    def discard_if_empty(self) -> None:
        """Remove the folder of a sweep that never measured anything."""
        if any(record["record"] != "run" for run in self.runs.values() for record in run.records):
            return
        self.close()
        try:
            self.path.unlink()
            self.folder.rmdir()
        except OSError:
            pass  # someone put a file there: leave it


def folder_name(axes: Sequence[grid.Axis]) -> str:
    """ "sweep-vocab-size_dtype"."""
    return "sweep-" + "_".join(grid.flag(axis.key) for axis in axes)


def start(axes: Sequence[grid.Axis], shared: Dict[str, Any], names: Sequence[str], log_dir: Path) -> SweepFile:
    """A new sweep in a folder of its own."""
    revision, dirty = machine.git_state(ROOT)
    header = {
        "record": "sweep",
        "schema": records.SCHEMA,
        "sweep_id": uuid.uuid4().hex[:12],
        "grid": {axis.key: list(axis.values) for axis in axes},
        "settings": shared,
        "names": list(names),
        "command": sys.argv,
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "git_revision": revision,
        "git_dirty": dirty,
        "machine": machine.describe(),
    }
    claim = runs.claim_folder(log_dir, folder_name(axes))
    path = claim.path.with_name(records.SWEEP_FILE_NAME)
    try:
        records.append(path, [header])
    except UserError:
        claim.release()
        raise
    return SweepFile(path, [header], claim)


def resume(axes: Sequence[grid.Axis], shared: Dict[str, Any], log_dir: Path) -> SweepFile:
    """The newest sweep under `log_dir` of the same grid and settings.  Raises UserError when there is none, or when
    another process is measuring it."""
    wanted = _identity({axis.key: axis.values for axis in axes}, shared)
    newest: Optional[Tuple[str, Path]] = None
    unreadable: List[str] = []
    for path in sorted(log_dir.glob(f"*/{records.SWEEP_FILE_NAME}")):
        head = records.first(path)
        try:
            same = _identity(head["grid"], head["settings"]) == wanted
            if same and (newest is None or head["started"] >= newest[0]):
                newest = head["started"], path
        except (LookupError, TypeError, AttributeError):
            unreadable.append(path.parent.name)
    runs.warn_of_unreadable(unreadable, log_dir)
    if newest is None:
        raise UserError(f"--resume: no sweep of this grid with these settings under {log_dir}; leave the flag out")
    claim = runs.claim_again(newest[1].parent)
    try:
        records.mend(newest[1])
        return SweepFile(newest[1], records.read(newest[1]), claim)
    except (UserError, LookupError, TypeError) as error:
        claim.release()
        if isinstance(error, UserError):
            raise
        raise UserError(
            f"{newest[1]}: a record is not as this suite writes it ({type(error).__name__}: {error}); "
            "leave out --resume to start anew"
        ) from error


def _identity(axes: Mapping[str, Sequence[Any]], shared: Any) -> str:
    """Of a grid and its settings, as text: lists and tuples are one in JSON, and the order of the keys counts."""
    return json.dumps([[[key, list(values)] for key, values in axes.items()], shared])
