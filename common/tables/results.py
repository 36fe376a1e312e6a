"""Rows of runs -> text: a table of each configuration, and remarks below them.  CSV and JSON: see export.py."""

from __future__ import annotations

from typing import List, Sequence

from common.analysis import metrics
from common.analysis.groups import groups, heading
from common.analysis.metrics import Metric
from common.analysis.row import Row
from common.core.errors import NOT_RUNNABLE
from common.core.text import plain
from common.present.export import csv_text, json_text
from common.present.table import Cell, Column, Table
from common.present.text import block
from common.tables import remarks

FORMATS = ("table", "markdown", "csv", "json")
STATUS_MARKS = {"ok": "good", **dict.fromkeys(NOT_RUNNABLE, "quiet")}


def render(rows: Sequence[Row], format: str = "table") -> str:
    """The rows as text that ends with a newline.  ValueError for a format not in FORMATS."""
    if format not in FORMATS:
        raise ValueError(f"not a format: {format}")
    grouped = [(heading(group), group) for group in groups(rows)]
    if format in ("csv", "json"):
        return (csv_text if format == "csv" else json_text)(list(map(metrics.exported, rows)))
    blocks = [block(table("results", title, group), format) for title, group in grouped]
    return "\n\n".join(blocks + remarks.remarks(rows, format)) + "\n"


def table(of: str, title: str, rows: Sequence[Row], name: str = "results") -> Table:
    """The table `of` metrics.COLUMNS."""
    shown = metrics.columns(of, rows)
    return Table(name, title, columns(shown, of), [cells(row, shown) for row in rows])


def columns(shown: Sequence[Metric], of: str) -> List[Column]:
    on_page = of.startswith("page")
    return [Column((metric.on_page if on_page else "") or metric.title, metric.numeric) for metric in shown]


def cells(row: Row, shown: Sequence[Metric]) -> List[Cell]:
    """Each number with the file it is from."""
    return [_cell(row, metric) for metric in shown]


def _cell(row: Row, metric: Metric) -> Cell:
    words = plain(metric.shown(row))
    if metric.numeric:
        return Cell(words, metric.value(row), row.trace if metric.profiled else row.results)
    status = "bad" if words == "busy" else STATUS_MARKS.get(row.status, "bad")
    marks = {"label": "name", "status": status, "reason": "long"}
    return Cell(words, mark=marks.get(metric.key, ""))
