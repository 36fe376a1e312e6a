"""A run of one implementation: its folder under the log directory, and its records in memory and on disk.

Folders are claimed, never shared: ``<name>-<suffix>``, and ``.2``, ``.3`` ... behind it when an earlier run is there,
so that TensorBoard and the summary never see windows of two runs as one.  As long as a process measures into a folder
it holds a lock there, so that no other one continues the same run.
"""

from __future__ import annotations

import itertools
import json
import sys
import uuid
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Dict, Iterable, Iterator, List, Mapping, Optional, Sequence, Union

from common.errors import UserError
from common.implementations import find
from common.results import records
from common.results.exports import plain
from common.results.records import Record
from common.running import machine
from common.settings import ROOT, Settings
from common.setup.locks import Claim, Held

#: In the folder of a run, or of a sweep, as long as a process measures into it.
LOCK_NAME = ".measuring.lock"


class Run:
    """Records of one implementation in one folder; every addition is on disk before the next job starts.

    claim: the lock of the folder, where it is this run's alone.
    """

    def __init__(self, folder: Path, existing: Sequence[Record], claim: Optional[Claim] = None):
        self.folder, self.claim = folder, claim
        self.records: List[Record] = list(existing)
        self.failed = False

    def add(self, new: Union[Record, Iterable[Record]]) -> None:
        """Raises records.NotWritten for what is not the end of a job; a job that the disk has no room for becomes one
        that failed, on disk too where there is room for that."""
        new = [new] if isinstance(new, dict) else list(new)
        try:
            self._add(new)
        except records.NotWritten as error:
            if new[-1]["record"] != "status":
                raise
            del self.records[-len(new) :]
            with suppress(records.NotWritten):
                self._add([{**new[-1], "status": "error", "reason": str(error)}])

    def _add(self, new: Sequence[Record]) -> None:
        self.records += new
        self.failed = self.failed or any(r["record"] == "status" and r["status"] != "ok" for r in new)
        self._keep(new)

    def _keep(self, new: Sequence[Record]) -> None:
        """Bring `new`, the last of the records, to disk."""
        records.write(self.folder, self.records)

    def _statuses(self) -> List[str]:
        jobs = records.latest_jobs(self.records).values()
        return [job[-1]["status"] for job in jobs if job[-1]["record"] == "status"]

    def is_done(self, job: str) -> bool:
        """Has the job ended well?  Anything else is worth another try when a run is resumed."""
        ended = records.latest_jobs(self.records).get(job, [])
        return bool(ended) and ended[-1].get("status") == "ok"

    @property
    def last_status(self) -> Record:
        return next(r for r in reversed(self.records) if r["record"] == "status")

    @property
    def status(self) -> str:
        return next(
            (status for status in self._statuses() if status != "ok"), "ok" if self._statuses() else "interrupted"
        )

    def close(self) -> None:
        """Let other processes write into the folder."""
        if self.claim:
            self.claim.release()

    def discard_if_empty(self) -> None:
        """Remove the folder of a run that never measured anything."""
        if any(r["record"] != "run" for r in self.records):
            return
        self.close()
        try:
            (self.folder / records.FILE_NAME).unlink()
            self.folder.rmdir()
        except OSError:
            pass  # someone put a file there: leave it


def claim_folder(log_dir: Path, base: str) -> Claim:
    """Make a new folder `base` (or base.2, base.3, ...) in `log_dir`, and hold its lock, whose path's parent it is.

    Raises UserError when that cannot be written.
    """
    for number in itertools.count(1):
        folder = log_dir / (base if number == 1 else f"{base}.{number}")
        try:
            try:
                log_dir.mkdir(parents=True, exist_ok=True)
                folder.mkdir()
            except FileExistsError:
                if log_dir.exists() and not log_dir.is_dir():
                    raise UserError(f"--log-dir {log_dir}: is a file; name a folder") from None
                if not folder.is_dir() or any(folder.iterdir()):
                    continue
            return Claim(folder / LOCK_NAME)
        except Held:
            continue  # another run took it just now
        except NotADirectoryError:
            raise UserError(f"--log-dir {log_dir}: part of this path is a file; name a folder") from None
        except OSError as error:
            raise UserError(
                f"--log-dir {log_dir}: cannot be written ({error.strerror}); name another folder"
            ) from error
    raise AssertionError("unreachable")


def claim_again(folder: Path) -> Claim:
    """The lock of the folder of a run that is to be continued.  Raises UserError while another process has it."""
    try:
        return Claim(folder / LOCK_NAME)
    except Held as held:
        raise UserError(
            f"--resume: {folder} is being measured by process {held.holder}: wait for it, or give another --log-dir"
        ) from None
    except OSError as error:
        raise UserError(f"--resume: {folder} cannot be written ({error.strerror}); leave the flag out") from error


def header(name: str, chosen: Settings, run_id: str, started: str, about: Dict[str, Any]) -> Record:
    """The ``run`` record."""
    return {
        "record": "run",
        "schema": records.SCHEMA,
        "run_id": run_id,
        "name": name,
        "suffix": chosen.suffix,
        "package": find(name).package,
        "kind": find(name).kind,
        "exact": find(name).exact,
        "settings": chosen.to_json(),
        "command": sys.argv,
        "started": started,
        **about,
    }


def _resumable(names: Sequence[str], chosen: Settings, log_dir: Path) -> Optional[Dict[str, Path]]:
    """Folders of the newest run under `log_dir` with the same settings, by implementation; None when there is none."""
    as_written = json.loads(json.dumps(chosen.to_json()))
    found: Dict[str, Dict[str, Path]] = {}
    started: Dict[str, str] = {}
    unreadable: List[str] = []
    for path in sorted(log_dir.glob(f"*/{records.FILE_NAME}")):
        head = records.head(path.parent)
        if not head:
            unreadable.append(path.parent.name)
        elif head.get("name") in names and head.get("settings") == as_written:
            found.setdefault(str(head.get("run_id")), {})[head["name"]] = path.parent
            started[str(head.get("run_id"))] = str(head.get("started"))
    warn_of_unreadable(unreadable, log_dir)
    if not found:
        return None
    return found[max(found, key=lambda run_id: started[run_id])]


def warn_of_unreadable(folders: Sequence[str], log_dir: Path) -> None:
    """One line, where there are any: they stand in nobody's way."""
    if folders:
        said = f"not looked at, as the first line cannot be read: {', '.join(map(plain, folders))} in {log_dir}"
        print(f"warning: --resume: {said}", file=sys.stderr)


@contextmanager
def open_runs(
    names: Sequence[str], chosen: Settings, log_dir: Path, resume: bool, more: Optional[Mapping[str, Any]] = None
) -> Iterator[Dict[str, Run]]:
    """A Run for each implementation: new folders, or those of the newest run with the same settings when resuming.

    more: further keys of the ``run`` records; when resuming, those of the run that is continued.  Raises UserError when
    there is nothing to resume, or when another process is measuring it.
    """
    opened: Dict[str, Run] = {}
    try:
        _open(opened, names, chosen, log_dir, resume, more or {})
        yield opened
    finally:
        for run in opened.values():
            run.close()


def _open(
    opened: Dict[str, Run],
    names: Sequence[str],
    chosen: Settings,
    log_dir: Path,
    resume: bool,
    more: Mapping[str, Any],
) -> None:
    """Fill `opened`."""
    folders = _resumable(names, chosen, log_dir) if resume else None
    if resume and folders is None:
        raise UserError(f"--resume: no run with these settings under {log_dir}; leave the flag out to start one")
    run_id = uuid.uuid4().hex[:12]
    started = datetime.now(timezone.utc).isoformat(timespec="seconds")
    revision, dirty = machine.git_state(ROOT)
    about = {"git_revision": revision, "git_dirty": dirty, "machine": machine.describe(), **more}
    if folders:
        folder = next(iter(folders.values()))
        head = records.run_header(records.read(folder))
        run_id, started = str(head.get("run_id")), str(head.get("started"))
        if not all(isinstance(head.get(key), type(value)) for key, value in more.items()):
            raise UserError(
                f"{folder}: its first line is not as this suite writes it; leave out --resume to start anew"
            )
        about.update({key: head[key] for key in more})
    for name in names:
        if folders and name in folders:
            opened[name] = Run(folders[name], [], claim_again(folders[name]))
            opened[name].records = records.read(folders[name])
            continue
        claim = claim_folder(log_dir, f"{find(name).folder}-{chosen.suffix}")
        opened[name] = Run(claim.path.parent, [], claim)
        opened[name].add(header(name, chosen, run_id, started, about))
