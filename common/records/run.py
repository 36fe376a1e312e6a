"""A run of one implementation: its folder under the log directory, of this run alone, and its
records.  A process that measures into a folder holds a lock there, so that no other one continues
the same run."""

from __future__ import annotations

import itertools
import os
import sys
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeVar

from rnnt_bench.core.errors import UserError
from rnnt_bench.core.files import ROOT, Claim, Held, cannot_write, code, not_a_folder
from rnnt_bench.core.implementations import find
from rnnt_bench.core.settings import Settings
from rnnt_bench.core.text import plain
from rnnt_bench.records import schema, store
from rnnt_bench.system import machine

#: In the folder of a run, or of a sweep, as long as a process measures into it.
LOCK_NAME = ".measuring.lock"
Head = TypeVar("Head", bound=schema.FirstLine)


class Run:
    """The records of one implementation, in memory and in a file; each addition is written before
    the next job starts.

    records: those without the samples, which are in the file alone; claim: the lock of the folder,
    if it belongs to this run alone; resumed: whether another process measured some of it; failed:
    whether a job that this process added did not end well."""

    def __init__(
        self, path: Path, existing: Sequence[schema.Line] = (), claim: Claim | None = None
    ):
        self.path = path
        self.folder = path.parent
        self.claim = claim
        self.records = _without_samples(existing)
        self.resumed = len(existing) > 1
        self.unwritten: list[schema.Line] = []
        self.failed = False

    def add(self, new: Sequence[schema.Line]) -> None:
        """Add records.  Where the disk has no room for a job, the job becomes one that failed, on
        disk too if there is room for that. Raises NotWritten for records that are not the end of a
        job; the next addition tries to write them again."""
        before = len(self.records), len(self.unwritten)
        end = store.status_of(new)
        try:
            self._add(new)
        except store.NotWritten as error:
            if end is None:
                raise
            del self.records[before[0] :], self.unwritten[before[1] :]
            end.status = "error"
            end.reason = str(error)
            with suppress(store.NotWritten):
                self._add([end])
        self.failed = self.failed or (end is not None and end.status != "ok")

    def _add(self, new: Sequence[schema.Line]) -> None:
        """Raises NotWritten."""
        self.records += _without_samples(new)
        self.unwritten += new
        store.append(self.path, map(schema.as_written, self.unwritten))
        self.unwritten.clear()

    def is_done(self, job: str) -> bool:
        """Tell whether the job ended well; any other job is tried again when a run is resumed."""
        lines = store.latest_jobs(self.records).get(job)
        end = store.status_of(lines) if lines else None
        return end is not None and end.status == "ok"

    def needs(self, job: str) -> bool:
        """Tell whether the job is still to be carried out, and can be."""
        return not (self.failed or self.is_done(job))

    @property
    def name(self) -> str:
        """Return the name of the implementation, or of what a tool measures."""
        return str(getattr(self.records[0], "name", ""))

    @property
    def header(self) -> schema.Header:
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
    """Delete a file of records, and its folder unless it holds another file."""
    with suppress(OSError):
        path.unlink(missing_ok=True)
        path.parent.rmdir()


def claim_folder(log_dir: Path, base: str) -> Claim:
    """Make a folder `base` (or base.2, base.3, ...) in `log_dir` and return its lock.  Raises
    UserError."""
    for number in itertools.count(1):
        folder = log_dir / (base if number == 1 else f"{base}.{number}")
        try:
            log_dir.mkdir(parents=True, exist_ok=True)
            folder.mkdir(exist_ok=True)
            if not any(folder.iterdir()):
                return Claim(folder / LOCK_NAME)
        except Held:
            pass  # another run took it just now
        # a file, or a link that leads nowhere, may be where a folder should be
        except OSError as error:
            if isinstance(error, FileExistsError) and os.path.isdir(log_dir):
                continue
            words = (
                f"cannot write {error.filename} ({not_a_folder(error.filename) or error.strerror})"
            )
            raise UserError(f"--log-dir {log_dir}: {words}; name another folder") from error
    raise AssertionError("unreachable")


def anew(log_dir: Path, base: str, file_name: str, head: Mapping[str, Any]) -> Run:
    """Return a new run with this first line.  Raises UserError where it cannot be written; nothing
    is left then."""
    claim = claim_folder(log_dir, base)
    first = {**head, "schema": schema.SCHEMA}  # written with its defaults, too
    run = Run(claim.path.with_name(file_name), [schema.typed(first)], claim)
    try:
        store.append(run.path, [first])
    except store.NotWritten:
        run.discard_if_empty()
        raise
    return run


def again(path: Path) -> Run:
    """Return the run in a file, to be continued; a job that a killed process left half written is
    cut off.

    Raises UserError while another process is measuring it."""
    lock = path.with_name(LOCK_NAME)
    try:
        claim = Claim(lock)
    except Held as held:
        words = f"is being measured by process {held}: wait for it, or give another --log-dir"
        raise UserError(f"--resume: {path.parent} {words}") from None
    except OSError as error:
        raise UserError(f"--resume: {cannot_write(lock, error, 'leave the flag out')}") from error
    try:
        store.mend(path)
        return Run(path, store.read(path), claim)
    except UserError:
        claim.release()
        raise


def origin() -> schema.Record:
    """Return the keys of a file's first record that tell when, where and by which revision it is
    measured."""
    revision, dirty = machine.git_state(ROOT)
    return {
        "run_id": uuid.uuid4().hex[:12],
        "command": sys.argv,
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "git_revision": revision,
        "git_dirty": dirty,
        "code": code(),
        "machine": machine.describe(),
    }


def unchanged(heads: Sequence[tuple[Head, Path]], here: schema.Record) -> list[tuple[Head, Path]]:
    """Return the runs that --resume can go on with: begun on this machine, by the code of now.
    Where there are runs, but none of these, print why.

    heads: the first record of each run, and its file; here: what `origin` returns."""
    # of any kind, since their common fields are compared
    now: schema.FirstLine = schema.typed({"record": "tool", "tool": "", "name": "", **here})
    changes = [_change(head, now) for head, _ in heads]
    if changes and all(changes):
        print(f"--resume: {plain(changes[-1])}: a run of its own begins", file=sys.stderr)
    return [head for head, change in zip(heads, changes) if not change]


def _change(head: schema.FirstLine, now: schema.FirstLine) -> str:
    """Return what differs from where a run began, in words; "" where nothing does."""
    for what in head.machine.__struct_fields__:
        before, after = getattr(head.machine, what), getattr(now.machine, what)
        # a new kernel counts the memory anew; the command's Python measures nothing
        if before not in (None, after) and what not in ("memory_bytes", "python"):
            return f"the run began on another machine: {what} {before}, here {after}"
    if head.git_revision != now.git_revision:
        return f"the run began at another revision of the suite, {head.git_revision}, here {now.git_revision}"
    return (
        ""
        if head.code in (None, now.code)
        else "the code of the suite has changed since the run began"
    )


class Changed(Exception):
    """A job measured something else than earlier jobs of its run; the message says what differs."""


def facts(name: str, lines: Iterable[schema.Line]) -> dict[str, object]:
    """Return what must be equal in the jobs of a run that ran in one Python, by a name in words.

    name: of the implementation or task that the records of a job, `lines`, are about."""
    result: dict[str, object] = {}
    for line in lines:
        if isinstance(line, schema.Environment):
            result.update(
                torch=line.torch, Python=line.python, CUDA=line.cuda, device=line.device_name
            )
            result["GPU"] = line.gpu.uuid if line.gpu else None
            # a tool's tasks may differ in them on purpose
            result[f"threads of {name}"] = line.threads
            result[f"the version of {name}"] = line.implementation_version
            result[f"the digest of {line.shape_file}"] = line.shape_file_sha256
        elif isinstance(line, schema.Status):
            result.update({f"the digest of {file}": digest for file, digest in line.code.items()})
    return {key: value for key, value in result.items() if value is not None}


def earlier(log_dir: Path, file_name: str, kind: type[Head]) -> list[tuple[Head, Path]]:
    """Return the first line and the path of each file of this name under `log_dir`, the newest
    last; warn of files that cannot be read, which do not block --resume."""
    heads = [(store.first(path), path) for path in sorted(log_dir.glob(f"*/{file_name}"))]
    skipped = ", ".join(
        plain(path.parent.name) for head, path in heads if not isinstance(head, kind)
    )
    if skipped:
        print(
            f"warning: --resume: skipped {skipped} in {log_dir}: the first line cannot be read",
            file=sys.stderr,
        )
    readable = [(head, path) for head, path in heads if isinstance(head, kind)]
    readable.sort(key=lambda pair: pair[0].started)
    if len(readable) > 1:
        newest, path = readable[-1]
        store.warn_of_clock(path.parent, newest.started)
    return readable


@contextmanager
def open_runs(
    names: Sequence[str],
    settings: Settings,
    log_dir: Path,
    resume: bool,
    extra: Mapping[str, Any] | None = None,
    or_anew: bool = False,
) -> Iterator[dict[str, Run]]:
    """Yield a Run for each implementation: new folders, or to resume those of the newest run with
    the same settings.

    extra: further keys of the ``run`` records; or_anew: start a run where there is none to resume.
    Raises UserError where there is none, or when another process is measuring it."""
    shared = {**origin(), "settings": settings.to_json(), **(extra or {})}
    wanted = schema.recorded(settings)
    cell = shared.get("values", {})
    heads = [
        (head, path)
        for head, path in (earlier(log_dir, schema.FILE_NAME, schema.Header) if resume else ())
        if head.name in names and head.settings == wanted and head.values == cell
    ]
    if resume and not (heads or or_anew):
        raise UserError(
            f"--resume: no run with these settings under {log_dir}; leave the flag out to start one"
        )
    heads = unchanged(heads, shared)
    if heads:
        first = heads[-1][0]
        shared.update(run_id=first.run_id, started=first.started)
    paths = {head.name: path for head, path in heads if head.run_id == heads[-1][0].run_id}
    opened: dict[str, Run] = {}
    try:
        for name in names:
            if name in paths:
                opened[name] = again(paths[name])
            else:
                implementation = find(name)
                row = {
                    "package": implementation.package,
                    "kind": implementation.kind,
                    "exact": implementation.exact,
                    "suffix": settings.suffix,
                }
                head = {"record": "run", "name": name, **row, **shared}
                opened[name] = anew(
                    log_dir, f"{implementation.folder}-{settings.suffix}", schema.FILE_NAME, head
                )
        yield opened
    except UserError:  # a mistake, or no room for a first line
        for run in opened.values():
            run.discard_if_empty()
        raise
    finally:
        for run in opened.values():
            run.close()
