"""The rows of --find-largest -> text: tables of their own, by kind and throughput."""

from __future__ import annotations

from typing import Sequence

from common.analysis.groups import groups, heading
from common.analysis.metrics import largest
from common.analysis.row import Row, search_of
from common.core.text import plain
from common.present.text import block
from common.tables import remarks
from common.tables.results import table


def render(rows: Sequence[Row], format: str) -> str:
    """The rows as text of the "table" or "markdown" format, that ends with a newline."""
    blocks = [block(table("search", heading(group), group), format) for group in groups(rows)]
    return "\n\n".join([*blocks, *remarks.remarks(rows, format)]) + "\n"


def said(row: Row) -> str:
    """The largest size in words: "24 utterances", "12000 frames"."""
    unit = "frames" if search_of(row).of == "max-frames" else "utterances"
    return plain(f"{largest(row)} {unit}")
