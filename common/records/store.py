"""Read and write files of records: JSON Lines that only grow (see schema.py for what is in them).
No torch here."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from functools import cache
from pathlib import Path

from rnnt_bench.core.errors import UserError
from rnnt_bench.core.files import cannot_write, open_file, read_bytes
from rnnt_bench.core.text import clipped, count, plain
from rnnt_bench.records import schema

#: The folder in a log folder for the runs that `compare --save-baseline` keeps.  Readers of the log
#: folder leave it out.
BASELINES = "baselines"
#: Advice for a file that cannot be used.
ANEW = "delete the folder and run again"
#: The most bytes that `first` reads of a file: no first line is longer.
LONGEST_LINE = 2**24


class NotWritten(UserError):
    """Raised where records could not be brought to disk; the file is as it was before."""


def append(path: Path, new: Iterable[schema.Record]) -> None:
    """Add records at the end of a file, which is made where it is missing.  Raises NotWritten where
    the disk does not take all of them; then the file is as it was before."""
    lines = [json.dumps(record, separators=(",", ":"), allow_nan=False) for record in new]
    unwritten = "".join(f"{line}\n" for line in lines).encode()
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        # The file has no buffer, which would be written again when it is closed.
        with open(descriptor, "r+b", buffering=0) as stream:
            before = stream.seek(0, os.SEEK_END)
            stream.seek(max(before - 1, 0))
            # A file that ends within a line has an earlier addition that could not be undone.
            if stream.read(1) not in (b"", b"\n"):
                unwritten = b"\n" + unwritten
            try:
                while unwritten:
                    unwritten = unwritten[stream.write(unwritten) :]
            except OSError:
                with suppress(OSError):
                    stream.truncate(before)
                raise
    except OSError as error:
        raise NotWritten(
            cannot_write(path, error, "free some space and go on with --resume")
        ) from error


def mend(path: Path) -> None:
    """Cut off what a killed writer left at the end of a file: a line cut short, and the records of
    a job without its status.  They must not be mixed with those of the next attempt at the job.
    Raises UserError, also for a file of a newer version."""
    try:
        with open(os.open(path, os.O_RDWR | os.O_NOFOLLOW), "r+b") as stream:
            position = 0
            kept_bytes = 0  # up to the end of the last whole addition
            for line in stream:
                if not position:
                    _refuse_newer(path, line)
                position += len(line)
                if _ends_addition(line):
                    kept_bytes = position
            stream.truncate(kept_bytes)
    except OSError as error:
        raise UserError(cannot_write(path, error, "leave out --resume to start anew")) from error


def _ends_addition(line: bytes) -> bool:
    """Return whether a line is the last of those that a writer adds in one go: it is the first of a
    file, the device's limits, or the status of a job."""
    try:
        return json.loads(line)["record"] in ("tool", "run", "limits", "status")
    except (ValueError, TypeError, KeyError, RecursionError):
        return False


def _refuse_newer(path: Path, first_line: bytes) -> None:
    """Raise UserError for a file that a newer version of this suite wrote."""
    newer = schema.version(first_line)
    if newer > schema.SCHEMA:
        raise UserError(
            f"{path}: written by a newer version (schema {newer}, this one reads {schema.SCHEMA})"
        )


def files_named(name: str, path: Path) -> list[Path]:
    """Return the files of this name at or under `path`, sorted, without those of baselines."""
    if os.path.isfile(path):
        return [path] if path.name == name else []
    result = []
    for folder, below, names in os.walk(path):  # it passes over folders that are gone meanwhile
        below[:] = {*below} - {BASELINES}
        if name in names:
            result.append(Path(folder, name))
    return sorted(result)


def read(path: Path) -> list[schema.Line]:
    """Return the records of a file in their order.

    Lines that are no records are left out, with one warning for the file.  A last line that a
    killed writer cut short needs no warning.  Raises UserError for a file that does not begin with
    a record, and for one that a newer version of this suite wrote.
    """
    try:
        lines = read_bytes(path).split(b"\n")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    _refuse_newer(path, lines[0])
    records, broken = _decoded(lines)
    if 1 in broken:
        raise UserError(f"{path}, line 1: not a record of this suite ({broken[1]}); {ANEW}")
    if broken:
        (number, reason), *others = broken.items()
        rest = f", with {count(len(others), 'more line')}" if others else ""
        warn(f"{path}, line {number}: not a record of this suite ({reason}), left out{rest}")
    return records


def lost(path: Path) -> int:
    """Return how many lines of a file are no records.  A last line that is cut short does not
    count.  Raises OSError."""
    _, broken = _decoded(read_bytes(path).split(b"\n"))
    return len(broken)


def _decoded(lines: Sequence[bytes]) -> tuple[list[schema.Line], dict[int, str]]:
    """Return the records on the lines of a file, and {line number: reason} of the lines that are no
    records.  The numbers begin at 1.

    Empty lines are skipped, and so is a last line that was cut short.

    lines: the content of the file, split at each newline."""
    records: list[schema.Line] = []
    broken: dict[int, str] = {}
    for number, line in enumerate(lines, start=1):
        try:
            record = schema.decoded(line) if line.strip() else None
        except (ValueError, RecursionError) as error:
            broken[number] = clipped(str(error))
            continue
        if record is not None:
            records.append(record)
    broken.pop(len(lines), None)  # no newline follows this one: it is empty or was cut short
    return records, broken


@cache
def warn(text: str) -> None:
    """Print a warning once, since a command may read a file again."""
    print(f"warning: {plain(text)}", file=sys.stderr)


def warn_of_hidden(path: Path, hidden: Iterable[Path]) -> None:
    """Warn of the hidden runs whose folder is `path` or lies below it, if there are any.

    hidden: the folders of all runs that are not shown, since a newer run under one of the user's
    paths measured the same."""
    names = [
        folder.name
        for folder in hidden
        if path.resolve() in (folder.resolve(), *folder.resolve().parents)
    ]
    if names:
        warn(
            f"{path}: {count(len(names), 'run')} not shown, since a newer one measured the same: "
            f"{clipped(', '.join(sorted(names)))} (--all-runs of summarize shows all)"
        )


def warn_of_clock(folder: Path, started: str) -> None:
    """Warn of a run if its recorded start lies in the future.  Such a run counts as the newest, so it
    is shown and resumed in place of later runs that measure the same.

    folder: that of the run; started: the recorded start, ISO 8601 in UTC."""
    if started > datetime.now(timezone.utc).isoformat():
        warn(
            f"{folder} began at {started}, when the clock was ahead: later runs are not shown until then (--all-runs)"
        )


def read_run(folder: Path) -> tuple[schema.Header, list[schema.Line]]:
    """Return the header of the run in a folder, and all its records, the header among them.  Raises
    UserError."""
    path = folder / schema.FILE_NAME
    records = read(path)
    if not records or not isinstance(records[0], schema.Header):
        raise UserError(f"{path}: does not begin with a run record; {ANEW}")
    return records[0], records


def first(path: Path) -> schema.FirstLine | None:
    """Return the first record of a file; None if the file cannot be read, or does not begin with a
    FirstLine."""
    try:
        with open_file(path) as stream:
            record = schema.decoded(stream.readline(LONGEST_LINE))
    except (OSError, ValueError, RecursionError):
        return None
    return record if isinstance(record, schema.FirstLine) else None


def latest_jobs(records: Iterable[schema.Line]) -> dict[str, list[schema.JobLine]]:
    """Return {job: records of one attempt} for each job.

    That attempt is the last that ended well.  If none did, it is the last that ended, with a
    ``status`` record; if none ended, the last.  Jobs with an attempt that has not ended come first;
    the others follow in the order in which their attempts ended."""
    open_attempts: dict[str, list[schema.JobLine]] = {}
    ended: dict[str, list[schema.JobLine]] = {}
    for record in records:
        if not isinstance(record, schema.JobLine):
            continue
        attempt = open_attempts.setdefault(record.job, [])
        # An attempt begins with its environment: earlier records are of an attempt without status.
        if isinstance(record, schema.Environment):
            attempt.clear()
        attempt.append(record)
        if isinstance(record, schema.Status):
            del open_attempts[record.job]
            before = status_of(ended.get(record.job, []))
            # Only an attempt that ended well takes the place of one that did.
            if record.status == "ok" or before is None or before.status != "ok":
                ended.pop(record.job, None)  # so that the job comes last
                ended[record.job] = attempt
    # Of a job in both, this takes the position of the first and the attempt of the second.
    return {**open_attempts, **ended}


def repeated(records: Iterable[schema.Line]) -> dict[int, int]:
    """Return {round: how often it was measured again} of the timing rounds that ended well more
    than once.

    records: those of one run, with every attempt at a job."""
    ends = [record for record in records if isinstance(record, schema.Status)]
    rounds = Counter(end.round for end in ends if (end.pass_name, end.status) == ("timing", "ok"))
    # Rounds count from 1; a job without a round has None, and is left out.
    return {number: times - 1 for number, times in rounds.items() if number and times > 1}


def is_loaded(samples: Sequence[schema.Sample]) -> bool:
    """Return whether samples of one process ran beside other load for more than half of their
    time."""
    loaded_ns = sum(sample.total_wall_ns for sample in samples if sample.beside_load)
    return 2 * loaded_ns > sum(sample.total_wall_ns for sample in samples)


def ended_well(lines: Sequence[schema.Line]) -> bool:
    """Return whether a job ended with the status "ok".  lines: its records."""
    end = status_of(lines)
    return end is not None and end.status == "ok"


def status_of(lines: Sequence[schema.Line]) -> schema.Status | None:
    """Return the status record of a job, None where it has not ended.  lines: its records."""
    last = lines[-1] if lines else None
    return last if isinstance(last, schema.Status) else None
