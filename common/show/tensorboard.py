"""Write log folders as ordinary TensorBoard scalars, which need no plugin and no internet: the
command `tensorboard`.

It runs in the viewer environment. Each run folder gets one event file. TensorBoard's step is the
number of a sample for its time, and the number of a window for what the profiler measured, both
from 1.  It is 0 for all numbers of a whole run.
"""

from __future__ import annotations

import os
import tempfile
from argparse import Namespace
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from rnnt_bench.analysis import logs, metrics
from rnnt_bench.analysis.row import SCOPES, Row
from rnnt_bench.core import flag_types
from rnnt_bench.core.arguments import Parser
from rnnt_bench.core.called import command
from rnnt_bench.core.errors import EXIT_OK, UserError, say
from rnnt_bench.core.files import not_a_folder
from rnnt_bench.core.text import plain
from rnnt_bench.setup import interpreters

SUFFIX = ".suite"  # ends the names of our event files, so that no other file is replaced
NOTES = (
    "The PyTorch Profiler tab is torch-tb-profiler: no longer maintained (removed from pytorch/kineto in 2026), and "
    "its charts load from the internet.",
    "That tab reads a run folder once: start again to see traces that were written since.  `make trace-viewer NAME=k2` "
    "shows one trace, offline.",
)


class Scalar(NamedTuple):
    """Hold a number as TensorBoard draws it: the curves are named by their tags, "group/name"."""

    step: int
    tag: str
    value: float | None


def scalars(row: Row) -> list[Scalar]:
    """Return the numbers of a row that are known."""
    result = [Scalar(0, tag, value) for tag, value in metrics.scalars(row).items()]
    for scope in SCOPES:
        samples = enumerate(row.samples_of(scope), start=1)
        result += [Scalar(step, f"1_time/{scope}_ms", sample.ms) for step, sample in samples]
    for step, window in enumerate(row.profile.windows, start=1):
        result.append(Scalar(step, "4_profiled/step_us", window.average_step_time_us))
        result.append(Scalar(step, "4_profiled/peak_memory_mb", window.peak_memory_mb))
    return [scalar for scalar in result if scalar.value is not None]


def write_run(folder: Path) -> None:
    """Write the event file of a run folder, whole or not at all, in place of an earlier one. Raises
    UserError if no row of the folder can be read."""
    from tensorboard.compat.proto import event_pb2, summary_pb2
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    rows = [row for row in logs.rows([folder], all_runs=True) if row.folder == folder]
    if rows and all(row.unreadable for row in rows):
        raise UserError(rows[0].reason)
    # Only records tell when a run began: a trace without records gets the time of its folder.
    wall_time = folder.stat().st_mtime
    if rows:
        with suppress(ValueError, OverflowError):
            wall_time = datetime.fromisoformat(rows[0].header.started).timestamp()
    earlier = list(folder.glob(f"events.out.tfevents.*{SUFFIX}"))
    with tempfile.TemporaryDirectory(dir=folder, prefix=".events-") as scratch:
        writer = EventFileWriter(scratch, filename_suffix=SUFFIX)
        for row in rows:
            prefix = "" if len(rows) == 1 else f"{plain(row.name)}/"
            for step, tag, number in scalars(row):
                value = summary_pb2.Summary.Value(tag=prefix + tag, simple_value=number)
                summary = summary_pb2.Summary(value=[value])
                writer.add_event(event_pb2.Event(wall_time=wall_time, step=step, summary=summary))
        writer.close()
        for path in earlier:
            path.unlink()
        (events,) = Path(scratch).iterdir()
        os.replace(events, folder / events.name)


def parser() -> Parser:
    result = Parser(
        description="Write the scalars of every run in a log folder beside its records."
    )
    result.add_argument("log_dir", type=flag_types.path, metavar="LOG", help="Folder of the runs.")
    return result


def main(options: Namespace) -> int:
    """Write the event files of all runs of a log folder, and say how many; return the exit code."""
    interpreters.need("tensorboard", "viewer")
    log_dir = options.log_dir
    problem = not_a_folder(log_dir)
    if problem:
        raise UserError(
            f"{log_dir}: {problem}; run `{command('run')}` first, or name one with LOGDIR=..."
        )
    folders = list(logs.run_folders(log_dir))
    written = 0
    for folder in folders:
        try:
            write_run(folder)
            written += 1
        except (OSError, UserError) as error:
            say(f"{folder}: no scalars: {plain(getattr(error, 'strerror', None) or error)}")
    say(f"{len(folders)} run folders in {log_dir}, scalars of {written} written")
    for note in NOTES:
        say(f"note: {note}")
    return EXIT_OK
