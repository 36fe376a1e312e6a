"""A made conformance matrix for tests: one row with given outcomes, and one that was not judged."""

from __future__ import annotations

from typing import Any, Dict

from common.conformance import findings as conformance
from common.conformance.cases import CASES
from common.conformance.records import Judged, Outcome


def made(**cells: Outcome) -> Dict[str, Any]:
    """The document of the row "a" with these outcomes."""
    rows = [Judged("a", "exact", about={"version": "1", "torch": "2", "python": "3"}, cells=cells)]
    rows.append(Judged("gone", "exact", "missing", "gone is not installed: pip install <gone>"))
    cases = [case for case in CASES if case.name in cells]
    return conformance.document(
        rows, cases, device="cpu", machine={"cpu": "x", "cores": 2}, suite=("abc", False), command=["c"]
    )
