"""What the commands about models and no loss share: the flags of a run, its processes, its files and its end."""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import Any, Callable, Mapping, Optional, Sequence

from common.cli import ending, flag_types, flags
from common.cli.ending import Shown
from common.cli.parser import Parser
from common.core.errors import UserError
from common.core.files import write_whole
from common.core.settings import DEFAULTS, Settings
from common.core.text import plain
from common.jobs import tasks as jobs
from common.jobs.executor import Executor
from common.jobs.progress import Progress
from common.jobs.spec import Task
from common.plots import png
from common.present.section import Section
from common.present.style import Figure
from common.records.run import Run, remove
from common.report import page

#: The advice where a file of a run cannot be written.
SPACE = "free some space and go on with --resume"
#: Flags of every command about a model, see flags.add_table.  {quick}: what --preset quick means; {timeout}: seconds;
#: {folder}: what a run calls its folder.
EVERY = """
  --preset: quick: a smoke run: {quick}; what other flags say counts
  --timeout S: seconds after which one process is ended and reads timeout; the others go on. Default: {timeout}
  --format: of what is printed. Default: table
  --quiet: no progress
  --log-dir DIR: where the run makes its folder, {folder}. Default: log/ beside this script
"""
#: Flags of those that measure, one after the other or on a cluster.
MEASURING = f"""\
  --resume: continue the newest run of the same: what ended well is not run again
  --png: write the charts as PNGs too
{flags.EXECUTOR}
"""
#: Seconds of --timeout by default; None is no limit.
TIMEOUT = 600.0


def add_flags(
    parser: Parser,
    table: str,
    takes: Mapping[str, Any],
    *,
    folder: str,
    quick: str,
    timeout: Optional[float] = TIMEOUT,
    measuring: bool = True,
) -> None:
    """Add the flags of a command, whose last group, "the run", gets those that all such commands have.

    Args:
        parser: that gets them.
        table: of the command's own flags, see flags.add_table, as is what they take, in `takes`.
        folder: what a run calls its own.
        quick: what --preset quick changes, in words.
        timeout: default of --timeout, in seconds.
        measuring: with the flags of MEASURING, and --seed.
    """
    words = EVERY.format(folder=folder, quick=quick, timeout="none" if timeout is None else f"{timeout:g}")
    every = {"--preset": ("quick",), **({"--seed": flag_types.whole(0)} if measuring else {})}
    flags.add_table(parser, table.rstrip() + words + (MEASURING if measuring else ""), {**every, **takes})
    # what is printed is all there is: no details
    parser.set_defaults(details=False, timeout=math.inf if timeout is None else timeout, format="table")
    if measuring:
        parser.set_defaults(seed=DEFAULTS["seed"])


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
    """Carry out the tasks, then show what there is; returns the exit code.  Raises UserError
    for what is missing and for other mistakes; a run without results leaves nothing then."""

    def measure() -> None:
        ending.warn_of_load(executor, settings)
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
    path: Path,
    files: Mapping[str, str],
    title: str,
    sections: Sequence[Section],
    figures: Sequence[Figure],
    arguments: argparse.Namespace,
) -> None:
    """Write the files, a page of the sections, and PNGs with --png, beside the records at `path`.

    What cannot be written is a warning: the records are there.
    """
    folder = path.parent
    try:
        write_whole(SPACE, *((folder / name, text) for name, text in files.items()))
        content = page.assembled(sections, folder, title, f"{folder.name}.")
        write_whole(SPACE, (path.with_suffix(".html"), content))
        if figures and arguments.png:
            png.save([(figure.key, figure) for figure in figures], folder)
    except UserError as error:  # or no jinja2 or no matplotlib: the numbers are there
        print(f"warning: {plain(error)}", file=sys.stderr)
