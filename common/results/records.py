"""Results on disk: versioned JSON Lines, one folder per run of one implementation.

A run of an implementation owns one folder, ``log/<name>-<suffix>/``: its records (``results.jsonl``), its traces and
its key_averages text; and a lock file, as long as a process measures into it (see running/runs.py).  The folder can be
moved, copied or deleted on its own.  Every record is one JSON object on one line with the key ``record``; times are
nanoseconds, sizes are bytes.  No torch here.

run          always the first line: schema (1), run_id (shared by the implementations of one run, and by the two sides
             of one ``compare.py --rev``: their rounds are paired), name ("k2", or "k2:modified" for a variant), suffix,
             package, kind (one of common.implementations.KINDS; older runs have none), exact (bool), settings (every
             flag as resolved), command (list), started (ISO 8601, UTC), git_revision, git_dirty, machine (cpu, cores,
             memory_bytes, os, python); with --find-largest memory_limit too ({bytes: above the loaded process, null on
             CUDA, where the probe records tell; source: in words}), and suffix is "largest-batch-size" or
             "largest-max-frames"
environment  once per job: job, python, torch, implementation_version, options (of the package's functions: {name:
             {ours, default}}, default "-" where the function hides it), device ("cpu" or "cuda"), device_name, cuda,
             threads, denormals, shape_file, shape_file_sha256, batches (list of {index, N, T_max, U_max, useful_cells,
             padded_cells, frames, tokens, one_symbol_cells, pruned_cells}: index into the batches of the shape file;
             cells are T * (U + 1), frames and tokens the sums of T and of U, one_symbol_cells those that a path with at
             most one symbol a frame can meet, pruned_cells T * min(S, U + 1) for the run's prune range S; older runs
             have none of the last four), shape_file_totals ({utterances, frames, T_max} of all of them; older runs have
             none), shape_distribution (of the correctness job alone, and not of a sweep or of --find-largest; older
             runs have none: {T, U: of the utterances of the shape file as the run varied them; padding_percent: of all
             batches}, each {begin, width, all (counts: bin i is from begin + i * width on), measured (likewise, of
             those in the measured batches), lowest, median, highest (of all)}), warnings (lines for the user)
correctness  job, loss_error, grad_error (largest relative errors against the float64 reference; for a pruned loss with
             its range widened to all of U), tolerance, ok (bool), approximation_gap (relative difference of the pruned
             loss to the exact one at the configured range and logits; null for exact losses), approximation_gaps
             ({"random": ..., "peaky": ...}, likewise with these logits; null where they cannot be made, and for exact
             losses), at_size (of the measured batch with the most padded cells, or, with --find-largest, of its first
             two utterances: {batch: index, N, T_max, U_max, loss_error, grad_error, grad_tolerance: which grows with
             the sums, ok}; null where the small batches were wrong already, or simulated; older runs have none), note
sample       job, scope ("loss" or "step"), round, batch (index), repeat, warmup (bool), forward_wall_ns (null on CUDA,
             where the host runs ahead), total_wall_ns, forward_event_ns, total_event_ns (CUDA events; null on CPU),
             stages ({name: wall ns; event ns on CUDA}), foreign_cpu (other processes' share of the machine's CPU time,
             0..1, or null), flags (list, e.g. ["busy"])
memory       job, scope, batch, device_allocated_bytes, device_reserved_bytes (CUDA peaks above the baseline, else
             null), torch_allocated_bytes (CPU: peak of torch's own allocations above the baseline, else null; null too
             for losses that loop in Python), process_bytes (CPU: VmHWM above the baseline, else null)
trace        job, steps, schedule ({wait, warmup, active, repeat}), files (names in the folder, .json or .json.gz),
             key_averages (names), profiler ({record_shapes, with_stack, profile_memory}), memory_snapshot (file name
             or null), foreign_cpu and flags (see sample; of the profiled loop, null where it was too short to tell;
             older runs have neither), note (why there is no trace, else ""; schedule and profiler are null then),
             warnings (lines for the user)
limits       no job; at least one in each run that was timed, before its first round, the same record in all
             implementations of the run: torch, device, device_name, threads, dtype, tf32 (bool: might CUDA use it; null
             on a CPU), cache_bytes (of all last-level caches, or null), copies (list of {buffer_bytes, ns}: bytes of
             one of the two buffers, ns of each copy of one to the other), products (list of {n, ns}: n x n matrices of
             the dtype), foreign_cpu and flags (see sample), reason (why a list is empty,
             else "")
probe        with --find-largest, before each step that must fit (of the batch with the most padded cells, then of that
             with the most useful ones): job, scope, index, N, frames, T_max, U_max, useful_cells, padded_cells (of the
             batch), limit_bytes (above the loaded process), limit_kind ("address space": RLIMIT_AS; "device memory":
             the rest of a CUDA device held back), warnings (one where less than --memory-limit was left)
fit          after it, when it did: job, scope, batch (index), loss, peak_bytes (resident on a CPU, torch's allocator on
             CUDA; above the loaded process, inputs included; or null)
status       last line of each job: job ("correctness", "timing-1", ..., "memory", "trace"; "probe-64" and
             "throughput-64-of-96-1", whose samples are at the largest size, with --find-largest), pass, round (or
             null), size (that was tried or timed, of those alone), pool (of the latter: the utterances timed are those
             of the run's batches of this size, the largest of any implementation; older runs have none), status (ok |
             oom | unsupported | missing | error | timeout | interrupted), reason, wall_ns, and, where the job failed,
             stderr_tail (its last lines)

A job that ran again (resume) appears again: its later records replace the earlier ones (see ``latest_jobs``).

A sweep owns one folder too, ``log/sweep-<keys>/``, with one file, ``sweep.jsonl``: its first line, then the runs of all
cells of the grid, one behind the other.  Every line after the first carries ``cell`` (number of the cell, from 0: the
values of the grid combined, those of the last key varying fastest) and ``implementation``; the lines of one cell and
implementation are one run as above.  The file only grows, by a run's header or by a job at a time (see ``append``).

sweep        always the first line: schema (1), sweep_id, grid ({setting: [values]}), settings (those that all cells
             share), names (implementations), command, started, git_revision, git_dirty, machine
run          as above, and values ({setting: value} of the cell); run_id is the sweep_id
correctness, limits, status
             as above, and, where it was not measured again, reused_from (the cell whose result it is: the device's
             limits; who is missing or unsupported.  Older sweeps reused correctness too)
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any, Dict, Iterable, List

from common.errors import UserError

SCHEMA = 1
FILE_NAME = "results.jsonl"
SWEEP_FILE_NAME = "sweep.jsonl"
MEMORY_SNAPSHOT = "memory_snapshot.pickle"
STATUSES = ("ok", "oom", "unsupported", "missing", "error", "timeout", "interrupted")

Record = Dict[str, Any]


class NotWritten(UserError):
    """Records could not be brought to disk; the file is as it was before."""


def remove_traces(folder: Path) -> None:
    """What an attempt of the trace pass left in the folder of a run, whole or in part."""
    for path in [*folder.glob("*.pt.trace.json*"), folder / MEMORY_SNAPSHOT, folder / f"{folder.name}.txt"]:
        path.unlink(missing_ok=True)


def write(folder: Path, records: Iterable[Record]) -> Path:
    """Replace ``folder/results.jsonl`` with `records` in one step: a reader, or a full disk, meets the old file or the
    new one.

    Raises NotWritten when the folder cannot be written; the file that was there before stays as it was.
    """
    path = folder / FILE_NAME
    temporary = folder / f".{FILE_NAME}.{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with temporary.open("w", encoding="utf-8") as stream:
            for record in records:
                stream.write(json.dumps(record, separators=(",", ":"), allow_nan=False) + "\n")
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise NotWritten(
            f"cannot write {path}: {error.strerror or error}; free some space or name another folder with --log-dir"
        ) from error
    finally:
        with suppress(OSError):  # gone already, or never made
            temporary.unlink()
    return path


def append(path: Path, new: Iterable[Record]) -> None:
    """Add `new` at the end of the file `path`, and have them on disk.

    Raises NotWritten when that cannot be done, with the file as it was before where the disk allows.
    """
    text = "".join(json.dumps(record, separators=(",", ":"), allow_nan=False) + "\n" for record in new)
    try:
        with path.open("ab") as stream:
            before = stream.tell()
            try:
                stream.write(text.encode("utf-8"))
                stream.flush()
                os.fsync(stream.fileno())
            except OSError:
                with suppress(OSError):
                    os.truncate(path, before)
                raise
    except OSError as error:
        raise NotWritten(
            f"cannot write {path}: {error.strerror or error}; free some space and go on with --resume"
        ) from error


def mend(path: Path) -> None:
    """Cut from the end of an appended file what a killed writer left of a job: a line cut short, and records without
    their status, which the job's next attempt must not be mixed with.

    Raises UserError when the file cannot be read or changed.
    """
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


def read(path: Path) -> List[Record]:
    """Records of a results.jsonl (or of the folder that holds one), in file order.

    A last line cut short (a killed writer) is left out.  Raises UserError for a file that is not such a file or that a
    newer version of this suite wrote.
    """
    if path.is_dir():
        path = path / FILE_NAME
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    records = []
    lines = text.split("\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            _check_types(record)
        except (ValueError, TypeError, KeyError) as error:
            if number == len(lines):  # no newline at its end: cut short
                break
            raise UserError(
                f"{path}, line {number}: not a record of this suite ({error}); delete the line or the folder"
            ) from None
        records.append(record)
    if records and records[0]["record"] in ("run", "sweep") and records[0].get("schema", 0) > SCHEMA:
        raise UserError(f"{path}: written by a newer version (schema {records[0]['schema']}, this one reads {SCHEMA})")
    return records


#: What every reader takes for granted, by the kind of record; the rest is checked where it is read.
_TYPES = {
    "run": {"schema": int, "settings": dict},
    "sweep": {"schema": int, "settings": dict, "grid": dict},
    "sample": {"job": str, "total_wall_ns": (int, float)},
    "status": {"job": str, "status": str},
}
_OTHER_TYPES = {"job": str}


def _check_types(record: Record) -> None:
    """KeyError, TypeError or ValueError unless a record is one and what it has of _TYPES is as it says."""
    for key, wanted in _TYPES.get(record["record"], _OTHER_TYPES).items():
        if key in record and (not isinstance(record[key], wanted) or isinstance(record[key], bool)):
            raise ValueError(f"{key} is {json.dumps(record[key])[:40]}")


def head(folder: Path) -> Record:
    """The first record of the results.jsonl in a folder, whatever it is; {} where there is none to be read."""
    return first(folder / FILE_NAME)


def first(path: Path) -> Record:
    """The first record of a file, whatever it is; {} where there is none to be read."""
    try:
        with path.open(encoding="utf-8") as stream:
            found = json.loads(stream.readline())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def run_header(records: List[Record]) -> Record:
    """The ``run`` record, or an empty dict for a folder of someone else's traces."""
    return records[0] if records and records[0]["record"] == "run" else {}


def kind_of(header: Record) -> str:
    """The kind of a ``run`` record's implementation, also of runs from before there were kinds."""
    return header.get("kind") or ("pruned" if header.get("exact") is False else "exact")


def latest_jobs(records: Iterable[Record]) -> Dict[str, List[Record]]:
    """Records by job, for each job only those of its last attempt (an attempt ends with its ``status`` record).

    Records after the last status record of a job (an attempt whose writer died) count as that job's last attempt only
    when no attempt ended.
    """
    open_attempts: Dict[str, List[Record]] = {}
    ended: Dict[str, List[Record]] = {}
    for record in records:
        job = record.get("job")
        if job is None:
            continue
        open_attempts.setdefault(job, []).append(record)
        if record["record"] == "status":
            ended[job] = open_attempts.pop(job)
    return {**open_attempts, **ended}
