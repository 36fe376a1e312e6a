"""What the commands about models and no loss share: the flags of a run, its processes, its files and its end."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Callable, Mapping, Sequence

from common.cli import ending, flag_types, flags
from common.cli.ending import Shown
from common.cli.parser import Parser
from common.core import paths
from common.core.errors import UserError
from common.core.files import write_whole
from common.core.settings import Settings
from common.core.text import plain
from common.jobs import tasks as jobs
from common.jobs.executor import Executor
from common.jobs.progress import Progress
from common.jobs.spec import Task
from common.plots import png
from common.plots.style import Figure
from common.records.run import Run, remove
from common.report import page
from common.report.section import Section

#: The advice where a file of a run cannot be written.
SPACE = "free some space and go on with --resume"
FORMATS = ("table", "markdown", "csv", "json")


def add_flags(parser: Parser, folder: str) -> None:
    """To the group "the run".  folder: what a run calls its own."""
    parser.set_defaults(details=False)  # what is printed is all there is
    group = next(one for one in parser._action_groups if one.title == "the run")
    add = group.add_argument
    add(
        "--timeout",
        type=flag_types.positive,
        default=600.0,
        metavar="S",
        help="seconds after which one process is ended and reads timeout; the others go on. Default: 600",
    )
    add("--resume", action="store_true", help="continue the newest run of the same: what ended well is not run again")
    add("--format", choices=FORMATS, default="table", help="of what is printed. Default: table")
    add("--quiet", action="store_true", help="no progress")
    flags.add_executor(add)
    add_files(add, folder)


def add_files(add: Callable[..., object], folder: str) -> None:
    """add: `add_argument` of a group; folder: as in `add_flags`."""
    add("--png", action="store_true", help="write the charts as PNGs too")
    add(
        "--log-dir",
        type=flag_types.path,
        default=paths.ROOT / "log",
        metavar="DIR",
        help=f"where the run makes its folder, {folder}. Default: log/ beside this script",
    )


def finish(
    run: Run,
    tasks: Sequence[Task],
    python: Path,
    settings: Settings,
    arguments: argparse.Namespace,
    executor: Executor,
    show: Callable[[], Shown],
) -> int:
    """Carry out the tasks, then show what there is; returns the exit code.  Raises UserError
    for what is missing and for other mistakes; a run without results leaves nothing then."""

    def measure() -> None:
        with Progress(arguments.quiet) as progress:
            missing = jobs.carry_out(run, tasks, python, settings, arguments.timeout, progress, executor)
        if missing:
            raise UserError(missing)

    def discard() -> bool:
        kept = any(run.is_done(task.name) for task in tasks)
        if not kept:
            run.close()
            remove(run.path)
        return kept

    return ending.finish(measure, lambda _: show(), discard, arguments)


def write(
    run: Run,
    files: Mapping[str, str],
    title: str,
    sections: Sequence[Section],
    figures: Sequence[Figure],
    arguments: argparse.Namespace,
) -> None:
    """The files, a page of the sections, and PNGs with --png, into the folder of the run.  What cannot be written is
    a warning: the records are there."""
    folder = run.folder
    try:
        write_whole(SPACE, *((folder / name, text) for name, text in files.items()))
        content = page.assembled(sections, folder, title, f"{folder.name}.")
        write_whole(SPACE, (folder / f"{run.path.stem}.html", content))
        if arguments.png:
            png.save([(figure.key, figure) for figure in figures], folder)
    except UserError as error:  # or no jinja2 or no matplotlib: the numbers are there
        print(f"warning: {plain(error)}", file=sys.stderr)
