"""What the commands about models and no loss share: the flags of a run, its processes, its files and its end."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any, Callable, Mapping, Sequence

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
from common.plots.style import Figure
from common.records.run import Run, remove
from common.report import page
from common.report.section import Section

#: The advice where a file of a run cannot be written.
SPACE = "free some space and go on with --resume"
#: See flags.add_table; {}: what a run calls its folder.
FILES = """\
  --png: write the charts as PNGs too
  --log-dir DIR: where the run makes its folder, {}. Default: log/ beside this script
"""
RUN = f"""
  --timeout S: seconds after which one process is ended and reads timeout; the others go on. Default: 600
  --resume: continue the newest run of the same: what ended well is not run again
  --format: of what is printed. Default: table
  --quiet: no progress
{flags.EXECUTOR}
{FILES}"""


def add_flags(parser: Parser, table: str, takes: Mapping[str, Any], folder: str, **defaults: Any) -> None:
    """The flags of a command, in a table that ends with the group "the run", and there those that all have.  takes: see
    flags.add_table; folder: what a run calls its own."""
    own = {"--seed": flag_types.whole(0), **takes}
    flags.add_table(parser, table.rstrip() + RUN.format(folder), own)
    # what is printed is all there is: no details
    parser.set_defaults(details=False, timeout=600.0, format="table", seed=DEFAULTS["seed"], **defaults)


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
