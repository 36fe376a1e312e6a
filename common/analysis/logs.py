"""Read log folders: the newest run of each implementation and configuration, and sweeps.
A folder that cannot be read becomes a row with status "error". Times come from the samples of
timing jobs that ended well, without warm-up; flagged samples are kept and counted. ``step_ms`` is
wall time on every device."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from rnnt_bench.analysis import groups, machines, measured
from rnnt_bench.analysis.groups import Group, Sweep
from rnnt_bench.analysis.row import Row
from rnnt_bench.core import errors, files, text
from rnnt_bench.core.called import command
from rnnt_bench.present import parts, style
from rnnt_bench.records import schema, store
from rnnt_bench.traces import reader, windows

#: File that sweeps had before each cell became an ordinary run.
SWEEP_OF_BEFORE = "sweep.jsonl"
#: Setting of searches for the largest batch before they became a tool's.
SEARCH_OF_BEFORE = "find_largest"


class Log:
    """Hold the rows of log folders: of runs and of traces without records, and of the cells of
    sweeps."""

    def __init__(self, every: Sequence[Row]) -> None:
        self.every = every
        self.rows = [row for row in every if not row.header.values]
        self.swept = [row for row in every if row.header.values]
        look_of = style.looks({row.name: row.kind for row in every})
        for row in every:
            row.look = look_of[row.name]

    @property
    def readable(self) -> bool:
        """Tell whether any file could be read, or there is none."""
        return not self.every or any(not row.unreadable for row in self.every)

    def newest(self) -> Log:
        """Return the log with only the newest run of each implementation and configuration."""

        def same_run(row: Row, other: Row) -> bool:
            if (row.name, row.header.values) != (other.name, other.header.values):
                return False
            if not row.header.run_id or not other.header.run_id:
                return False
            return not groups.differing(
                row.configuration, other.configuration
            ) and not machines.apart(row, other)

        return Log(groups.newest_of_each(self.every, same_run))

    def within(self, folders: Collection[Path]) -> Log:
        return Log([row for row in self.every if row.folder in folders])

    @cached_property
    def groups(self) -> list[Group]:
        return groups.collect(self.rows)

    @cached_property
    def sweeps(self) -> list[Sweep]:
        return groups.sweeps(self.swept)


def read(paths: Sequence[Any] = (), all_runs: bool = False, traces: bool = True) -> Log:
    """Return what is in, at or under `paths` (default: ``log``), each a folder, a trace or a
    results.jsonl. traces: those of runs too. Raises UserError for a path that does not exist (the
    default may be absent)."""
    every = [
        row for folder, asked in _folders(paths).items() for row in _rows_of(folder, asked, traces)
    ]
    rates = {row.header.run_id: row.rates for row in every if row.rates.memory}
    for row in every:  # the records of a loss that was not timed lack those of its run
        if row.rates.memory is None:
            row.rates = rates.get(row.header.run_id, row.rates)
    if all_runs:
        return Log(every)
    newest = Log(every).newest()
    left = {row.folder for row in every} - {row.folder for row in newest.every}
    for path in paths if len(paths) > 1 else ():
        store.warn_of_hidden(Path(path), left)
    return newest


def read_any(paths: Sequence[Any] = (), all_runs: bool = False) -> Log:
    """Return what `read` returns.  Raises UserError where that is nothing and there is no run of a
    model either."""
    log = read(paths, all_runs)
    folders = [Path(path) for path in paths] or [Path("log")]
    if not log.every and not any(tool.holds(path) for tool in parts.slices() for path in folders):
        where = ", ".join(map(str, paths)) or "log/"
        advice = f"run `{command('run')}` first, or name a folder of runs or traces"
        raise errors.UserError(f"no runs under {where}: {advice}")
    return log


def rows(paths: Sequence[Any] = (), all_runs: bool = False) -> list[Row]:
    """Return the rows of `read`."""
    return read(paths, all_runs).rows


def _folders(paths: Sequence[Any]) -> dict[Path, list[Path]]:
    """Return the run folders at or under `paths`, each with the traces that were asked for, [] for
    all of them."""
    folders: dict[Path, list[Path]] = {}
    for path in [Path(path) for path in paths] or [Path("log")]:
        problem = files.not_there(path)
        if problem and paths:
            raise errors.UserError(
                f"{path}: {problem}; name a log folder, a results.jsonl or a trace"
            )
        if os.path.isdir(path):
            for folder in run_folders(path):
                folders[folder] = []
        elif os.path.isfile(path):
            asked = folders.setdefault(path.parent, [])
            asked += [] if path.name == schema.FILE_NAME else [path]
    return folders


def run_folders(top: Path) -> Iterator[Path]:
    """Yield the folders that hold records of a run or traces, then those that this user may not
    read."""
    closed: list[Path] = []

    def note(error: OSError) -> None:
        if isinstance(error, PermissionError):  # a folder that is gone meanwhile is no matter
            closed.append(Path(error.filename))

    for folder, below, names in os.walk(top, onerror=note):
        below[:] = sorted({*below} - {store.BASELINES})
        if SWEEP_OF_BEFORE in names:
            store.warn(
                f"{folder}/{SWEEP_OF_BEFORE}: a sweep of an earlier version is left out; measure it again"
            )
        if schema.TOOL_FILE_NAME in names:
            below.clear()  # its traces are of its own jobs
        elif schema.FILE_NAME in names or any(
            reader.is_trace(Path(folder, name)) for name in names
        ):
            yield Path(folder)
    yield from closed


def _rows_of(folder: Path, asked: list[Path], traces: bool) -> list[Row]:
    try:
        if (folder / schema.FILE_NAME).exists() and not asked:
            header, records = store.read_run(folder)
            if getattr(header.settings, SEARCH_OF_BEFORE):
                advice = "measure it again with rnnt-bench largest"
                store.warn(f"{folder}: a search of an earlier version is left out; {advice}")
                return []
            return [measured.row(records, folder, traces)]
        return _foreign_rows(asked or reader.trace_files(folder), folder) if traces else []
    except (errors.UserError, OSError) as error:
        why = (
            f"{folder}: cannot be read: {error.strerror or error}"
            if isinstance(error, OSError)
            else str(error)
        )
        return [Row(folder.resolve().name, folder, status="error", reason=why, unreadable=True)]


def _foreign_rows(paths: list[Path], folder: Path) -> list[Row]:
    """Return a row of profiled numbers for each worker that left traces without records."""
    by_worker = text.gathered(
        (reader.worker(path), (path, window)) for path, window in windows.read_windows(paths)
    )
    name = folder.resolve().name
    result = []
    for label, traces in by_worker.items():
        numbers = windows.profiled(traces)
        readable = not numbers.error or any(window.steps for window in numbers.windows)
        device = ("cuda" if numbers.on_cuda else "cpu") if readable else None
        result.append(
            Row(
                name if len(by_worker) == 1 else f"{name} {label}",
                folder,
                status="error" if numbers.error else "ok",
                reason=numbers.error or "",
                environment=schema.Environment(device=device),
                profile=numbers,
                unreadable=not readable,
            )
        )
    return result
