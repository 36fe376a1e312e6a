"""Make the page's section about conformance: findings, the matrix, and the answers of each implementation.

It shows the newest matrix that conformance.py has left beside the page, in the log folders or in log/, else the one
that is committed with the suite, with a remark.  A file that cannot be read costs one line.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, Dict, List, Mapping, Sequence

from common.conformance.documents import Matrix
from common.conformance.findings import FILE_NAME, called, cell, heading, judged_of, not_judged
from common.conformance.matrix import MARKS, SYMBOLS, findings_by_kind, legend, matrix, versions
from common.conformance.records import NOT_APPLICABLE, PASS, RESULTS, Asked, Outcome
from common.core import paths
from common.core.errors import UserError
from common.present.section import Failure, Section
from common.present.table import Link, Sentence
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
            document = documents.written(file, Matrix)
            matrices.append((file != COMMITTED, document["made"], _matrix(file, document)))
        except FileNotFoundError:
            continue
        except UserError as error:
            reason = f" cannot be read ({error}): make it again with conformance.py, or delete it."
            unreadable.append([Link(file.name, file), reason])
    if not matrices and not unreadable:
        return []
    newest = max(matrices, key=lambda each: each[:2])[2] if matrices else None
    return [
        Section("conformance/conformance.html.jinja", ID, TITLE, content={"matrix": newest, "unreadable": unreadable})
    ]


def _matrix(file: Path, document: Mapping[str, Any]) -> Dict[str, Any]:
    """Return the variables of conformance.html.jinja for a document."""
    absent = [(entry["status"], entry["name"], entry["reason"]) for entry in not_judged(document)]
    return {
        "origin": _origin(file, document),
        "legend": legend(document),
        "findings": findings_by_kind(document),
        "cases": [Asked.from_json(case) for case in document["cases"]],
        "columns": [_column(document, entry) for entry in judged_of(document)],
        "not_judged": [Failure(status, name, [f"{status}: {reason}"]) for status, name, reason in absent],
        "table": matrix(document),
        "symbols": SYMBOLS,
        "marks": MARKS,
        "cell": cell,
    }


def _origin(file: Path, document: Mapping[str, Any]) -> Sentence:
    """Return a sentence with the file, machine and day of a matrix, and what it covers."""
    judged, every = len(judged_of(document)), len(document["implementations"])
    scope = f": {heading(document)}. {judged} of {every} implementations and variants, {len(document['cases'])} cases."
    if file != COMMITTED:
        return [Link(file.name, file), scope]
    name = f"Committed with the suite as {COMMITTED.relative_to(paths.ROOT)}, not made with the runs above"
    return [f"{name}{scope} Run ./conformance.py for a matrix of this machine."]


def _column(document: Mapping[str, Any], entry: Mapping[str, Any]) -> Dict[str, Any]:
    """Return the variables of an implementation.

    "answers" has (title of the case, outcome) of all that is not a mere pass, the less important ones last.
    """
    outcomes = [(case["title"], Outcome.from_json(entry["cells"][case["name"]])) for case in document["cases"]]
    counts = Counter(outcome.result for _, outcome in outcomes)
    answers = [each for each in outcomes if each[1].result != PASS or each[1].message]
    answers.sort(key=lambda each: each[1].result in (PASS, NOT_APPLICABLE))
    return {
        "name": called(entry),
        "versions": versions(entry, document),
        "counted": ", ".join(f"{counts[result]} {result}" for result in RESULTS if counts[result]),
        "answers": answers,
        "outcomes": [outcome for _, outcome in outcomes],
    }
