"""Write a table, and the lines below it, for the terminal and as Markdown; rows as CSV and JSON.
Names and reasons come from files anyone may have written: they are shown as plain text."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from textwrap import wrap
from typing import Any

from rnnt_bench.core.text import LONGEST_CELL, count, escaped, plain, short
from rnnt_bench.present.parts import Cell, Column, Table, Values

#: Marks of cells that Markdown shows in bold.
BOLD = ("wrong", "dead")


def block(table: Table, format: str) -> str:
    if format == "markdown":
        return f"**{escaped(table.title)}**\n\n{markdown(table)}"
    return f"{plain(table.title)}\n{aligned(table)}"


def listed(lines: Sequence[str], format: str) -> str:
    return "\n".join(
        f"- {escaped(line)}" if format == "markdown" else plain(line) for line in lines
    )


def spaced(blocks: Iterable[Sequence[str]]) -> str:
    """Join the blocks that are not empty with an empty line between them; the last line ends with a
    newline."""
    return "\n\n".join("\n".join(lines) for lines in blocks if lines) + "\n"


def aligned(
    table: Table, longest: int = LONGEST_CELL, colors: Mapping[str, str] | None = None
) -> str:
    """Return the table in columns of equal width; a long heading is broken over several lines.
    colors: mark -> ANSI code."""
    body = [
        [cell._replace(shown=short(plain(cell.shown), longest)) for cell in row]
        for row in table.rows
    ]
    cells = list(zip(*body)) or [()] * len(table.columns)
    widths, titles = [], []
    for column, below in zip(table.columns, cells):
        width = max(map(len, [*column.title.split(), *(cell.shown for cell in below)]))
        widths.append(width)
        titles.append(wrap(column.title, width, break_on_hyphens=False))
    height = max(map(len, titles))
    heads = zip(*([""] * (height - len(lines)) + lines for lines in titles))
    rows = [
        [Cell(words) for words in line] for line in (*heads, ["-" * width for width in widths])
    ] + body
    lines = [
        "  ".join(
            painted(
                cell.shown.rjust(width) if column.numeric else cell.shown.ljust(width),
                cell.mark,
                colors or {},
            )
            for cell, column, width in zip(row, table.columns, widths)
        ).rstrip()
        for row in rows
    ]
    groups = ["", *table.groups]
    head = len(rows) - len(body)
    for index in reversed(range(len(table.groups))):
        if groups[index + 1] != groups[index]:
            lines.insert(head + index, f"{groups[index + 1]}:")
    return "\n".join(lines)


def painted(words: str, mark: str, colors: Mapping[str, str]) -> str:
    return f"\x1b[{colors[mark]}m{words}\x1b[0m" if mark in colors else words


def markdown(table: Table) -> str:
    cells = [
        [f"**{escaped(cell.shown)}**" if cell.mark in BOLD else escaped(cell.shown) for cell in row]
        for row in table.rows
    ]
    return markdown_of(
        [column._replace(title=escaped(column.title)) for column in table.columns], cells
    )


def markdown_of(columns: Sequence[Column | str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table.  columns: a plain title is a column of text; rows: cells in
    Markdown."""
    titles, rules = [], []
    for column in columns:
        if isinstance(column, str):
            column = Column(column, numeric=False)
        titles.append(column.title)
        rule = "---:" if column.numeric else "---"
        rules.append(":-:" if column.centered else rule)
    return "\n".join(f"| {' | '.join(row)} |" for row in (titles, rules, *rows))


# Rows.

NUMBER = re.compile(r"[-+]?[\d.]+(e[-+]?\d+)?")


def json_text(rows: Sequence[Values]) -> str:
    """Return the rows as a JSON list of objects, in ASCII, so that no control character gets
    through."""
    return json.dumps(finite(list(rows)), indent=2, allow_nan=False) + "\n"


def csv_text(rows: Sequence[Values]) -> str:
    """Return a line for each row of plain values; a list becomes one cell."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(_cell(name) for name in names)
    writer.writerows([_cell(row.get(name)) for name in names] for row in rows)
    return stream.getvalue()


def _cell(value: Any) -> Any:
    """Return a cell as text; text that a spreadsheet would take for a formula is marked."""
    if value is None or isinstance(value, (bool, int, float)):
        return value
    text = plain("; ".join(map(str, value)) if isinstance(value, list) else value)
    return f"'{text}" if text[:1] in ("=", "+", "-", "@") and not NUMBER.fullmatch(text) else text


def finite(value: Any, digits: int = 17) -> Any:
    """Replace infinity and NaN, which JSON lacks, by None; round numbers to so many significant
    digits."""
    if isinstance(value, dict):
        return {key: finite(item, digits) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item, digits) for item in value]
    if isinstance(value, float):
        return float(f"{value:.{digits}g}") if math.isfinite(value) else None
    return value


def stopped_later(folders: Sequence[str]) -> str:
    """Return a line on runs in these folders, which measured nothing, "" for none."""
    if not folders:
        return ""
    shown = "that is not shown" if len(folders) == 1 else "that are not shown"
    return f"{count(len(folders), 'later run')} {shown}, stopped before measuring anything: {', '.join(folders)}"
