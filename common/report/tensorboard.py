"""Ordinary TensorBoard summaries of what is in a log folder: they need no plugin and no internet.

``python -m common.cli.tensorboard LOGDIR``, run by the viewer environment before `make tensorboard` starts the server.
Each run folder gets one event file: scalars of its row, the profiled ones by window at steps 1, 2, ..., and the PNGs in
the folder.  The log folder itself gets the table as text, its PNGs, and those of the report, drawn by the main
environment.  The file's name ends in a fingerprint of what it was made from: nothing is written again until that
changes.  No torch.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
from datetime import datetime
from pathlib import Path
from typing import Any, List, NamedTuple, Optional, Sequence

from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from common.analysis import logs, metrics
from common.analysis.row import Row
from common.core.errors import UserError
from common.core.text import plain
from common.records import schema
from common.report import writing
from common.setup import environments
from common.tables import results, search

VERSION = 2  # of what is written: a new one makes every file anew
MARK = ".suite-"  # between the name that TensorBoard expects and the fingerprint
PNG = b"\x89PNG\r\n\x1a\n"


class Value(NamedTuple):
    """One summary; `step` is the window for profiled numbers, 0 for what a run has one of."""

    step: int
    value: summary_pb2.Summary.Value


def of_row(row: Row, prefix: str = "") -> List[Value]:
    """The scalars of a row; `prefix` tells the rows of one folder apart."""
    found = [(0, tag, value) for tag, value in metrics.scalars(row).items()]
    for step, window in enumerate(row.windows, start=1):
        found.append((step, "profiled/step_us", window["average_step_time_us"]))
        found.append((step, "profiled/peak_memory_mb", window["peak_memory_mb"]))
    known = [(step, prefix + tag, number) for step, tag, number in found if number is not None]
    return [Value(step, summary_pb2.Summary.Value(tag=tag, simple_value=number)) for step, tag, number in known]


def drawn(log_dir: Path, main: Optional[Path]) -> List[Value]:
    """The report's pictures, by report.py --png under `main`; without it, or when it fails, a line says why not."""
    if main is None:
        print(f"{log_dir}: no pictures of the report: {environments.reason('main')}", file=sys.stderr)
        return []
    with tempfile.TemporaryDirectory() as scratch:
        failed, _, said = writing.run(main, log_dir, f"--output={scratch}/report.html", f"--png={scratch}")
        found = pictures(Path(scratch), "report/")
    if failed and not found:
        print(f"{log_dir}: no pictures of the report: {plain(said)}", file=sys.stderr)
    return found


def pictures(folder: Path, prefix: str = "") -> List[Value]:
    """The PNG files directly in a folder."""
    found = []
    for path in sorted(folder.glob("*.png")):
        data = path.read_bytes()
        if data.startswith(PNG):
            width, height = (int.from_bytes(data[at : at + 4], "big") for at in (16, 20))
            image = summary_pb2.Summary.Image(height=height, width=width, colorspace=4, encoded_image_string=data)
            found.append(Value(0, summary_pb2.Summary.Value(tag=plain(prefix + path.stem), image=image)))
    return found


def fingerprint(paths: Sequence[Path], *more: Any) -> str:
    """Of names, sizes and times of change: the contents may be gigabytes; and of what else matters."""
    states = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(paths)]
    return hashlib.sha256(repr((VERSION, states, *more)).encode()).hexdigest()[:16]


def sources(folder: Path) -> List[Path]:
    """The files in a folder that its event file is made from."""
    suffixes = (schema.FILE_NAME, ".pt.trace.json", ".pt.trace.json.gz", ".png")
    return [path for path in folder.iterdir() if path.name.endswith(suffixes) and path.is_file()]


def is_written(folder: Path, mark: str) -> bool:
    """Whether the event file with this mark is there; others of ours are removed."""
    current = False
    for path in folder.glob(f"events.out.tfevents.*{MARK}*"):
        if path.name.endswith(mark):
            current = True
        else:
            path.unlink()
    return current


def write(folder: Path, values: Sequence[Value], mark: str, wall_time: float) -> None:
    """The event file of a folder, whole or not at all."""
    with tempfile.TemporaryDirectory(dir=folder, prefix=".events-") as scratch:
        writer = EventFileWriter(scratch, filename_suffix=mark)
        for step, value in values:
            event = event_pb2.Event(wall_time=wall_time, step=step, summary=summary_pb2.Summary(value=[value]))
            writer.add_event(event)
        writer.close()
        (made,) = Path(scratch).iterdir()
        os.replace(made, folder / made.name)


def write_run(folder: Path) -> bool:
    """The event file of a run folder; False where it is up to date.  Raises UserError where nothing can be read."""
    files = sources(folder)
    mark = MARK + fingerprint(files)
    if is_written(folder, mark):
        return False
    rows = [row for row in logs.rows([folder], all_runs=True) if Path(row.log_dir) == folder]
    values = pictures(folder)
    if not values and rows and all(row.unreadable for row in rows):
        raise UserError(rows[0].reason)
    for row in rows:
        values += of_row(row, "" if len(rows) == 1 else f"{plain(row.name)}/")
    write(folder, values, mark, _wall_time(rows[0].started if rows else None, files))
    return True


def write_top(log_dir: Path, folders: Sequence[Path]) -> None:
    """The table of all runs and the pictures of the log folder itself; not where that is a run folder too."""
    if log_dir in folders:
        return
    files = [path for folder in [log_dir, *folders] for path in sources(folder)]
    files += log_dir.rglob(schema.SWEEP_FILE_NAME)  # the report has pictures of sweeps
    main = environments.interpreter("main")
    mark = MARK + fingerprint(files, main is None)
    if files and not is_written(log_dir, mark):
        log = logs.read([log_dir])
        shown = results.render(log.rows, "markdown")
        if log.searches:
            shown += "\n" + search.render(log.searches, "markdown")
        table: Any = text_pb("table", shown)
        values = [*pictures(log_dir), *drawn(log_dir, main), Value(0, table.value[0])]
        write(log_dir, values, mark, _wall_time(None, files))


def _wall_time(started: Optional[str], files: Sequence[Path]) -> float:
    try:
        return datetime.fromisoformat(started or "").timestamp()
    except (ValueError, OverflowError):
        return max(path.stat().st_mtime for path in files)
