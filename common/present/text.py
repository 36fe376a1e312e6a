"""Write tables and lines for the terminal and as Markdown, and rows as CSV and JSON.

Names and messages come from files that anyone may have written, so they are shown without markup
and without commands to a terminal."""

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
    """Return a table below its title.  format: "markdown", or "table" for the terminal."""
    if format == "markdown":
        return f"**{escaped(table.title)}**\n\n{markdown(table)}"
    return f"{plain(table.title)}\n{aligned(table)}"


def listed(lines: Sequence[str], format: str) -> str:
    """Return sentences as a list, a line each.  format: "markdown", or "table" for the terminal."""
    return "\n".join(
        f"- {escaped(line)}" if format == "markdown" else plain(line) for line in lines
    )


def spaced(blocks: Iterable[Sequence[str]]) -> str:
    """Join blocks of lines with an empty line between them, and a newline at the end.

    Blocks without lines are left out."""
    return "\n\n".join("\n".join(lines) for lines in blocks if lines) + "\n"


def aligned(
    table: Table, longest: int = LONGEST_CELL, colors: Mapping[str, str] | None = None
) -> str:
    """Return a table for the terminal, in aligned columns.

    A title that is wider than the cells below it is broken over several lines.

    longest: a cell with more characters is cut; colors: mark of a cell -> ANSI code."""
    rows = []
    for row in table.rows:
        rows.append([cell._replace(shown=short(plain(cell.shown), longest)) for cell in row])
    widths = []
    for index, column in enumerate(table.columns):
        texts = [*column.title.split(), *(row[index].shown for row in rows)]
        widths.append(max(map(len, texts)))

    def line(cells: Iterable[Cell]) -> str:
        """Return a line of the table, with each cell as wide as its column."""
        texts = []
        for cell, column, width in zip(cells, table.columns, widths):
            text = cell.shown.rjust(width) if column.numeric else cell.shown.ljust(width)
            texts.append(painted(text, cell.mark, colors or {}))
        return "  ".join(texts).rstrip()

    lines = [line(map(Cell, texts)) for texts in _head(table.columns, widths)]
    heading = ""
    for row, group in zip(rows, table.groups or [""] * len(rows)):
        if group != heading:
            lines.append(f"{group}:")
            heading = group
        lines.append(line(row))
    return "\n".join(lines)


def _head(columns: Sequence[Column], widths: Sequence[int]) -> list[tuple[str, ...]]:
    """Return the lines of a table's head, of which the last is of dashes.  A line is a tuple with a
    text for each column.

    A title of fewer lines than others begins lower, so that all titles end just above the dashes.

    widths: of the columns, in characters."""
    titles = []
    for column, width in zip(columns, widths):
        titles.append(wrap(column.title, width, break_on_hyphens=False))
    height = max(map(len, titles))
    padded = [[""] * (height - len(title)) + title for title in titles]
    return [*zip(*padded), tuple("-" * width for width in widths)]


def painted(text: str, mark: str, colors: Mapping[str, str]) -> str:
    """Return a text in the colour of its mark, if that has one.  colors: mark -> ANSI code."""
    return f"\x1b[{colors[mark]}m{text}\x1b[0m" if mark in colors else text


def markdown(table: Table) -> str:
    """Return a table in Markdown, without its title and groups; cells of BOLD marks are bold."""
    columns = [column._replace(title=escaped(column.title)) for column in table.columns]
    rows = []
    for row in table.rows:
        cells = [escaped(cell.shown) for cell in row]
        rows.append(
            [f"**{text}**" if cell.mark in BOLD else text for text, cell in zip(cells, row)]
        )
    return markdown_of(columns, rows)


def markdown_of(columns: Sequence[Column | str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of cells that are Markdown already.

    columns: a str is the title of a column of text."""
    titles, rules = [], []
    for column in columns:
        if isinstance(column, str):
            column = Column(column, numeric=False)
        titles.append(column.title)
        rule = "---:" if column.numeric else "---"
        rules.append(":-:" if column.centered else rule)
    return "\n".join(f"| {' | '.join(row)} |" for row in (titles, rules, *rows))


#: A number in CSV, such as "-1.5e-07".
NUMBER = re.compile(r"[-+]?[\d.]+(e[-+]?\d+)?")


def json_text(rows: Sequence[Values]) -> str:
    """Return rows as a JSON list of objects.

    It is ASCII, so control characters are escaped; infinity and NaN are null."""
    return json.dumps(finite(list(rows)), indent=2, allow_nan=False) + "\n"


def csv_text(rows: Sequence[Values]) -> str:
    """Return rows as CSV, with a column for each key that one of them has.

    A list is one cell, with "; " between its items; None is an empty cell."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(_cell(name) for name in names)
    writer.writerows([_cell(row.get(name)) for name in names] for row in rows)
    return stream.getvalue()


def _cell(value: Any) -> Any:
    """Return a cell of CSV: a number as it is, else text.

    A text that a spreadsheet would run as a formula, such as "=1+1", gets a "'" before it."""
    if value is None or isinstance(value, (bool, int, float)):
        return value
    text = plain("; ".join(map(str, value)) if isinstance(value, list) else value)
    return f"'{text}" if text[:1] in ("=", "+", "-", "@") and not NUMBER.fullmatch(text) else text


def finite(value: Any, digits: int = 17) -> Any:
    """Return a value of JSON with None for infinity and NaN, which JSON lacks.

    digits: significant digits to which floats are rounded; 17 keeps all."""
    if isinstance(value, dict):
        return {key: finite(item, digits) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item, digits) for item in value]
    if isinstance(value, float):
        return float(f"{value:.{digits}g}") if math.isfinite(value) else None
    return value


def stopped_later(folders: Sequence[str]) -> str:
    """Return a line about later runs, in these folders, that measured nothing; "" for none."""
    if not folders:
        return ""
    shown = "that is not shown" if len(folders) == 1 else "that are not shown"
    return f"{count(len(folders), 'later run')} {shown}, stopped before measuring anything: {', '.join(folders)}"
