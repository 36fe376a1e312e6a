"""The conformance matrix on the page, where conformance.py has left one beside it: findings, the table, and what each
implementation said.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, List, Mapping

from common.conformance import matrix
from common.conformance.findings import KINDS, Finding, findings
from common.conformance.outcomes import CRASHES, DIFFERS, ERROR, NOT_APPLICABLE, PASS, REFUSES, TIMEOUT, Outcome
from common.report.markup import Cell, Column, Table, table, text
from common.results.exports import plain

FILE_NAME = "conformance.json"
MALFORMED = (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError)
#: A symbol before each word, and the class of its colour: no meaning is in colour alone.
MARKS = {
    PASS: ("\u2713", "good"),
    DIFFERS: ("\u2717", "bad"),
    CRASHES: ("\u2717", "bad"),
    TIMEOUT: ("\u2717", "bad"),
    ERROR: ("\u2717", "bad"),
    REFUSES: ("!", "warned"),
    NOT_APPLICABLE: ("\u2013", "quiet"),
}


def section(base: Path) -> str:
    """The section of the page in the folder `base`; "" where there is no matrix."""
    try:
        document = json.loads((base / FILE_NAME).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return ""
    except (OSError, *MALFORMED) as error:
        return _wrapped(_unreadable(error))
    try:
        return _wrapped(_body(document, base))
    except MALFORMED as error:
        return _wrapped(_unreadable(error))


def _wrapped(body: str) -> str:
    return (
        '<section class="group" id="conformance" aria-labelledby="conformance-title">\n'
        f'<h2 id="conformance-title">Conformance</h2>\n{body}</section>\n'
    )


def _unreadable(error: Exception) -> str:
    reason = f"{FILE_NAME} cannot be read ({type(error).__name__}): make it again with conformance.py"
    return f'<p class="nothing">{text(reason)}.</p>\n'


def _body(document: Mapping[str, Any], base: Path) -> str:
    others = [entry for entry in document["implementations"] if entry["status"] != "judged"]
    left_out = "".join(
        f"<li><strong>{text(entry['name'])}</strong>: {text(entry['status'])}: {text(entry['reason'])}</li>"
        for entry in others
    )
    return (
        f'<p class="configuration">{text(matrix.heading(document))}</p>\n'
        + _findings(findings(document))
        + f"<h3>Every case</h3>\n{_legend()}{table(_table(document), base)}"
        + f"<details><summary>What was asked, and what was said</summary>\n{_said(document)}</details>\n"
        + (f'<div class="failures"><h3>Not judged</h3><ul>{left_out}</ul></div>\n' if left_out else "")
    )


def _legend() -> str:
    words = "; ".join(f"{MARKS[result][0]} {result}: {words}" for result, words in matrix.LEGEND.items())
    return f"<p>{text(words)}.</p>\n"


def _findings(found: List[Finding]) -> str:
    parts = []
    for kind in KINDS:
        items = "".join(
            f"<li><strong>{text(finding.case.title)}</strong>: {text(finding.sentence)}: "
            f"{text(', '.join(name for names in finding.who.values() for name in names))}.</li>"
            for finding in found
            if finding.kind == kind
        )
        if items:
            parts.append(f'<h3>{text(kind)}</h3>\n<ul class="notes">{items}</ul>\n')
    return "".join(parts)


def _table(document: Mapping[str, Any]) -> Table:
    judged = matrix.judged_of(document)
    columns = [Column(title, False) for title in ("case", *(plain(entry["name"]) for entry in judged))]
    rows = []
    for case in document["cases"]:
        outcomes = [Outcome.from_json(entry["cells"][case["name"]]) for entry in judged]
        cells = [
            Cell(f"{MARKS[o.result][0]} {matrix.cell(o)}", matrix.cell(o), mark=MARKS[o.result][1]) for o in outcomes
        ]
        rows.append([Cell(plain(case["title"]), mark="name"), *cells])
    return Table("conformance", "Conformance matrix", columns, rows)


def _cell(outcome: Outcome) -> Cell:
    symbol, mark = MARKS[outcome.result]
    words = matrix.cell(outcome)
    return Cell(f"{symbol} {words}", words, mark=mark)


def _said(document: Mapping[str, Any]) -> str:
    parts = []
    for case in document["cases"]:
        items = "".join(
            f"<li>{text(', '.join(names))}: {text(result)}: {text(words)}</li>"
            for (result, words), names in matrix.said(document, case["name"]).items()
        )
        parts.append(f"<h4>{text(case['title'])}</h4>\n<p>{text(case['asks'])}.</p>\n")
        parts.append(f'<ul class="notes">{items}</ul>\n' if items else "")
    return "".join(parts)
