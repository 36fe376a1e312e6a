#!/usr/bin/env python3
"""Measure every implementation, each pass and round in a process and environment of its own, and print the table.

A crash, a kill, an OOM, a hang or a missing package costs only that implementation's row.  Ctrl-C and SIGTERM keep
what is measured.  Exit code: 0 when every row that could run did, 1 when some failed, 2 for bad usage.
"""

import sys
from pathlib import Path

from common.cli import benchmark, flags
from common.cli.parser import Parser, add_choice, chosen
from common.core.guard import guarded
from common.core.implementations import environments, with_variants


def list_implementations() -> int:
    """Name, script and environment of each and of its variants, and where it would run."""
    from common.setup import interpreters

    for implementation in with_variants():
        choice = interpreters.choose(implementation, in_place=False, prefer_here=False)
        where = f"environment {implementation.environment}" if choice.python else f"missing: {choice.reason}"
        print(f"{implementation.name:30s} {implementation.script + '.py':30s} {implementation.kind:10s} {where}")
    print(f"any of them under the torch of an environment: {', '.join(f'NAME@{one}' for one in environments())}")
    return 0


def main() -> int:
    parser = Parser(prog=Path(sys.argv[0]).name, description=__doc__)
    add_choice(parser)
    parser.add_argument("--list", action="store_true", help="list them, with the environment each runs in, and stop")
    flags.add_flags(parser)
    arguments = parser.parse_args()
    if arguments.list:
        return guarded(parser.prog, list_implementations)
    names = chosen(parser, arguments)
    return guarded(parser.prog, lambda: benchmark.benchmark(names, arguments))


if __name__ == "__main__":
    raise SystemExit(main())
