"""`rnnt-bench report`: write one HTML page from log folders, see docs/reading.md."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Optional, Sequence

from common.cli.parser import Parser, add_logs
from common.core import flag_types
from common.core.errors import EXIT_FAILED, EXIT_OK, guarded
from common.setup import interpreters

NAME = "rnnt-bench report"
DESCRIPTION = """Write one HTML page that opens offline: verdicts, table, plots of time and memory, samples over time,
and the runs of other commands in the log folders (check, flops, profile, inference, pipelines).  Every number links to
its samples by relative path, so move the page together with its log folders.  Every benchmark run writes this page into
its log folder too."""
EXIT_CODES = "Exit code: 0; 1 if nothing could be read; 2 for bad usage, or if there is no run or trace."


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Run the command; return its exit code."""
    parser = Parser(prog=NAME, description=DESCRIPTION, epilog=EXIT_CODES)
    add_logs(parser)
    parser.add_argument(
        "--output",
        metavar="FILE",
        type=flag_types.path,
        default=Path("log") / "report.html",
        help="Page to write. Default: log/report.html",
    )
    options = parser.parse_args(arguments)
    return guarded(NAME, lambda: _report(options))


def _report(options: argparse.Namespace) -> int:
    if interpreters.lacks("msgspec", "jinja2"):
        interpreters.continue_in("main")  # returns where there is no such environment
    from common.analysis import logs
    from common.show import page

    log = logs.read_any(options.log)
    print(page.write(log, options.output, options.log or [Path("log")]))
    return EXIT_OK if log.readable else EXIT_FAILED
