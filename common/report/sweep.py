"""A sweep on the page: what did not run, all cells in one table, a plot for each swept setting."""

from __future__ import annotations

from common.analysis.sweep import Sweep
from common.core import grid
from common.core.table import Link
from common.plots.sweep import figures
from common.records import schema
from common.report import facts
from common.report.section import Section
from common.tables import sweep as sweep_table


def section(sweep: Sweep, place: int) -> Section:
    first = {row.label: row for row in reversed(sweep.rows)}  # of each implementation
    return Section(
        kind="sweep",
        id=f"sweep-{place}",
        title=title(sweep),
        link=title(sweep),
        place=f"sweep-{place}",
        heading=sweep_table.heading(sweep) if sweep.rows else sweep.name,
        failures=[("", [Link(line, sweep.path)]) for line in sweep_table.failures(sweep)],
        table=sweep_table.table("page sweep", title(sweep), sweep) if sweep.rows else None,
        figures=figures(sweep),
        facts=[*facts.machine(sweep.rows), ("Results", schema.SWEEP_FILE_NAME)],
        versions=facts.versions([first[label] for label in sorted(first)]) if sweep.rows else None,
        notes=[("", [line]) for line in sweep_table.notes(sweep)],
    )


def title(sweep: Sweep) -> str:
    keys = " and ".join(grid.flag(key) for key in sweep.grid)
    return f"Sweep over {keys}" if keys else "A sweep that cannot be read"
