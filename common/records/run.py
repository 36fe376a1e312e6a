"""Start, continue and extend runs.

A run measures one implementation, or one thing that a tool measures.  It has a folder of its own
under the log directory, with its records.  A process that measures into the folder holds a lock
there, so that no other one continues the same run.
"""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Generic, TypeVar

from rnnt_bench.core.errors import UserError
from rnnt_bench.core.files import ROOT, Claim, Held, cannot_write, code_digest, not_a_folder
from rnnt_bench.core.implementations import find
from rnnt_bench.core.settings import Settings
from rnnt_bench.core.text import plain
from rnnt_bench.records import schema, store
from rnnt_bench.system import machine

#: The lock file in the folder of a run as long as a process measures into it.
LOCK_NAME = ".measuring.lock"
Head = TypeVar("Head", bound=schema.FirstLine)


class Run:
    """The records of a run, in memory and in a file; each addition is written before the next job
    starts.

    Attributes:
        path: the file
        records: all but the samples, which are in the file alone
        claim: the lock of the folder
        resumed: whether an earlier process measured some of it
        failed: whether a job that this process added did not end well
        unwritten: records for which the disk had no room yet
    """

    def __init__(
        self, path: Path, existing: Sequence[schema.Line] = (), claim: Claim | None = None
    ):
        self.path = path
        self.folder = path.parent
        self.claim = claim
        self.records = _without_samples(existing)
        self.resumed = len(existing) > 1  # a new run has its first line alone
        self.unwritten: list[schema.Line] = []
        self.failed = False

    def add(self, new: Sequence[schema.Line]) -> None:
        """Add records: those of a job, its status last, or some without a status.  Set `failed`
        after a job that did not end well.

        If the disk has no room for a job, the job becomes one that failed: its status record is
        changed to "error", and is kept alone, on disk too if there is room for that.  If the disk
        has no room for records without a status, raise NotWritten; they stay in memory, and the
        next addition tries to write them again."""
        records_before = len(self.records)
        unwritten_before = len(self.unwritten)
        end = store.status_of(new)
        try:
            self._write(new)
        except store.NotWritten as error:
            if end is None:
                raise
            del self.records[records_before:]
            del self.unwritten[unwritten_before:]
            end.status = "error"
            end.reason = str(error)
            with suppress(store.NotWritten):
                self._write([end])
        self.failed = self.failed or (end is not None and end.status != "ok")

    def _write(self, new: Sequence[schema.Line]) -> None:
        """Add records in memory, without samples, and append all to the file, after those that are
        not written yet.

        Raises NotWritten.  Then they are in memory, and `unwritten` has them too."""
        self.records += _without_samples(new)
        self.unwritten += new
        store.append(self.path, map(schema.as_written, self.unwritten))
        self.unwritten.clear()

    def is_done(self, job: str) -> bool:
        """Return whether a job ended well; --resume tries any other again."""
        return store.ended_well(store.latest_jobs(self.records).get(job, []))

    def needs(self, job: str) -> bool:
        """Return whether a job is still to be carried out.  After one that failed none is."""
        return not (self.failed or self.is_done(job))

    @property
    def name(self) -> str:
        """Return the name in the first record: of the implementation, or of what a tool measures;
        "" if the record has none."""
        return str(getattr(self.records[0], "name", ""))

    @property
    def header(self) -> schema.Header:
        """Return the first record of a run of an implementation."""
        header = self.records[0]
        assert isinstance(header, schema.Header)
        return header

    def close(self) -> None:
        """Let other processes write into the folder."""
        if self.claim:
            self.claim.release()

    def discard_if_empty(self) -> None:
        """Remove the folder of a run that never measured anything."""
        if all(isinstance(record, schema.FirstLine) for record in self.records):
            self.close()
            remove(self.path)


def _without_samples(lines: Iterable[schema.Line]) -> list[schema.Line]:
    return [line for line in lines if not isinstance(line, schema.Sample)]


def remove(path: Path) -> None:
    """Delete a file of records, and its folder unless another file is in there.  What cannot be
    deleted stays, without an error."""
    with suppress(OSError):
        path.unlink(missing_ok=True)
        path.parent.rmdir()


def claim_folder(log_dir: Path, base: str) -> Claim:
    """Lock an empty folder `base` in `log_dir`, made if it is absent; return the lock.

    If that name is taken, try base.2, base.3, ...  Raises UserError if none can be made."""
    folder, number = log_dir / base, 1
    while True:
        try:
            log_dir.mkdir(parents=True, exist_ok=True)
            folder.mkdir(exist_ok=True)
            if not any(folder.iterdir()):
                return Claim(folder / LOCK_NAME)
        except Held:
            pass  # another run took the folder just now
        except OSError as error:
            # A file, or a link that leads nowhere, may have this name: then the next is tried.
            if not (isinstance(error, FileExistsError) and os.path.isdir(log_dir)):
                reason = not_a_folder(error.filename) or error.strerror
                raise UserError(
                    f"--log-dir {log_dir}: cannot write {error.filename} ({reason}); name another folder"
                ) from error
        number += 1
        folder = log_dir / f"{base}.{number}"


def new_run(log_dir: Path, base: str, file_name: str, head: Mapping[str, Any]) -> Run:
    """Start a run in a new folder: write the first line of its file, and return the run.

    Raises UserError if the folder cannot be made.  Raises UserError too if the line cannot be
    written; the folder is removed then.

    Args:
        log_dir: the log directory, in which the folder is made
        base: the name of the folder; if that is taken, it becomes base.2, base.3, ...
        file_name: schema.FILE_NAME or schema.TOOL_FILE_NAME
        head: the first line of the file, without its schema
    """
    claim = claim_folder(log_dir, base)
    # The dict itself is written: a typed record would leave out fields that have their defaults.
    first = {**head, "schema": schema.SCHEMA}
    run = Run(claim.path.with_name(file_name), [schema.typed(first)], claim)
    try:
        store.append(run.path, [first])
    except store.NotWritten:
        run.discard_if_empty()
        raise
    return run


def continued_run(path: Path) -> Run:
    """Return the run in a file, to be continued.  Cut off of the file a job that a killed process
    left half written.

    Raises UserError while another process is measuring the run, and for a file that cannot be read
    or written."""
    lock = path.with_name(LOCK_NAME)
    try:
        claim = Claim(lock)
    except Held as held:
        raise UserError(
            f"--resume: {path.parent} is being measured by process {held}: wait for it, or give another --log-dir"
        ) from None
    except OSError as error:
        raise UserError(f"--resume: {cannot_write(lock, error, 'leave the flag out')}") from error
    try:
        store.mend(path)
        return Run(path, store.read(path), claim)
    except UserError:
        claim.release()
        raise


def origin() -> schema.Record:
    """Return the fields of a first line that every run has: its id, its command, the present time,
    this machine and the present code of the suite."""
    revision, dirty = machine.git_state(ROOT)
    return {
        "run_id": uuid.uuid4().hex[:12],
        "command": sys.argv,
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "git_revision": revision,
        "git_dirty": dirty,
        "code": code_digest(),
        "machine": machine.describe(),
    }


@dataclass(frozen=True)
class EarlierRun(Generic[Head]):
    """Describe a run on disk.  head: its first line; path: its file."""

    head: Head
    path: Path


def resumable(runs: Sequence[EarlierRun[Head]], here: schema.Record) -> list[EarlierRun[Head]]:
    """Return the runs that began on this machine with the present code of the suite.  If there are
    runs, but none of these, print what has changed since the newest.

    runs: earlier runs, the newest last; here: a first line's fields for now, at least those of
    `origin`."""
    # A first line of any kind has the fields that `_change` compares, so a nameless tool's will do.
    now: schema.FirstLine = schema.typed({"record": "tool", "tool": "", "name": "", **here})
    changes = [_change(run.head, now) for run in runs]
    if changes and all(changes):
        print(f"--resume: {plain(changes[-1])}: a run of its own begins", file=sys.stderr)
    return [run for run, change in zip(runs, changes) if not change]


def _change(head: schema.FirstLine, now: schema.FirstLine) -> str:
    """Return in words how the machine or the code has changed since a run began; "" for no change.

    head: the first line of the run; now: the line that a run would begin with now."""
    for key in head.machine.__struct_fields__:
        before = getattr(head.machine, key)
        after = getattr(now.machine, key)
        # None: the suite that began the run did not record it, or could not read it.
        # memory_bytes: another kernel may count the memory differently.  python: the command's own,
        # which measures nothing.
        if before not in (None, after) and key not in ("memory_bytes", "python"):
            return f"the run began on another machine: {key} {before}, here {after}"
    if head.git_revision != now.git_revision:
        return f"the run began at another revision of the suite, {head.git_revision}, here {now.git_revision}"
    if head.code not in (None, now.code):
        return "the code of the suite has changed since the run began"
    return ""


class Changed(Exception):
    """Raised where a job measured something else than earlier jobs of its run, another version of a
    package say; the message says what differs."""


def facts(name: str, lines: Iterable[schema.Line]) -> dict[str, object]:
    """Return the facts of a job that all jobs of its run in the same Python must share.

    They are {description: value}, such as {"torch": "2.11.0", "threads of k2": 2}.

    Args:
        name: the implementation or task
        lines: the records of one job of `name`
    """
    result: dict[str, object] = {}
    for line in lines:
        if isinstance(line, schema.Environment):
            result.update(
                torch=line.torch, Python=line.python, CUDA=line.cuda, device=line.device_name
            )
            result["GPU"] = line.gpu.uuid if line.gpu else None
            # The tasks of a tool may differ in these on purpose, so each gets keys of its own.
            result[f"threads of {name}"] = line.threads
            result[f"the version of {name}"] = line.implementation_version
            result[f"the digest of {line.shape_file}"] = line.shape_file_sha256
        elif isinstance(line, schema.Status):
            result.update({f"the digest of {file}": digest for file, digest in line.code.items()})
    return {key: value for key, value in result.items() if value is not None}


def earlier_runs(log_dir: Path, file_name: str, kind: type[Head]) -> list[EarlierRun[Head]]:
    """Return the runs with a file of this name under `log_dir`, the newest last.

    A file whose first line cannot be read is skipped, with a warning, so that it does not block
    --resume.  If there are several runs, also warn if the newest seems to begin in the future.

    kind: schema.Header or schema.ToolHeader, the type of the first line."""
    runs = []
    skipped = []
    for path in sorted(log_dir.glob(f"*/{file_name}")):
        head = store.first(path)
        if isinstance(head, kind):
            runs.append(EarlierRun(head, path))
        else:
            skipped.append(plain(path.parent.name))
    if skipped:
        print(
            f"warning: --resume: skipped {', '.join(skipped)} in {log_dir}: the first line cannot be read",
            file=sys.stderr,
        )
    runs.sort(key=lambda run: run.head.started)
    if len(runs) > 1:
        newest = runs[-1]
        store.warn_of_clock(newest.path.parent, newest.head.started)
    return runs


@contextmanager
def open_runs(
    names: Sequence[str],
    settings: Settings,
    log_dir: Path,
    resume: bool,
    cell: Mapping[str, Any] | None = None,
    or_new: bool = False,
) -> Iterator[dict[str, Run]]:
    """Yield a Run for each implementation, by name.  Raises UserError where there is no run to
    resume, or another process is measuring it.

    With `resume`, an implementation that the resumed run lacks gets a folder of its own, with the
    id of that run.

    All runs are closed at the end.  After a UserError, also one from within the `with` block, the
    folders of those that measured nothing are removed.

    Args:
        names: the implementations
        settings: the settings that all of them have
        log_dir: the log directory
        resume: whether the newest run with these settings goes on, instead of a new one
        cell: {setting: value} of this cell of a sweep
        or_new: whether a new run begins where there is none to resume
    """
    shared = {**origin(), "settings": settings.to_json()}
    if cell:
        shared["values"] = dict(cell)
    paths: dict[str, Path] = {}
    if resume:
        wanted = schema.recorded(settings)
        earlier = [
            run
            for run in earlier_runs(log_dir, schema.FILE_NAME, schema.Header)
            if run.head.name in names
            and run.head.settings == wanted
            and run.head.values == (cell or {})
        ]
        if not (earlier or or_new):
            raise UserError(
                f"--resume: no run with these settings under {log_dir}; leave the flag out to start one"
            )
        earlier = resumable(earlier, shared)
        if earlier:  # the newest is the last; others of its id were measured beside it
            newest = earlier[-1].head
            shared.update(run_id=newest.run_id, started=newest.started)
            paths = {run.head.name: run.path for run in earlier if run.head.run_id == newest.run_id}
    opened: dict[str, Run] = {}
    try:
        for name in names:
            if name in paths:
                opened[name] = continued_run(paths[name])
            else:
                implementation = find(name)
                head = {
                    "record": "run",
                    "name": name,
                    "package": implementation.package,
                    "kind": implementation.kind,
                    "exact": implementation.exact,
                    "suffix": settings.suffix,
                    **shared,
                }
                base = f"{implementation.folder}-{settings.suffix}"
                opened[name] = new_run(log_dir, base, schema.FILE_NAME, head)
        yield opened
    except UserError:  # a mistake of the user, or a disk without room for a first line
        for run in opened.values():
            run.discard_if_empty()
        raise
    finally:
        for run in opened.values():
            run.close()
