"""Files of records: JSON Lines that only grow (see schema.py for what is in them).  No torch here."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Dict, Iterable, List, Optional, Sequence, Tuple

from common.core.errors import UserError
from common.records import schema
from common.records.schema import FILE_NAME, Header, JobLine, Line, Record, Status, SweepHeader

ANEW = "delete the folder and run again"


class NotWritten(UserError):
    """Records could not be brought to disk; the file is as it was before."""


def change_first(path: Path, changes: Record) -> None:
    """Change fields of the first record of a file in one step: a reader meets the old file or the new one."""
    first, rest = path.read_bytes().split(b"\n", 1)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_bytes(_line({**json.loads(first), **changes}) + rest)
    os.replace(temporary, path)


def _line(record: Record) -> bytes:
    return json.dumps(record, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def append(path: Path, new: Iterable[Record]) -> None:
    """Add `new` at the end of the file `path`, made where it is missing.  Raises NotWritten where the disk does not
    take all of it; then the file is as it was before."""
    left = b"".join(map(_line, new))
    try:
        with path.open("ab", buffering=0) as stream:  # a buffer would be written again when the file is closed
            before = stream.tell()
            try:
                while left:
                    left = left[stream.write(left) :]
            except OSError:
                with suppress(OSError):
                    stream.truncate(before)
                raise
    except OSError as error:
        reason = error.strerror or error
        raise NotWritten(f"cannot write {path}: {reason}; free some space and go on with --resume") from error


def mend(path: Path) -> None:
    """Cut off what a killed writer left of a job at the end of a file: a line cut short, and records without their
    status, which must not be mixed with those of the next attempt.  Raises UserError."""
    try:
        with path.open("r+b") as stream:
            end = position = 0
            for line in stream:
                position += len(line)
                if line.endswith(b"\n") and _ends_addition(line):
                    end = position
            stream.truncate(end)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}; leave out --resume to start anew") from error


def _ends_addition(line: bytes) -> bool:
    try:
        return json.loads(line)["record"] in ("sweep", "run", "limits", "status")
    except (ValueError, TypeError, KeyError):
        return False


def read(path: Path) -> List[Line]:
    """Records of a results.jsonl or sweep.jsonl, in file order.  A last line cut short (a killed writer) is left out.
    Raises UserError for another file, and for one that a newer version of this suite wrote."""
    if path.is_dir():
        path = path / FILE_NAME
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    newer = schema.version(lines[0])
    if newer > schema.SCHEMA:
        raise UserError(f"{path}: written by a newer version (schema {newer}, this one reads {schema.SCHEMA})")
    records = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = schema.decoded(line)
        except ValueError as error:
            if number == len(lines):  # no newline at its end: cut short
                break
            words = f"not a record of this suite ({error}); delete the line or the folder"
            raise UserError(f"{path}, line {number}: {words}") from None
        if record is not None:
            records.append(record)
    return records


def read_run(path: Path) -> Tuple[Header, List[Line]]:
    """The header of a results.jsonl (or of the folder that holds one), and all records.  Raises UserError."""
    records = read(path)
    if not records or not isinstance(records[0], Header):
        where = path / FILE_NAME if path.is_dir() else path
        raise UserError(f"{where}: does not begin with a run record; {ANEW}")
    return records[0], records


def read_sweep(path: Path) -> Tuple[SweepHeader, Dict[Tuple[int, str], List[Line]]]:
    """The header of a sweep.jsonl, and the records of each run by cell and implementation.  Raises UserError."""
    records = read(path)
    if not records or not isinstance(records[0], SweepHeader):
        raise UserError(f"{path}: does not begin with a sweep record; {ANEW}")
    header = records[0]
    runs: Dict[Tuple[int, str], List[Line]] = {}
    for record in records[1:]:
        if record.cell is None or record.implementation is None:
            raise UserError(f"{path}: a record has no cell or implementation; {ANEW}")
        runs.setdefault((record.cell, record.implementation), []).append(record)
    for found in runs.values():
        if not isinstance(found[0], Header) or not header.grid.keys() <= found[0].values.keys():
            raise UserError(f"{path}: a run does not begin with its run record; {ANEW}")
    return header, runs


def first(path: Path) -> Record:
    """The first record of a file as it is written, whatever it is; {} where there is none to be read."""
    try:
        with path.open(encoding="utf-8") as stream:
            found = json.loads(stream.readline())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def latest_jobs(records: Iterable[Line]) -> Dict[str, List[JobLine]]:
    """Records by job, for each job only those of its last attempt that ended (with a ``status`` record); where none
    did, those that there are."""
    open_attempts: Dict[str, List[JobLine]] = {}
    ended: Dict[str, List[JobLine]] = {}
    for record in records:
        if isinstance(record, JobLine):
            open_attempts.setdefault(record.job, []).append(record)
        if isinstance(record, Status):
            ended[record.job] = open_attempts.pop(record.job)
    return {**open_attempts, **ended}


def status_of(lines: Sequence[JobLine]) -> Optional[Status]:
    """With which a job ended; None where it did not."""
    return lines[-1] if isinstance(lines[-1], Status) else None
