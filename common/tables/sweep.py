"""Show sweeps as text: a table each, sorted by cell, the swept settings in front.  CSV and JSON: see
present/export.py."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from common.analysis import groups, metrics, verdict, wording
from common.analysis.row import Row
from common.analysis.sweep import Sweep, growth, is_number, is_numeric
from common.core import grid
from common.core.setting import worded
from common.core.text import count, gathered, plain
from common.present.table import Cell, Column, Table
from common.present.text import aligned, block, listed, spaced
from common.tables import answer, results

GAP = (
    "gap to exact: relative difference of a pruned loss to the exact one as timed; its errors are those with the range "
    "widened to all of U"
)
MOST_CELLS = 3  # that a failure names one by one


def render(sweeps: Sequence[Sweep], format: str) -> str:
    """Return the sweeps as text in the "table" or "markdown" format, ending with a newline."""
    blocks: List[str] = []
    for sweep in sweeps:
        if sweep.rows:
            blocks.append(block(table("sweep", heading(sweep), sweep), format))
        lines = [*failures(sweep), *growth(sweep), *notes(sweep)]
        if lines:
            blocks.append(listed(lines, format))
    return "\n\n".join(blocks) + "\n"


def table(of: str, title: str, sweep: Sweep) -> Table:
    """Return the table `of` metrics.COLUMNS, with the swept settings in front."""
    shown = [metric for metric in metrics.columns(of, sweep.rows) if _is_told(metric, of, sweep)]
    lead = [Column(grid.flag(key), is_numeric(values)) for key, values in sweep.grid.items()]
    cells = []
    for run in sweep.runs:
        swept = [Cell(worded(value), value if is_number(value) else None) for value in run.values.values()]
        cells.append([*swept, *results.cells(run.row, shown)])
    return Table(sweep.name, title, [*lead, *results.columns(shown, of)], cells)


def _is_told(metric: metrics.Metric, of: str, sweep: Sweep) -> bool:
    """Return whether a column says something on the terminal, where its rows differ."""
    if of == "sweep" and metric.key == "useful":  # one value is in the heading
        return len({row.useful_fraction for row in sweep.rows} - {None}) > 1
    return of != "sweep" or metric.key != "gap" or any(row.approximation_gap is not None for row in sweep.rows)


def heading(sweep: Sweep) -> str:
    """Return one line: the grid, and what all cells have in common."""
    axes = " x ".join(f"{grid.flag(key)} {', '.join(map(worded, values))}" for key, values in sweep.grid.items())
    varied = dict.fromkeys(sweep.grid)
    shown = [replace(row, configuration={**row.configuration, **varied}) for row in sweep.rows]
    return plain(f"{sweep.name}: {axes}; {groups.heading(shown)}")


def failures(sweep: Sweep) -> List[str]:
    """Return each reason once, with the cells that failed for it."""
    if sweep.reason:
        return [f"{sweep.name}: {sweep.reason}"]
    return [f"{name}{at}: {status}: {reason}" for name, at, status, reason in failed(sweep)]


def failed(sweep: Sweep) -> List[Tuple[str, str, str, str]]:
    """Return (implementation, cells in words, status, reason) of each reason."""
    runs = [run for run in sweep.runs if run.row.reason]
    cells = gathered(((run.row.name, run.row.status, run.row.reason), run.values) for run in runs)
    return [(name, where(sweep, values), status, reason) for (name, status, reason), values in cells.items()]


def where(sweep: Sweep, cells: Sequence[grid.Values]) -> str:
    """Return the cells in as few words as name them, such as " at dtype float16"; "" for all cells."""
    among = {
        key: [value for value in every if any(cell[key] == value for cell in cells)]
        for key, every in sweep.grid.items()
    }
    if len(cells) == math.prod(map(len, among.values())):
        some = {key: values for key, values in among.items() if len(values) < len(sweep.grid[key])}
        named = [f"{grid.flag(key)} {', '.join(map(worded, values))}" for key, values in some.items()]
        return f" at {' and '.join(named)}" if named else ""
    return f" at {'; '.join(map(grid.words, cells))}" if len(cells) <= MOST_CELLS else f" at {len(cells)} cells"


def notes(sweep: Sweep) -> List[str]:
    """Return lines that a reader of the numbers needs: load, gaps, missing cells, older sweeps."""
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


# On a screen.


def screen(sweeps: Sequence[Sweep], width: int = answer.WIDTH, colors: Mapping[str, str] = answer.NO_COLORS) -> str:
    """Return the sweeps as lines of at most `width` characters, the last with a newline.

    Time and peak of each implementation, with a column for each cell.
    """
    return spaced(block for sweep in sweeps for block in _on_screen(sweep, width, colors))


def _on_screen(sweep: Sweep, width: int, colors: Mapping[str, str]) -> List[List[str]]:
    scope = "step" if any(row.step_ms for row in sweep.rows) else "loss"
    shown = [(f"{scope} ms", f"{scope}_median"), ("peak MB", "peak_mb")]
    known = [each for each in shown if any(metrics.METRICS[each[1]].value(row) is not None for row in sweep.rows)]
    if not known and sweep.rows:
        known = [("grad error", "grad_error")]
    below = [*failures(sweep), *growth(sweep), *notes(sweep)]
    return [
        answer.wrapped(heading(sweep) if sweep.rows else sweep.name, width),
        *(_pivot(sweep, title, metrics.METRICS[key], width, colors) for title, key in known),
        [line for text in below for line in answer.wrapped(text, width, "  ", 3)],
        answer.load(sweep.rows, width, colors),
        answer.verdict_lines(_verdict(sweep), width, colors),
    ]


def _pivot(sweep: Sweep, title: str, metric: metrics.Metric, width: int, colors: Mapping[str, str]) -> List[str]:
    """Return a row for each implementation and a column for each cell, in as many tables as the width needs."""
    every: Dict[str, Dict[int, Row]] = {}
    for run in sorted(sweep.runs, key=lambda run: (groups.kind_rank(run.row), run.cell)):
        every.setdefault(run.row.name, {})[run.cell] = run.row
    names = list(every.items())
    rows = [next(iter(of.values())) for _, of in names]
    heads = {run.cell: _head(run.values) for run in sweep.runs}
    first = Column(f"{title} at {', '.join(map(grid.flag, sweep.grid))}", False)
    lines: List[str] = []
    cells = sorted(heads)
    while cells:
        for some in range(len(cells), 0, -1):  # the most that there is room for
            columns = [first, *(Column(heads[cell]) for cell in cells[:some])]
            body = [[Cell(name), *(_value(of.get(cell), metric) for cell in cells[:some])] for name, of in names]
            shown = Table(sweep.name, "", columns, body)
            if some == 1 or max(map(len, aligned(shown, answer.LONGEST_NAME).splitlines())) <= width:
                break
        lines += answer.titled(aligned(shown, answer.LONGEST_NAME, colors), rows)
        cells = cells[some:]
    return lines


def _head(values: Mapping[str, Any]) -> str:
    return " ".join(map(worded, values.values()))


def _value(row: Optional[Row], metric: metrics.Metric) -> Cell:
    """Return the number, in color for the fastest; the status where the row failed."""
    if row is None or row.status != "ok":
        return Cell("-" if row is None else row.status)
    best = metric.key != "peak_mb" and row.is_fastest
    return Cell(plain(metric.shown(row)), mark="good" if best else "")


def _verdict(sweep: Sweep) -> Dict[str, str]:
    """Return the fastest and the smallest exact loss, each with the cells where it is that."""
    cells = {cell: [run for run in sweep.runs if run.cell == cell] for cell in sorted({run.cell for run in sweep.runs})}
    answers: Dict[str, Dict[str, List[grid.Values]]] = {"fastest exact": {}, "smallest exact": {}}
    for runs in cells.values():
        rows = [run.row for run in runs]
        for question, pick in zip(answers, (verdict.fastest(rows), verdict.smallest(rows))):
            if pick and pick.withheld:
                answers[question].setdefault(wording.WITHHELD, []).append(runs[0].values)
            elif pick:
                winners = (
                    pick.row.name if pick.sure else " or ".join([pick.row.name, *(row.name for row in pick.rivals)])
                )
                answers[question].setdefault(winners, []).append(runs[0].values)
    return {
        question: "; ".join(f"{name}{where(sweep, at) or ' everywhere'}" for name, at in of.items())
        for question, of in answers.items()
        if of
    }
