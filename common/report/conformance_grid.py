"""The conformance matrix as one small table: a row for each case, a narrow column for each implementation, one symbol a
cell.  Its words are in each cell's title and label, in the legend, and in the CSV file.
"""

from __future__ import annotations

from typing import Any, Mapping

from common.conformance import matrix
from common.conformance.compact import SYMBOLS
from common.conformance.findings import called
from common.conformance.outcomes import CRASHES, DIFFERS, ERROR, NOT_APPLICABLE, PASS, REFUSES, TIMEOUT, Outcome
from common.report.markup import Cell, Column, Table, download, text
from common.results.exports import plain

CLASSES = {
    PASS: "good",
    DIFFERS: "wrong",
    REFUSES: "refused",
    CRASHES: "dead",
    TIMEOUT: "dead",
    ERROR: "dead",
    NOT_APPLICABLE: "quiet",
}
#: A symbol of each result, and the class of its colour: no meaning is in colour alone.
MARKS = {result: (SYMBOLS[result], CLASSES[result]) for result in CLASSES}


def grid(document: Mapping[str, Any]) -> str:
    """Legend, table and download.  Raises what a document raises that is none (see conformance_section.MALFORMED)."""
    judged = matrix.judged_of(document)
    heads = "".join(
        f'<th scope="col" title="{text(matrix.versions(entry, document))}"><span>{text(called(entry))}</span></th>'
        for entry in judged
    )
    rows = "".join(
        f'<tr><th scope="row" title="{text(case["asks"])}">{text(case["title"])}</th>'
        + "".join(_cell(case, entry) for entry in judged)
        + "</tr>\n"
        for case in document["cases"]
    )
    return (
        _legend(document) + '<div class="scroll matrix" role="region" tabindex="0" aria-label="Conformance matrix">'
        f'<table><caption class="unseen">Conformance matrix</caption><thead><tr><th scope="col">case</th>{heads}</tr>'
        f"</thead>\n<tbody>\n{rows}</tbody></table></div>\n{download(_content(document))}"
    )


def _legend(document: Mapping[str, Any]) -> str:
    """Of the results that occur."""
    used = {outcome["result"] for entry in matrix.judged_of(document) for outcome in entry["cells"].values()}
    items = "".join(
        f'<li><span class="{mark}" aria-hidden="true">{symbol}</span> <strong>{text(result)}</strong>: '
        f"{text(matrix.LEGEND[result])}</li>"
        for result, (symbol, mark) in MARKS.items()
        if result in used
    )
    return (
        f'<ul class="legend">{items}</ul>\n<p class="legend">The words of a cell are shown when it is pointed at, and '
        "are in the CSV file; what it said is in the lists below.</p>\n"
    )


def _cell(case: Mapping[str, Any], entry: Mapping[str, Any]) -> str:
    outcome = Outcome.from_json(entry["cells"][case["name"]])
    symbol, mark = MARKS[outcome.result]
    words = matrix.cell(outcome) + (f": {outcome.message}" if outcome.message else "")
    title = f"{case['title']}, {called(entry)}: {words}"
    return (
        f'<td class="{mark}" title="{text(title)}">'
        f'<span role="img" aria-label="{text(matrix.cell(outcome))}">{symbol}</span></td>'
    )


def _content(document: Mapping[str, Any]) -> Table:
    """The words of all cells, for the CSV file."""
    judged = matrix.judged_of(document)
    columns = [Column(title, False) for title in ("case", *(plain(called(entry)) for entry in judged))]
    rows = [
        [
            Cell(plain(case["title"])),
            *(Cell(matrix.cell(Outcome.from_json(entry["cells"][case["name"]]))) for entry in judged),
        ]
        for case in document["cases"]
    ]
    return Table("conformance", "Conformance matrix", columns, rows)
