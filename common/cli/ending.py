"""How every measuring command ends: what was measured is shown whatever stopped it, and tells the exit code."""

from __future__ import annotations

import argparse
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Iterator, Optional, Sequence

from common.analysis.logs import Log
from common.core.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, NOT_RUNNABLE, UserError, drop_stdout
from common.core.files import write_whole
from common.core.settings import Settings
from common.jobs.session import Executor
from common.records import store
from common.show import page

#: The status of each row of a table; None where stdout did not take the table.
Shown = Optional[Sequence[str]]

#: The file in --log-dir that has the last tables with the lines below them.
DETAILS = "details.txt"


@dataclass
class Ending:
    """Describe how measuring ended.  mistake: the user's mistake or the full disk that stopped it."""

    code: int = EXIT_OK
    mistake: Optional[UserError] = None


@contextmanager
def measuring() -> Iterator[Ending]:
    """Yield how the block ends, filled in when it has: with Ctrl-C, a full disk or a mistake of the user's too."""
    ending = Ending()
    try:
        yield ending
    except KeyboardInterrupt:
        ending.code = EXIT_INTERRUPTED
    except UserError as error:
        ending.mistake = error


def finish(ending: Ending, shown: Shown, arguments: argparse.Namespace, log: Optional[Log] = None) -> int:
    """Write the report and return the exit code, once the table is printed.

    Args:
        ending: how the measuring ended.
        shown: status of each row.
        arguments: the flags of the command.
        log: what --log-dir holds, where that is read already.

    Raises the UserError that stopped the measuring."""
    if isinstance(ending.mistake, store.NotWritten):
        print(f"error: {ending.mistake}", file=sys.stderr)
        ending.code = EXIT_FAILED
    elif ending.mistake:
        raise ending.mistake
    page.after_run(arguments.log_dir, arguments.quiet, log)
    if ending.code == EXIT_INTERRUPTED:
        kept = f"what was measured is in {arguments.log_dir}, of the stopped job too, which the table leaves out"
        print(f"interrupted: {kept}; --resume continues and runs that job again", file=sys.stderr)
    return ending.code or (EXIT_FAILED if shown is None else exit_code(shown))


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
    path = arguments.log_dir / DETAILS
    kept = f"stages, options, limits, notes: {path}"
    try:
        write_whole("summarize.py --details has it", (path, details))
    except UserError as error:
        kept = f"warning: {error}"
    try:
        print(details if arguments.details else short, end="", flush=True)
    except OSError as error:
        drop_stdout()
        if not isinstance(error, BrokenPipeError):
            print(f"warning: no table: {error.strerror or error}; summarize.py prints it", file=sys.stderr)
        return None
    if kept.startswith("warning") or not arguments.quiet:
        print(kept, file=sys.stderr)
    return statuses
