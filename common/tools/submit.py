"""Make a folder of results/ from a log folder, to be sent as a pull request; --check says what is
wrong with one.

Every record is written anew, field by field: numbers, and a few texts that name packages, settings
and hardware.  No file is copied, so no path, message or trace leaves the machine.  A run is
refused, with a line for each reason.  It may be incomplete (interrupted rows, fewer than three
rounds, no revision, no machine), of several machines, or measured beside other load."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rnnt_bench.analysis import doubts, logs, machines
from rnnt_bench.analysis.row import Row
from rnnt_bench.core import files, implementations
from rnnt_bench.core.arguments import Parser
from rnnt_bench.core.errors import EXIT_FAILED, EXIT_OK, UserError
from rnnt_bench.core.settings import FEWEST_ROUNDS, SETTINGS
from rnnt_bench.core.text import count, plain
from rnnt_bench.records import schema, store

#: Fields whose texts are kept ("..." for what is no WORDS); numbers are kept everywhere, other
#: texts nowhere.
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
#: Scripts that a command line may begin with, by name.
SCRIPTS = {
    Path(file).name: file
    for file in (
        "rnnt-bench",
        "benchmark_all.py",
        *(row.file for row in implementations.IMPLEMENTATIONS),
    )
}
#: Commands of rnnt-bench that measure losses.
COMMANDS = ("run", "sweep")
#: Files that a user's run may name in its settings.
SUITES_OWN = ("shape_info.pt", "data/shape_info.features.pt")


def kept(value: Any, field: str) -> Any:
    """Return what may leave the machine of a field of a record; None or nothing in the place of the
    rest."""
    if isinstance(value, dict):
        fields = field if field in ("settings", "values", "variables") else ""
        items = {}
        for key, item in value.items():
            if not (key in VARIABLES if field == "variables" else WORDS.fullmatch(key)):
                continue
            new = kept(item, fields or key)
            if new is not None or item is None:
                items[key] = new
        return items
    if isinstance(value, (list, tuple)):
        values = (kept(item, field) for item in value)
        return [item for item in values if item is not None]
    if isinstance(value, str):
        return sendable(value) if field in ALLOWED else None
    return value


def sendable(text: str) -> str:
    """Return a text as it may be sent: itself, or "..." in the place of what may name a path or a
    person."""
    return text if WORDS.fullmatch(text) else "..."


def records(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a run as they may be sent.  Raises UserError."""
    header, lines = store.read_run(folder)
    for line in lines:
        record = kept(schema.as_written(line), "")
        if line is header:
            passes = header.settings.passes or ()
            record["settings"]["passes"] = [name for name in passes if name != "trace"] or passes
            record["settings"]["shape_file"] = shape_file(header.settings.shape_file)
            record["command"] = flags_of(header.command)
        if record["record"] in KINDS and "trace" not in (record.get("pass"), record.get("job")):
            yield record


def shape_file(path: Any) -> str:
    """Return the path of a shape file as it may be sent; "own" for a user's."""
    return path if path in SUITES_OWN else "own"


def flags_of(command: Any) -> list[str]:
    """Return the script of a command line, and its flags that say what it measured, without a
    path."""
    if not isinstance(command, list) or not command:
        return []
    script, *arguments = map(str, command)
    name = Path(script).name
    result = [SCRIPTS[name]] if name in SCRIPTS else []
    if name == "rnnt-bench":
        result += [word for word in arguments[:1] if word in COMMANDS]
    flags = {"--only", "--skip", "--topology", "--in-place", "--limits", "--sweep"}
    flags.update(setting.flag for setting in SETTINGS.values())
    if result[1:] == ["sweep"]:  # its axes are words: vocab-size=500,4096
        axes = (word for word in arguments[1:] if f"--{word.partition('=')[0]}" in flags)
        result += map(sendable, axes)
    for word, following in zip(arguments, [*arguments[1:], "--"]):
        flag, equals, value = word.partition("=")
        if flag not in flags:
            continue
        result.append(flag)
        if not equals:
            value = following
        if flag == "--shape-file":
            value = shape_file(value)
        if not value.startswith("--"):
            result.append(sendable(value))
    return result


def damage(folder: Path) -> Iterator[str]:
    """Yield a line for each file of runs that has lines which are no records."""
    for file in store.files_named(schema.FILE_NAME, folder):
        lost = store.lost(file)
        if lost:
            yield f"{file.parent.name}: {count(lost, 'line')} of {file.name} cannot be read: measure again"


def keep(rows: Sequence[Row], folder: Path) -> None:
    """Write the runs of the suite's own losses into an empty folder.  Raises UserError, and OSError
    where it cannot."""
    losses = {row.name for row in implementations.with_variants()}
    names = {row.folder: row.header.name for row in rows if not row.unreadable}
    for number, (run, name) in enumerate(names.items(), 1):
        file = run / schema.FILE_NAME
        loss = name.partition("@")[0].removesuffix(f":{implementations.BY_UTTERANCE}")
        if loss not in losses or not file.is_file() or run.is_symlink() or file.is_symlink():
            continue
        below = folder / f"{number:03d}-{name.replace(':', '-').replace('@', '-at-')}"
        below.mkdir()
        with open(below / schema.FILE_NAME, "x", encoding="utf-8") as stream:
            for record in records(run):
                stream.write(json.dumps(record, separators=(",", ":")) + "\n")


def folder_name(rows: Sequence[Row]) -> str:
    """Return the name of a folder: the day and the device of its rows.
    "2026-11-23-amd-epyc-2-cores"."""
    row = next((row for row in rows if row.device_name), rows[0])
    cores = f"{row.header.machine.cores} cores" if row.device == "cpu" else ""
    return dashed(row.header.started[:10], row.device_name or row.device or "unknown", cores)


def dashed(*words: str) -> str:
    """Return words as the name of a folder."""
    return re.sub(r"[^a-z0-9]+", "-", " ".join(words).lower()).strip("-")


def rows_of(folder: Path) -> list[Row]:
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
        yield from (f"{row.folder.name}: {problem}" for problem in _problems(row))
    if not any(row.ms for row in rows) and not [*store.files_named(schema.TOOL_FILE_NAME, folder)]:
        yield "nothing was measured: no row has a time"
    readable = [row for row in rows if not row.unreadable]
    differences = [
        words for row in readable[1:] for words in machines.differences(readable[0], row)
    ]
    devices = {row.device_name for row in readable if row.device_name}
    if differences:
        yield f"is of several machines, {plain(differences[0])}: make a folder of each"
    elif len(devices) > 1:
        names = ", ".join(map(plain, sorted(devices)))
        yield f"is of {len(devices)} devices, {names}: make a folder of each"


def _problems(row: Row) -> Iterator[str]:
    """Yield what makes a row incomplete, a line each."""
    header = row.header
    machine = header.machine
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
        yield (
            f"it has {count(rounds, 'round')}, an interval needs {FEWEST_ROUNDS}: "
            f"measure with --rounds {FEWEST_ROUNDS} or more"
        )
    if any(doubt.withholds for doubt in doubts.doubts(row)):
        yield "it ran beside other load: measure when the machine is quiet"


def parser() -> Parser:
    result = Parser(description=__doc__)
    result.add_argument(
        "folders",
        nargs="+",
        type=Path,
        metavar="FOLDER",
        help="Log folder; with --check, folders of results/.",
    )
    result.add_argument(
        "--check", action="store_true", help="Only print what is wrong with folders of results/."
    )
    result.add_argument(
        "--into",
        type=Path,
        default=Path("results"),
        metavar="FOLDER",
        help="Folder to write into. Default: results",
    )
    result.add_argument("--name", help="Name of the new folder. Default: the day and the device")
    return result


def main(options: argparse.Namespace) -> int:
    for folder in options.folders:
        reason = files.not_a_folder(folder)
        if reason:
            raise UserError(f"{folder}: {reason}; name a folder with runs")
    wrong = (
        {folder: list(problems(folder)) for folder in options.folders}
        if options.check
        else made(options)
    )
    lines = [f"{folder}: {problem}" for folder in wrong for problem in dict.fromkeys(wrong[folder])]
    for line in lines:
        print(line, file=sys.stderr)
    if not lines:
        print(
            "complete and consistent: send it as a pull request"
            if len(wrong) == 1
            else "all are complete"
        )
    return EXIT_FAILED if lines else EXIT_OK


def made(options: argparse.Namespace) -> dict[Path, list[str]]:
    """Make a folder of a log folder, and print its path; or return the problems of the log folder
    for which there is none.  Raises UserError."""
    if len(options.folders) > 1:
        raise UserError("name one log folder; several are taken with --check alone")
    source = options.folders[0]
    rows = rows_of(source)
    if not rows:
        raise UserError(f"{source}: holds no runs; name the log folder of a run")
    folder = options.into / (options.name or folder_name(rows))
    if os.path.lexists(folder):
        raise UserError(f"{folder}: is there already; remove it, or name another with --name")
    files.make_folder(folder.parent, files.another("--into", "folder"))
    try:
        write(rows, folder)
    except OSError as error:
        raise UserError(
            files.cannot_write(folder, error, files.another("--into", "folder"))
        ) from error
    lines = [*damage(source), *problems(folder)]
    if lines:
        shutil.rmtree(folder)  # made a moment ago
        return {source: lines}
    print(folder)
    return {folder: []}


def write(rows: Sequence[Row], folder: Path, replaces: bool = False) -> None:
    """Make the folder of these rows, whole or not at all.  Raises UserError, and OSError where it
    cannot.

    replaces: whether the folder may be there already, and is then removed."""
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".new-") as scratch:
        new = Path(scratch) / "new"
        new.mkdir()
        keep(rows, new)
        if replaces and folder.exists():
            folder.rename(Path(scratch) / "old")
        new.rename(folder)
