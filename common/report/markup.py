"""Text to HTML: escaping, links, and tables that can be sorted and downloaded.

Every text goes through ``text``; names and reasons come from files anyone may have written.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, List, NamedTuple, Optional, Sequence, Union
from urllib.parse import quote

from common.results.exports import csv_text, plain

#: From here on a table is set smaller on paper.
MANY_COLUMNS = 12


class Link(NamedTuple):
    """Words that lead to a file."""

    words: str
    target: Path


Sentence = Sequence[Union[str, Link]]


class Cell(NamedTuple):
    """shown: as people read it; value: what sorting and the CSV take, `shown` where None; target: the file it is
    from; mark: a class of the style sheet."""

    shown: str
    value: Union[str, int, float, None] = None
    target: Optional[Path] = None
    mark: str = ""


class Column(NamedTuple):
    title: str
    numeric: bool = True


@dataclass(frozen=True)
class Table:
    """name: of the CSV file, without its ending; title: what a screen reader announces."""

    name: str
    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]


def text(words: Any) -> str:
    """Text as HTML that shows just it, in content and in quoted attributes."""
    return html.escape(plain(words), quote=True)


def href(target: Path, base: Path) -> str:
    """A relative address of `target` for a page in the folder `base`, as a quoted attribute takes it."""
    relative = os.path.relpath(target.resolve(), base.resolve())
    return quote(os.fsencode(relative), safe="/")


def sentence(parts: Sentence, base: Path) -> str:
    return "".join(
        f'<a href="{href(part.target, base)}">{text(part.words)}</a>' if isinstance(part, Link) else html.escape(part)
        for part in parts
    )


def words(parts: Sentence) -> str:
    """The sentence without its links."""
    return "".join(part.words if isinstance(part, Link) else part for part in parts)


def script_json(value: Any) -> str:
    """JSON that is safe within a script element: no markup can end it; what is not finite becomes null."""
    dumped = json.dumps(_finite(value), allow_nan=False, separators=(",", ":"))
    return dumped.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def script_hash(source: str) -> str:
    """What a content security policy allows this one script by."""
    digest = base64.b64encode(hashlib.sha256(source.encode("utf-8")).digest()).decode()
    return f"'sha256-{digest}'"


def table(content: Table, base: Path) -> str:
    """A table in a box of its own that scrolls, with a button in each heading and the table as a CSV file."""
    head = "".join(
        f'<th scope="col" aria-sort="none"{_numeric(column)}><button type="button">{text(column.title)}'
        '<span class="arrow" aria-hidden="true"></span></button></th>'
        for column in content.columns
    )
    body = "".join(
        "<tr>" + "".join(_cell(cell, column, base) for cell, column in zip(row, content.columns)) + "</tr>\n"
        for row in content.rows
    )
    wide = " wide" if len(content.columns) > MANY_COLUMNS else ""
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{text(content.title)}">'
        f'<table class="sortable{wide}"><caption class="unseen">{text(content.title)}</caption>'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody></table></div>\n{download(content)}"
    )


def download(content: Table) -> str:
    """A link that holds the table as a CSV file."""
    encoded = base64.b64encode(_csv(content).encode("utf-8")).decode()
    return (
        f'<p class="download"><a download="{text(content.name)}.csv" '
        f'href="data:text/csv;charset=utf-8;base64,{encoded}">Download as CSV</a></p>\n'
    )


def _numeric(column: Column) -> str:
    return ' class="number"' if column.numeric else ""


def _cell(cell: Cell, column: Column, base: Path) -> str:
    shown = text(cell.shown)
    if cell.target is not None and cell.value is not None:
        shown = f'<a href="{href(cell.target, base)}">{shown}</a>'
    classes = " ".join(filter(None, ["number" if column.numeric else "", cell.mark]))
    value = "" if cell.value is None and column.numeric else text(_value(cell))
    return f'<td data-value="{value}"{f" class={chr(34)}{classes}{chr(34)}" if classes else ""}>{shown}</td>'


def _value(cell: Cell) -> Union[str, int, float]:
    return cell.shown if cell.value is None else cell.value


def _csv(content: Table) -> str:
    rows: List[dict] = []
    for row in content.rows:
        cells = zip(row, content.columns)
        rows.append(
            {column.title: None if cell.value is None and column.numeric else _value(cell) for cell, column in cells}
        )
    return csv_text(rows) if rows else csv_text([{column.title: None for column in content.columns}])
