"""`make tensorboard`: write a log folder as ordinary TensorBoard scalars, which need no plugin and no internet.

Runs in the viewer environment, without torch, before the server starts.  Each run folder gets one event file with every
timed sample at the step of its number, the numbers of its row at step 0, and the profiled numbers by window at steps
1, 2, ...; it is written again only when the folder's records or traces change.
"""

from __future__ import annotations

import os
import sys
import tempfile
from datetime import datetime
from pathlib import Path
from typing import Iterator, List, Optional, Sequence, Tuple

from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from common.analysis import logs, metrics
from common.analysis.logs import run_folders
from common.analysis.row import SCOPES, Row
from common.cli.parser import Parser
from common.core import flag_types
from common.core.errors import EXIT_OK, UserError, guarded
from common.core.files import not_a_folder
from common.core.text import plain
from common.records import schema
from common.traces.reader import trace_files

SUFFIX = ".suite"  # of our event files, so that no other is touched
NOTES = (
    "The PyTorch Profiler tab is torch-tb-profiler: no longer maintained (removed from pytorch/kineto in 2026), and "
    "its charts load from the internet.",
    "That tab reads a run folder once: start again to see traces that were written since.  `make trace-viewer NAME=k2` "
    "shows one trace, offline.",
)


def scalars(row: Row, prefix: str = "") -> Iterator[Tuple[int, str, float]]:
    """Yield (step, tag, value) of a row.  prefix: tells the rows of one folder apart."""
    values: List[Tuple[int, str, Optional[float]]] = [(0, tag, value) for tag, value in metrics.scalars(row).items()]
    for scope in SCOPES:
        values += [(step, f"1_time/{scope}_ms", sample.ms) for step, sample in enumerate(row.of_scope(scope), start=1)]
    for step, window in enumerate(row.profile.windows, start=1):
        values.append((step, "4_profiled/step_us", window.average_step_time_us))
        values.append((step, "4_profiled/peak_memory_mb", window.peak_memory_mb))
    yield from ((step, prefix + tag, number) for step, tag, number in values if number is not None)


def write_run(folder: Path) -> bool:
    """Write the event file of a run folder; return False where it is up to date.  Raises UserError where nothing can be
    read."""
    records = folder / schema.FILE_NAME
    changed = [path.stat().st_mtime for path in [*trace_files(folder), *([records] if records.is_file() else [])]]
    ours = list(folder.glob(f"events.out.tfevents.*{SUFFIX}"))
    if ours and all(path.stat().st_mtime > max(changed, default=0.0) for path in ours):
        return False
    rows = [row for row in logs.rows([folder], all_runs=True) if row.folder == folder]
    if rows and all(row.unreadable for row in rows):
        raise UserError(rows[0].reason)
    values = [each for row in rows for each in scalars(row, "" if len(rows) == 1 else f"{plain(row.name)}/")]
    for path in ours:
        path.unlink()
    _write(folder, values, _wall_time(rows[0].started if rows else None, changed))
    return True


def _write(folder: Path, values: Sequence[Tuple[int, str, float]], wall_time: float) -> None:
    """Write the event file of a folder, whole or not at all."""
    with tempfile.TemporaryDirectory(dir=folder, prefix=".events-") as scratch:
        writer = EventFileWriter(scratch, filename_suffix=SUFFIX)
        for step, tag, number in values:
            summary = summary_pb2.Summary(value=[summary_pb2.Summary.Value(tag=tag, simple_value=number)])
            writer.add_event(event_pb2.Event(wall_time=wall_time, step=step, summary=summary))
        writer.close()
        (made,) = Path(scratch).iterdir()
        os.replace(made, folder / made.name)


def _wall_time(started: Optional[str], changed: Sequence[float]) -> float:
    try:
        return datetime.fromisoformat(started or "").timestamp()
    except (ValueError, OverflowError):
        return max(changed, default=0.0)


def main(arguments: Optional[List[str]] = None) -> int:
    """Write the scalars of the log folder in the arguments; return an exit code."""
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("log_dir", type=flag_types.path, help="Folder of the runs.")
    log_dir = parser.parse_args(arguments).log_dir
    problem = not_a_folder(log_dir)
    if problem:
        raise UserError(f"{log_dir}: {problem}; run `make bench` first, or name one with LOGDIR=...")
    folders = list(run_folders(log_dir))
    written = 0
    for folder in folders:
        try:
            written += write_run(folder)
        except (OSError, UserError) as error:
            print(f"{folder}: no scalars: {plain(getattr(error, 'strerror', None) or error)}", file=sys.stderr)
    print(f"{len(folders)} run folders in {log_dir}, scalars of {written} written anew", file=sys.stderr)
    for note in NOTES:
        print(f"note: {note}", file=sys.stderr)
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(guarded("tensorboard", main))
