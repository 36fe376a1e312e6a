"""Log folders -> rows: one plain dict for the newest run of each implementation and configuration.

``rows`` never raises for what is in a folder: a folder that cannot be read is a row with status "error".  Timing
numbers come from the samples of timing jobs that ended well, warm-up left out, flagged samples kept and counted;
``step_ms`` is wall time on every device (CUDA synchronised at both ends).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Dict, Iterable, Iterator, List, Mapping, Optional, Sequence, Tuple

from common.errors import UserError
from common.results import largest, records
from common.results.measured import fill
from common.results.profiled import Window, profiled, read_windows, trace_files, worker
from common.results.trace_reader import TraceSummary

Row = Dict[str, Any]

#: Every key of a row, with its value where nothing is known.  ms, us and MB (2**20 bytes) as the names say.
EMPTY: Row = {
    "name": "",
    "log_dir": "",
    "status": "ok",
    "reason": "",
    "device": None,
    "device_name": None,
    "torch_version": None,
    "implementation_version": None,
    "kind": None,
    "options": {},  # of the package's function: name -> ours, default
    "exact": None,
    # profiled
    "windows": [],
    "average_step_time_us": None,
    "peak_memory_mb": None,
    "profiled_stages_us": {},
    "profiler_inflation": None,
    # timing pass
    "step_ms": None,
    "loss_ms": None,
    "step_ms_interval": None,
    "loss_ms_interval": None,
    "step_event_ms": None,
    "loss_event_ms": None,
    "against_fastest": {},  # of its kind, set where rows are grouped (see ranking.py)
    "step_forward_ms": None,
    "loss_forward_ms": None,
    "stages": {},
    "round_medians_ms": {},  # scope -> round -> batch
    "samples": 0,
    "flagged_samples": 0,
    "rounds": 0,
    # correctness and memory passes, batches
    "loss_error": None,
    "grad_error": None,
    "at_size": None,
    "approximation_gap": None,
    "approximation_gaps": {},
    "memory": {},
    "measured_batches": None,  # how many: fewer than asked for where there are no more
    "padded_cells": None,
    "useful_cells": None,
    "useful_fraction": None,
    # what the device does at best, what the loss must do at least, and how much of the median that is
    "copy_bytes_per_second": None,
    "flops_per_second": None,
    "floor": {},  # scope -> packed, padded -> bytes, flops, ms
    "limit_percent": {},  # scope -> packed, padded
    # the run; unreadable: nothing of it could be read
    "configuration": {},
    "largest": {},  # of a --find-largest alone: see largest.py
    "suffix": None,
    "sweep": {},  # id, cell, and the values of the swept settings (see sweeps.py)
    "run_id": None,
    "started": None,
    "earlier_runs": 0,
    "unreadable": False,
    "notes": [],
}


def searches(paths: Sequence[Any] = (), all_runs: bool = False) -> List[Row]:
    """The rows of the --find-largest runs at or under `paths`, which `rows` leaves out.  Otherwise as `rows`."""
    folders = {folder: traces for folder, traces in _folders(paths).items() if largest.is_search(records.head(folder))}
    return _shown([row for row in _all_rows(folders) if row["largest"]], all_runs)


def rows(paths: Sequence[Any] = (), all_runs: bool = False) -> List[Row]:
    """The rows of the run folders in, at or under `paths` (default: ``log``); [] when there are none.

    A path may also be a single trace or results.jsonl.  Of several runs of one implementation and configuration only
    the newest is returned, its "earlier_runs" telling how many are not, unless `all_runs`.  Raises UserError for a
    path that does not exist (the default may be absent).
    """
    return _shown([row for row in _all_rows(_folders(paths)) if not row["largest"]], all_runs)


def _shown(found: List[Row], all_runs: bool) -> List[Row]:
    return found if all_runs else _newest(found)


def _all_rows(folders: Mapping[Path, List[Path]]) -> List[Row]:
    return [row for folder, traces in folders.items() for row in _rows_of(folder, traces)]


def _folders(paths: Sequence[Any]) -> Dict[Path, List[Path]]:
    """The run folders at or under `paths`, each with the traces that were asked for, [] for all of them."""
    found: Dict[Path, List[Path]] = {}
    for path in [Path(path) for path in paths] or [Path("log")]:
        if path.is_dir():
            for folder in run_folders(path):
                found[folder] = []
        elif path.is_file():
            if path.name == records.FILE_NAME:
                found[path.parent] = []
            elif path.name != records.SWEEP_FILE_NAME:
                found.setdefault(path.parent, []).append(path)
        elif paths:
            raise UserError(f"{path}: no such file or folder; name a log folder, a results.jsonl or a trace")
    return found


def run_folders(top: Path) -> Iterator[Path]:
    """The folders at or under `top` that hold records or traces."""
    for folder, below, names in os.walk(top):
        below.sort()
        if records.FILE_NAME in names or any(".pt.trace.json" in name for name in names):
            yield Path(folder)


def _rows_of(folder: Path, traces: List[Path]) -> List[Row]:
    name = folder.resolve().name
    try:
        if (folder / records.FILE_NAME).exists() and not traces:
            return [_measured_row(folder, name)]
        return _foreign_rows(traces or trace_files(folder), folder, name)
    except UserError as error:
        return [_unreadable(folder, name, str(error))]
    except OSError as error:
        return [_unreadable(folder, name, f"{folder}: cannot be read: {error.strerror or error}")]


def new_row(folder: Path, name: str) -> Row:
    """A row of which nothing is known yet."""
    fresh = {key: type(value)() if isinstance(value, (list, dict)) else value for key, value in EMPTY.items()}
    return {**fresh, "name": name, "log_dir": str(folder)}


def _unreadable(folder: Path, name: str, reason: str) -> Row:
    return {**new_row(folder, name), "status": "error", "reason": reason, "unreadable": True}


def _measured_row(folder: Path, name: str) -> Row:
    row = new_row(folder, name)
    path = folder / records.FILE_NAME
    try:
        found = records.read(folder)
        if not records.run_header(found):
            raise UserError(f"{path}: does not begin with a run record; delete the folder and run again")
        search = largest.is_search(records.run_header(found))
        fill(row, largest.relevant(found) if search else found, folder)
        if search:
            largest.fill(row, found)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise UserError(
            f"{path}: a record is not as this suite writes it "
            f"({type(error).__name__}: {error}); delete the folder and run again"
        ) from error
    return row


def _foreign_rows(files: List[Path], folder: Path, name: str) -> List[Row]:
    """Traces without records: a row for each worker (each rank has its own), with what the traces tell."""
    by_worker: Dict[Tuple[str, Optional[int]], List[Window]] = {}
    for path, window in read_windows(files):
        rank = window.rank if isinstance(window, TraceSummary) else None
        by_worker.setdefault((worker(path), rank), []).append((path, window))
    result = []
    for (worker_name, rank), windows in by_worker.items():
        label = worker_name if rank is None else f"{worker_name} rank {rank}"
        row = new_row(folder, name if len(by_worker) == 1 else f"{name} {label}")
        numbers = profiled(windows)
        row.update(
            device="cuda" if numbers.on_cuda else "cpu",
            device_name=numbers.device_name if numbers.on_cuda else None,
            windows=numbers.windows,
            average_step_time_us=numbers.average_step_time_us,
            peak_memory_mb=numbers.peak_memory_mb,
            profiled_stages_us=numbers.label_us,
            notes=numbers.notes,
        )
        if numbers.error:
            readable = any(window["steps"] for window in numbers.windows)
            row.update(
                status="error",
                reason=numbers.error,
                unreadable=not readable,
                device=row["device"] if readable else None,
            )
        result.append(row)
    return result


def same_configuration(one: Row, other: Row) -> bool:
    """Whether two rows' settings agree, as far as both know them: a run whose package
    was missing knows no shape file hash."""
    mine, theirs = one["configuration"], other["configuration"]
    return all(mine.get(key) == value or mine.get(key) is None or value is None for key, value in theirs.items())


def _newest(found: Iterable[Row]) -> List[Row]:
    shown: List[Row] = []
    dated: List[Tuple[int, Row]] = list(enumerate(found))
    for _, row in sorted(dated, key=lambda item: (item[1]["started"] or "", item[0]), reverse=True):
        newer: Optional[Row] = None
        if row["run_id"] is not None:
            newer = next(
                (
                    other
                    for other in shown
                    if other["run_id"] is not None and other["name"] == row["name"] and same_configuration(other, row)
                ),
                None,
            )
        if newer is None:
            shown.append(row)
        else:
            newer["earlier_runs"] += 1
    kept = {id(row) for row in shown}
    return [row for _, row in dated if id(row) in kept]
