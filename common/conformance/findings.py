"""Make and read conformance documents, and draw findings from them.

Findings tell a user what to beware of: first wrong answers without an error, then crashes, then errors for inputs that
one could expect to work.  Does not import torch.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from common.conformance.documents import Matrix
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
    Judged,
    Outcome,
)
from common.core.errors import UserError
from common.core.implementations import with_variants
from common.core.paths import ROOT
from common.core.text import UNBOUNDED, gathered, without_folders
from common.records import documents
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


def called(entry: Mapping[str, Any]) -> str:
    """Return the name of the implementation of a row, with a remark if it was simulated."""
    return str(entry["name"]) + (obtaining.SIMULATED if entry.get("simulator") else "")


def outcomes_of(document: Mapping[str, Any], case: str) -> List[Tuple[str, Outcome]]:
    """Return (implementation, outcome) of each implementation that was asked the case."""
    return [
        (called(entry), Outcome.from_json(entry["cells"][case]))
        for entry in document["implementations"]
        if case in entry["cells"]
    ]


def findings(document: Mapping[str, Any]) -> List[Finding]:
    """Return the findings of a matrix, sorted by KINDS and then by case."""
    result = []
    for kind, results in ((WRONG, (DIFFERS,)), (FATAL, (CRASHES, TIMEOUT)), (REFUSAL, (REFUSES,))):
        for case in map(Asked.from_json, document["cases"]):
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
            matrix = documents.written(folder / FILE_NAME, Matrix)
        except (FileNotFoundError, UserError):  # the page says what is wrong with it
            continue
        entry = next((row for row in judged_of(matrix) if row["name"] == name), None)
        if entry is not None:
            return _caveats(entry, list(map(Asked.from_json, matrix["cases"])))
    return None


def _caveats(entry: Mapping[str, Any], cases: Sequence[Asked]) -> List[str]:
    """Return the caveats of a row of a matrix, each once."""
    outcomes = [(case, Outcome.from_json(entry["cells"][case.name])) for case in cases if case.name in entry["cells"]]
    wrong = [case.wrong for case, outcome in outcomes if outcome.result == DIFFERS]
    fatal = [f"ends or hangs the process: {case.title}" for case, of in outcomes if of.result in (CRASHES, TIMEOUT)]
    refused = [case.refusal for case, outcome in outcomes if outcome.result == REFUSES]
    return list(dict.fromkeys(filter(None, [*wrong, *fatal, *refused])))


#: Version of the document's fields; 2 has the words `wrong` and `refusal` of each case.
FORMAT = 2
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
#: Fields of the run that judged a row; rows of old documents lack them and have those of the document.
ORIGIN = ("made", "git_revision", "git_dirty")


def document(
    judged: Sequence[Judged],
    cases: Sequence[Asked],
    *,
    device: str,
    machine: Mapping[str, Any],
    suite: Sequence[Any],
    command: Sequence[str],
) -> Dict[str, Any]:
    """Return the document that conformance.json holds.

    Each row says when and by which revision it was judged, since `updated` may add rows of other runs.

    Args:
        judged: the rows.
        cases: what was asked.
        device: "cpu" or "cuda".
        machine: description of the computer.
        suite: (git revision, whether there are uncommitted changes).
        command: the command line.
    """
    origin = dict(zip(ORIGIN, (datetime.now(timezone.utc).isoformat(timespec="seconds"), *suite)))

    def entry(row: Judged) -> Dict[str, Any]:
        fields = {"name": row.name, "kind": row.kind, "status": row.status, "reason": without_folders(row.reason)}
        cells = {name: replace(of, message=without_folders(of.message)).to_json() for name, of in row.cells.items()}
        return {**fields, **origin, **row.about, "cells": cells}

    return {
        "format": FORMAT,
        **origin,
        "command": _command(command),
        "machine": dict(machine),
        "device": device,
        "cases": [case.to_json() for case in cases],
        "implementations": list(map(entry, judged)),
    }


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


def judged_of(document: Mapping[str, Any]) -> List[Mapping[str, Any]]:
    """Return the rows that were judged."""
    return [entry for entry in document["implementations"] if entry["status"] == "judged"]


def not_judged(document: Mapping[str, Any]) -> List[Mapping[str, Any]]:
    """Return the rows that could not be judged."""
    return [entry for entry in document["implementations"] if entry["status"] != "judged"]


def heading(document: Mapping[str, Any]) -> str:
    """Return device, machine, day and revision of a document in one line."""
    computer = document["machine"]
    devices = dict.fromkeys(entry["device_name"] for entry in judged_of(document) if entry.get("device_name"))
    device = " and ".join(map(str, devices)) or computer.get("cpu")
    return f"{document['device']}: {device}, {computer.get('cores')} cores; {judged_when(document)}"


def judged_when(origin: Mapping[str, Any]) -> str:
    """Return day and revision of a document or of one of its rows."""
    revision = str(origin["git_revision"] or "unknown")[:12]
    return f"{origin['made'][:10]}; suite {revision}" + (" with uncommitted changes" if origin["git_dirty"] else "")


def judged_elsewhere(entry: Mapping[str, Any], document: Mapping[str, Any]) -> str:
    """Return `judged_when` of a row that an earlier run judged, "" for a row of the document's own run."""
    earlier = "made" in entry and judged_when(entry) != judged_when(document)
    return judged_when(entry) if earlier else ""


def messages(document: Mapping[str, Any], case: str) -> Dict[Tuple[str, str], List[str]]:
    """Return the names of implementations by (result, message) in a case, of all outcomes that have a message."""
    answers = outcomes_of(document, case)
    return gathered(((outcome.result, outcome.message), name) for name, outcome in answers if outcome.message)


def read(path: Path, device: str, cpu: str, flag: str = "--update") -> Dict[str, Any]:
    """Return the document in `path`, {} if there is none.

    Raises UserError, with the name of the `flag` that reads it, if it cannot be read or is of another device or
    computer.
    """
    try:
        document: Dict[str, Any] = documents.written(path, Matrix)
        json.dumps(document, indent=1)  # it will be written again
    except FileNotFoundError:
        return {}
    except (UserError, RecursionError) as error:
        raise UserError(f"{flag}: {path} cannot be read ({error}); remove the flag") from error
    earlier = (document["device"], document["machine"].get("cpu"))
    if earlier != (device, cpu) and document["implementations"]:
        raise UserError(
            f"{flag}: {path} is of {earlier[0]} on {earlier[1]}, this run of {device} on {cpu}; name another --output"
        )
    return document


def resumed(
    path: Path, cases: Sequence[Asked], device: str, cpu: str, suite: Sequence[Any], large: Sequence[str]
) -> List[Judged]:
    """Return the rows of the document in `path` that need not be judged again.

    Raises UserError if there is no document, or one of other cases, another device, computer or revision.

    Args:
        path: conformance.json of the run that was stopped.
        cases, device, cpu: of this run.
        suite: see `document`.
        large: implementations that are also asked for more than 2^31 elements.
    """
    before = read(path, device, cpu, "--resume")
    asked = [case.to_json() for case in cases]
    if not before or (before.get("cases"), before.get("git_revision"), before.get("git_dirty")) != (asked, *suite):
        raise UserError(f"--resume: no run of these cases by this revision in {path}; remove the flag to start one")
    rows = []
    for entry in judged_of(before):
        cells = {name: Outcome.from_json(outcome) for name, outcome in entry["cells"].items()}
        same = (entry["git_revision"], entry["git_dirty"]) == tuple(suite)
        if same and entry.get("large", False) == (entry["name"] in large):
            if all(outcome.result != ERROR for outcome in cells.values()):
                facts = {key: entry[key] for key in entry if key not in ("name", "kind", "status", "reason", "cells")}
                rows.append(Judged(entry["name"], entry["kind"], about=facts, cells=cells))
    return rows


def updated(document: Mapping[str, Any], earlier: Mapping[str, Any]) -> Dict[str, Any]:
    """Return `document` with rows of `earlier`: those that it lacks, and those that it has as missing packages."""
    rows = {entry["name"]: entry for entry in document["implementations"]}
    for entry in earlier.get("implementations", ()):
        today = rows.get(entry["name"])
        if today is None or (today["status"] == "missing" and entry["status"] == "judged"):
            rows[entry["name"]] = _kept(entry, document, earlier)
    order = {implementation.name: index for index, implementation in enumerate(with_variants())}
    return {**document, "implementations": sorted(rows.values(), key=lambda row: order.get(row["name"], len(order)))}


def _kept(entry: Mapping[str, Any], document: Mapping[str, Any], earlier: Mapping[str, Any]) -> Dict[str, Any]:
    """Return a row of `earlier` as a row of `document`, whose new cases it was not asked."""
    row = {**{key: earlier.get(key) for key in ORIGIN}, **entry}
    if row["status"] != "judged":
        return row
    unasked = Outcome(NOT_APPLICABLE, f"not asked (judged at {str(row['git_revision'])[:12]})").to_json()
    cells = {case["name"]: entry["cells"].get(case["name"], unasked) for case in document["cases"]}
    return {**row, "cells": cells}
