#!/usr/bin/env python3
"""Measure every loss and print which one to use.

Each pass and round of a loss has a process of its own, so a crash, a hang or a missing package costs only that row.
Ctrl-C and SIGTERM keep what is measured.  Exit code: 0 if every row that could run did, 1 if some failed, 2 for bad
usage.
"""

import sys

from rnnt_bench.cli import benchmark, cluster
from rnnt_bench.cli.parser import EXAMPLES, Parser, add_choice, add_flags, chosen
from rnnt_bench.command import run


def main() -> int:
    parser = Parser(description=__doc__, examples=EXAMPLES)
    add_choice(parser)
    parser.add_argument(
        "--list",
        action="store_true",
        help="List the implementations, where each would run and what it lacks, and stop.",
    )
    add_flags(parser)
    cluster.add_flags(parser)
    arguments = parser.parse_args()
    if arguments.list:
        return run(parser.prog, lambda: benchmark.show_list(arguments.device))
    names = chosen(parser, arguments)
    if arguments.executor == "ray":
        return run(parser.prog, lambda: benchmark.on_cluster(arguments, sys.argv[1:]))
    return run(parser.prog, lambda: benchmark.benchmark(names, arguments, arguments.loss))


if __name__ == "__main__":
    raise SystemExit(main())
