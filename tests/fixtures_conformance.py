"""A made conformance matrix for tests: one row with given outcomes, and one that was not judged."""

from __future__ import annotations

from common.conformance import findings as conformance
from common.conformance.cases import CASES
from common.conformance.documents import Matrix, MatrixRow
from common.conformance.records import Judged, Loaded, Outcome
from common.records.schema import Machine


def made(**cells: Outcome) -> Matrix:
    """Return the document of the row "a" with these outcomes."""
    rows = [
        Judged("a", "exact", loaded=Loaded("1", "2", "3"), cells=cells),
        Judged("gone", "exact", "missing", "gone is not installed: pip install <gone>"),
    ]
    return conformance.document(
        list(map(MatrixRow.from_judged, rows)),
        [case for case in CASES if case.name in cells],
        device="cpu",
        machine=Machine(cpu="x", cores=2),
        suite=("abc", False),
        command=["c"],
    )
