#!/usr/bin/env python3
"""Print one table from log folders: see ``summarize.py --help`` and docs/reading.md."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import List, Optional

sys.path.insert(0, str(Path(__file__).resolve().parent))  # Python leaves it out with -P and PYTHONSAFEPATH

from common.analysis import logs
from common.analysis.logs import Log
from common.cli.parser import Parser, add_logs
from common.command import run
from common.core import flag_types
from common.core.errors import EXIT_FAILED, EXIT_OK
from common.core.files import another, write_whole
from common.present import parts
from common.present.text import csv_text, json_text
from common.show import answer, results
from common.show.results import FORMATS

DESCRIPTION = """\
Print a table of log folders: the losses by kind, what did not run, correctness and the verdict. A folder of
torch.profiler traces (.pt.trace.json or .pt.trace.json.gz) of any program has a row for each worker. --details prints
every column:

  step ms, loss ms   mean over batches of their medians, spread within a batch, number of samples (n); no profiler
  peak memory MB     highest peak of a step above its baseline, from the memory pass (MB = 2^20 bytes)
  profiled step us   mean of the ProfilerStep# spans of the active windows, the profiler's own cost included
  profiled peak MB   highest Total Allocated of the [memory] events
  loss, grad error   largest relative error against the float64 oracle
  useful %           cells of the lattice that are not padding

Sweeps and searches of --find-largest have tables of their own. In csv and json their rows have the keys sweep (the
values of the swept settings) or largest.
"""
EXIT_CODES = "Exit code: 0; 1 if nothing could be read; 2 for bad usage, or if there is no run or trace."


def parser() -> argparse.ArgumentParser:
    result = Parser(
        prog="summarize.py",
        description=DESCRIPTION,
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_logs(result)
    result.add_argument(
        "--format",
        choices=FORMATS,
        default="table",
        help="Format of what is printed; json is a list of objects. Default: table",
    )
    result.add_argument(
        "--all-runs",
        action="store_true",
        help="Show earlier runs too, not only the newest of each implementation and configuration.",
    )
    result.add_argument(
        "--details",
        action="store_true",
        help="Print the whole table, with stages, options, limits, errors and notes below it.",
    )
    result.add_argument(
        "--all-columns",
        action="store_true",
        help="In csv, print every column that the rows have. Default: name, kind, status, device, vocab_size, step_ms, "
        "step_ms_low, step_ms_high, loss_ms, peak_mb",
    )
    result.add_argument("--output", metavar="FILE", type=flag_types.path, help="Write to FILE instead of the screen.")
    return result


def main(arguments: Optional[List[str]] = None) -> int:
    options = parser().parse_args(arguments)
    log = logs.read_any(options.log, options.all_runs)
    text = _text(log, options) if log else ""
    if not log or options.format not in ("csv", "json"):  # these have rows of losses, or of other tools
        text = "\n".join(filter(None, [text, _of_tools(options.log or [Path("log")], options.format)]))
    if options.output is not None:
        write_whole(another("--output"), (options.output, text))
    else:
        print(text, end="")
    return EXIT_OK if log.readable or not log else EXIT_FAILED


def _of_tools(paths: List[Path], format: str) -> str:
    """Return the runs of every tool of its own as text; "" where there is none."""
    tools = parts.slices()
    if format in ("csv", "json"):
        rows = [row for tool in tools for row in tool.rows(paths)]
        return (csv_text if format == "csv" else json_text)(rows) if rows else ""
    return "\n".join(text for tool in tools for text in tool.text(paths, format))


def _text(log: Log, options: argparse.Namespace) -> str:
    format, sweeps = options.format, log.sweeps  # made here, which ranks the rows of each cell
    if format in ("csv", "json"):
        rows = [*log.rows, *log.searches, *(row for sweep in sweeps for row in sweep.rows)]
        if format == "csv" and not options.all_columns:
            return csv_text(results.tidy(rows))
        return results.render(rows, format)
    if format == "table" and not options.details:
        how = {"width": answer.WIDTH} if options.output else answer.how()
        return answer.of_log(log, folders=options.log, **how)
    return results.of_log(log, format)


if __name__ == "__main__":
    sys.exit(run("summarize.py", main))
