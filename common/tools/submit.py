"""Make a folder of results/ from a log folder, to be sent as a pull request; --check says what is wrong with one.

The folder holds the raw records and the packed traces, without paths of the machine, and is named after the day and the
device.  A run is refused, with a line for each reason, if
- it is incomplete: interrupted rows, no revision, no machine
- it is of several machines, or was measured beside other load
- two exact losses disagree on one of its batches
"""

from __future__ import annotations

import gzip
import io
import re
import shutil
import sys
import zlib
from pathlib import Path
from typing import Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

from common.analysis import logs
from common.analysis.row import Row
from common.cli.parser import Parser
from common.core.errors import EXIT_FAILED, EXIT_OK, UserError
from common.core.files import LARGEST, another, cannot_write, make_folder, read_bytes
from common.core.guard import guarded
from common.core.paths import ROOT, not_a_folder
from common.core.text import number, plain
from common.records import schema, store
from common.setup import interpreters
from common.traces.files import is_trace

NAME = "rnnt-bench submit"
#: Folders below which are a user's own files.
PRIVATE = re.compile(
    r"(?<![\w.~-])/(?:home|Users|root|media|mnt|scratch|data|tmp|private|var/folders)/[^\s\"'\\,;:()<>]+"
)
#: Files that a folder may hold beside records and traces.
BESIDE = ("README.md",)
#: Largest relative difference of what two exact losses return for one batch: torchaudio's float32 is off by 6e-4 with
#: peaky logits.  Half precision carries fewer digits.
AGREE, AGREE_IN_HALF = 2e-3, 5e-2
MOST_MB = 64


def keep(log: Path, folder: Path, root: Path = ROOT) -> None:
    """Replace `folder` by the records and packed traces of a log folder, without paths of this machine.

    root: paths below it become relative.  Raises UserError for a file that cannot be read, and OSError.
    """
    new = folder.with_name(f"{folder.name}.new")
    shutil.rmtree(new, ignore_errors=True)
    for path in sorted(log.rglob("*")):
        if path.suffix != ".jsonl" and not is_trace(path.name):
            continue
        data = without_private_paths(_text_of(path), root).encode("utf-8", "surrogateescape")
        to = new / path.relative_to(log)
        to.parent.mkdir(parents=True, exist_ok=True)
        if is_trace(path.name):
            to.with_name(f"{path.name.removesuffix('.gz')}.gz").write_bytes(gzip.compress(data, 9, mtime=0))
        else:
            to.write_bytes(data)
    shutil.rmtree(folder, ignore_errors=True)
    new.rename(folder)


def _text_of(path: Path) -> str:
    """Return the text of records, or of a trace, packed or not.  Raises UserError where it cannot be read, and for more
    than LARGEST bytes."""
    try:
        data = read_bytes(path)
        if path.suffix == ".gz":
            data = gzip.GzipFile(fileobj=io.BytesIO(data)).read(LARGEST + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    if len(data) > LARGEST:
        raise UserError(f"cannot read {path}: it unpacks to more than {LARGEST:,} bytes")
    return data.decode("utf-8", "surrogateescape")


def without_private_paths(text: str, root: Path) -> str:
    """Return text with paths below `root` relative to it, and the names alone of files in folders of users."""
    text = text.replace(f"{root}/", "").replace(str(root), ".")
    return PRIVATE.sub(lambda path: path[0].rstrip("/").rpartition("/")[2], text)


def folder_name(rows: Sequence[Row]) -> str:
    """Return the name of a folder: the day and the device of its rows. "2026-11-23-amd-epyc-2-cores"."""
    row = next((row for row in rows if row.device_name), rows[0])
    cores = f"{row.header.machine.cores} cores" if row.device == "cpu" else ""
    words = f"{(row.started or '')[:10]} {row.device_name or row.device or 'unknown'} {cores}"
    return re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")


def rows_of(folder: Path) -> List[Row]:
    """Return every row of a folder, of sweeps and searches too.  Raises UserError."""
    log = logs.read([folder], all_runs=True)
    return [*log.rows, *log.searches, *(run.row for swept in log.sweeps for run in swept.runs)]


def problems(folder: Path) -> Iterator[str]:
    """Yield what makes a folder of results incomplete or inconsistent, a line each."""
    try:
        rows = rows_of(folder)
    except UserError as error:
        yield plain(str(error))
        return
    yield from _of_files(folder)
    for row in rows:
        where = Path(row.folder or folder).name
        yield from (f"{where}: {reason}" for reason in _of_row(row))
    if not any(row.step_ms or row.loss_ms or row.largest for row in rows):
        yield "nothing was measured: no row has a time or a size"
    yield from _of_machines([row for row in rows if not row.unreadable])
    yield from _disagreements([row for row in rows if row.is_exact and row.kind == "exact" and row.round_medians_ms])


def _of_files(folder: Path) -> Iterator[str]:
    """Yield what is wrong with the files of a folder."""
    size = 0
    for path in sorted(each for each in folder.rglob("*") if each.is_file()):
        name = path.relative_to(folder)
        size += path.stat().st_size
        if path.suffix == ".jsonl" or is_trace(path.name):
            try:
                private = PRIVATE.search(_text_of(path))
            except UserError as error:
                yield plain(str(error))
                continue
            if private:
                yield f"{name}: holds a path of the machine: {plain(private[0])}"
        elif path.name not in BESIDE:
            yield f"{name}: is neither records nor a trace: remove it"
    if size > MOST_MB * 10**6:
        yield f"takes {number(size / 1e6)} MB, more than {MOST_MB}: leave the traces out"


def _of_row(row: Row) -> Iterator[str]:
    """Yield why a row is not complete."""
    if row.unreadable:
        yield plain(row.reason)
        return
    if row.status == "interrupted":
        yield f"{plain(row.reason)}: --resume measures it"
    header = row.header
    if not header.git_revision:
        yield "its records have no revision: measure in a checkout of the suite"
    if header.git_dirty:
        yield "it was measured with uncommitted changes: commit or stash them, and measure again"
    if not (header.machine.cpu and header.machine.cores and header.machine.memory_bytes):
        yield "its records do not say on which machine it was measured"
    if not (row.step_ms or row.loss_ms):
        return
    if not (row.torch_version and row.device_name):
        yield "its records do not say which torch and which device measured it"
    for scope in row.round_medians_ms:
        if row.is_beside_load(scope):
            yield f"its {scope} ran beside other load: measure when the machine is quiet"


def _of_machines(rows: Sequence[Row]) -> Iterator[str]:
    """Yield what tells that a folder is not of one machine."""
    machines = [(row.header.machine.cpu, row.header.machine.cores) for row in rows]
    devices = [row.device_name for row in rows if row.device_name]
    for what, values in (("machines", machines), ("devices", devices)):
        different = list(dict.fromkeys(map(str, values)))
        if len(different) > 1:
            yield f"is of {len(different)} {what}, {', '.join(map(plain, different))}: make a folder of each"


def _disagreements(rows: Sequence[Row]) -> Iterator[str]:
    """Yield which exact losses returned something else than the first one of their run for the same batch."""
    first: Dict[Tuple[str, ...], Tuple[str, float]] = {}
    for row in rows:
        settings = row.header.settings
        half = settings.get("amp") or settings.get("dtype") in ("float16", "bfloat16")
        allowed = AGREE_IN_HALF if half else AGREE
        for key, loss in _losses(row).items():
            name, other = first.setdefault((row.run_id or "", *key), (row.name, loss))
            if abs(loss - other) > allowed * max(abs(other), 1.0):
                yield (
                    f"{Path(row.folder or '').name}: returned {number(loss)} for batch {key[1]} of round {key[0]}, and "
                    f"{name} {number(other)}: they were not given the same"
                )
                break


def _losses(row: Row) -> Mapping[Tuple[str, ...], float]:
    """Return the loss of the first sample of each batch of the step, by (round, batch)."""
    losses: Dict[Tuple[str, ...], float] = {}
    for line in _samples(row):
        if line.scope == "step" and not line.repeat and line.loss is not None:
            losses.setdefault((str(line.round), str(line.batch)), line.loss)
    return losses


def _samples(row: Row) -> List[schema.Sample]:
    """Return the samples of a row's own file; [] of a cell of a sweep, whose file holds many rows."""
    path = Path(row.folder or "") / schema.FILE_NAME
    if not path.exists():
        return []
    return [line for line in store.read_run(path)[1] if isinstance(line, schema.Sample)]


def submit(log: Path, into: Path, name: Optional[str]) -> int:
    """Keep a log folder as a folder in `into` and check that; return an exit code.  Raises UserError."""
    rows = rows_of(log)
    if not rows:
        raise UserError(f"{log}: holds no runs; name the log folder of `make bench`")
    folder = into / (name or folder_name(rows))
    if folder.exists():
        raise UserError(f"{folder}: is there already; remove it, or name another with --name")
    make_folder(into, another("--into", "folder"))
    try:
        keep(log, folder)
    except OSError as error:
        raise UserError(cannot_write(folder, error, another("--into", "folder"))) from error
    print(folder)
    return check([folder])


def check(folders: Sequence[Path]) -> int:
    """Print what is wrong with folders of results, a line each; return an exit code."""
    lines = [f"{folder}: {problem}" for folder in folders for problem in dict.fromkeys(problems(folder))]
    for line in lines:
        print(line, file=sys.stderr)
    if not lines:
        print("complete and consistent: send it as a pull request" if len(folders) == 1 else "all are complete")
    return EXIT_FAILED if lines else EXIT_OK


def parser() -> Parser:
    result = Parser(prog=NAME, description=__doc__)
    result.add_argument(
        "folders", nargs="+", type=Path, metavar="FOLDER", help="Log folder; with --check, folders of results/."
    )
    result.add_argument("--check", action="store_true", help="Only print what is wrong with folders of results/.")
    result.add_argument(
        "--into", type=Path, default=Path("results"), metavar="FOLDER", help="Folder to write into. Default: results"
    )
    result.add_argument("--name", help="Name of the new folder. Default: the day and the device")
    return result


def main(arguments: Optional[List[str]] = None) -> int:
    options = parser().parse_args(arguments)

    def run() -> int:
        if interpreters.lacks("msgspec"):  # with which records are read
            interpreters.continue_in("main")
        for folder in options.folders:
            reason = not_a_folder(folder)
            if reason:
                raise UserError(f"{folder}: {reason}; name a folder with runs")
        if options.check:
            return check(options.folders)
        if len(options.folders) > 1:
            raise UserError("name one log folder; several are taken with --check alone")
        return submit(options.folders[0], options.into, options.name)

    return guarded(NAME, run)
