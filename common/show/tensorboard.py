"""Write the content of a log folder as ordinary TensorBoard summaries, which need no plugin and no internet.

``python -m common.cli.tensorboard LOGDIR`` runs in the viewer environment before `make tensorboard` starts the server.

- Each run folder gets one event file.  It has every timed sample at the step of its number, the numbers of its row at
  step 0, and the profiled numbers by window at steps 1, 2, ...  It also has its line of the HParams table and the PNGs
  in the folder.
- The log folder gets the results as text, the columns of the HParams table, its PNGs and those of the report.

The name of an event file ends in a fingerprint of its sources: it is written again only when these change.  No torch.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
from datetime import datetime
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple, Union

from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.plugins.hparams import summary_v2 as hparams
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from common.analysis import logs, metrics
from common.analysis.groups import groups, heading
from common.analysis.row import SCOPES, Row
from common.core.errors import UserError
from common.core.files import read_bytes
from common.core.text import plain
from common.present.text import block
from common.records import schema
from common.setup import environments
from common.show import writing
from common.tables import remarks, results, search

VERSION = 3  # of what is written: a new one makes every file anew
MARK = ".suite-"  # between the name that TensorBoard expects and the fingerprint
PNG = b"\x89PNG\r\n\x1a\n"
#: One summary, behind the number of its sample or of its profiled window, 0 for what a run has one of.
Value = Tuple[int, summary_pb2.Summary.Value]

#: Of the HParams table: settings, with their type, and what they are compared by, keys of metrics.METRICS.
SETTINGS = {
    **dict.fromkeys(("implementation", "kind", "torch", "device", "dtype"), str),
    **dict.fromkeys(("vocab_size", "batch_size", "threads"), int),
}
COMPARED = ("step_median", "loss_median", "utterances_per_second", "peak_mb", "loss_error", "grad_error")


def of_row(row: Row, prefix: str = "") -> List[Value]:
    """Return the scalars of a row.  prefix: tells the rows of one folder apart."""
    values: List[Tuple[int, str, Optional[float]]] = [(0, tag, value) for tag, value in metrics.scalars(row).items()]
    for scope in SCOPES:
        values += [(step, f"1_time/{scope}_ms", sample.ms) for step, sample in enumerate(row.of_scope(scope), start=1)]
    for step, window in enumerate(row.windows, start=1):
        values.append((step, "4_profiled/step_us", window.average_step_time_us))
        values.append((step, "4_profiled/peak_memory_mb", window.peak_memory_mb))
    known = [(step, prefix + tag, number) for step, tag, number in values if number is not None]
    return [(step, summary_pb2.Summary.Value(tag=tag, simple_value=number)) for step, tag, number in known]


def settings(row: Row) -> Dict[str, Union[str, int]]:
    """Return the settings of SETTINGS that are known."""
    known = {**row.configuration, "implementation": plain(row.name), "kind": row.kind, "torch": row.torch}
    return {key: known[key] for key, kind in SETTINGS.items() if type(known.get(key)) is kind}


def session(row: Row, name: str, wall_time: float) -> Value:
    """Return the line of a run in the HParams table."""
    return 0, hparams.hparams_pb(settings(row), trial_id=name, start_time_secs=wall_time).value[0]


def experiment(rows: Sequence[Row]) -> Value:
    """Return the columns of the HParams table."""
    known = [settings(row) for row in rows]
    values = {key: sorted({each[key] for each in known if key in each}) for key in SETTINGS}
    columns = [hparams.HParam(key, hparams.Discrete(of_key)) for key, of_key in values.items() if of_key]
    compared = [metrics.METRICS[key] for key in COMPARED]
    shown = [hparams.Metric(metric.tag, display_name=metric.on_page or metric.title) for metric in compared]
    return 0, hparams.hparams_config_pb(columns, shown, time_created_secs=0.0).value[0]


def text(log: logs.Log) -> str:
    """Return the results in Markdown, in as many columns as TensorBoard shows without breaking a word."""
    tables = [results.table("text tab", heading(group), group) for group in groups(log.rows)]
    blocks = [block(table, "markdown") for table in tables]
    blocks += [search.render(log.searches, "markdown")] if log.searches else []
    return "\n\n".join([*blocks, *remarks.remarks(log.rows, "markdown")]) + "\n"


def drawn(log_dir: Path, main: Optional[Path]) -> List[Value]:
    """Return the report's pictures, which report.py --png draws under the Python `main`; none, and a warning, where
    that fails."""
    if main is None:
        print(f"{log_dir}: no pictures of the report: {environments.reason('main')}", file=sys.stderr)
        return []
    with tempfile.TemporaryDirectory() as scratch:
        failed, _, output = writing.run(main, log_dir, f"--output={scratch}/report.html", f"--png={scratch}")
        images = pictures(Path(scratch), "report/")
    if failed and not images:
        print(f"{log_dir}: no pictures of the report: {plain(output)}", file=sys.stderr)
    return images


def pictures(folder: Path, prefix: str = "") -> List[Value]:
    """Return the PNG files directly in a folder, without those that cannot be read."""
    images = []
    for path in sorted(folder.glob("*.png")):
        try:
            data = read_bytes(path)
        except OSError:
            continue
        if data.startswith(PNG):
            width, height = (int.from_bytes(data[at : at + 4], "big") for at in (16, 20))
            image = summary_pb2.Summary.Image(height=height, width=width, colorspace=4, encoded_image_string=data)
            images.append((0, summary_pb2.Summary.Value(tag=plain(prefix + path.stem), image=image)))
    return images


def fingerprint(paths: Sequence[Path], *extra: Any) -> str:
    """Return a hash of the files' names, sizes and times of change, since they may be gigabytes, and of `extra`."""
    states = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(paths)]
    return hashlib.sha256(repr((VERSION, states, *extra)).encode()).hexdigest()[:16]


def sources(folder: Path) -> List[Path]:
    """Return the files in a folder from which its event file is made."""
    suffixes = (schema.FILE_NAME, ".pt.trace.json", ".pt.trace.json.gz", ".png")
    return [path for path in folder.iterdir() if path.name.endswith(suffixes) and path.is_file()]


def is_written(folder: Path, mark: str) -> bool:
    """Return whether the event file with this mark exists; remove older event files of ours."""
    ours = list(folder.glob(f"events.out.tfevents.*{MARK}*"))
    others = [path for path in ours if not path.name.endswith(mark)]
    for path in others:
        path.unlink()
    return len(others) < len(ours)


def write(folder: Path, values: Sequence[Value], mark: str, wall_time: float) -> None:
    """Write the event file of a folder, whole or not at all."""
    with tempfile.TemporaryDirectory(dir=folder, prefix=".events-") as scratch:
        writer = EventFileWriter(scratch, filename_suffix=mark)
        for step, value in values:
            event = event_pb2.Event(wall_time=wall_time, step=step, summary=summary_pb2.Summary(value=[value]))
            writer.add_event(event)
        writer.close()
        (made,) = Path(scratch).iterdir()
        os.replace(made, folder / made.name)


def write_run(folder: Path) -> bool:
    """Write the event file of a run folder; return False where it is up to date.  Raises UserError where nothing can be
    read."""
    files = sources(folder)
    mark = MARK + fingerprint(files)
    if is_written(folder, mark):
        return False
    rows = [row for row in logs.rows([folder], all_runs=True) if Path(row.log_dir) == folder]
    values = pictures(folder)
    if not values and rows and all(row.unreadable for row in rows):
        raise UserError(rows[0].reason)
    wall_time = _wall_time(rows[0].started if rows else None, files)
    values += [session(rows[0], folder.name, wall_time)] if len(rows) == 1 else []
    for row in rows:
        values += of_row(row, "" if len(rows) == 1 else f"{plain(row.name)}/")
    write(folder, values, mark, wall_time)
    return True


def write_top(log_dir: Path, folders: Sequence[Path]) -> None:
    """Write the table of all runs and the pictures into the log folder itself, unless that is a run folder too."""
    if log_dir in folders:
        return
    files = [path for folder in [log_dir, *folders] for path in sources(folder)]
    files += log_dir.rglob(schema.SWEEP_FILE_NAME)  # the report has pictures of sweeps
    main = environments.interpreter("main")
    mark = MARK + fingerprint(files, main is None)
    if files and not is_written(log_dir, mark):
        log = logs.read([log_dir])
        table: Any = text_pb("table", text(log))
        values = [experiment(log.rows), *pictures(log_dir), *drawn(log_dir, main), (0, table.value[0])]
        write(log_dir, values, mark, _wall_time(None, files))


def _wall_time(started: Optional[str], files: Sequence[Path]) -> float:
    try:
        return datetime.fromisoformat(started or "").timestamp()
    except (ValueError, OverflowError):
        return max(path.stat().st_mtime for path in files)
