"""Measure every loss at each of several values: the command `sweep`."""

from __future__ import annotations

from argparse import Namespace

from rnnt_bench.cli import benchmark, cluster
from rnnt_bench.cli.parser import add, add_choice, add_flags
from rnnt_bench.core import settings
from rnnt_bench.core.arguments import Parser

DESCRIPTION = """Measure every loss at each of several values, and print a table of them.

Several KEY=A,B are measured at all combinations, each in a run of its own, without traces.  Exit code: 0 if every row
that could run did, 1 if some failed, 2 for bad usage."""
EXAMPLES = """examples
  {prog} vocab-size=500,1000,4096 --frames 100 --tokens 20
  {prog} batch-size=1,8,32 vocab-size=500,4096 --only torchaudio,fused
  {prog} threads=1,2,4 --preset quick
"""


def parser() -> Parser:
    """Return the parser of the flags of `sweep`."""
    result = Parser(description=DESCRIPTION, examples=EXAMPLES)
    add(
        result.add_argument_group("what varies"),
        "sweep",
        "Values to measure at: vocab-size=500,4096.",
        nargs="+",
        type=settings.axis,
        metavar="KEY=A,B",
        help=f"Values to measure at. KEY is one of {', '.join(settings.SWEEPABLE)}",
    )
    add_choice(result)
    add_flags(result, without=("sweep", "budget"))
    cluster.add_flags(result)
    return result


def main(options: Namespace) -> int:
    return benchmark.main(options)
