"""Judge every implementation and variant by the corner cases: which answer right, wrong, not at
all, or crash.

Loss and gradient are compared with the float64 oracle.  A case that may end its process has a
process of its own. Exit code: 0 if the matrix could be made, whatever it shows of packages; 1 if a
loss of your own is wrong, crashes or cannot be judged, or if an error of this suite kept a loss
from being judged; 2 for bad usage or a matrix that could not be written (it is printed); 130 or 143
if it was stopped.
"""

from __future__ import annotations

import argparse
import json

from rnnt_bench.cli.parser import add_loss, implementations
from rnnt_bench.conformance import show
from rnnt_bench.conformance.judge import LOADING_SECONDS, simulator
from rnnt_bench.core import errors, files, flag_types, settings, text
from rnnt_bench.core.arguments import Parser
from rnnt_bench.core.implementations import find, with_variants
from rnnt_bench.core.questions import TABLE
from rnnt_bench.jobs import job, session
from rnnt_bench.present.parts import Cell, tabulated
from rnnt_bench.present.text import aligned
from rnnt_bench.records import schema
from rnnt_bench.setup import interpreters
from rnnt_bench.tools import commands, kept

#: With --preset quick.
QUICK = ("ragged", "one-frame", "padding-gradient", "upstream", "unmodified")


def parser() -> Parser:
    result = Parser(description=__doc__)
    names = tuple(implementation.name for implementation in with_variants())
    standard = tuple(
        implementation.name for implementation in with_variants() if not implementation.template
    )
    only = f"Judge only these: {', '.join(names)}; or a loss of your own, by its file. Default: all but the template"
    result.add_argument(
        "--only", type=implementations(standard), default=standard, metavar="A,B", help=only
    )
    add_loss(result)
    some = flag_types.some_of(tuple(case.name for case in TABLE))
    result.add_argument(
        "--cases", type=some, metavar="X,Y", help="Only these (--list names them). Default: all"
    )
    result.add_argument(
        "--device",
        type=flag_types.device,
        default="auto",
        help="Device: auto, cpu, cuda or cuda:N. Default: auto",
    )
    written = (
        f"Also write {show.PAGE}, and {show.CORNERS}, which the verdict reads in docs/, into DIR; what it has there "
        "of losses that this run does not judge is kept, with its day."
    )
    result.add_argument("--output", type=flag_types.path, metavar="DIR", help=written)
    result.add_argument(
        "--list", action="store_true", help="List the cases with what they ask, and stop."
    )
    result.add_argument(
        "--in-place", action="store_true", help="Judge in this Python only, with what it has."
    )
    commands.add_flags(
        result, folder="check-corners", quick=f"the cases {', '.join(QUICK)}", timeout=120.0
    )
    return result


def main(arguments: argparse.Namespace, executor: session.Executor | None = None) -> int:
    if arguments.list:
        rows = [
            {
                "case": Cell(case.name),
                "asks": Cell(": ".join(filter(None, (case.title, case.asks)))),
            }
            for case in TABLE
        ]
        print(aligned(tabulated("cases", "Cases", rows), text.LONGEST_MESSAGE))
        return errors.EXIT_OK
    commands.set_quick(arguments, {"cases": QUICK})
    advice = files.another("--output", "folder")
    before: dict[str, show.Corners] = {}
    if arguments.output:
        files.make_folder(arguments.output, advice)
        before = show.read_corners(arguments.output)
    if arguments.loss:  # alone, unless others are named too
        others = () if arguments.only == parser().get_default("only") else arguments.only
        arguments.only = tuple(dict.fromkeys([*arguments.loss, *others]))
    choices = interpreters.choose_all(arguments.only, arguments.in_place, arguments.loss)
    interpreters.need_torch(choices)
    device = interpreters.resolve_device(
        arguments.device, [choice.python for choice in choices.values()]
    )
    config = show.Config(
        cases=[case.name for case in TABLE if case.name in (arguments.cases or case.name)],
        device=device,
        missing={name: choice.reason for name, choice in choices.items() if choice.python is None},
    )
    tasks = []
    for name, choice in choices.items():
        if not choice.python:
            continue
        row = find(name)
        given = {
            "name": name,
            "kind": row.kind,
            "script": row.script,
            "variant": row.variant,
            "cases": config.cases,
            "timeout": arguments.timeout,
        }
        variables = simulator(row, device)
        tasks.append(
            job.Task(name, "conformance", given, python=choice.python, environment=variables)
        )
    arguments.timeout = LOADING_SECONDS + len(config.cases) * arguments.timeout  # of a process

    def answer(run: kept.Kept) -> kept.Answer:
        matrix = show.matrix_of(run)
        if arguments.output:
            judged = show.corners(matrix)
            earlier = {name: entry for name, entry in before.items() if name not in judged}
            written = json.dumps(schema.as_written({**judged, **earlier}), indent=1) + "\n"
            pages = (
                (arguments.output / show.PAGE, show.page(matrix, earlier)),
                (arguments.output / show.CORNERS, written),
            )
            files.write_whole(advice, *pages)
        return show.answer_of(
            matrix, [name for name in choices if find(name).script.endswith(".py")]
        )

    resolved = settings.resolve({}, device)
    return commands.measured(
        show.TOOL, "corners", config, tasks, resolved, arguments, answer, executor, timed=False
    )
