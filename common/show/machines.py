"""Show machines side by side: configurations that differ only in the machine, in one table.

Times of different machines are not compared.  Within each machine, every time is divided by that of the fastest exact
loss there; these ratios are shown side by side.
"""

from __future__ import annotations

from dataclasses import replace
from typing import List, Optional, Sequence

from common.analysis import groups, metrics
from common.analysis.groups import Machine, rows_by_name, shared_configuration
from common.analysis.row import Row
from common.core.text import number, plain
from common.present.section import Section
from common.present.table import Cell, Column, Table

TITLE = "Machines side by side"
NOTE = (
    "These configurations differ in nothing but the machine. Ratios to the fastest exact loss of the same machine can "
    "be compared from one machine to another; milliseconds cannot."
)


def section(family: Sequence[Machine], number: int) -> Section:
    """Return the section of one configuration on several machines.  number: its number among such sections."""
    heading = groups.heading([replace(row, configuration=shared_configuration(row)) for row in family[0].rows])
    lines = [NOTE, *(f"{machine.title}." for machine in family)]
    notes = [("", [line]) for line in lines]
    return Section(f"machines-{number}", TITLE, heading, tables=[numbers(family)], notes=notes)


def numbers(family: Sequence[Machine]) -> Table:
    """Return a table with a row for each implementation and its numbers on every machine."""
    titles = ("step ms", "over the fastest exact", "% of limit", "peak MB")
    columns = [Column("implementation", False)]
    columns += [Column(f"{title}, {machine.letter}") for title in titles for machine in family]
    rows = []
    for name, first in rows_by_name(family).items():
        cells = [_cells(machine, machine.row(name)) for machine in family]
        rows.append([Cell(first.marked, mark="name"), *(cell for of_title in zip(*cells) for cell in of_title)])
    return Table("machines", TITLE, columns, rows)


def _cells(machine: Machine, row: Optional[Row]) -> List[Cell]:
    """Return the cells of one machine; the first holds the status of a loss that did not run there."""
    if row is None:
        return [Cell("-")] * 4
    ms, percent = row.median_ms("step"), metrics.METRICS["step_limit"].value(row)
    over = machine.over_fastest(row)
    values = [
        (ms, number(ms) if ms or row.status == "ok" else plain(row.status)),
        (over, number(over, 3)),
        (percent, number(percent, 2)),
        (row.peak_mb, number(row.peak_mb, 3)),
    ]
    return [Cell(words, value, row.results) for value, words in values]
