"""Print one table from log folders: the command `summarize`, see docs/reading.md."""

from __future__ import annotations

from argparse import Namespace, RawDescriptionHelpFormatter
from pathlib import Path

from rnnt_bench.analysis import logs
from rnnt_bench.core import flag_types
from rnnt_bench.core.arguments import Parser, add_logs
from rnnt_bench.core.errors import EXIT_FAILED, EXIT_OK
from rnnt_bench.core.files import advise_another, write_whole
from rnnt_bench.present import parts
from rnnt_bench.show import tables

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

Sweeps and searches for the largest batch have tables of their own. csv has the same columns for every run, the table's
first, then the settings that differ between rows; json has them too, and after them what has parts: step and loss
(times in ms by round, batch and stage), against_fastest, memory, at_size, small_batches, options, configuration,
windows, notes. Rows of runs of a model (profile, inference, pipelines, flops, check) follow those of the losses, with
the tool's name in `tool`.
"""
EXIT_CODES = (
    "Exit code: 0; 1 if nothing could be read; 2 for bad usage, or if there is no run or trace."
)


def parser() -> Parser:
    raw = RawDescriptionHelpFormatter
    result = Parser(description=DESCRIPTION, epilog=EXIT_CODES, formatter_class=raw)
    add_logs(result)
    result.add_argument(
        "--format",
        choices=tables.FORMATS,
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
        "--output",
        metavar="FILE",
        type=flag_types.path,
        help="Write to FILE instead of the screen.",
    )
    return result


def _text(log: logs.Log, options: Namespace) -> str:
    """Return what is printed: the rows of the losses, then those of the tools."""
    format = options.format
    paths = options.log or [Path("log")]
    if format in ("csv", "json"):
        tool_rows = [row for tool in parts.slices() for row in tool.rows(paths)]
        return tables.exported(log, tool_rows, format)
    texts = []
    if log.all_rows and format == "table" and not options.details:
        terminal = tables.UNKNOWN if options.output else tables.this_terminal()
        texts.append(tables.screen(log, terminal, options.log))
    elif log.all_rows:
        texts.append(tables.whole(log, format, options.log))
    texts += [text for tool in parts.slices() for text in tool.text(paths, format)]
    return "\n".join(filter(None, texts))


def main(options: Namespace) -> int:
    """Print the table, or write it to the file of --output; return the exit code."""
    log = logs.read_any(options.log, options.all_runs)
    text = _text(log, options)
    if options.output is not None:
        write_whole((options.output, text), advice=advise_another("--output"))
    else:
        print(text, end="")
    return EXIT_OK if log.readable else EXIT_FAILED
