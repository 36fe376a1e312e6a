"""Ordinary TensorBoard summaries of what is in a log folder: they need no plugin and no internet.

``python -m common.results.tensorboard_scalars LOGDIR``, run by the viewer environment's Python before
`make tensorboard` starts the server.  Each run folder gets one event file: scalars of its row (see summary.py), the
profiled ones by window at steps 1, 2, ..., and the PNG pictures in the folder.  The log folder itself gets the table
as text, its pictures, and those of the report, drawn by the main environment, which has matplotlib.  The file's name
ends in a fingerprint of what it was made from: nothing is drawn or written again until that changes.  No torch.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from datetime import datetime
from pathlib import Path
from typing import Any, Iterator, List, NamedTuple, Optional, Sequence

from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from common import cli, flag_types
from common.commands import guarded
from common.errors import EXIT_OK, UserError
from common.results import largest_tables, records, summary, tables
from common.results.exports import plain
from common.settings import ROOT
from common.setup import environments

VERSION = 2  # of what is written: a new one makes every file anew
MARK = ".suite-"  # between the name that TensorBoard expects and the fingerprint
PNG = b"\x89PNG\r\n\x1a\n"

NOTES = (
    "Scalars, images and text work offline.  The PyTorch Profiler tab is torch-tb-profiler: no longer maintained "
    "(removed from pytorch/kineto in 2026), and its charts load from the internet.",
    "That tab reads a run folder once: start again to see traces that were written since.  `make trace-viewer NAME=k2` "
    "shows one trace, offline.",
)


class Value(NamedTuple):
    """One summary; `step` is the window for profiled numbers, 0 for what a run has one of."""

    step: int
    value: summary_pb2.Summary.Value


def scalar(tag: str, number: Optional[float], step: int = 0) -> List[Value]:
    """Nothing where the number is not known."""
    return [] if number is None else [Value(step, summary_pb2.Summary.Value(tag=tag, simple_value=number))]


def of_row(row: summary.Row, prefix: str = "") -> List[Value]:
    """The scalars of a row; `prefix` tells the rows of one folder apart."""
    found: List[Value] = []
    for scope in ("step", "loss"):
        described = row[f"{scope}_ms"] or {}
        found += scalar(f"{prefix}timing/{scope}_ms_median", described.get("median"))
        found += scalar(f"{prefix}timing/{scope}_ms_p20", described.get("p20"))
        found += scalar(f"{prefix}timing/{scope}_ms_p80", described.get("p80"))
        for key, megabytes in (row["memory"].get(scope) or {}).items():
            found += scalar(f"{prefix}memory/{scope}_{key}", megabytes)
    for number, window in enumerate(row["windows"], start=1):
        found += scalar(f"{prefix}profiled/step_us", window["average_step_time_us"], number)
        found += scalar(f"{prefix}profiled/peak_memory_mb", window["peak_memory_mb"], number)
    found += scalar(f"{prefix}profiled/inflation", row["profiler_inflation"])
    found += scalar(f"{prefix}correctness/loss_error", row["loss_error"])
    return found + scalar(f"{prefix}correctness/grad_error", row["grad_error"])


def drawn(log_dir: Path, main: Optional[Path]) -> List[Value]:
    """The report's pictures, by report.py --png under `main`; without it, or when it fails, a line says why not."""
    if main is None:
        print(f"{log_dir}: no pictures of the report: {environments.reason('main')}", file=sys.stderr)
        return []
    with tempfile.TemporaryDirectory() as scratch:
        command = [str(main), str(ROOT / "report.py"), f"--output={scratch}/report.html", f"--png={scratch}"]
        done = subprocess.run(
            [*command, "--", str(log_dir)], stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace"
        )
        found = pictures(Path(scratch), "report/")
    if done.returncode and not found:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        print(f"{log_dir}: no pictures of the report: {plain(said[-1])}", file=sys.stderr)
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


def run_folders(top: Path) -> Iterator[Path]:
    for folder, below, names in os.walk(top):
        below.sort()
        if records.FILE_NAME in names or any(".pt.trace.json" in name for name in names):
            yield Path(folder)


def fingerprint(paths: Sequence[Path], *more: Any) -> str:
    """Of names, sizes and times of change: the contents may be gigabytes; and of what else matters."""
    states = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(paths)]
    return hashlib.sha256(repr((VERSION, states, *more)).encode()).hexdigest()[:16]


def sources(folder: Path) -> List[Path]:
    """The files in a folder that its event file is made from."""
    suffixes = (records.FILE_NAME, ".pt.trace.json", ".pt.trace.json.gz", ".png")
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
    rows = [row for row in summary.rows([folder], all_runs=True) if Path(row["log_dir"]) == folder]
    values = pictures(folder)
    if not values and rows and all(row["unreadable"] for row in rows):
        raise UserError(rows[0]["reason"])
    for row in rows:
        values += of_row(row, "" if len(rows) == 1 else f"{plain(row['name'])}/")
    write(folder, values, mark, _wall_time(rows[0]["started"] if rows else None, files))
    return True


def write_top(log_dir: Path, folders: Sequence[Path]) -> None:
    """The table of all runs and the pictures of the log folder itself; not where that is a run folder too."""
    if log_dir in folders:
        return
    files = [path for folder in [log_dir, *folders] for path in sources(folder)]
    files += log_dir.rglob(records.SWEEP_FILE_NAME)  # the report has pictures of sweeps
    main = environments.interpreter("main")
    mark = MARK + fingerprint(files, main is None)
    if files and not is_written(log_dir, mark):
        shown, searched = tables.render(summary.rows([log_dir]), "markdown"), summary.searches([log_dir])
        if searched:
            shown += "\n" + largest_tables.render(searched, "markdown")
        table: Any = text_pb("table", shown)
        values = [*pictures(log_dir), *drawn(log_dir, main), Value(0, table.value[0])]
        write(log_dir, values, mark, _wall_time(None, files))


def _wall_time(started: Optional[str], files: Sequence[Path]) -> float:
    try:
        return datetime.fromisoformat(started or "").timestamp()
    except (ValueError, OverflowError):
        return max(path.stat().st_mtime for path in files)


def main(arguments: Optional[List[str]] = None) -> int:
    parser = cli.Parser(description=__doc__.splitlines()[0])
    parser.add_argument("log_dir", type=flag_types.path)
    log_dir = parser.parse_args(arguments).log_dir
    if not log_dir.is_dir():
        raise UserError(f"{log_dir}: no such folder; run `make bench` first, or name one with LOGDIR=...")
    folders = list(run_folders(log_dir))
    written = 0
    for folder in folders:
        try:
            written += write_run(folder)
        except (OSError, UserError) as error:
            print(f"{folder}: no scalars: {plain(getattr(error, 'strerror', None) or error)}", file=sys.stderr)
    try:
        write_top(log_dir, folders)
    except OSError as error:
        print(f"{log_dir}: no table: {error.strerror or error}", file=sys.stderr)
    print(f"{len(folders)} run folders in {log_dir}, scalars of {written} written anew", file=sys.stderr)
    for note in NOTES:
        print(f"note: {note}", file=sys.stderr)
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(guarded("tensorboard", main))
