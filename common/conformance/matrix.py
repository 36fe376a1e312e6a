"""The matrix as data, as a table for the terminal, and as Markdown.  No torch."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any, Dict, List, Mapping, Sequence

from common.conformance import obtaining
from common.conformance.cases import Case
from common.conformance.findings import KINDS, Finding, findings, outcomes_of
from common.conformance.isolated import Judged
from common.conformance.outcomes import (
    CRASHES,
    DIFFERS,
    ERROR,
    INFINITE,
    NOT_APPLICABLE,
    PASS,
    REFUSES,
    TIMEOUT,
    Outcome,
)
from common.results.exports import plain

#: Version of the document's fields.
FORMAT = 1
LEGEND = {
    PASS: "as asked",
    DIFFERS: "a wrong answer without an error; the number is the larger relative error of loss and gradient",
    REFUSES: "an error instead of an answer",
    CRASHES: "its process died, or its CUDA context, which only a new process gets back",
    TIMEOUT: "no answer in time",
    NOT_APPLICABLE: "the case does not concern it, or was not asked",
    ERROR: "this suite failed",
}
COLORS = {PASS: "32", DIFFERS: "1;31", REFUSES: "33", CRASHES: "1;35", TIMEOUT: "1;35", NOT_APPLICABLE: "2", ERROR: "7"}


def document(
    judged: Sequence[Judged],
    cases: Sequence[Case],
    *,
    device: str,
    machine: Mapping[str, Any],
    suite: Sequence[Any],
    command: Sequence[str],
) -> Dict[str, Any]:
    """What conformance.json holds.  suite: (git revision, are there uncommitted changes?).  Each row says when and by
    which revision it was judged, as rows of other runs may come beside it (common.conformance.updating)."""
    origin = {
        "made": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "git_revision": suite[0],
        "git_dirty": suite[1],
    }
    return {
        "format": FORMAT,
        **origin,
        "command": list(command),
        "machine": dict(machine),
        "device": device,
        "cases": [{"name": case.name, "title": case.title, "asks": case.asks} for case in cases],
        "implementations": [
            {
                "name": one.name,
                "kind": one.kind,
                "status": one.status,
                "reason": one.reason,
                **origin,
                **one.about,
                "cells": {name: outcome.to_json() for name, outcome in one.cells.items()},
            }
            for one in judged
        ],
    }


def cell(outcome: Outcome) -> str:
    """A few words: "pass", "differs 2e-01", "refuses"."""
    errors = [error for error in (outcome.loss_error, outcome.grad_error) if error is not None]
    if outcome.result != DIFFERS or not errors:
        return outcome.result
    return f"{DIFFERS} {'nan' if max(errors) >= INFINITE else f'{max(errors):.0e}'}"


def judged_of(document: Mapping[str, Any]) -> List[Mapping[str, Any]]:
    """The implementations that have cells."""
    return [entry for entry in document["implementations"] if entry["status"] == "judged"]


def heading(document: Mapping[str, Any]) -> str:
    """Device, machine, day and revision."""
    about = document["machine"]
    device = next((entry["device_name"] for entry in judged_of(document) if entry.get("device_name")), about.get("cpu"))
    return f"{document['device']}: {device}, {about.get('cores')} cores; {judged_when(document)}"


def judged_when(origin: Mapping[str, Any]) -> str:
    """Day and revision of a document or of one of its rows."""
    revision = str(origin["git_revision"] or "unknown")[:12]
    return f"{origin['made'][:10]}; suite {revision}" + (" with uncommitted changes" if origin["git_dirty"] else "")


def _when_else(entry: Mapping[str, Any], document: Mapping[str, Any]) -> str:
    """`judged_when` of a row that an earlier run judged, "" for one of the document's own."""
    earlier = "made" in entry and judged_when(entry) != judged_when(document)
    return judged_when(entry) if earlier else ""


def versions(entry: Mapping[str, Any], document: Mapping[str, Any]) -> str:
    """ "1.4, torch 2.11.0", whether it was simulated, and when it was judged if that was not with the document."""
    versions = [str(entry.get(key) or "-").partition("+")[0] for key in ("version", "torch")]
    simulator = f", simulated: {entry['simulator']}" if entry.get("simulator") else ""
    when = _when_else(entry, document)
    return f"{versions[0]}, torch {versions[1]}{simulator}" + (f"; judged {when}" if when else "")


def said(document: Mapping[str, Any], case: str) -> Dict[tuple, List[str]]:
    """(result, message) -> who, of all that have something to say."""
    found: Dict[tuple, List[str]] = {}
    for name, outcome in outcomes_of(document, case):
        if outcome.message:
            found.setdefault((outcome.result, outcome.message), []).append(name)
    return found


# -- terminal --------------------------------------------------------------------------------------------------------


def table(document: Mapping[str, Any], color: bool) -> str:
    """A row for each case, a numbered column for each implementation; then what they said and the findings."""

    def paint(text: str, code: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if color else text

    columns = judged_of(document)
    lines = [heading(document), ""]
    lines += [
        f"{place:3d}  {entry['name']} ({versions(entry, document)})" for place, entry in enumerate(columns, start=1)
    ]
    for entry in document["implementations"]:
        if entry["status"] != "judged":
            lines.append(f"  -  {entry['name']}: {entry['status']}: {plain(entry['reason'])}")
    titles = [case["title"] for case in document["cases"]]
    first = max(map(len, [*titles, "case"]))
    rows = [[Outcome.from_json(e["cells"][case["name"]]) for e in columns] for case in document["cases"]]
    widths = [max(len(cell(row[at])) for row in rows) for at in range(len(columns))]
    head = "  ".join(str(at).ljust(width) for at, width in enumerate(widths, start=1))
    lines += ["", f"{'case'.ljust(first)}  {head}".rstrip()]
    lines.append("  ".join(["-" * first, *("-" * width for width in widths)]))
    for title, row in zip(titles, rows):
        cells = "  ".join(paint(cell(o).ljust(w), COLORS[o.result]) for o, w in zip(row, widths))
        lines.append(f"{title.ljust(first)}  {cells}".rstrip())
    used = {outcome.result for row in rows for outcome in row}
    lines += ["", *(f"{result}: {words}" for result, words in LEGEND.items() if result in used)]
    found = findings(document)
    for kind in KINDS:
        of_kind = [finding for finding in found if finding.kind == kind]
        if of_kind:
            lines += ["", paint(kind, "1")]
            lines += [line for finding in of_kind for line in _told(finding)]
    return "\n".join(lines) + "\n"


def _told(finding: Finding) -> List[str]:
    lines = [f"  {finding.case.title}: {finding.sentence}"]
    return lines + [f"    {', '.join(names)}: {plain(words) or 'no message'}" for words, names in finding.who.items()]


# -- Markdown --------------------------------------------------------------------------------------------------------


def escaped(words: str) -> str:
    return plain(words).replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


def _code(words: str) -> str:
    return f"`{plain(words).replace('`', chr(39))}`"


def markdown(document: Mapping[str, Any]) -> str:
    """A page of its own: findings, matrix, what each said, what was asked."""
    columns = judged_of(document)
    lines = ["# Conformance of the transducer losses", "", f"On {escaped(heading(document))}.", ""]
    lines += [
        f"Made by `{' '.join(document['command'])}`. Loss and gradient are compared with the float64 reference of "
        "`common/losses/reference.py`, with the lattice that the implementation documents; a pruned loss has all of "
        "U in its ranges. What is asked is float32 where nothing else is said.",
        "",
    ]
    lines += ["## Findings", ""]
    found = findings(document)
    if any(finding.shown for finding in found):
        lines += [
            f"Each block of code is a whole program: save it as `{obtaining.SHOWN}` in the folder of this suite, and "
            "run the command above it there. The comment at its end says what it prints.",
            "",
        ]
    for kind in KINDS:
        of_kind = [finding for finding in found if finding.kind == kind]
        if of_kind:
            lines += [f"### {kind}", ""]
            for finding in of_kind:
                lines += _finding(finding)
    if not found:
        lines += ["None.", ""]
    lines += ["## Matrix", ""]
    lines += [f"- **{result}**: {words}" for result, words in LEGEND.items()]
    lines += ["", f"| case | {' | '.join(escaped(entry['name']) for entry in columns)} |"]
    lines.append(f"| --- |{' --- |' * len(columns)}")
    for case in document["cases"]:
        cells = [Outcome.from_json(entry["cells"][case["name"]]) for entry in columns]
        lines.append(f"| {escaped(case['title'])} | {' | '.join(map(_marked, cells))} |")
    lines += [
        "",
        "## Versions",
        "",
        "| implementation | kind | version | torch | Python | judged |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for entry in columns:
        values = (entry["name"], entry["kind"], entry.get("version"), entry.get("torch"), entry.get("python"))
        when = _when_else(entry, document) or judged_when(document)
        lines.append(f"| {' | '.join(escaped(str(value)) for value in (*values, when))} |")
    if any(_when_else(entry, document) for entry in columns):
        lines += ["", "A row is judged as a whole; one that was not judged again stands as it was, with its revision."]
    simulated = [f"{entry['name']} ({entry['simulator']})" for entry in columns if entry.get("simulator")]
    if simulated:
        lines += ["", f"Kernels for CUDA, run in a simulator on the CPU: {escaped(', '.join(simulated))}."]
    others = [entry for entry in document["implementations"] if entry["status"] != "judged"]
    if others:
        lines += ["", "Not judged:", ""]
        lines += [f"- {escaped(entry['name'])}: {entry['status']}: {escaped(entry['reason'])}" for entry in others]
    lines += ["", "## What was asked, and what was said", ""]
    for case in document["cases"]:
        lines += [f"**{escaped(case['title'])}** (`{case['name']}`): {escaped(case['asks'])}.", ""]
        for (result, words), names in said(document, case["name"]).items():
            lines.append(f"- {result}: {_code(words)}: {escaped(', '.join(names))}")
        lines += [""] if lines[-1] else []
    return "\n".join(lines)


def _marked(outcome: Outcome) -> str:
    return f"**{cell(outcome)}**" if outcome.result in (DIFFERS, CRASHES, TIMEOUT, ERROR) else cell(outcome)


def _finding(finding: Finding) -> List[str]:
    lines = [f"**{escaped(finding.case.title)}**: {escaped(finding.sentence)}.", ""]
    for words, names in finding.who.items():
        lines.append(f"- {escaped(', '.join(names))}" + (f": {_code(words)}" if words else ""))
    lines.append("")
    for place, (name, code) in enumerate(finding.shown.items()):
        title = f"Shown with {escaped(name)}"
        block = [*_to_run(name), "", "```python", code, "```", ""]
        lines += [f"{title}: {block[0]}", *block[1:]] if place == 0 else _folded(title, block)
    return lines


def _to_run(name: str) -> List[str]:
    command = obtaining.command(name)
    return [f"{_code(command)} ({escaped(obtaining.source(name))})"] if command else [escaped(obtaining.source(name))]


def _folded(title: str, block: List[str]) -> List[str]:
    return [f"<details><summary>{title}</summary>", "", *block, "</details>", ""]
