#!/usr/bin/env python3
"""Ask every implementation and variant the corner cases, and print who answers right, wrong, not at all, or dies.

Loss and gradient are compared with the float64 oracle; what may end a process has one of its own.  Differences are
data: the exit code is 0 when the matrix could be made, 1 when an implementation could not be judged for an error of
this suite, 2 for bad usage.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import List, Mapping, Sequence

from common.analysis import conformance
from common.cli import flag_types
from common.cli.parser import Parser, implementations
from common.conformance.cases import CASES, Case
from common.conformance.isolated import examine
from common.core.errors import EXIT_FAILED, EXIT_OK, UserError
from common.core.guard import guarded
from common.core.implementations import find, with_variants
from common.core.paths import ROOT
from common.jobs.progress import Progress
from common.records.conformance import ERROR, Judged
from common.setup import interpreters
from common.system import machine
from common.tables.conformance import block, markdown, table

JSON_NAME, MARKDOWN_NAME = "conformance.json", "conformance.md"


def parser() -> Parser:
    result = Parser(prog=Path(sys.argv[0]).name, description=__doc__)
    names = tuple(one.name for one in with_variants())
    standard = tuple(one.name for one in with_variants() if not one.template)
    result.add_argument(
        "--only",
        type=implementations(standard),
        default=standard,
        metavar="A,B",
        help=f"these: {', '.join(names)}; or a loss of your own, by its file (benchmark_flash.py). "
        "Default: all but the template",
    )
    cases = tuple(case.name for case in CASES)
    result.add_argument(
        "--cases",
        type=flag_types.some_of(cases),
        default=cases,
        metavar="X,Y",
        help="these cases (--list names them). Default: all",
    )
    result.add_argument(
        "--device", type=flag_types.device, default="auto", help="auto, cpu, cuda or cuda:N. Default: auto"
    )
    result.add_argument(
        "--format",
        choices=("table", "markdown", "json", "readme"),
        default="table",
        help="of what is printed; readme: the small folded matrix of docs/corners.md. Default: table",
    )
    result.add_argument(
        "--output",
        type=flag_types.path,
        metavar="DIR",
        help=f"write {MARKDOWN_NAME} and {JSON_NAME} into DIR. Default: only {JSON_NAME}, into log/",
    )
    result.add_argument(
        "--update",
        action="store_true",
        help=f"keep the rows of the {JSON_NAME} that is there which this run does not judge, with their revision",
    )
    result.add_argument("--list", action="store_true", help="list the cases with what they ask, and stop")
    result.add_argument(
        "--timeout", type=flag_types.positive, default=120.0, metavar="S", help="seconds for one case. Default: 120"
    )
    result.add_argument(
        "--large",
        nargs="?",
        type=flag_types.some_of(names, names),
        default=(),
        const=names,
        metavar="A,B",
        help="ask all, or these, for more than 2^31 elements too: 8 GiB of logits, minutes for each, where 17 GiB of "
        "memory are free",
    )
    result.add_argument("--in-place", action="store_true", help="judge with this Python only, with what it has")
    result.add_argument("--quiet", action="store_true", help="no progress on stderr")
    return result


def main(arguments: argparse.Namespace) -> int:
    if arguments.list:
        width = max(len(case.name) for case in CASES)
        print("\n".join(f"{case.name:{width}s}  {case.title}: {case.asks}" for case in CASES))
        return EXIT_OK
    suite = machine.git_state(ROOT)  # as it is now, whatever changes while it runs
    folder = arguments.output or ROOT / "log"
    _make(folder)
    choices = {
        name: interpreters.choose(find(name), in_place=arguments.in_place, prefer_here=False) for name in arguments.only
    }
    pythons = [choice.python for choice in choices.values() if choice.python]
    device = interpreters.resolve_device(arguments.device, pythons)
    cases = [case for case in CASES if case.name in arguments.cases]
    about = machine.describe()
    if arguments.update and len(cases) < len(CASES):
        raise UserError("--update: a row is judged as a whole; leave --cases out")
    earlier = conformance.read(folder / JSON_NAME, device, about["cpu"]) if arguments.update else {}
    judged = judge_all(choices, cases, device, arguments)
    found = conformance.document(
        judged,
        cases,
        device=device,
        machine=about,
        suite=suite,
        command=[Path(sys.argv[0]).name, *sys.argv[1:]],
    )
    found = conformance.updated(found, earlier)
    _write(folder / JSON_NAME, json.dumps(found, indent=1) + "\n")
    if arguments.output:
        _write(folder / MARKDOWN_NAME, markdown(found))
    if arguments.format == "json":
        print(json.dumps(found, indent=1))
    elif arguments.format == "markdown":
        print(markdown(found), end="")
    elif arguments.format == "readme":
        print(block(found))
    else:
        print(table(found, color=sys.stdout.isatty() and not os.environ.get("NO_COLOR")), end="")
    failed = any(one.status == "error" or any(cell.result == ERROR for cell in one.cells.values()) for one in judged)
    return EXIT_FAILED if failed else EXIT_OK


def judge_all(
    choices: Mapping[str, interpreters.Choice], cases: Sequence[Case], device: str, arguments: argparse.Namespace
) -> List[Judged]:
    """Every implementation in turn; one that cannot run costs only its own column."""
    judged = []
    with Progress(arguments.quiet) as progress:
        progress.expect(len(choices))
        for name, choice in choices.items():
            progress.start(name)
            if choice.python is None:
                judged.append(Judged(name, find(name).kind, "missing", choice.reason))
            else:
                judged.append(
                    examine(
                        find(name),
                        choice.python,
                        device,
                        cases,
                        timeout=arguments.timeout,
                        large=name in arguments.large,
                        note=progress.note,
                    )
                )
            progress.done(name, judged[-1].status, judged[-1].reason)
    return judged


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make {folder}: {error.strerror or error}; name another with --output") from error


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}; name another with --output") from error


if __name__ == "__main__":
    parsed = parser().parse_args()
    raise SystemExit(guarded("conformance.py", lambda: main(parsed)))
