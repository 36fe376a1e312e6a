#!/usr/bin/env python3
"""Write one HTML page from log folders: see ``report.py --help`` and common/report/page.py."""

from __future__ import annotations

import sys
from pathlib import Path

from common import flag_types
from common.cli import Parser
from common.commands import guarded
from common.errors import EXIT_FAILED, EXIT_OK
from common.report import pngs, writing
from common.running import interpreters

DESCRIPTION = """One page that opens offline: the verdicts, the table, time and memory by stages, memory within a step,
samples over time, what was measured where, and which loss is right in which corner: the newest matrix of conformance.py
in the log folders, or the committed one.  Every number links to the samples it is from, by relative path, so a page and
its log folders can be moved together.  Every benchmark run writes it into its log folder too."""
EXIT_CODES = "Exit code: 0; 1 when nothing that was found could be read; 2 for bad usage or when nothing was found."


def parser() -> Parser:
    result = Parser(prog=Path(sys.argv[0]).name, description=DESCRIPTION, epilog=EXIT_CODES)
    result.add_argument(
        "log",
        nargs="*",
        metavar="LOG",
        type=flag_types.path,
        help="log folders, searched through; a results.jsonl or a single trace works too (default: log)",
    )
    result.add_argument(
        "--output",
        metavar="FILE",
        type=flag_types.path,
        default=Path("log") / writing.FILE_NAME,
        help="the page (default: log/report.html)",
    )
    result.add_argument("--png", metavar="DIR", type=flag_types.path, help="also draw the main plots as PNGs into DIR")
    return result


def main() -> int:
    options = parser().parse_args()
    if writing.lacks("plotly", *(["matplotlib"] if options.png is not None else [])):
        interpreters.continue_in("main")  # returns only where there is no other that may have them
    rows, groups, swept = writing.read(options.log)
    written = [writing.write(groups, options.output, swept, options.log or [Path("log")])]
    if options.png is not None:
        written += pngs.write(groups, options.png, swept)
    for path in written:
        print(path)
    readable = [not row["unreadable"] for row in rows] + [not sweep.reason for sweep in swept]
    return EXIT_OK if any(readable) else EXIT_FAILED


if __name__ == "__main__":
    sys.exit(guarded("report.py", main))
