"""Show a sweep on the page: a table of all cells, the cells that failed, a plot for each swept setting."""

from __future__ import annotations

from typing import List

from common.analysis.sweep import Sweep
from common.core import grid
from common.present.section import Failure, Section
from common.present.table import Link
from common.records import schema
from common.show import facts
from common.show.sweep_plot import figures
from common.tables import remarks
from common.tables import sweep as sweep_table


def section(sweep: Sweep, number: int) -> Section:
    """Return the section of a sweep.  number: its number among such sections."""
    first = {row.label: row for row in reversed(sweep.rows)}  # of each implementation
    keys = " and ".join(grid.flag(key) for key in sweep.grid)
    title = f"Sweep over {keys}" if keys else "A sweep that cannot be read"
    return Section(
        f"sweep-{number}",
        title,
        sweep_table.heading(sweep) if sweep.rows else sweep.name,
        remarks.beside_load(sweep.rows),
        tables=[sweep_table.table("page sweep", title, sweep)] if sweep.rows else [],
        figures=figures(sweep),
        facts=[*facts.machine(sweep.rows), ("Results", schema.SWEEP_FILE_NAME)],
        conditions=[facts.versions([first[label] for label in sorted(first)])] if sweep.rows else [],
        failures=_failures(sweep),
        notes=[("", [line]) for line in sweep_table.notes(sweep)],
    )


def _failures(sweep: Sweep) -> List[Failure]:
    if sweep.reason:
        return [Failure("error", sweep.name, [Link("error", sweep.path), f": {sweep.reason}"])]
    return [
        Failure(status, f"{name}{at}", [Link(status, sweep.path), f": {reason}"])
        for name, at, status, reason in sweep_table.failed(sweep)
    ]
