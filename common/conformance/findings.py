"""What a user must know, in plain words, from the cells of a matrix: wrong answers without an error first, then
crashes, then errors where an answer could be expected.  No torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Dict, List, Mapping, Tuple

from common.conformance.cases import BY_NAME, Case
from common.conformance.outcomes import CRASHES, DIFFERS, REFUSES, TIMEOUT, Outcome

WRONG, FATAL, REFUSAL = "Wrong without an error", "Ends or hangs the process", "Refuses what one could expect to work"
KINDS = (WRONG, FATAL, REFUSAL)


@dataclass(frozen=True)
class Finding:
    """kind: one of KINDS; who: implementations by what they said; reproduction: code for the first of them that has
    one, `shown` its name."""

    kind: str
    case: Case
    sentence: str
    who: Dict[str, List[str]]
    reproduction: str = ""
    shown: str = ""


def called(entry: Mapping[str, Any]) -> str:
    """The name of an implementation; a simulated one says so."""
    return entry["name"] + (" (simulated)" if entry.get("simulator") else "")


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
    can_be_shown = [(name, outcome) for name, outcome in hits if outcome.reproduction]
    if not can_be_shown:
        return Finding(kind, case, sentence, who)
    name, outcome = max(
        can_be_shown, key=lambda hit: len(who[hit[1].message])
    )  # the first of those that say most alike
    return Finding(kind, case, sentence, who, outcome.reproduction, name)
