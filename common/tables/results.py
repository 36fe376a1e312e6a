"""Show rows as text: a table for each configuration, search or sweep, with remarks below.  CSV and JSON: see
present/export.py."""

from __future__ import annotations

from typing import List, Sequence

from common.analysis import metrics
from common.analysis.groups import groups as grouped
from common.analysis.groups import heading
from common.analysis.logs import Log
from common.analysis.metrics import Metric
from common.analysis.row import Row
from common.analysis.sweep import Sweep, is_numeric
from common.core.errors import NOT_RUNNABLE
from common.core.grid import flag
from common.core.setting import worded
from common.core.text import plain
from common.present.export import csv_text, json_text
from common.present.table import Cell, Column, Table, Value
from common.present.text import block
from common.records.schema import Record
from common.tables import remarks

FORMATS = ("table", "markdown", "csv", "json")
STATUS_MARKS = {"ok": "good", **dict.fromkeys(NOT_RUNNABLE, "quiet")}


def render(rows: Sequence[Row], format: str = "table", of: str = "results") -> str:
    """Return the rows as text that ends with a newline.  of: of metrics.COLUMNS.  Raises ValueError for a format not in
    FORMATS."""
    if format not in FORMATS:
        raise ValueError(f"not a format: {format}")
    groups = grouped(rows)  # which ranks them
    if format in ("csv", "json"):
        return (csv_text if format == "csv" else json_text)(list(map(metrics.exported, rows)))
    blocks = [block(table(of, heading(group), group), format) for group in groups]
    return "\n\n".join(blocks + remarks.remarks(rows, format)) + "\n"


def of_log(log: Log, format: str = "table") -> str:
    """Return runs, searches and sweeps as text in the "table" or "markdown" format, ending with a newline."""
    parts = [render(rows, format, of) for of, rows in (("results", log.rows), ("search", log.searches)) if rows]
    for sweep in log.sweeps:
        shown = block(sweep_table("sweep", sweep.heading, sweep), format)
        parts.append("\n\n".join([shown, *remarks.remarks(sweep.rows, format)]) + "\n")
    return "\n".join(parts)


def tidy(rows: Sequence[Row]) -> List[Record]:
    """Return the rows with ten columns, the same for every run, then the settings that a sweep varied and the size that
    a search found, where there are any.

    Times in ms: medians, and the 95% interval of the step's; the peak of a step in MB (2**20 bytes).
    """
    return [_tidy(row) for row in rows]


def _tidy(row: Row) -> Record:
    low, high = row.step.interval or (None, None)
    columns: Record = {"name": row.name, "kind": row.kind, "status": row.status, "device": row.device}
    columns["vocab_size"] = row.configuration.get("vocab_size")
    columns.update(step_ms=row.median_ms("step"), step_ms_low=low, step_ms_high=high, loss_ms=row.median_ms("loss"))
    columns["peak_mb"] = row.peak_mb
    return {**columns, **row.header.values, **({"largest": row.largest.size} if row.largest else {})}


def table(of: str, title: str, rows: Sequence[Row], name: str = "results") -> Table:
    """Return the table `of` metrics.COLUMNS."""
    shown = metrics.columns(of, rows)
    return Table(name, title, columns(shown, of), [cells(row, shown) for row in rows])


def sweep_table(of: str, title: str, sweep: Sweep) -> Table:
    """Return the table `of` metrics.COLUMNS of all cells of a sweep, with the swept settings in front."""
    plain_table = table(of, title, sweep.rows, sweep.name)
    lead = [Column(flag(key), is_numeric(values)) for key, values in sweep.grid.items()]
    swept = [[Cell(worded(value), value) for value in row.header.values.values()] for row in sweep.rows]
    body = [[*first, *rest] for first, rest in zip(swept, plain_table.rows)]
    return plain_table._replace(columns=[*lead, *plain_table.columns], rows=body)


def columns(shown: Sequence[Metric], of: str) -> List[Column]:
    on_page = of.startswith("page")
    return [Column((metric.on_page if on_page else "") or metric.title, metric.numeric) for metric in shown]


def cells(row: Row, shown: Sequence[Metric]) -> List[Cell]:
    """Return the cells of a row, each number with the file that it is from."""
    return [_cell(row, metric) for metric in shown]


def _cell(row: Row, metric: Metric) -> Cell:
    words = plain(metric.shown(row))
    if metric.numeric:
        value: Value = metric.value(row)
        if value is None and words != "-":  # an interval, say: its words in the CSV too
            value = words
        return Cell(words, value, row.trace if metric.profiled else row.results)
    status = "bad" if words == "busy" else STATUS_MARKS.get(row.status, "bad")
    marks = {"label": "name", "status": status, "reason": "long"}
    return Cell(words, mark=marks.get(metric.key, ""))
