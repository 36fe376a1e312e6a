"""Make and read conformance documents, and draw findings from them.

Findings tell a user what to beware of: first wrong answers without an error, then crashes, then errors for inputs that
one could expect to work.  Does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Dict, List, Mapping, Optional, Sequence, Tuple, Union

from msgspec import structs

from common.conformance.documents import Matrix, MatrixRow
from common.conformance.records import (
    CRASHES,
    DIFFERS,
    ERROR,
    NAN_GRADIENT,
    NOT_APPLICABLE,
    PASS,
    REFUSES,
    TIMEOUT,
    Asked,
    Outcome,
)
from common.core.errors import UserError
from common.core.implementations import with_variants
from common.core.paths import ROOT
from common.core.text import UNBOUNDED, gathered, without_folders
from common.records import documents
from common.records.schema import Machine
from common.setup import obtaining

WRONG, FATAL, REFUSAL = "Wrong without an error", "Ends or hangs the process", "Refuses what one could expect to work"
KINDS = (WRONG, FATAL, REFUSAL)


@dataclass(frozen=True)
class Finding:
    """The implementations that fail one case in the same way, and how."""

    kind: str  # one of KINDS
    case: Asked
    sentence: str
    who: Dict[str, List[str]]  # names of implementations by their message
    #: Code that reproduces it by name of an implementation: one for each package, those that are easy to get first.
    shown: Mapping[str, str] = field(default_factory=dict)


def called(row: MatrixRow) -> str:
    """Return the name of the implementation of a row, with a remark if it was simulated."""
    return row.name + (obtaining.SIMULATED if row.simulator else "")


def outcomes_of(document: Matrix, case: str) -> List[Tuple[str, Outcome]]:
    """Return (implementation, outcome) of each implementation that was asked the case."""
    return [(called(row), row.cells[case]) for row in document.implementations if case in row.cells]


def findings(document: Matrix) -> List[Finding]:
    """Return the findings of a matrix, sorted by KINDS and then by case."""
    result = []
    for kind, results in ((WRONG, (DIFFERS,)), (FATAL, (CRASHES, TIMEOUT)), (REFUSAL, (REFUSES,))):
        for case in document.cases:
            hits = [(who, outcome) for who, outcome in outcomes_of(document, case.name) if outcome.result in results]
            if hits and not (kind == REFUSAL and not case.refusal):
                result.append(_finding(kind, case, hits))
    return result


def _finding(kind: str, case: Asked, hits: List[Tuple[str, Outcome]]) -> Finding:
    """Return the finding of a case from (implementation, outcome) of those that it concerns."""
    who = gathered((outcome.message, name) for name, outcome in hits)
    sentence = {WRONG: case.wrong, FATAL: f"asked for: {case.asks}", REFUSAL: case.refusal}[kind]
    packages: Dict[str, Tuple[str, str]] = {}
    for name, outcome in sorted(hits, key=lambda hit: obtaining.effort(hit[0])):
        if outcome.reproduction:
            implementation = obtaining.implementation_of(name)
            packages.setdefault(implementation.package if implementation else name, (name, outcome.reproduction))
    return Finding(kind, case, sentence, who, dict(packages.values()))


FILE_NAME = "conformance.json"


def caveats(name: str, folders: Sequence[Path]) -> Optional[List[str]]:
    """Return what to beware of in the implementation `name`, the worst first.

    Reads the first matrix in `folders` that judged it, else the one of docs/.  Returns None if none did.
    """
    for folder in [*folders, ROOT / "docs"]:
        try:
            matrix = documents.read(folder / FILE_NAME, Matrix)
        except (FileNotFoundError, UserError):  # the page says what is wrong with it
            continue
        row = next((row for row in matrix.judged if row.name == name), None)
        if row is not None:
            return _caveats(row, matrix.cases)
    return None


def _caveats(row: MatrixRow, cases: Sequence[Asked]) -> List[str]:
    """Return the caveats of a row of a matrix, each once."""
    outcomes = [(case, row.cells[case.name]) for case in cases if case.name in row.cells]
    wrong = [case.wrong for case, outcome in outcomes if outcome.result == DIFFERS]
    fatal = [f"ends or hangs the process: {case.title}" for case, of in outcomes if of.result in (CRASHES, TIMEOUT)]
    refused = [case.refusal for case, outcome in outcomes if outcome.result == REFUSES]
    return list(dict.fromkeys(filter(None, [*wrong, *fatal, *refused])))


LEGEND = {
    PASS: "as asked",
    DIFFERS: "a wrong answer without an error",
    REFUSES: "an error instead of an answer",
    CRASHES: "its process died, or its CUDA context, which only a new process gets back",
    TIMEOUT: "no answer in time",
    NOT_APPLICABLE: "the case does not concern it, or was not asked",
    ERROR: "this suite failed",
}
NUMBER = "A number is the larger relative error of loss and gradient."
#: Revision of the suite, and whether there were uncommitted changes; see machine.git_state.
Revision = Tuple[Optional[str], Optional[bool]]


def document(
    judged: Sequence[MatrixRow],
    cases: Sequence[Asked],
    *,
    device: str,
    machine: Machine,
    suite: Revision,
    command: Sequence[str],
) -> Matrix:
    """Return the document that conformance.json holds.

    Each row says when and by which revision it was judged, since `updated` may add rows of other runs.

    Args:
        judged: the rows; those that were judged now have no `made` yet.
        cases: what was asked.
        device: "cpu" or "cuda".
        machine: the computer.
        suite: revision of the suite.
        command: the command line.
    """
    made = datetime.now(timezone.utc).isoformat(timespec="seconds")
    revision, dirty = suite
    document = Matrix(
        made=made,
        git_revision=revision,
        git_dirty=dirty,
        command=_command(command),
        machine=machine,
        device=device,
        cases=[case.in_words() for case in cases],
        implementations=list(map(_without_folders, judged)),
    )
    document.implementations = [_dated(row, document) for row in document.implementations]
    return document


def _without_folders(row: MatrixRow) -> MatrixRow:
    """Return the row with messages that name no folder of this machine."""
    cells = {name: replace(outcome, message=without_folders(outcome.message)) for name, outcome in row.cells.items()}
    return structs.replace(row, reason=without_folders(row.reason), cells=cells)


def _dated(row: MatrixRow, document: Matrix) -> MatrixRow:
    """Return the row with when and by which revision it was judged: with its document, unless it says otherwise."""
    if row.made is not None:
        return row
    origin = {"made": document.made, "git_revision": document.git_revision, "git_dirty": document.git_dirty}
    return structs.replace(row, **origin)


def _command(words: Sequence[str]) -> List[str]:
    """Return the command line without --output and without folders, which depend on the machine."""
    kept, rest = [], iter(words)
    for word in rest:
        flag, given, _ = word.partition("=")
        if not (flag.startswith("--ou") and "--output".startswith(flag)):
            kept.append(without_folders(word))
        elif not given:
            next(rest, None)
    return kept


def leaves_nan(outcome: Outcome) -> bool:
    """Return whether the outcome passes although the gradient is NaN, which no optimizer may see."""
    return outcome.result == PASS and outcome.message.endswith(NAN_GRADIENT)


def cell(outcome: Outcome) -> str:
    """Return an outcome in a few words: "pass 2e-07", "differs 2e-01", "refuses", "pass, gradient nan"."""
    if leaves_nan(outcome):
        return f"{PASS}, {NAN_GRADIENT}"
    errors = [error for error in (outcome.loss_error, outcome.grad_error) if error is not None]
    if outcome.result not in (PASS, DIFFERS) or not errors:
        return outcome.result
    worst = max(errors)
    return f"{outcome.result} {'nan' if worst >= UNBOUNDED else f'{worst:.0e}' if worst else '0'}"


def heading(document: Matrix) -> str:
    """Return device, machine, day and revision of a document in one line."""
    devices = dict.fromkeys(row.device_name for row in document.judged if row.device_name)
    device = " and ".join(devices) or document.machine.cpu
    return f"{document.device}: {device}, {document.machine.cores} cores; {judged_when(document)}"


def judged_when(origin: Union[Matrix, MatrixRow]) -> str:
    """Return day and revision of a document or of one of its rows."""
    revision = (origin.git_revision or "unknown")[:12]
    return f"{(origin.made or '')[:10]}; suite {revision}" + (" with uncommitted changes" if origin.git_dirty else "")


def judged_elsewhere(row: MatrixRow, document: Matrix) -> str:
    """Return `judged_when` of a row that an earlier run judged, "" for a row of the document's own run."""
    when = judged_when(_dated(row, document))
    return when if when != judged_when(document) else ""


def messages(document: Matrix, case: str) -> Dict[Tuple[str, str], List[str]]:
    """Return the names of implementations by (result, message) in a case, of all outcomes that have a message."""
    answers = outcomes_of(document, case)
    return gathered(((outcome.result, outcome.message), name) for name, outcome in answers if outcome.message)


def read(path: Path, device: str, cpu: Optional[str], flag: str = "--update") -> Optional[Matrix]:
    """Return the document in `path`, None if there is none.

    Raises UserError, with the name of the `flag` that reads it, if it cannot be read or is of another device or
    computer.
    """
    try:
        document = documents.read(path, Matrix)
    except FileNotFoundError:
        return None
    except UserError as error:
        raise UserError(f"{flag}: {path} cannot be read ({error}); remove the flag") from error
    earlier = (document.device, document.machine.cpu)
    if earlier != (device, cpu) and document.implementations:
        raise UserError(
            f"{flag}: {path} is of {earlier[0]} on {earlier[1]}, this run of {device} on {cpu}; name another --output"
        )
    return document


def resumed(
    path: Path, cases: Sequence[Asked], device: str, cpu: Optional[str], suite: Revision, large: Sequence[str]
) -> List[MatrixRow]:
    """Return the rows of the document in `path` that need not be judged again.

    Raises UserError if there is no document, or one of other cases, another device, computer or revision.

    Args:
        path: conformance.json of the run that was stopped.
        cases, device, cpu: of this run.
        suite: revision of this run.
        large: implementations that are also asked for more than 2^31 elements.
    """
    before = read(path, device, cpu, "--resume")
    asked = [case.in_words() for case in cases]
    if before is None or (before.cases, before.git_revision, before.git_dirty) != (asked, *suite):
        raise UserError(f"--resume: no run of these cases by this revision in {path}; remove the flag to start one")
    return [
        row
        for row in before.judged
        if (row.git_revision, row.git_dirty) == suite
        and row.large == (row.name in large)
        and all(outcome.result != ERROR for outcome in row.cells.values())
    ]


def updated(document: Matrix, earlier: Optional[Matrix]) -> Matrix:
    """Return `document` with rows of `earlier`: those that it lacks, and those that it has as missing packages."""
    rows = {row.name: row for row in document.implementations}
    if earlier is not None:
        for row in earlier.implementations:
            today = rows.get(row.name)
            if today is None or (today.status == "missing" and row.is_judged):
                rows[row.name] = _kept(_dated(row, earlier), document)
    order = {implementation.name: index for index, implementation in enumerate(with_variants())}
    in_order = sorted(rows.values(), key=lambda row: order.get(row.name, len(order)))
    return structs.replace(document, implementations=in_order)


def _kept(row: MatrixRow, document: Matrix) -> MatrixRow:
    """Return a row of an earlier document as a row of `document`, whose new cases it was not asked."""
    if not row.is_judged:
        return row
    unasked = Outcome(NOT_APPLICABLE, f"not asked (judged at {str(row.git_revision)[:12]})")
    return structs.replace(row, cells={case.name: row.cells.get(case.name, unasked) for case in document.cases})
