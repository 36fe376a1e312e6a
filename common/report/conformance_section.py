"""The conformance matrix on the page: findings, the table, and what each implementation said.

It is the newest that conformance.py has left beside the page, in the log folders or in log/, or else the one that is
committed with the suite, which says so.  One that cannot be read costs one line.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, NamedTuple, Sequence

from common.conformance import matrix
from common.conformance.findings import KINDS, Finding, called, findings
from common.conformance.outcomes import NOT_APPLICABLE, PASS, RESULTS, Outcome
from common.report.conformance_grid import grid
from common.report.markup import href, text
from common.settings import ROOT

FILE_NAME = "conformance.json"
COMMITTED = ROOT / "docs" / FILE_NAME
#: Where conformance.py writes without --output.
LOG = ROOT / "log" / FILE_NAME
ID, TITLE = "conformance", "Conformance: which loss is right in which corner"
MALFORMED = (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError)


class _Source(NamedTuple):
    path: Path
    document: Any


def section(base: Path, paths: Sequence[Path] = ()) -> str:
    """The section of the page in the folder `base` about the logs `paths`; "" where not even the committed matrix is
    there."""
    parts: List[str] = []
    sources = [*_newest_first(_read(_files(base, paths), base, parts)), *_read([COMMITTED], base, parts)]
    for source in sources:
        try:
            body = _body(source, base)
        except MALFORMED as error:
            parts.append(_unreadable(source.path, base, error))
        else:
            return _wrapped("".join([*parts, body]))
    return _wrapped("".join(parts)) if parts else ""


def _files(base: Path, paths: Sequence[Path]) -> List[Path]:
    """Each file once, whichever way it was found; the committed one is not looked for here."""
    found: Dict[Path, Path] = {}
    for file in (base / FILE_NAME, *_below(paths), LOG):
        found.setdefault(file.resolve(), file)
    found.pop(COMMITTED.resolve(), None)
    return list(found.values())


def _below(paths: Sequence[Path]) -> Iterator[Path]:
    for path in paths:
        for folder, below, names in os.walk(path):
            below.sort()
            if FILE_NAME in names:
                yield Path(folder) / FILE_NAME


def _read(files: Sequence[Path], base: Path, parts: List[str]) -> List[_Source]:
    """Those that are JSON; what is said of the others is added to `parts`."""
    found = []
    for file in files:
        try:
            found.append(_Source(file, json.loads(file.read_text(encoding="utf-8"))))
        except FileNotFoundError:
            continue
        except (OSError, *MALFORMED) as error:
            parts.append(_unreadable(file, base, error))
    return found


def _newest_first(sources: Sequence[_Source]) -> List[_Source]:
    def made(source: _Source) -> str:
        return str(source.document.get("made")) if isinstance(source.document, dict) else ""

    return sorted(sources, key=made, reverse=True)


def _wrapped(body: str) -> str:
    return (
        f'<section class="group" id="{ID}" aria-labelledby="{ID}-title">\n'
        f'<h2 id="{ID}-title">{TITLE}</h2>\n{body}</section>\n'
    )


def _unreadable(path: Path, base: Path, error: Exception) -> str:
    reason = f"cannot be read ({type(error).__name__}): make it again with conformance.py, or delete it"
    return f'<p class="nothing"><a href="{href(path, base)}">{text(path.name)}</a> {text(reason)}.</p>\n'


def _body(source: _Source, base: Path) -> str:
    document = source.document
    others = [entry for entry in document["implementations"] if entry["status"] != "judged"]
    left_out = "".join(
        f"<li><strong>{text(entry['name'])}</strong>: {text(entry['status'])}: {text(entry['reason'])}</li>"
        for entry in others
    )
    return (
        _where_from(source, base)
        + _findings(findings(document))
        + f'<div class="together"><h3>Every case</h3>\n{grid(document)}</div>\n'
        + f'<div class="said"><h3>What was asked, and what was said</h3>\n{_asked(document)}'
        + "".join(_said(document, entry) for entry in matrix.judged_of(document))
        + "</div>\n"
        + (f'<div class="failures"><h3>Not judged</h3><ul>{left_out}</ul></div>\n' if left_out else "")
    )


def _where_from(source: _Source, base: Path) -> str:
    """Of whose machine and day it is, and what it covers."""
    document = source.document
    judged, every, cases = (matrix.judged_of(document), document["implementations"], document["cases"])
    covers = f"{len(judged)} of {len(every)} implementations and variants, {len(cases)} cases."
    if source.path == COMMITTED:
        file = COMMITTED.relative_to(ROOT)
        said = text(f"Committed with the suite as {file}, not made with the runs above: {matrix.heading(document)}.")
        more = text(f"{covers} ./conformance.py makes one of this machine.")
        return f'<p class="configuration">{said} {more}</p>\n'
    file = f'<a href="{href(source.path, base)}">{text(source.path.name)}</a>'
    return f'<p class="configuration">{file}: {text(f"{matrix.heading(document)}. {covers}")}</p>\n'


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


def _asked(document: Mapping[str, Any]) -> str:
    items = "".join(
        f"<li><strong>{text(case['title'])}</strong>: {text(case['asks'])}.</li>" for case in document["cases"]
    )
    return f'<details><summary>What each case asks</summary>\n<ul class="notes">{items}</ul></details>\n'


def _said(document: Mapping[str, Any], entry: Mapping[str, Any]) -> str:
    """Everything one implementation has to say: how far off, which error, why a case does not concern it."""
    outcomes = [(case["title"], Outcome.from_json(entry["cells"][case["name"]])) for case in document["cases"]]
    counts = Counter(outcome.result for _, outcome in outcomes)
    counted = ", ".join(f"{counts[result]} {result}" for result in RESULTS if counts[result])
    items = "".join(
        f"<li><strong>{text(title)}</strong>: {text(_words(outcome))}</li>"
        for title, outcome in sorted(outcomes, key=lambda each: each[1].result in (PASS, NOT_APPLICABLE))
        if outcome.result != PASS or outcome.message
    )
    return (
        f"<details><summary>{text(called(entry))}: {text(counted)}</summary>\n"
        f"<p>{text(matrix.versions(entry, document))}</p>\n"
        f'<ul class="notes">{items}</ul></details>\n'
    )


def _words(outcome: Outcome) -> str:
    return f"{matrix.cell(outcome)}: {outcome.message}" if outcome.message else matrix.cell(outcome)
