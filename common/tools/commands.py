"""Shared by the commands about models: the flags of a run, its processes, its files and its end."""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import Any, Callable, Mapping, Optional, Sequence

from common.cli import ending
from common.cli.ending import Shown
from common.core import flag_types, paths
from common.core.errors import UserError
from common.core.files import write_whole
from common.core.settings import Settings
from common.core.text import plain
from common.jobs import tasks as jobs
from common.jobs.executor import Executor
from common.jobs.progress import Progress
from common.jobs.spec import Task
from common.present.section import Section
from common.records.run import Run, remove
from common.show import page
from common.tables.results import FORMATS

#: The advice where a file of a run cannot be written.
SPACE = "free some space and go on with --resume"
#: Seconds of --timeout by default; None is no limit.
TIMEOUT = 600.0


def add_flags(run: Any, *, folder: str, quick: str, timeout: Optional[float] = TIMEOUT, measuring: bool = True) -> None:
    """Add the flags that every command about a model has.

    Args:
        run: the group of flags about the run.
        folder: what a run calls its folder, for --help.
        quick: what --preset quick changes, for --help.
        timeout: default of --timeout, in seconds; None is no limit.
        measuring: whether the command measures, on this machine or a cluster, and can go on with a run.
    """
    run.add_argument("--preset", choices=("quick",), help=f"Make a smoke run: {quick}. Other flags override it.")
    seconds = "none" if timeout is None else f"{timeout:g}"
    run.add_argument(
        "--timeout",
        type=flag_types.positive,
        default=math.inf if timeout is None else timeout,
        metavar="S",
        help=f"End a process after S seconds; its row says timeout, and the others go on. Default: {seconds}",
    )
    run.add_argument("--format", choices=FORMATS, default="table", help="Format of what is printed. Default: table")
    run.add_argument("--quiet", action="store_true", help="Print no progress.")
    run.add_argument(
        "--log-dir",
        type=flag_types.path,
        default=paths.LOG,
        metavar="DIR",
        help=f"Folder in which the run makes its own, {folder}. Default: log/ beside this script",
    )
    run.set_defaults(details=False)  # what is printed is all there is
    if measuring:
        run.add_argument(
            "--resume",
            action="store_true",
            help="Continue the newest run with the same flags: processes that ended well are not run again.",
        )


def set_quick(arguments: argparse.Namespace, values: Mapping[str, Any]) -> None:
    """Set the flags that were not given, those that are None, to these values where --preset quick was given."""
    if arguments.preset == "quick":
        for name, value in values.items():
            if getattr(arguments, name) is None:
                setattr(arguments, name, value)


def finish(
    run: Run,
    tasks: Sequence[Task],
    python: Path,
    settings: Settings,
    arguments: argparse.Namespace,
    executor: Executor,
    show: Callable[[], Shown],
) -> int:
    """Carry out the tasks, then show the results; return the exit code.  Raises UserError
    for what is missing and for other mistakes; a run without results leaves nothing then."""

    with ending.measuring() as ended:
        ending.warn_of_load(executor, settings)
        with Progress(arguments.quiet) as progress:
            missing = jobs.carry_out(run, tasks, python, settings, arguments.timeout, progress, executor)
        if missing:
            raise UserError(missing)
    if ended.mistake and not any(run.is_done(task.name) for task in tasks):
        run.close()
        remove(run.path)
        raise ended.mistake
    return ending.finish(ended, show(), arguments)


def write(path: Path, files: Mapping[str, str], title: str, sections: Sequence[Section]) -> None:
    """Write the files and a page of the sections beside the records at `path`.

    What cannot be written is a warning: the records are there.
    """
    folder = path.parent
    try:
        write_whole(SPACE, *((folder / name, text) for name, text in files.items()))
        content = page.assembled(sections, folder, title, f"{folder.name}.")
        write_whole(SPACE, (path.with_suffix(".html"), content))
    except UserError as error:  # or no jinja2: the numbers are there
        print(f"warning: {plain(error)}", file=sys.stderr)
