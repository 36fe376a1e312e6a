"""Shared by the commands about models: the flags of a run, the run itself, and its end."""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import Any, Callable, Mapping, Optional, Sequence

from common.cli import ending
from common.cli.ending import Shown
from common.cli.tool import measured as carried_out
from common.core import flag_types, paths
from common.core.settings import Settings
from common.jobs.session import Executor
from common.jobs.spec import Task
from common.records.schema import as_written
from common.show.results import FORMATS
from common.tools.kept import Answer, Kept, read

#: The advice where a file of a run cannot be written.
SPACE = "free some space and go on with --resume"
#: Seconds of --timeout by default; None is no limit.
TIMEOUT = 600.0


def add_flags(
    group: Any, *, folder: str, quick: str, timeout: Optional[float] = TIMEOUT, measuring: bool = True
) -> None:
    """Add the flags that every command about a model has.

    Args:
        group: of the flags about the run.
        folder: what a run calls its folder, for --help.
        quick: what --preset quick changes, for --help.
        timeout: default of --timeout, in seconds; None is no limit.
        measuring: whether the command measures, on this machine or a cluster, and can go on with a run.
    """
    group.add_argument("--preset", choices=("quick",), help=f"Make a smoke run: {quick}. Other flags override it.")
    seconds = "none" if timeout is None else f"{timeout:g}"
    group.add_argument(
        "--timeout",
        type=flag_types.positive,
        default=math.inf if timeout is None else timeout,
        metavar="S",
        help=f"End a process after S seconds; its row says timeout, and the others go on. Default: {seconds}",
    )
    group.add_argument("--format", choices=FORMATS, default="table", help="Format of what is printed. Default: table")
    group.add_argument("--quiet", action="store_true", help="Print no progress.")
    group.add_argument(
        "--log-dir",
        type=flag_types.path,
        default=paths.LOG,
        metavar="DIR",
        help=f"Folder in which the run makes its own, {folder}. Default: log/ beside this script",
    )
    group.set_defaults(details=False)  # what is printed is all there is
    if measuring:
        group.add_argument(
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


def measured(
    tool: str,
    name: str,
    config: Any,
    tasks: Sequence[Task],
    settings: Settings,
    arguments: argparse.Namespace,
    answer: Callable[[Kept], Answer],
    executor: Optional[Executor] = None,
) -> int:
    """Carry out the tasks of a run and print its answer; return the exit code, see common.cli.tool.

    config: a Struct that tells the run from others, and that `answer` reads again."""
    head = {"record": "tool", "tool": tool, "name": name}

    def show(path: Path) -> Shown:
        found = answer(read(path))
        text = found.render(arguments.format)
        return ending.printed(text, text, found.statuses, arguments)

    header = {**head, "config": as_written(config), "settings": settings.to_json()}
    return carried_out(header, tasks, Path(sys.executable), settings, arguments, show, executor)
