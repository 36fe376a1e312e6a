"""Read log folders: the newest run of each implementation and configuration, and sweeps.

A folder that cannot be read becomes a row with status "error"."""

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

#: The file in which older versions kept a sweep, whose cells are ordinary runs now.
OLD_SWEEP = "sweep.jsonl"
#: The setting by which older versions searched for the largest batch, which is a tool's now.
OLD_SEARCH = "find_largest"


class Log:
    """Hold the rows of log folders, and set their looks.

    Attributes:
        all_rows: all of them
        rows: those of ordinary runs, and of traces without records
        swept: those of the cells of sweeps
    """

    def __init__(self, all_rows: Sequence[Row]) -> None:
        self.all_rows = all_rows
        # Only a cell of a sweep has `values`: those of the settings that the sweep varies.
        self.rows = [row for row in all_rows if not row.header.values]
        self.swept = [row for row in all_rows if row.header.values]
        look_of = style.looks_of({row.name: row.kind for row in all_rows})
        for row in all_rows:
            row.look = look_of[row.name]

    @property
    def readable(self) -> bool:
        """Tell whether any row could be read; True where there are no rows at all."""
        return not self.all_rows or any(not row.unreadable for row in self.all_rows)

    def newest(self) -> Log:
        """Return the log with only the newest run of each implementation and configuration. Set
        the `earlier` and `stopped` rows of each."""

        def measure_the_same(row: Row, other: Row) -> bool:
            """Tell whether two rows measure the same, so that the newer one replaces the other."""
            if (row.name, row.header.values) != (other.name, other.header.values):
                return False
            # Traces without records do not tell what they measured.
            if not row.header.run_id or not other.header.run_id:
                return False
            different = groups.differing(row.configuration, other.configuration)
            return not different and not machines.apart(row, other)

        return Log(groups.newest_of_each(self.all_rows, measure_the_same))

    def within(self, folders: Collection[Path]) -> Log:
        """Return the log with only the rows of these folders."""
        return Log([row for row in self.all_rows if row.folder in folders])

    @cached_property
    def groups(self) -> list[Group]:
        return groups.collect(self.rows)

    @cached_property
    def sweeps(self) -> list[Sweep]:
        return groups.sweeps(self.swept)


def read(paths: Sequence[Any] = (), all_runs: bool = False, traces: bool = True) -> Log:
    """Return the rows of the runs and traces at or under some paths. With several paths, warn of
    the runs that are left out since there are newer ones.

    Args:
        paths: folders, traces or results.jsonl files; () for ``log``, which need not exist
        all_runs: keep all runs, instead of the newest of each implementation and configuration
        traces: read traces too

    Raises UserError for a path that does not exist."""
    rows: list[Row] = []
    for folder, asked in _folders(paths).items():
        rows += _rows_of(folder, asked, traces)
    # All losses of a run share its rates, but the records of a loss that was not timed lack them.
    rates = {row.header.run_id: row.rates for row in rows if row.rates.memory}
    for row in rows:
        if row.rates.memory is None:
            row.rates = rates.get(row.header.run_id, row.rates)
    if all_runs:
        return Log(rows)
    newest = Log(rows).newest()
    if len(paths) > 1:
        hidden = {row.folder for row in rows} - {row.folder for row in newest.all_rows}
        for path in paths:
            store.warn_of_hidden(Path(path), hidden)
    return newest


def read_any(paths: Sequence[Any] = (), all_runs: bool = False) -> Log:
    """Return the rows of the runs and traces at or under some paths (default: ``log``).

    Raises UserError if there are none, and no results of a tool such as a profile either."""
    log = read(paths, all_runs)
    folders = [Path(path) for path in paths] or [Path("log")]
    if not log.all_rows and not any(
        tool.holds(path) for tool in parts.slices() for path in folders
    ):
        where = ", ".join(map(str, paths)) or "log/"
        advice = f"run `{command('run')}` first, or name a folder of runs or traces"
        raise errors.UserError(f"no runs under {where}: {advice}")
    return log


def rows(paths: Sequence[Any] = (), all_runs: bool = False) -> list[Row]:
    """Return the rows at or under some paths (default: ``log``), without the cells of sweeps."""
    return read(paths, all_runs).rows


def _folders(paths: Sequence[Any]) -> dict[Path, list[Path]]:
    """Return run folder -> the traces in it that `paths` name one by one; [] where they also name
    the whole folder or its records.

    Raises UserError for a path that does not exist."""
    folders: dict[Path, list[Path]] = {}
    whole: set[Path] = set()
    for path in [Path(path) for path in paths] or [Path("log")]:
        problem = files.not_a_file_or_folder(path)
        if problem and paths:  # without paths: the default folder need not exist
            raise errors.UserError(
                f"{path}: {problem}; name a log folder, a results.jsonl or a trace"
            )
        if os.path.isdir(path):
            for folder in run_folders(path):
                folders.setdefault(folder, [])
                whole.add(folder)
        elif os.path.isfile(path):
            traces = folders.setdefault(path.parent, [])
            if path.name == schema.FILE_NAME:
                whole.add(path.parent)
            else:
                traces.append(path)
    return {folder: [] if folder in whole else traces for folder, traces in folders.items()}


def run_folders(top: Path) -> Iterator[Path]:
    """Yield the folders at or under `top` that hold records of a run or traces, then the folders
    that this user may not read.

    Skip a folder with records of a tool, and all folders below it. Warn of a folder in which an
    older version kept a sweep (OLD_SWEEP): that file is not read."""
    forbidden: list[Path] = []

    def note(error: OSError) -> None:
        if isinstance(error, PermissionError):  # a folder that was removed meanwhile is skipped
            forbidden.append(Path(error.filename))

    for folder, subfolders, names in os.walk(top, onerror=note):
        # os.walk goes on into the folders that are left in this list.  The runs in BASELINES are
        # kept for `compare` alone.
        subfolders[:] = sorted({*subfolders} - {store.BASELINES})
        if OLD_SWEEP in names:
            store.warn(
                f"{folder}/{OLD_SWEEP}: a sweep of an earlier version is left out; measure it again"
            )
        if schema.TOOL_FILE_NAME in names:
            subfolders.clear()  # what is below belongs to the tool's own jobs
        elif schema.FILE_NAME in names or any(
            reader.is_trace(Path(folder, name)) for name in names
        ):
            yield Path(folder)
    yield from forbidden


def _rows_of(folder: Path, asked: list[Path], traces: bool) -> list[Row]:
    """Return the rows of a folder: one of its records, or one for each worker that left traces.

    A folder that cannot be read has one row, which says why. For a search of an older version,
    warn and return [].

    Args:
        asked: traces to read instead of the records; []: read the records, or all traces of a
            folder without records
        traces: whether to read traces
    """
    try:
        if (folder / schema.FILE_NAME).exists() and not asked:
            header, records = store.read_run(folder)
            if getattr(header.settings, OLD_SEARCH):
                advice = "measure it again with rnnt-bench largest"
                store.warn(f"{folder}: a search of an earlier version is left out; {advice}")
                return []
            return [measured.row_of(records, folder, traces)]
        if not traces:
            return []
        return _foreign_rows(asked or reader.trace_files(folder), folder)
    except errors.UserError as error:
        reason = str(error)
    except OSError as error:
        reason = f"{folder}: cannot be read: {error.strerror or error}"
    return [Row(folder.resolve().name, folder, status="error", reason=reason, unreadable=True)]


def _foreign_rows(paths: list[Path], folder: Path) -> list[Row]:
    """Return a row for each worker, from its traces alone: records of this suite are not read.

    A row is unreadable if one of its traces has an error and none has a complete step.

    paths: the traces of all workers; folder: where they are, which names the rows"""
    by_worker = text.gathered(
        (reader.worker(path), (path, trace)) for path, trace in windows.read_windows(paths)
    )
    name = folder.resolve().name
    result = []
    for label, traces in by_worker.items():
        numbers = windows.profiled(traces)
        has_steps = any(window.steps for window in numbers.windows)
        unreadable = bool(numbers.error) and not has_steps
        device = "cuda" if numbers.on_cuda else "cpu"
        result.append(
            Row(
                name if len(by_worker) == 1 else f"{name} {label}",
                folder,
                status="error" if numbers.error else "ok",
                reason=numbers.error or "",
                environment=schema.Environment(device=None if unreadable else device),
                profile=numbers,
                unreadable=unreadable,
            )
        )
    return result
