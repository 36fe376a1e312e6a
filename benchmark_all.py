#!/usr/bin/env python3
"""Measure every implementation, each pass and round in a process and environment of its own, and print the table.

A crash, a kill, an OOM, a hang or a missing package costs only that implementation's row.  Ctrl-C keeps what is
measured.  Exit code: 0 when every row that could run did, 1 when some failed, 2 for bad usage.
"""

import sys
from pathlib import Path

from common import cli, flag_types
from common.commands import guarded
from common.implementations import BY_NAME, IMPLEMENTATIONS
from common.running import runner


def list_implementations() -> int:
    """Name, environment and script of each, and where it would run."""
    from common.running import interpreters

    for implementation in IMPLEMENTATIONS:
        choice = interpreters.choose(implementation, in_place=False, prefer_here=False)
        where = f"environment {implementation.environment}" if choice.python else f"missing: {choice.reason}"
        print(f"{implementation.name:22s} {implementation.script + '.py':26s} {where}")
    return 0


def main() -> int:
    names = tuple(BY_NAME)
    parser = cli.Parser(prog=Path(sys.argv[0]).name, description=__doc__)
    group = parser.add_argument_group("which implementations")
    group.add_argument(
        "--only",
        type=flag_types.some_of(names),
        metavar="A,B",
        default=names,
        help=f"these: {', '.join(names)}. Default: all",
    )
    group.add_argument("--skip", type=flag_types.some_of(names), metavar="A,B", default=(), help="all but these")
    group.add_argument("--list", action="store_true", help="list them, with the environment each runs in, and stop")
    cli.add_flags(parser)
    arguments = parser.parse_args()
    if arguments.list:
        return list_implementations()
    chosen = [name for name in arguments.only if name not in arguments.skip]
    if not chosen:
        parser.error("argument --skip: nothing is left of --only")
    return guarded(parser.prog, lambda: runner.benchmark(chosen, arguments))


if __name__ == "__main__":
    raise SystemExit(main())
