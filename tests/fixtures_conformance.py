"""A made conformance matrix for tests: one row with given outcomes, and one that was not judged; and a run of it."""

from __future__ import annotations

from pathlib import Path

from fixtures_model_runs import write_tool

from common.conformance import show
from common.conformance.cases import CASES, Outcome, Row

GONE = "gone is not installed: pip install <gone>"


def made(name: str = "a", **cells: Outcome) -> show.Matrix:
    """Return the matrix of the row `name` with these outcomes."""
    rows = [Row(name, "exact", version="1", torch="2", python="3", cells=cells), Row("gone", "exact", "missing", GONE)]
    return show.Matrix("cpu: x; 2020-01-01; suite abc", rows, [case for case in CASES if case.name in cells])


def write_check(log: Path, name: str = "a", day: int = 1, **cells: Outcome) -> Path:
    """Write a run of `check` in a log, whose matrix `made` returns, of that day of 2099; return its file."""
    matrix = made(name, **cells)
    config = show.Config(cases=[case.name for case in matrix.cases], device="cpu", missing={"gone": GONE})
    started = f"2099-01-{day:02d}T00:00:00+00:00"
    return write_tool(log, show.TOOL, f"day-{day}", config, {name: matrix.rows[0]}, started)
