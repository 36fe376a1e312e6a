"""Show rows of --find-largest as text: tables of their own, by kind and throughput."""

from __future__ import annotations

from typing import Sequence

from common.analysis.groups import groups, heading
from common.analysis.row import Row
from common.present.text import block
from common.tables import remarks
from common.tables.results import table


def render(rows: Sequence[Row], format: str) -> str:
    """Return the rows as text in the "table" or "markdown" format, ending with a newline."""
    blocks = [block(table("search", heading(group), group), format) for group in groups(rows)]
    return "\n\n".join([*blocks, *remarks.remarks(rows, format)]) + "\n"
