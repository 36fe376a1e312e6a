"""Make a folder of results/ from a log folder, to be sent as a pull request; --check says what is wrong with one.

Every record is written anew, field by field: numbers, and a few texts that name packages, settings and hardware.  No
file is copied, so no path, message or trace leaves the machine.  A run is refused, with a line for each reason, if it
is incomplete (interrupted rows, fewer than three rounds, no revision, no machine), of several machines, or was measured
beside other load."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any, Dict, Iterator, List, Sequence

from rnnt_bench.analysis import doubts, logs, machines
from rnnt_bench.analysis.row import Row
from rnnt_bench.core import files, implementations
from rnnt_bench.core.arguments import Parser
from rnnt_bench.core.errors import EXIT_FAILED, EXIT_OK, UserError
from rnnt_bench.core.settings import FEWEST_ROUNDS, SETTINGS
from rnnt_bench.core.text import count, plain
from rnnt_bench.records import schema, store

#: Fields whose texts are kept ("..." for what is no WORDS); numbers are kept everywhere, other texts nowhere.
ALLOWED = frozenset(
    """record name run_id suffix package kind settings values started git_revision cpu vectors os python gpu torch
    device device_name cuda driver throttled_by implementation_version options ours default l2 denormals allocator
    variables transparent_huge_pages affinity shape_file_sha256 scope dtype kernel flags status pass job
    differing reached_by_padding by same_as""".split()
)
WORDS = re.compile(r"[\w .,:;()\[\]+@%=<>'-]{0,120}")
#: Environment variables that are kept, of those that a record has.
VARIABLES = frozenset(
    """OMP_NUM_THREADS OMP_PROC_BIND OMP_PLACES OMP_WAIT_POLICY OMP_DYNAMIC OMP_SCHEDULE KMP_AFFINITY KMP_BLOCKTIME
    GOMP_CPU_AFFINITY GOMP_SPINCOUNT MKL_NUM_THREADS MKL_CBWR MKL_DYNAMIC MKL_ENABLE_INSTRUCTIONS MKL_DEBUG_CPU_TYPE
    MALLOC_ARENA_MAX MALLOC_MMAP_MAX_ MALLOC_MMAP_THRESHOLD_ MALLOC_TRIM_THRESHOLD_ MALLOC_TOP_PAD_ MALLOC_CONF
    NVIDIA_TF32_OVERRIDE TORCH_ALLOW_TF32_CUBLAS_OVERRIDE CUBLAS_WORKSPACE_CONFIG LD_PRELOAD""".split()
)
#: Kinds of records that results hold, but for those of traces.
KINDS = ("run", "environment", "correctness", "sample", "stop", "memory", "limits", "status")
#: Scripts that a command line may begin with.
SCRIPTS = ("rnnt-bench", *(f"benchmark_{name}.py" for name in ("all", "fused", "k2", "k2_pruned", "ot", "torchaudio")))
#: Commands of rnnt-bench that measure losses.
COMMANDS = ("run", "sweep", "largest")
#: Files that a user's run may name in its settings.
SUITES_OWN = ("shape_info.pt", "data/shape_info.features.pt")


def kept(value: Any, field: str) -> Any:
    """Return what may leave the machine of a field of a record; None or nothing in the place of the rest."""
    if isinstance(value, dict):
        inside = field if field in ("settings", "values", "variables") else ""
        names = [key for key in value if (key in VARIABLES if field == "variables" else WORDS.fullmatch(key))]
        items = {key: kept(value[key], inside or key) for key in names}
        return {key: item for key, item in items.items() if item is not None or value[key] is None}
    if isinstance(value, (list, tuple)):
        return [item for item in (kept(each, field) for each in value) if item is not None]
    if isinstance(value, str):
        return (value if WORDS.fullmatch(value) else "...") if field in ALLOWED else None
    return value


def records(folder: Path) -> Iterator[Dict[str, Any]]:
    """Yield the records of a run as they may be sent.  Raises UserError."""
    header, lines = store.read_run(folder)
    for line in lines:
        record = kept(schema.as_written(line), "")
        if line is header:
            shapes, passes = header.settings.shape_file, header.settings.passes or ()
            record["settings"]["shape_file"] = shapes if shapes in SUITES_OWN else "own"
            record["settings"]["passes"] = [name for name in passes if name != "trace"] or passes
            record["command"] = flags_of(header.command)
        if record["record"] in KINDS and "trace" not in (record.get("pass"), record.get("job")):
            yield record


def flags_of(command: Any) -> List[str]:
    """Return the script of a command line, and its flags that say what it measured, without a path."""
    words = [str(word) for word in command] if isinstance(command, list) else []
    kept = [Path(word).name for word in words[:1] if Path(word).name in SCRIPTS]
    if kept == ["rnnt-bench"]:
        kept += [word for word in words[1:2] if word in COMMANDS]
    names = {"--only", "--topology", "--limits", "--sweep", *(setting.flag for setting in SETTINGS.values())}
    for word, after in zip(words[1:], [*words[2:], "--"]):
        name, equals, value = word.partition("=")
        if name not in names:
            continue
        value = value if equals else after
        if name == "--shape-file" and value not in SUITES_OWN:
            value = "own"
        kept += [name] if value[:2] == "--" else [name, value if WORDS.fullmatch(value) else "..."]
    return kept


def damage(folder: Path) -> Iterator[str]:
    """Yield a line for each file of runs that has lines which are no records."""
    for file in store.files_named(schema.FILE_NAME, folder):
        lost = store.lost(file)
        if lost:
            yield f"{file.parent.name}: {count(lost, 'line')} of {file.name} cannot be read: measure again"


def keep(rows: Sequence[Row], folder: Path) -> None:
    """Write the runs of the suite's own losses into an empty folder.  Raises UserError, and OSError where it cannot."""
    known = {row.name for row in implementations.with_variants()}
    names = {row.folder: row.header.name for row in rows if not row.unreadable}
    for number, (run, name) in enumerate(names.items(), 1):
        file, loss = run / schema.FILE_NAME, name.partition("@")[0].removesuffix(f":{implementations.BY_UTTERANCE}")
        if file.is_file() and not (run.is_symlink() or file.is_symlink()) and loss in known:
            below = folder / f"{number:03d}-{name.replace(':', '-').replace('@', '-at-')}"
            below.mkdir()
            with open(below / schema.FILE_NAME, "x", encoding="utf-8") as stream:
                stream.writelines(json.dumps(record, separators=(",", ":")) + "\n" for record in records(run))


def folder_name(rows: Sequence[Row]) -> str:
    """Return the name of a folder: the day and the device of its rows. "2026-11-23-amd-epyc-2-cores"."""
    row = next((row for row in rows if row.device_name), rows[0])
    cores = f"{row.header.machine.cores} cores" if row.device == "cpu" else ""
    return dashed(row.header.started[:10], row.device_name or row.device or "unknown", cores)


def dashed(*words: str) -> str:
    """Return words as the name of a folder."""
    return re.sub(r"[^a-z0-9]+", "-", " ".join(words).lower()).strip("-")


def rows_of(folder: Path) -> List[Row]:
    """Return every row of a folder.  Raises UserError."""
    log = logs.read([folder], all_runs=True)
    return [*log.rows, *log.swept]


def problems(folder: Path) -> Iterator[str]:
    """Yield what makes a folder of results incomplete or inconsistent, a line each."""
    try:
        rows = rows_of(folder)
    except UserError as error:
        yield plain(str(error))
        return
    yield from damage(folder)
    for row in rows:
        yield from (f"{row.folder.name}: {words}" for words in _problems_of(row))
    if not any(row.ms for row in rows) and not [*store.files_named(schema.TOOL_FILE_NAME, folder)]:
        yield "nothing was measured: no row has a time"
    readable = [row for row in rows if not row.unreadable]
    different = [words for row in readable[1:] for words in machines.differences(readable[0], row)]
    devices = {row.device_name for row in readable if row.device_name}
    if different:
        yield f"is of several machines, {plain(different[0])}: make a folder of each"
    elif len(devices) > 1:
        yield f"is of {len(devices)} devices, {', '.join(map(plain, sorted(devices)))}: make a folder of each"


def _problems_of(row: Row) -> Iterator[str]:
    header, machine = row.header, row.header.machine
    if row.unreadable:
        yield plain(row.reason)
    if row.status == "interrupted":
        yield f"{plain(row.reason)}: --resume measures it"
    if not header.git_revision:
        yield "its records have no revision: measure in a checkout of the suite"
    if header.git_dirty:
        yield "it was measured with uncommitted changes: commit or stash them, and measure again"
    if not (machine.cpu and machine.cores and machine.memory_bytes):
        yield "its records do not say on which machine it was measured"
    if row.ms and not (row.environment.torch and row.device_name):
        yield "its records do not say which torch and which device measured it"
    rounds = header.settings.rounds
    if row.ms and isinstance(rounds, int) and rounds < FEWEST_ROUNDS:
        has = f"it has {count(rounds, 'round')}, an interval needs {FEWEST_ROUNDS}"
        yield f"{has}: measure with --rounds {FEWEST_ROUNDS} or more"
    if any(doubt.withholds for doubt in doubts.doubts(row)):
        yield "it ran beside other load: measure when the machine is quiet"


def parser() -> Parser:
    result = Parser(description=__doc__)
    result.add_argument(
        "folders", nargs="+", type=Path, metavar="FOLDER", help="Log folder; with --check, folders of results/."
    )
    result.add_argument("--check", action="store_true", help="Only print what is wrong with folders of results/.")
    result.add_argument(
        "--into", type=Path, default=Path("results"), metavar="FOLDER", help="Folder to write into. Default: results"
    )
    result.add_argument("--name", help="Name of the new folder. Default: the day and the device")
    return result


def main(options: argparse.Namespace) -> int:
    for folder in options.folders:
        reason = files.not_a_folder(folder)
        if reason:
            raise UserError(f"{folder}: {reason}; name a folder with runs")
    folders = options.folders if options.check else [made(options)]
    damaged = [] if options.check else list(damage(options.folders[0]))
    lines = [f"{folder}: {problem}" for folder in folders for problem in dict.fromkeys([*damaged, *problems(folder)])]
    for line in lines:
        print(line, file=sys.stderr)
    if not lines:
        print("complete and consistent: send it as a pull request" if len(folders) == 1 else "all are complete")
    return EXIT_FAILED if lines else EXIT_OK


def made(options: argparse.Namespace) -> Path:
    """Make a folder of a log folder, and print its path.  Raises UserError."""
    if len(options.folders) > 1:
        raise UserError("name one log folder; several are taken with --check alone")
    rows = rows_of(options.folders[0])
    if not rows:
        raise UserError(f"{options.folders[0]}: holds no runs; name the log folder of a run")
    folder = options.into / (options.name or folder_name(rows))
    if os.path.lexists(folder):
        raise UserError(f"{folder}: is there already; remove it, or name another with --name")
    files.make_folder(folder.parent, files.another("--into", "folder"))
    try:
        write(rows, folder)
    except OSError as error:
        raise UserError(files.cannot_write(folder, error, files.another("--into", "folder"))) from error
    print(folder)
    return folder


def write(rows: Sequence[Row], folder: Path, replaces: bool = False) -> None:
    """Make the folder of these rows, whole or not at all.  Raises UserError, and OSError where it cannot.

    replaces: whether the folder may be there already, and is then removed."""
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".new-") as scratch:
        new = Path(scratch) / "new"
        new.mkdir()
        keep(rows, new)
        if replaces and folder.exists():
            folder.rename(Path(scratch) / "old")
        new.rename(folder)
