"""Files of records: JSON Lines that only grow (see schema.py for what is in them).  No torch
here."""

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

#: The folder of a log folder that has the runs that `compare --save-baseline` kept: readers leave
#: it out.
BASELINES = "baselines"
ANEW = "delete the folder and run again"
#: Bytes of the first line that are read where nothing else of a file is.
LONGEST_LINE = 2**24


class NotWritten(UserError):
    """Records could not be brought to disk; the file is as it was before."""


def append(path: Path, new: Iterable[schema.Record]) -> None:
    """Add `new` at the end of the file `path`, made where it is missing.  Raises NotWritten where
    the disk does not take all of it; then the file is as it was before."""
    lines = [json.dumps(record, separators=(",", ":"), allow_nan=False) for record in new]
    added = "".join(f"{line}\n" for line in lines).encode()
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        # a buffer would be written again when the file is closed
        with open(descriptor, "r+b", buffering=0) as stream:
            before = stream.seek(0, os.SEEK_END)
            # an addition that could not be undone costs no line but its own
            stream.seek(max(before - 1, 0))
            left = added if stream.read(1) in (b"", b"\n") else b"\n" + added
            try:
                while left:
                    left = left[stream.write(left) :]
            except OSError:
                with suppress(OSError):
                    stream.truncate(before)
                raise
    except OSError as error:
        raise NotWritten(
            cannot_write(path, error, "free some space and go on with --resume")
        ) from error


def mend(path: Path) -> None:
    """Cut off what a killed writer left of a job at the end of a file: a line cut short, and
    records without their status, which must not be mixed with those of the next attempt.  Raises
    UserError, also for a newer version's."""
    try:
        with open(os.open(path, os.O_RDWR | os.O_NOFOLLOW), "r+b") as stream:
            end = position = 0
            for line in stream:
                if not position:
                    _refuse_newer(path, line)
                position += len(line)
                if _ends_addition(line):
                    end = position
            stream.truncate(end)
    except OSError as error:
        raise UserError(cannot_write(path, error, "leave out --resume to start anew")) from error


def _ends_addition(line: bytes) -> bool:
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
    for folder, below, names in os.walk(path):  # a folder that is gone meanwhile has none
        below[:] = {*below} - {BASELINES}
        if name in names:
            result.append(Path(folder, name))
    return sorted(result)


def read(path: Path) -> list[schema.Line]:
    """Return the records of a results.jsonl, or of the folder that holds it, in file order.

    What is no record is left out, with one warning for the file; a last line cut short (a killed
    writer) is, without. Raises UserError for a file that does not begin with a record, and for one
    that a newer version of this suite wrote.
    """
    path = path / schema.FILE_NAME if path.is_dir() else path
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
        rest = f"; likewise {len(others)} more" if others else ""
        warn(f"{path}, line {number}: not a record of this suite ({reason}), left out{rest}")
    return records


def lost(path: Path) -> int:
    """Return how many lines of a file are no records, a last one that is cut short not counted.
    Raises OSError."""
    return len(_decoded(read_bytes(path).split(b"\n"))[1])


def _decoded(lines: Sequence[bytes]) -> tuple[list[schema.Line], dict[int, str]]:
    """Return the records on these lines, and by number, from 1, why others are none."""
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
    broken.pop(len(lines), None)  # no newline at its end: cut short
    return records, broken


@cache
def warn(text: str) -> None:
    """Print a warning once, since a command may read a file again."""
    print(f"warning: {plain(text)}", file=sys.stderr)


def warn_of_hidden(path: Path, hidden: Iterable[Path]) -> None:
    """Warn of runs at or under a path that was named, of which another path that was named has a
    newer one."""
    names = [
        folder.name
        for folder in hidden
        if path.resolve() in (folder.resolve(), *folder.resolve().parents)
    ]
    if names:
        words = f"{path}: {count(len(names), 'run')} not shown, since a newer one measured the same"
        warn(f"{words}: {clipped(', '.join(sorted(names)))} (--all-runs of summarize shows all)")


def warn_of_clock(folder: Path, started: str) -> None:
    """Warn of a run that began later than it is now, since the newest of equal runs is what is
    shown and resumed."""
    if started > datetime.now(timezone.utc).isoformat():
        warn(
            f"{folder} began at {started}, when the clock was ahead: later runs are not shown until then (--all-runs)"
        )


def read_run(path: Path) -> tuple[schema.Header, list[schema.Line]]:
    """Return the header of a results.jsonl (or of the folder that holds one), and all records.
    Raises UserError."""
    records = read(path)
    if not records or not isinstance(records[0], schema.Header):
        path = path / schema.FILE_NAME if path.is_dir() else path
        raise UserError(f"{path}: does not begin with a run record; {ANEW}")
    return records[0], records


def first(path: Path) -> schema.FirstLine | None:
    """Return the first record of a file; None where it cannot be read."""
    try:
        with open_file(path) as stream:
            record = schema.decoded(stream.readline(LONGEST_LINE))
    except (OSError, ValueError, RecursionError):
        return None
    return record if isinstance(record, schema.FirstLine) else None


def latest_jobs(records: Iterable[schema.Line]) -> dict[str, list[schema.JobLine]]:
    """Return the records by job, for each only those of its last attempt that ended well; where
    none did, those of the last that ended (with a ``status`` record), or else of the last that
    there is.  In the order of time: a round that was measured again comes where it was."""
    open_attempts: dict[str, list[schema.JobLine]] = {}
    ended: dict[str, list[schema.JobLine]] = {}
    for record in records:
        if isinstance(record, schema.JobLine):
            attempt = open_attempts.setdefault(record.job, [])
            # the records before it have lost their status
            if isinstance(record, schema.Environment):
                attempt.clear()
            attempt.append(record)
        if isinstance(record, schema.Status):
            attempt = open_attempts.pop(record.job)
            before = status_of(ended[record.job]) if record.job in ended else None
            if record.status == "ok" or before is None or before.status != "ok":
                ended.pop(record.job, None)
                ended[record.job] = attempt
    return {**open_attempts, **ended}


def repeated(records: Iterable[schema.Line]) -> dict[int, int]:
    """Return how often each timing round that ended well was measured again; rounds without that
    are left out."""
    ends = [record for record in records if isinstance(record, schema.Status)]
    rounds = Counter(end.round for end in ends if (end.pass_name, end.status) == ("timing", "ok"))
    return {number: times - 1 for number, times in rounds.items() if number and times > 1}


def is_loaded(samples: Sequence[schema.Sample]) -> bool:
    """Return whether samples of one process ran beside other load for more than half of their
    time."""
    loaded = sum(sample.total_wall_ns for sample in samples if sample.beside_load)
    return 2 * loaded > sum(sample.total_wall_ns for sample in samples)


def ended_well(lines: Sequence[schema.Line]) -> bool:
    end = status_of(lines)
    return end is not None and end.status == "ok"


def status_of(lines: Sequence[schema.Line]) -> schema.Status | None:
    """Return the status with which a job ended; None where it did not."""
    last = lines[-1] if lines else None
    return last if isinstance(last, schema.Status) else None
