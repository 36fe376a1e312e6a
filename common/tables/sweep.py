"""Sweeps -> text: a table each, sorted by cell, the swept settings in front.  CSV and JSON: see exports.py."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Dict, List, Sequence

from common.analysis import groups, metrics
from common.analysis.sweep import Sweep, growth, is_number, is_numeric
from common.core import grid
from common.core.table import Cell, Column, Table
from common.core.text import count, gathered, plain
from common.tables import results
from common.tables.text import block, listed

GAP = (
    "gap to exact: relative difference of a pruned loss to the exact one as timed; its errors are those with the range "
    "widened to all of U"
)
MOST_CELLS = 3  # that a failure names one by one


def render(found: Sequence[Sweep], format: str) -> str:
    """The sweeps as text of the "table" or "markdown" format, that ends with a newline."""
    blocks: List[str] = []
    for sweep in found:
        if sweep.rows:
            blocks.append(block(table("sweep", heading(sweep), sweep), format))
        lines = [*failures(sweep), *growth(sweep), *notes(sweep)]
        if lines:
            blocks.append(listed(lines, format))
    return "\n\n".join(blocks) + "\n"


def table(of: str, title: str, sweep: Sweep) -> Table:
    """The table `of` metrics.COLUMNS, behind the values of the swept settings."""
    shown = [metric for metric in metrics.columns(of, sweep.rows) if _is_told(metric, of, sweep)]
    lead = [Column(grid.flag(key), is_numeric(values)) for key, values in sweep.grid.items()]
    cells = []
    for run in sweep.runs:
        swept = [Cell(grid.said(value), value if is_number(value) else None) for value in run.values.values()]
        cells.append([*swept, *results.cells(run.row, shown)])
    return Table(sweep.name, title, [*lead, *results.columns(shown, of)], cells)


def _is_told(metric: metrics.Metric, of: str, sweep: Sweep) -> bool:
    """In the terminal: where rows differ in it."""
    if of == "sweep" and metric.key == "useful":  # one value is in the heading
        return len({row.useful_fraction for row in sweep.rows} - {None}) > 1
    return of != "sweep" or metric.key != "gap" or any(row.approximation_gap is not None for row in sweep.rows)


def heading(sweep: Sweep) -> str:
    """One line: the grid, and what all cells have in common."""
    axes = " x ".join(f"{grid.flag(key)} {', '.join(map(grid.said, values))}" for key, values in sweep.grid.items())
    varied = dict.fromkeys(sweep.grid)
    shown = [replace(row, configuration={**row.configuration, **varied}) for row in sweep.rows]
    return plain(f"{sweep.name}: {axes}; {groups.heading(shown)}")


def failures(sweep: Sweep) -> List[str]:
    """Each reason once, with the cells that it is of."""
    if sweep.reason:
        return [f"{sweep.name}: {sweep.reason}"]
    failed = [run for run in sweep.runs if run.row.reason]
    cells = gathered(((run.row.name, run.row.status, run.row.reason), run.values) for run in failed)
    return [f"{name}{where(sweep, values)}: {status}: {reason}" for (name, status, reason), values in cells.items()]


def where(sweep: Sweep, cells: Sequence[Dict[str, Any]]) -> str:
    """The cells in words, as few as tell them: " at dtype float16"; nothing for all cells."""
    among = {
        key: [value for value in every if any(cell[key] == value for cell in cells)]
        for key, every in sweep.grid.items()
    }
    if len(cells) == math.prod(map(len, among.values())):
        some = {key: values for key, values in among.items() if len(values) < len(sweep.grid[key])}
        named = [f"{grid.flag(key)} {', '.join(map(grid.said, values))}" for key, values in some.items()]
        return f" at {' and '.join(named)}" if named else ""
    return f" at {'; '.join(map(grid.words, cells))}" if len(cells) <= MOST_CELLS else f" at {len(cells)} cells"


def notes(sweep: Sweep) -> List[str]:
    """What a reader of the numbers must know."""
    lines = []
    for name in dict.fromkeys(row.name for row in sweep.rows):
        mine = [row for row in sweep.rows if row.name == name]
        flagged = sum(row.flagged_samples for row in mine)
        if flagged:
            lines.append(f"{name}: {flagged} of {sum(row.samples for row in mine)} samples ran beside other load")
    if any(row.approximation_gap is not None for row in sweep.rows):
        lines.append(GAP)
    if sweep.absent and sweep.grid:
        missing = f"{sweep.absent} of {sweep.absent + len(sweep.runs)} rows are not measured yet"
        lines.append(f"{sweep.name}: {missing}; the same command with --resume goes on")
    if sweep.earlier:
        many = count(sweep.earlier, "earlier sweep")
        lines.append(f"{sweep.name}: {many} of the same grid and settings not shown (--all-runs shows them)")
    return lines
