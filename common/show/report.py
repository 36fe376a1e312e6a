"""Write one HTML page from log folders: the command `report`."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from rnnt_bench.analysis import logs
from rnnt_bench.core import flag_types
from rnnt_bench.core.arguments import Parser, add_logs
from rnnt_bench.core.errors import EXIT_FAILED, EXIT_OK
from rnnt_bench.setup import interpreters
from rnnt_bench.show import page

DESCRIPTION = """Write one HTML page that opens offline: verdicts, table, plots of time and memory, samples over time,
and the runs of other commands in the log folders (check, flops, profile, inference, pipelines).  Every number links to
its samples by relative path, so move the page together with its log folders.  Every benchmark run writes this page into
its log folder too."""
EXIT_CODES = (
    "Exit code: 0; 1 if nothing could be read; 2 for bad usage, or if there is no run or trace."
)


def parser() -> Parser:
    result = Parser(description=DESCRIPTION, epilog=EXIT_CODES)
    add_logs(result)
    default = Path("log", page.FILE_NAME)
    words = f"Page to write. Default: {default}"
    result.add_argument(
        "--output", metavar="FILE", type=flag_types.path, default=default, help=words
    )
    return result


def main(options: Namespace) -> int:
    """Write the page and print its path; return the exit code."""
    interpreters.need("jinja2")
    log = logs.read_any(options.log)
    print(page.write(log, options.output, options.log or [Path("log")]))
    return EXIT_OK if log.readable else EXIT_FAILED
