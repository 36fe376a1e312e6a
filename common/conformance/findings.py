"""What a user must know, in plain words, from the cells of a matrix: wrong answers without an error first, then
crashes, then errors where an answer could be expected.  No torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Dict, List, Mapping, Tuple

from common.conformance import obtaining
from common.conformance.cases import BY_NAME, Case
from common.conformance.outcomes import CRASHES, DIFFERS, REFUSES, TIMEOUT, Outcome

WRONG, FATAL, REFUSAL = "Wrong without an error", "Ends or hangs the process", "Refuses what one could expect to work"
KINDS = (WRONG, FATAL, REFUSAL)


@dataclass(frozen=True)
class Finding:
    """kind: one of KINDS; who: implementations by what they said; shown: code by the name of its implementation, one
    for each package that has some, those first that are easy to get."""

    kind: str
    case: Case
    sentence: str
    who: Dict[str, List[str]]
    shown: Mapping[str, str] = field(default_factory=dict)


def called(entry: Mapping[str, Any]) -> str:
    """The name of an implementation; a simulated one says so."""
    return entry["name"] + (obtaining.SIMULATED if entry.get("simulator") else "")


def outcomes_of(document: Mapping[str, Any], case: str) -> List[Tuple[str, Outcome]]:
    """(implementation, outcome) of those that were judged by the case."""
    return [
        (called(entry), Outcome.from_json(entry["cells"][case]))
        for entry in document["implementations"]
        if case in entry["cells"]
    ]


def findings(document: Mapping[str, Any]) -> List[Finding]:
    found = []
    for kind, results in ((WRONG, (DIFFERS,)), (FATAL, (CRASHES, TIMEOUT)), (REFUSAL, (REFUSES,))):
        for name in (entry["name"] for entry in document["cases"]):
            case = BY_NAME.get(name)
            if case is None or (kind == REFUSAL and not case.refusal):
                continue
            hits = [(who, outcome) for who, outcome in outcomes_of(document, name) if outcome.result in results]
            if hits:
                found.append(_finding(kind, case, hits))
    return found


def _finding(kind: str, case: Case, hits: List[Tuple[str, Outcome]]) -> Finding:
    who: Dict[str, List[str]] = {}
    for name, outcome in hits:
        who.setdefault(outcome.message, []).append(name)
    sentence = {WRONG: case.wrong, FATAL: f"asked for: {case.asks}", REFUSAL: case.refusal}[kind]
    packages: Dict[str, Tuple[str, str]] = {}
    for name, outcome in sorted(hits, key=lambda hit: obtaining.effort(hit[0])):
        if outcome.reproduction:
            implementation = obtaining.implementation_of(name)
            packages.setdefault(implementation.package if implementation else name, (name, outcome.reproduction))
    return Finding(kind, case, sentence, who, dict(packages.values()))
