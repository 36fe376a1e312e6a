"""Sweeps -> text: a table each, sorted by cell, the swept settings in front.  CSV and JSON: see exports.py."""

from __future__ import annotations

import math
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

from common import grid
from common.results import sweeps, tables, wording
from common.results.exports import plain
from common.results.summary import Row
from common.results.sweeps import Sweep
from common.results.tables import Column
from common.results.wording import number

#: Of the ordinary table, what says nothing of how things scale.
LEFT_OUT = ("version", "torch", "profiled step us", "profiled peak MB")
MOST_CELLS = 3  # that a failure names one by one


def render(found: Sequence[Sweep], format: str) -> str:
    """The sweeps as text of the "table" or "markdown" format, that ends with a newline."""
    blocks: List[str] = []
    for sweep in found:
        if sweep.rows:
            blocks.append(tables.block(heading(sweep), sweep.rows, format, columns(sweep)))
        lines = [plain(line) for line in (*failures(sweep), *exponents(sweep), *notes(sweep))]
        if lines:
            marked = [f"- {wording.escaped(line)}" for line in lines] if format == "markdown" else lines
            blocks.append("\n".join(marked))
    return "\n\n".join(blocks) + "\n"


def columns(sweep: Sweep) -> List[Column]:
    found = [Column(grid.flag(key), _value_of(key), sweeps.is_numeric(sweep.grid[key])) for key in sweep.grid]
    found += [column for column in tables.COLUMNS if column.title not in LEFT_OUT]
    if len({row["useful_fraction"] for row in sweep.rows} - {None}) > 1:  # else it is in the heading
        found.append(Column("useful %", lambda row: _percent(row["useful_fraction"])))
    if any(row["approximation_gap"] is not None for row in sweep.rows):
        found.append(Column("gap to exact", lambda row: gap_of(row)[1]))
    return found


def _value_of(key: str) -> Callable[[Row], str]:
    return lambda row: grid.said(row["sweep"][key])


def _percent(fraction: Optional[float]) -> str:
    return "-" if fraction is None else number(100 * fraction, 3)


def gap_of(row: Row) -> Tuple[Optional[float], str]:
    """How far off a pruned loss is, and the same in words; what is not finite is stored as 1e300."""
    gap = row["approximation_gap"]
    return (None, "-") if gap is None else (abs(gap), "inf" if abs(gap) >= 1e300 else f"{abs(gap):.1e}")


def heading(sweep: Sweep) -> str:
    """One line: the grid, and what all cells have in common."""
    axes = " x ".join(f"{grid.flag(key)} {', '.join(map(grid.said, values))}" for key, values in sweep.grid.items())
    varied = dict.fromkeys(sweep.grid)
    shown = [{**row, "configuration": {**row["configuration"], **varied}} for row in sweep.rows]
    return plain(f"{sweep.name}: {axes}; {tables.heading(shown)}")


def failures(sweep: Sweep) -> List[str]:
    """Each reason once, with the cells that it is of."""
    if sweep.reason:
        return [f"{sweep.name}: {sweep.reason}"]
    cells: Dict[Tuple[str, str, str], List[Dict[str, Any]]] = {}
    for run in sweep.runs:
        if run.row["reason"]:
            cells.setdefault((run.row["name"], run.row["status"], run.row["reason"]), []).append(run.values)
    return [f"{name}{where(sweep, values)}: {status}: {reason}" for (name, status, reason), values in cells.items()]


def where(sweep: Sweep, cells: Sequence[Dict[str, Any]]) -> str:
    """The cells in words, as few as tell them: " at dtype float16"; nothing for all cells."""
    among = {
        key: [value for value in every if any(cell[key] == value for cell in cells)]
        for key, every in sweep.grid.items()
    }
    if len(cells) == math.prod(map(len, among.values())):
        named = [
            f"{grid.flag(key)} {', '.join(map(grid.said, values))}"
            for key, values in among.items()
            if len(values) < len(sweep.grid[key])
        ]
        return f" at {' and '.join(named)}" if named else ""
    return f" at {'; '.join(map(grid.words, cells))}" if len(cells) <= MOST_CELLS else f" at {len(cells)} cells"


def exponents(sweep: Sweep, of_key: Optional[str] = None) -> List[str]:
    """How time grows with each numeric setting, or `of_key`, one line for each scope."""
    by_scope: Dict[Tuple[str, str], List[sweeps.Exponent]] = {}
    for one in sweeps.exponents(sweep):
        if of_key in (None, one.key):
            by_scope.setdefault((one.key, one.scope), []).append(one)
    lines = []
    for (key, scope), found in by_scope.items():
        others = {other: values[0] for other, values in sweep.grid.items() if other != key}
        where = f" (at {grid.words(others)})" if others else ""
        slopes = ", ".join(f"{one.name} {one.slope:.2f}{_where_less(one, sweep)}" for one in found)
        lines.append(f"{scope} time grows as {grid.flag(key)} to the power of{where}: {slopes}")
    return lines


def _where_less(one: sweeps.Exponent, sweep: Sweep) -> str:
    """The range of an exponent that is not of all values."""
    whole = one.points == len(sweep.grid[one.key])
    return "" if whole else f" ({number(one.low)} to {number(one.high)})"


def notes(sweep: Sweep) -> List[str]:
    """What a reader of the numbers must know."""
    lines = []
    for name in dict.fromkeys(row["name"] for row in sweep.rows):
        mine = [row for row in sweep.rows if row["name"] == name]
        flagged = sum(row["flagged_samples"] for row in mine)
        if flagged:
            lines.append(f"{name}: {flagged} of {sum(row['samples'] for row in mine)} samples ran beside other load")
    if any(row["approximation_gap"] is not None for row in sweep.rows):
        lines.append(
            "gap to exact: relative difference of a pruned loss to the exact one as timed; its errors are those with "
            "the range widened to all of U"
        )
    if sweep.absent and sweep.grid:
        missing = f"{sweep.absent} of {sweep.absent + len(sweep.runs)} rows are not measured yet"
        lines.append(f"{sweep.name}: {missing}; the same command with --resume goes on")
    if sweep.earlier:
        many = "1 earlier sweep" if sweep.earlier == 1 else f"{sweep.earlier} earlier sweeps"
        lines.append(f"{sweep.name}: {many} of the same grid and settings not shown (--all-runs shows them)")
    return lines
