#!/usr/bin/env python3
"""Write one HTML page from log folders: see ``report.py --help`` and docs/logs.md."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # Python leaves it out with -P and PYTHONSAFEPATH

from common.cli.parser import Parser
from common.command import run
from common.core import flag_types
from common.core.errors import EXIT_FAILED, EXIT_OK
from common.setup import interpreters

DESCRIPTION = """Write one HTML page that opens offline: verdicts, table, time and memory by stages, samples over time,
and the corner cases (the newest matrix of conformance.py in the log folders, or the committed one).  Every number links
to its samples by relative path, so move the page together with its log folders.  Every benchmark run writes this page
into its log folder too."""
EXIT_CODES = "Exit code: 0; 1 if nothing could be read; 2 for bad usage, or if there is no run or trace."


def parser() -> Parser:
    result = Parser(description=DESCRIPTION, epilog=EXIT_CODES)
    result.add_argument(
        "log",
        nargs="*",
        metavar="LOG",
        type=flag_types.path,
        help="Log folders, which are searched; a results.jsonl or a single trace works too. Default: log",
    )
    result.add_argument(
        "--output",
        metavar="FILE",
        type=flag_types.path,
        default=Path("log") / "report.html",
        help="Page to write. Default: log/report.html",
    )
    result.add_argument("--png", metavar="DIR", type=flag_types.path, help="Also draw the main plots as PNGs into DIR.")
    return result


def main() -> int:
    options = parser().parse_args()
    if interpreters.lacks("msgspec", "jinja2", *(["matplotlib"] if options.png is not None else [])):
        interpreters.continue_in("main")  # returns where there is no such environment
    from common.analysis import logs
    from common.present import slices
    from common.show import png, writing

    log = logs.read_any(options.log)
    written = [writing.write(log, options.output, options.log or [Path("log")])]
    if options.png is not None:
        written += png.write(log.groups, options.png, log.sweeps)
        paths = options.log or [Path("log")]
        written += png.save((each for tool in slices.registered() for each in tool.figures(paths)), options.png)
    for path in written:
        print(path)
    return EXIT_OK if log.readable or not log else EXIT_FAILED


if __name__ == "__main__":
    sys.exit(run("report.py", main))
