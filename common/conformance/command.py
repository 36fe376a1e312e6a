"""Judge every implementation and variant by the corner cases: which answer right, wrong, not at
all, or crash.

Loss and gradient are compared with the float64 oracle.  A case that may end its process has a
process of its own.  Exit code: 0 if the matrix could be made, whatever it shows of packages; 1 if a
loss of your own is wrong, crashes or cannot be judged, or if an error of this suite kept a loss
from being judged; 2 for bad usage or a matrix that could not be written (it is printed); 130 or 143
if it was stopped.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path

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

#: The cases of --preset quick.
QUICK = ("ragged", "one-frame", "padding-gradient", "upstream", "unmodified")
#: What to do where --output cannot be written.
ADVICE = files.advise_another("--output", "folder")


def parser() -> Parser:
    """Return the parser of `rnnt-bench check`."""
    result = Parser(description=__doc__)
    every = with_variants()
    names = ", ".join(implementation.name for implementation in every)
    standard = tuple(implementation.name for implementation in every if not implementation.template)
    result.add_argument(
        "--only",
        type=implementations(standard),
        default=standard,
        metavar="A,B",
        help=f"Judge only these: {names}; or a loss of your own, by its file. Default: all but the template",
    )
    add_loss(result)
    result.add_argument(
        "--cases",
        type=flag_types.some_of(tuple(case.name for case in TABLE)),
        metavar="X,Y",
        help="Only these (--list names them). Default: all",
    )
    result.add_argument(
        "--device",
        type=flag_types.device,
        default="auto",
        help="Device: auto, cpu, cuda or cuda:N. Default: auto",
    )
    result.add_argument(
        "--output",
        type=flag_types.path,
        metavar="DIR",
        help=f"Also write {show.PAGE} and {show.CORNERS} into DIR. Both keep what {show.CORNERS} there "
        "says of losses that this run does not judge, with its day. The verdict of `run` and `show` reads "
        f"docs/{show.CORNERS}.",
    )
    result.add_argument(
        "--list", action="store_true", help="List the cases with what they ask, and stop."
    )
    result.add_argument(
        "--in-place",
        action="store_true",
        help="Judge in this Python only, with what it has installed.",
    )
    commands.add_flags(
        result, folder="check-corners", quick=f"the cases {', '.join(QUICK)}", timeout=120.0
    )
    return result


def print_cases() -> None:
    """Print the name of each case with its title and what it asks."""
    rows = []
    for case in TABLE:
        asks = f"{case.title}: {case.asks}" if case.asks else case.title
        rows.append({"case": Cell(case.name), "asks": Cell(asks)})
    print(aligned(tabulated("cases", "Cases", rows), text.LONGEST_MESSAGE))


def main(arguments: argparse.Namespace, executor: session.Executor | None = None) -> int:
    """Judge the losses that the arguments name; return the exit code.  Raises UserError."""
    if arguments.list:
        print_cases()
        return errors.EXIT_OK
    commands.set_quick(arguments, {"cases": QUICK})
    earlier: dict[str, show.Corners] = {}
    if arguments.output:
        files.make_folder(arguments.output, ADVICE)
        earlier = show.read_corners(arguments.output)
    if arguments.loss:
        if arguments.only == parser().get_default("only"):  # without --only judge --loss alone
            arguments.only = ()
        arguments.only = tuple(dict.fromkeys([*arguments.loss, *arguments.only]))
    choices = interpreters.choose_all(arguments.only, arguments.in_place, arguments.loss)
    interpreters.need_torch(choices)
    pythons = {name: choice.python for name, choice in choices.items() if choice.python}
    config = show.Config(
        cases=[case.name for case in TABLE if not arguments.cases or case.name in arguments.cases],
        device=interpreters.resolve_device(arguments.device, pythons.values()),
        missing={name: choice.reason for name, choice in choices.items() if not choice.python},
    )
    tasks = [task(name, python, config, arguments.timeout) for name, python in pythons.items()]
    # --timeout is that of a case.  From here on it is that of a job, which judges all of them.
    arguments.timeout = LOADING_SECONDS + len(config.cases) * arguments.timeout

    def answer(run: kept.Kept) -> kept.Answer:
        matrix = show.matrix_of(run)
        if arguments.output:
            write(matrix, earlier, arguments.output)
        # The script of the suite's own losses is a module, that of the user's is a file.
        of_user = [name for name in choices if find(name).script.endswith(".py")]
        return show.answer_of(matrix, of_user)

    resolved = settings.resolve({}, config.device)
    return commands.measured(
        show.TOOL, "corners", config, tasks, resolved, arguments, answer, executor, timed=False
    )


def task(name: str, python: Path, config: show.Config, timeout: float) -> job.Task:
    """Return the task that judges an implementation in an interpreter; `timeout`: seconds for a
    case."""
    row = find(name)
    request = {
        "name": name,
        "kind": row.kind,
        "script": row.script,
        "variant": row.variant,
        "cases": config.cases,
        "timeout": timeout,
    }
    variables = simulator(row, config.device)
    return job.Task(name, "conformance", request, python=python, environment=variables)


def write(matrix: show.Matrix, earlier: Mapping[str, show.Corners], folder: Path) -> None:
    """Write two files into a folder: the page of the matrix, and its corners, which say what a user
    of each loss must beware of.  Losses that it does not judge keep their corners of `earlier`."""
    judged = show.corners(matrix)
    others = {name: entry for name, entry in earlier.items() if name not in judged}
    corners = json.dumps(schema.as_written({**judged, **others}), indent=1) + "\n"
    page = show.page(matrix, others)
    files.write_whole((folder / show.PAGE, page), (folder / show.CORNERS, corners), advice=ADVICE)
