"""Make a folder of results/ from a log folder, to be sent as a pull request; --check says what is
wrong with one.

Every record is written anew, field by field: numbers, and a few texts that name packages, settings
and hardware.  No file is copied, so no path, message or trace leaves the machine.  A log folder is
refused, with a line for each reason, if a run is incomplete: interrupted rows, fewer than three
rounds, no revision, no machine.  So is one that was measured beside other load, or on several
machines."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
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

#: Fields of records whose texts are sent, as `sendable` has them.  Numbers are sent of every field,
#: other texts of none.
SENT_TEXTS = frozenset(
    """record name run_id suffix package kind settings values started git_revision cpu vectors os python gpu torch
    device device_name cuda driver throttled_by implementation_version options ours default l2 denormals allocator
    variables transparent_huge_pages affinity shape_file_sha256 scope dtype kernel flags status pass job
    differing reached_by_padding by same_as""".split()
)
#: A text without a path or an address: "AMD EPYC 7763, 2 cores", "2.11.0+cpu".
HARMLESS = re.compile(r"[\w .,:;()\[\]+@%=<>'-]{0,120}")
#: Environment variables whose values are sent.
VARIABLES = frozenset(
    """OMP_NUM_THREADS OMP_PROC_BIND OMP_PLACES OMP_WAIT_POLICY OMP_DYNAMIC OMP_SCHEDULE KMP_AFFINITY KMP_BLOCKTIME
    GOMP_CPU_AFFINITY GOMP_SPINCOUNT MKL_NUM_THREADS MKL_CBWR MKL_DYNAMIC MKL_ENABLE_INSTRUCTIONS MKL_DEBUG_CPU_TYPE
    MALLOC_ARENA_MAX MALLOC_MMAP_MAX_ MALLOC_MMAP_THRESHOLD_ MALLOC_TRIM_THRESHOLD_ MALLOC_TOP_PAD_ MALLOC_CONF
    NVIDIA_TF32_OVERRIDE TORCH_ALLOW_TF32_CUBLAS_OVERRIDE CUBLAS_WORKSPACE_CONFIG LD_PRELOAD""".split()
)
#: Kinds of records that are sent, unless they are of the trace pass.
KINDS = ("run", "environment", "correctness", "sample", "stop", "memory", "limits", "status")
#: {name: path in a checkout} of the scripts that measure losses.
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
#: Shape files whose paths are sent: those of the suite.
SHAPE_FILES = ("shape_info.pt", "data/shape_info.features.pt")


def kept(value: Any, field: str) -> Any:
    """Return the part of a record's field that may leave the machine; None if nothing may leave.

    A number or a bool may leave, a text if SENT_TEXTS names its field; "..." takes the place of one
    that may name a path.  Dicts and lists are gone through, and lose the parts that may not leave.

    value: in types of JSON; field: its name, "" for a whole record."""
    if isinstance(value, dict):
        # SENT_TEXTS names these dicts as a whole: their texts are sent under the name of the dict.
        is_one_field = field in ("settings", "values", "variables")
        items = {}
        for key, item in value.items():
            is_sent = key in VARIABLES if field == "variables" else HARMLESS.fullmatch(key)
            if not is_sent:
                continue
            part = kept(item, field if is_one_field else key)
            # A part that may not leave is None, and left out.  A field that is None is kept.
            if part is not None or item is None:
                items[key] = part
        return items
    if isinstance(value, (list, tuple)):
        parts = (kept(item, field) for item in value)
        return [part for part in parts if part is not None]
    if isinstance(value, str):
        return sendable(value) if field in SENT_TEXTS else None
    return value


def sendable(text: str) -> str:
    """Return a text, or "..." in place of one that may name a path or a person."""
    return text if HARMLESS.fullmatch(text) else "..."


def records(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a run as they may be sent, without those of the trace pass.  Raises
    UserError."""
    header, lines = store.read_run(folder)
    for line in lines:
        record = kept(schema.as_written(line), field="")
        if line is header:
            passes = header.settings.passes or ()
            # Where the trace pass is the only one, its name stays: `passes` is never emptied.
            record["settings"]["passes"] = [name for name in passes if name != "trace"] or passes
            # Of these two texts less, or more, may be sent than `kept` lets through.
            record["settings"]["shape_file"] = shape_file(header.settings.shape_file)
            record["command"] = flags_of(header.command)
        if record["record"] in KINDS and "trace" not in (record.get("pass"), record.get("job")):
            yield record


def shape_file(path: Any) -> str:
    """Return the path of a shape file of the suite; "own" for one of the user."""
    return path if path in SHAPE_FILES else "own"


def flags_of(command: Any) -> list[str]:
    """Return the words of a command line that say what it measured: its script or command,
    and flags with their values.  A value that is not sendable becomes "...".

    command: the command line in a record, of any type there."""
    if not isinstance(command, list) or not command:
        return []
    script, *arguments = map(str, command)
    name = Path(script).name
    result = [SCRIPTS[name]] if name in SCRIPTS else []
    if name == "rnnt-bench":
        result += [word for word in arguments[:1] if word in COMMANDS]
    flags = {"--only", "--skip", "--topology", "--in-place", "--limits", "--sweep"}
    flags.update(setting.flag for setting in SETTINGS.values())
    if result == ["rnnt-bench", "sweep"]:  # the swept settings have no dashes: vocab-size=500,4096
        axes = (word for word in arguments[1:] if f"--{word.partition('=')[0]}" in flags)
        result += map(sendable, axes)
    # The value of a flag without "=" is the word behind it, if that is not the next flag.  The last
    # word gets "--", which looks like a flag.
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
    """Yield a line for each file of records under a folder, if the file has unreadable lines."""
    for file in store.files_named(schema.FILE_NAME, folder):
        lost = store.lost(file)
        if lost:
            yield f"{file.parent.name}: {count(lost, 'line')} of {file.name} cannot be read: measure again"


def rows_to_send(rows: Sequence[Row]) -> dict[str, Row]:
    """Return the rows to send, {"001-fused": its row}, by the name of their folder in results/.

    A row is sent if its loss is of the suite and its records can be read.  It is not sent if its
    file of records, or the folder of this file, is a link."""
    losses = {row.name for row in implementations.with_variants()}
    result: dict[str, Row] = {}
    for row in rows:
        file = row.folder / schema.FILE_NAME
        is_file = file.is_file() and not (file.is_symlink() or row.folder.is_symlink())
        # Of "torchaudio:by-utterance@k2", a loss by utterance under a second torch, "torchaudio".
        loss = row.header.name.partition("@")[0].removesuffix(f":{implementations.BY_UTTERANCE}")
        if is_file and loss in losses and not row.unreadable:
            name = row.header.name.replace(":", "-").replace("@", "-at-")
            result[f"{len(result) + 1:03d}-{name}"] = row
    return result


def folder_name(rows: Sequence[Row]) -> str:
    """Return the name of a folder of results: the day and the device of its rows,
    "2026-11-23-amd-epyc-2-cores"."""
    row = next((row for row in rows if row.device_name), rows[0])
    cores = f"{row.header.machine.cores} cores" if row.device == "cpu" else ""
    return dashed(row.header.started[:10], row.device_name or row.device or "unknown", cores)


def dashed(*words: str) -> str:
    """Return words as the name of a folder: "amd-epyc-2-cores" of "AMD EPYC", "2 cores"."""
    return re.sub(r"[^a-z0-9]+", "-", " ".join(words).lower()).strip("-")


def rows_of(folder: Path) -> list[Row]:
    """Return every row of a folder.  Raises UserError."""
    log = logs.read([folder], all_runs=True)
    return [*log.rows, *log.swept]


def problems(folder: Path, sources: Mapping[str, Row] | None = None) -> Iterator[str]:
    """Yield a line for each reason why a folder of results is incomplete or inconsistent.

    sources: name of a run's folder in `folder` -> the row of the log folder from which that run was
      made.  Lines then name a run by its folder in the log folder, and else by that in `folder`."""
    try:
        rows = rows_of(folder)
    except UserError as error:
        yield plain(str(error))
        return
    yield from damage(folder)
    for row in rows:
        name = (sources or {}).get(row.folder.name, row).folder.name
        yield from (f"{name}: {problem}" for problem in _problems(row))
    if not any(row.ms for row in rows) and not store.files_named(schema.TOOL_FILE_NAME, folder):
        yield "nothing was measured: no row has a time"
    readable = [row for row in rows if not row.unreadable]
    differences = [
        difference for row in readable[1:] for difference in machines.differences(readable[0], row)
    ]
    devices = {row.device_name for row in readable if row.device_name}
    if differences:
        yield f"is of several machines, {plain(differences[0])}: make a folder of each"
    elif len(devices) > 1:
        names = ", ".join(map(plain, sorted(devices)))
        yield f"is of {len(devices)} devices, {names}: make a folder of each"


def _problems(row: Row) -> Iterator[str]:
    """Yield each reason why a row is incomplete."""
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
    # Of the doubts about a single row, only that of other load withholds a verdict.
    if any(doubt.withholds for doubt in doubts.doubts(row)):
        yield "it ran beside other load: measure when the machine is quiet"


def parser() -> Parser:
    """Return the parser of the flags of `submit`."""
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
    """Make a folder of results, or check some; print the problems on stderr, and return the exit
    code."""
    for folder in options.folders:
        reason = files.not_a_folder(folder)
        if reason:
            raise UserError(f"{folder}: {reason}; name a folder with runs")
    if len(options.folders) > 1 and not options.check:
        raise UserError("name one log folder; several are taken with --check alone")
    lines: list[str] = []
    for folder in options.folders:
        reasons = problems(folder) if options.check else make(folder, options)
        lines += [f"{folder}: {reason}" for reason in dict.fromkeys(reasons)]
    for line in lines:
        print(line, file=sys.stderr)
    if lines:
        return EXIT_FAILED
    is_single = len(options.folders) == 1
    print("complete and consistent: send it as a pull request" if is_single else "all are complete")
    return EXIT_OK


def make(source: Path, options: argparse.Namespace) -> list[str]:
    """Make a folder of results from a log folder, print its path, and return [].  If there are
    problems, return them instead, and leave no folder.  Raises UserError.

    source: the log folder"""
    rows = rows_of(source)
    if not rows:
        raise UserError(f"{source}: holds no runs; name the log folder of a run")
    folder = options.into / (options.name or folder_name(rows))
    if os.path.lexists(folder):
        raise UserError(f"{folder}: is there already; remove it, or name another with --name")
    advice = files.advise_another("--into", "folder")
    files.make_folder(folder.parent, advice)
    try:
        write(rows, folder)
    except OSError as error:
        raise UserError(files.cannot_write(folder, error, advice)) from error
    lines = [*damage(source), *problems(folder, rows_to_send(rows))]
    if lines:
        shutil.rmtree(folder)
    else:
        print(folder)
    return lines


def write(rows: Sequence[Row], folder: Path, replaces: bool = False) -> None:
    """Make a folder of results with those of `rows` that are to be sent.  After an error there is
    no part of it.  Raises UserError, and OSError where the folder cannot be written.

    replaces: whether to replace the folder if it is there already."""
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".new-") as scratch:
        new = Path(scratch) / "new"
        new.mkdir()
        for name, row in rows_to_send(rows).items():
            (new / name).mkdir()
            with open(new / name / schema.FILE_NAME, "x", encoding="utf-8") as stream:
                for record in records(row.folder):
                    stream.write(json.dumps(record, separators=(",", ":")) + "\n")
        if replaces and folder.exists():
            folder.rename(Path(scratch) / "old")
        new.rename(folder)
