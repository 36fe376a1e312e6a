"""Ends every benchmark command: prints its table, writes the report and returns the exit code."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Callable, Mapping, Optional, Sequence

from common.analysis import logs
from common.analysis.logs import Log
from common.core.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, NOT_RUNNABLE, UserError
from common.core.files import write_whole
from common.core.guard import drop_stdout
from common.core.settings import Settings
from common.jobs.executor import Executor
from common.records import store
from common.records.run import Run
from common.show import writing

#: The status of each row of a table; None where stdout did not take the table.
Shown = Optional[Sequence[str]]

#: The file in --log-dir that has the last tables with the lines below them.
DETAILS = "details.txt"


def finish(
    measure: Callable[[], None],
    show: Callable[[Log], Shown],
    discard: Callable[[], bool],
    arguments: argparse.Namespace,
    kept: str = "",
    later: Optional[Callable[[], None]] = None,
    show_again: Callable[[Log], Shown] = lambda _: None,
) -> int:
    """Measure, then print the table and write the report; return the exit code.

    Args:
        measure: carries out the jobs.
        show: prints the table of what --log-dir holds, and returns the status of each row.
        discard: removes folders without results, and tells whether others are left.
        arguments: the flags of the command.
        kept: what an interruption leaves, for the user; "" for the usual words.
        later: carries out the jobs that the table does not wait for; not called after an interruption.
        show_again: does after `later` what `show` did before, but repeats the verdict alone.

    Raises the UserError of a mistake that stops the measuring, after the table of what was measured before."""
    try:
        code = _carried_out(measure)
    except UserError:
        if discard():
            show(logs.read([arguments.log_dir], all_runs=True))
        raise
    log = logs.read([arguments.log_dir], all_runs=True)  # read back: what is shown is what is kept
    statuses = show(log)
    if later is not None and code == EXIT_OK:
        code = _carried_out(later)
        log = logs.read([arguments.log_dir], all_runs=True)
        again = show_again(log)
        statuses = statuses and again
        kept = "the table above is whole; --resume goes on with what comes after it"
    writing.after_run(arguments.log_dir, arguments.quiet, log)
    if code == EXIT_INTERRUPTED:
        kept = kept or (
            f"what was measured is in {arguments.log_dir} (of the stopped job too; the table leaves that out); "
            "--resume continues and runs that job again"
        )
        print(f"interrupted: {kept}", file=sys.stderr)
        return EXIT_INTERRUPTED
    return EXIT_FAILED if code == EXIT_FAILED or statuses is None else exit_code(statuses)


def _carried_out(measure: Callable[[], None]) -> int:
    """Call `measure`; return EXIT_OK, EXIT_INTERRUPTED after Ctrl-C, or EXIT_FAILED where the disk had no room for a
    run's first line: what is measured stays.  Raises UserError."""
    try:
        measure()
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except store.NotWritten as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_FAILED
    return EXIT_OK


def warn_of_load(executor: Executor, settings: Settings) -> None:
    """Warn on stderr, whatever --quiet says, where others keep this machine so busy that times will be wrong."""
    disturbance = executor.disturbance(settings)
    if disturbance:
        print(f"warning: {disturbance}: times will be too long; wait until the machine is quiet", file=sys.stderr)


def exit_code(statuses: Sequence[str]) -> int:
    """Return 0 when every row that could run did (and at least one could), else 1."""
    ran = [status for status in statuses if status not in NOT_RUNNABLE]
    return EXIT_OK if ran and all(status == "ok" for status in ran) else EXIT_FAILED


def printed(short: str, details: str, statuses: Sequence[str], arguments: argparse.Namespace) -> Shown:
    """Print the short table, or the whole one with --details, and return the statuses.

    The whole one is written to --log-dir in any case.  Where stdout does not take the table, warn: the results are on
    disk."""
    kept = keep(details, arguments)
    try:
        print(details if arguments.details else short, end="", flush=True)
        if kept and not arguments.quiet:
            print(f"stages, options, limits, notes: {kept}", file=sys.stderr)
        return statuses
    except OSError as error:
        drop_stdout()
        if not isinstance(error, BrokenPipeError):
            print(f"warning: no table: {error.strerror or error}; summarize.py prints it", file=sys.stderr)
        return None


def keep(details: str, arguments: argparse.Namespace) -> Optional[Path]:
    """Write the whole table to --log-dir and return the file's path; warn and return None where that fails."""
    path: Path = arguments.log_dir / DETAILS
    try:
        write_whole("summarize.py --details has it", (path, details))
        return path
    except UserError as error:
        print(f"warning: {error}", file=sys.stderr)
        return None


def discard_empty(run_of: Mapping[str, Run]) -> bool:
    """Remove the folders of runs that measured nothing; tell whether others are left."""
    for run in run_of.values():
        run.discard_if_empty()
    return any(run.path.exists() for run in run_of.values())
