"""Make the page's section about conformance: findings, the matrix, and the answers of each implementation.

It shows the newest matrix that conformance.py left beside the page, in the log folders or in log/.  Without one it
shows the matrix that is committed with the suite, and says so.  A file that cannot be read costs one line.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, List, Mapping, Sequence, Tuple

from common.conformance.documents import Matrix, MatrixRow
from common.conformance.findings import FILE_NAME, Finding, called, cell, heading
from common.conformance.matrix import MARKS, SYMBOLS, by_kind, findings_by_kind, legend, matrix, titled, versions
from common.conformance.records import NOT_APPLICABLE, PASS, RESULTS, Asked, Outcome
from common.core import paths
from common.core.errors import UserError
from common.present.section import Failure, Section
from common.present.table import Link, Sentence, Table
from common.records import documents

COMMITTED = paths.ROOT / "docs" / FILE_NAME
#: The file that conformance.py writes without --output.
LOG = paths.LOG / FILE_NAME
ID, TITLE = "conformance", "Conformance: which loss is right in which corner"


def sections(base: Path, paths: Sequence[Path] = ()) -> List[Section]:
    """Return the section of a page in the folder `base` about the logs `paths`; [] if there is no matrix at all."""
    matrices, unreadable = [], []
    logs = [file for path in paths for file in sorted(path.rglob(FILE_NAME))]
    files = {file.resolve(): file for file in (LOG, *logs, base / FILE_NAME, COMMITTED)}
    for file in files.values():
        try:
            document = documents.read(file, Matrix)
            matrices.append((file != COMMITTED, document.made, _matrix(file, document)))
        except FileNotFoundError:
            continue
        except UserError as error:
            reason = f" cannot be read ({error}): make it again with conformance.py, or delete it."
            unreadable.append([Link(file.name, file), reason])
    if not matrices and not unreadable:
        return []
    newest = max(matrices, key=lambda each: each[:2])[2] if matrices else None
    return [
        Section(
            ID,
            TITLE,
            folded=True,
            template="conformance/conformance.html.jinja",
            content={"matrix": newest, "unreadable": unreadable},
        )
    ]


@dataclass(frozen=True)
class Column:
    """An implementation, as conformance.html.jinja shows it."""

    name: str
    versions: str
    counted: str  # "40 pass, 2 refuses"
    answers: List[Tuple[str, Outcome]]  # by title of the case: what is no mere pass, the more important first
    outcomes: List[Outcome]  # of all cases, in their order


@dataclass(frozen=True)
class Part:
    """The matrix of a kind of loss."""

    title: str
    table: Table
    cases: Sequence[Asked]
    columns: Sequence[Column]


@dataclass(frozen=True)
class Shown:
    """A matrix, as conformance.html.jinja shows it."""

    origin: Sentence
    legend: Mapping[str, str]  # meaning of each result that occurs
    findings: Mapping[str, Sequence[Finding]]  # by kind
    cases: Sequence[Asked]
    columns: Sequence[Column]  # of all kinds
    not_judged: Sequence[Failure]
    matrices: Sequence[Part]  # one for each kind of loss
    symbols: Mapping[str, str]  # by result
    marks: Mapping[str, str]  # CSS class by result
    cell: Callable[[Outcome], str]  # the words of an outcome


def _matrix(file: Path, document: Matrix) -> Shown:
    """Return a document as the page shows it."""
    return Shown(
        origin=_origin(file, document),
        legend=legend(document),
        findings=findings_by_kind(document),
        cases=document.cases,
        columns=[_column(document, row, document.cases) for row in document.judged],
        not_judged=[Failure(row.status, row.name, [f"{row.status}: {row.reason}"]) for row in document.not_judged],
        matrices=[_part(kind, part, document) for kind, part in by_kind(document).items()],
        symbols=SYMBOLS,
        marks=MARKS,
        cell=cell,
    )


def _part(kind: str, part: Matrix, document: Matrix) -> Part:
    """Return the matrix of a kind of loss, `part` of the document."""
    table = matrix(part)._replace(name=f"conformance-{kind}", title=f"Conformance matrix, {titled(kind)}")
    columns = [_column(document, row, part.cases) for row in part.judged]
    return Part(titled(kind), table, part.cases, columns)


def _origin(file: Path, document: Matrix) -> Sentence:
    """Return a sentence with the file, machine and day of a matrix, and what it covers."""
    judged, every = len(document.judged), len(document.implementations)
    scope = f": {heading(document)}. {judged} of {every} implementations and variants, {len(document.cases)} cases."
    if file != COMMITTED:
        return [Link(file.name, file), scope]
    name = f"Committed with the suite as {COMMITTED.relative_to(paths.ROOT)}, not made with the runs above"
    return [f"{name}{scope} Run ./conformance.py for a matrix of this machine."]


def _column(document: Matrix, row: MatrixRow, cases: Sequence[Asked]) -> Column:
    """Return a row of the document as a column of the page, with these cases."""
    outcomes = [(case.title, row.cells[case.name]) for case in cases]
    counts = Counter(outcome.result for _, outcome in outcomes)
    answers = [each for each in outcomes if each[1].result != PASS or each[1].message]
    answers.sort(key=lambda each: each[1].result in (PASS, NOT_APPLICABLE))
    counted = ", ".join(f"{counts[result]} {result}" for result in RESULTS if counts[result])
    return Column(called(row), versions(row, document), counted, answers, [outcome for _, outcome in outcomes])
