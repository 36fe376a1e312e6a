"""Judge every implementation and variant by the corner cases: which answer right, wrong, not at all, or crash.

Loss and gradient are compared with the float64 oracle.  A case that may end its process has a process of its own.
Exit code: 0 if the matrix could be made, whatever it shows; 1 if an error of this suite kept an implementation from
being judged; 2 for bad usage or a matrix that could not be written (it is printed); 130 or 143 if it was stopped.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Callable, List, Mapping, Optional, Sequence

from common.cli.parser import Parser, add_loss, implementations
from common.cli.screen import how, in_color
from common.conformance import findings as conformance
from common.conformance.cases import CASES, Case
from common.conformance.documents import Matrix, MatrixRow
from common.conformance.matrix import markdown, screen, table
from common.conformance.records import ERROR, Judged
from common.core import flag_types, settings
from common.core.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, UserError
from common.core.files import another, make_folder, write_whole
from common.core.implementations import find, with_variants
from common.core.paths import LOG, ROOT
from common.core.text import LONGEST_MESSAGE, count
from common.jobs.executor import Executor
from common.jobs.local import Local
from common.jobs.progress import Progress
from common.jobs.spec import Job
from common.present.table import Cell, tabulated
from common.present.text import aligned
from common.records import documents
from common.records.schema import Machine, Record
from common.setup import interpreters
from common.system import machine

JSON_NAME, MARKDOWN_NAME = "conformance.json", "conformance.md"


def parser() -> Parser:
    """Return the parser of the command's flags."""
    result = Parser(description=__doc__)
    names = tuple(implementation.name for implementation in with_variants())
    standard = tuple(implementation.name for implementation in with_variants() if not implementation.template)
    result.add_argument(
        "--only",
        type=implementations(standard),
        default=standard,
        metavar="A,B",
        help=f"Judge only these: {', '.join(names)}; or a loss of your own, by its file (benchmark_flash.py). "
        "Default: all but the template",
    )
    add_loss(result)
    cases = tuple(case.name for case in CASES)
    result.add_argument(
        "--cases",
        type=flag_types.some_of(cases),
        default=cases,
        metavar="X,Y",
        help="Judge by only these cases (--list names them). Default: all",
    )
    result.add_argument(
        "--device", type=flag_types.device, default="auto", help="Device: auto, cpu, cuda or cuda:N. Default: auto"
    )
    result.add_argument(
        "--format",
        choices=("table", "markdown", "json"),
        default="table",
        help="Format of what is printed. Default: table",
    )
    result.add_argument(
        "--output",
        type=flag_types.path,
        metavar="DIR",
        help=f"Write {MARKDOWN_NAME} and {JSON_NAME} into DIR. Default: only {JSON_NAME}, into log/",
    )
    result.add_argument(
        "--update",
        action="store_true",
        help=f"Keep the rows of the existing {JSON_NAME} that this run does not judge, with their revision.",
    )
    result.add_argument(
        "--resume",
        action="store_true",
        help=f"Continue a run that was stopped, from its {JSON_NAME}: implementations that it judged are not judged "
        "again. The revision, the cases and the device must be the same.",
    )
    result.add_argument("--list", action="store_true", help="List the cases with what they ask, and stop.")
    result.add_argument(
        "--timeout", type=flag_types.positive, default=120.0, metavar="S", help="Seconds for one case. Default: 120"
    )
    result.add_argument(
        "--large",
        nargs="?",
        type=flag_types.some_of(names, names),
        default=(),
        const=names,
        metavar="A,B",
        help="Also ask all implementations, or only these, for more than 2^31 elements: 8 GiB of logits, minutes for "
        "each. Skipped unless 17 GiB of memory are free.",
    )
    result.add_argument(
        "--in-place", action="store_true", help="Judge in this Python only, with what it has installed."
    )
    result.add_argument("--quiet", action="store_true", help="Print no progress on stderr.")
    result.add_argument("--details", action="store_true", help="Print the matrix, case by case, and every finding.")
    return result


def main(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit code; raise UserError for bad usage."""
    if arguments.list:
        rows = [{"case": Cell(case.name), "asks": Cell(f"{case.title}: {case.asks}")} for case in CASES]
        print(aligned(tabulated("cases", "Cases", rows), LONGEST_MESSAGE))
        return EXIT_OK
    suite = machine.git_state(ROOT)  # as it is now, whatever changes while it runs
    folder, advice = arguments.output or LOG, another("--output", "folder")
    make_folder(folder, advice)
    cases = [case for case in CASES if case.name in arguments.cases]
    if arguments.update and len(cases) < len(CASES):
        raise UserError("--update replaces whole rows: leave --cases out")
    if arguments.loss:  # alone, unless others are named too
        others = () if arguments.only == parser().get_default("only") else arguments.only
        arguments.only = tuple(dict.fromkeys([*arguments.loss, *others]))
    return judge(Local(), cases, folder, advice, suite, arguments)


def judge(
    executor: Executor,
    cases: Sequence[Case],
    folder: Path,
    advice: str,
    suite: conformance.Revision,
    arguments: argparse.Namespace,
) -> int:
    """Judge the implementations print the matrix and return the exit code.

    Args:
        executor: runs the jobs.
        cases: what is asked.
        folder: where the matrix is written after each implementation.
        advice: end of the message for a file that cannot be written.
        suite: revision of the suite, see machine.git_state.
        arguments: flags of the command.
    """
    choices = interpreters.choose_all(arguments.only, arguments.in_place, arguments.loss)
    device = interpreters.device_of(arguments.device, choices)
    computer = documents.typed(machine.describe(), Machine)
    earlier = conformance.read(folder / JSON_NAME, device, computer.cpu) if arguments.update else None
    command = [Path(sys.argv[0]).name, *sys.argv[1:]]
    judged: List[MatrixRow] = []
    if arguments.resume:
        judged += conformance.resumed(folder / JSON_NAME, cases, device, computer.cpu, suite, arguments.large)
    done = {row.name for row in judged}
    left = {name: choice for name, choice in choices.items() if name not in done}

    def document() -> Matrix:
        """Return the matrix of all that is judged so far."""
        matrix = conformance.document(judged, cases, device=device, machine=computer, suite=suite, command=command)
        return conformance.updated(matrix, earlier)

    def write() -> Optional[UserError]:
        """Write the matrix so far; return the error if that fails."""
        files = [(folder / JSON_NAME, document().to_json())]
        if arguments.output:
            files.append((folder / MARKDOWN_NAME, markdown(document())))
        try:
            write_whole(advice, *files)
        except UserError as error:
            return error
        return None

    problem: Optional[UserError] = None
    interrupted = False

    def keep(row: MatrixRow) -> None:
        """Add a row to the matrix and write it; warn once if that fails."""
        nonlocal problem
        judged.append(row)
        before, problem = problem, write()
        if problem and not before:
            print(f"warning: {problem}; judging continues, and the matrix will be printed", file=sys.stderr)

    try:
        judge_all(executor, left, cases, device, arguments, keep)
    except KeyboardInterrupt:
        if not judged:
            raise
        problem, interrupted = write(), True
    show(document(), arguments)
    if problem:
        raise problem
    if interrupted:
        done |= {row.name for row in judged}
        progress = f"{len(done & choices.keys())} of {count(len(choices), 'implementation')} judged"
        print(f"interrupted: {progress}, kept in {folder / JSON_NAME}; --resume judges the others", file=sys.stderr)
        return EXIT_INTERRUPTED
    failed = any(row.status == "error" or any(cell.result == ERROR for cell in row.cells.values()) for row in judged)
    return EXIT_FAILED if failed else EXIT_OK


def show(document: Matrix, arguments: argparse.Namespace) -> None:
    """Print the matrix in the format of --format."""
    format = arguments.format
    if format == "json":
        print(document.to_json(), end="")
    elif format == "markdown":
        print(markdown(document), end="")
    else:
        print(table(document, color=in_color()) if arguments.details else screen(document, **how()), end="")


def judge_all(
    executor: Executor,
    choices: Mapping[str, interpreters.Choice],
    cases: Sequence[Case],
    device: str,
    arguments: argparse.Namespace,
    keep: Callable[[MatrixRow], None],
) -> None:
    """Judge every implementation, one that cannot run costs only its own column.

    `keep` is called with the row of each; `device` is "cpu", "cuda" or "cuda:N".
    """
    with Progress(arguments.quiet) as progress:
        progress.expect([(name, "conformance") for name in choices])
        for name in choices:
            progress.start(name)
            python, reason = choices[name].python, choices[name].reason
            asked = (("cases", [case.name for case in cases]), ("large", name in arguments.large))
            job = Job(name, "conformance", overrides=asked, subject="conformance")
            if python is None:
                records = [job.status("missing", reason)]
            else:
                how = (ROOT, settings.resolve({}, device), arguments.timeout, progress.note)
                records = executor.execute(job, python, *how)
            row = _judged(name, records, name in arguments.large)
            progress.done(name, row.status, row.reason, (name, "conformance"))
            keep(row)


def _judged(name: str, records: Sequence[Record], large: bool) -> MatrixRow:
    """Return the row of an implementation from the records of its job, of which the status is the last.

    `large` says whether it was asked for more than 2^31 elements.
    """
    *results, end = records
    if end["status"] != "ok":
        return MatrixRow.from_judged(Judged(name, find(name).kind, end["status"], end["reason"]), large=large)
    return MatrixRow.from_judged(documents.typed(results[0]["judged"], Judged), results[0].get("node"), large)
