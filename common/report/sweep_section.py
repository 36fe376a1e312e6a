"""A sweep on the page: what did not run, all cells in one table, a plot for each swept setting."""

from __future__ import annotations

from pathlib import Path
from typing import Dict, List, Sequence

from common import grid
from common.report import facts, sweep_curves
from common.report.collect import Entry, entry_of, short
from common.report.look import Figure
from common.report.markup import Cell, Column, Table, href, table, text
from common.report.plots import plot
from common.results import records, sweep_tables, sweeps
from common.results.exports import plain
from common.results.sweeps import Sweep


def entries_of(sweep: Sweep) -> List[Entry]:
    """One for each of its runs."""
    name = sweep.path.name
    return [entry_of(run.row, short(plain(run.row["name"]) or "(no name)"), run.records, name) for run in sweep.runs]


def section(sweep: Sweep, place: int, figures: Dict[str, Figure], base: Path) -> str:
    """One section of the page; its plots are added to `figures`."""
    entries = entries_of(sweep)
    drawn = "".join(plot(figure, f"sweep-{place}", figures, base) for figure in sweep_curves.figures(sweep, entries))
    heading = sweep_tables.heading(sweep) if entries else sweep.name
    return (
        f'<section class="group" id="sweep-{place}" aria-labelledby="sweep-title-{place}">\n'
        f'<h2 id="sweep-title-{place}">{text(title(sweep))}</h2>\n'
        f'<p class="configuration">{text(heading)}</p>\n'
        + _failures(sweep, base)
        + drawn
        + (f"<h3>All cells</h3>\n{table(results(sweep, entries), base)}" if entries else "")
        + _measured(sweep, entries, base)
        + _notes(sweep)
        + "</section>\n"
    )


def title(sweep: Sweep) -> str:
    keys = " and ".join(grid.flag(key) for key in sweep.grid)
    return f"Sweep over {keys}" if keys else "A sweep that cannot be read"


def _failures(sweep: Sweep, base: Path) -> str:
    lines = sweep_tables.failures(sweep)
    if not lines:
        return ""
    items = "".join(f'<li><a href="{href(sweep.path, base)}">{text(line)}</a></li>' for line in lines)
    return f'<div class="failures"><h3>What did not run</h3><ul>{items}</ul></div>\n'


def results(sweep: Sweep, entries: Sequence[Entry]) -> Table:
    """A row for each cell and implementation: the values of the swept settings, then as in the table of a run."""
    numbers = [(title, number_of) for title, number_of, profiled in facts.NUMBERS if not profiled]
    columns = [Column(grid.flag(key), sweeps.is_numeric(values)) for key, values in sweep.grid.items()]
    columns += [Column("implementation", False), Column("status", False), *(Column(title) for title, _ in numbers)]
    columns += [Column("gap to exact"), Column("reason", False)]
    rows = []
    for run, entry in zip(sweep.runs, entries):
        cells = [Cell(grid.said(value), value if sweeps.is_number(value) else None) for value in run.values.values()]
        status = plain(run.row["status"])
        cells += [Cell(entry.marked, mark="name"), Cell(status, mark="good" if status == "ok" else "bad")]
        for _, number_of in numbers:
            value, words = number_of(entry)
            cells.append(Cell(words, value, entry.results))
        gap, words = sweep_tables.gap_of(run.row)
        cells.append(Cell(words, gap, entry.results))
        rows.append([*cells, Cell(plain(run.row["reason"]) or "-", mark="long")])
    return Table(sweep.name, title(sweep), columns, rows)


def _measured(sweep: Sweep, entries: Sequence[Entry], base: Path) -> str:
    if not entries:
        return ""
    terms = [*facts.machine(entries), ("Results", records.SWEEP_FILE_NAME)]
    listed = "".join(f"<div><dt>{text(term)}</dt><dd>{text(said)}</dd></div>" for term, said in terms)
    first = {entry.label: entry for entry in reversed(entries)}  # of each implementation
    return f'<h3>What was measured where</h3>\n<dl class="facts">{listed}</dl>\n' + table(
        facts.versions([first[label] for label in sorted(first)]), base
    )


def _notes(sweep: Sweep) -> str:
    items = "".join(f"<li>{text(line)}</li>" for line in sweep_tables.notes(sweep))
    return f'<h3>Notes</h3>\n<ul class="notes">{items}</ul>\n' if items else ""
