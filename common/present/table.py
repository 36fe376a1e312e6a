"""Define a table as data: columns, and cells with words, value and source.  present/text, export and html render it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Union

from common.core.text import number

Value = Union[str, int, float, None]
#: A row as CSV and JSON have it: key or title -> value.
Values = Dict[str, Any]


class Link(NamedTuple):
    """Hold words that lead to a file."""

    words: str
    target: Path


Sentence = Sequence[Union[str, Link]]


class Cell(NamedTuple):
    """Hold one cell.

    Attributes:
        shown: the words.
        value: for sorting and CSV; None for `shown`.
        target: the file that it is from.
        mark: a class of page.css, which other renderers may show too.
    """

    shown: str
    value: Value = None
    target: Optional[Path] = None
    mark: str = ""


def measured(value: Union[int, float, None], target: Optional[Path] = None) -> Cell:
    """Return the cell of a number.  target: the file that it is from."""
    return Cell(str(value) if type(value) is int else number(value), value, target)


class Column(NamedTuple):
    """Describe a column.  title: may be broken over several lines; numeric: aligned to the right."""

    title: str
    numeric: bool = True
    centered: bool = False

    def value(self, cell: Cell) -> Value:
        """Return the value of `cell` for sorting and CSV; None for a number that is not known."""
        return cell.shown if cell.value is None and not self.numeric else cell.value


class Table(NamedTuple):
    """Hold a table.  name: of the CSV file, without its ending; title: printed above, or read by a screen reader;
    groups: of each row, the words above the rows that have the same, in text."""

    name: str
    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    groups: Sequence[str] = ()

    def values(self) -> List[Values]:
        """Return each row as {title of the column: value}."""
        return [{column.title: column.value(cell) for cell, column in zip(row, self.columns)} for row in self.rows]


def tabulated(name: str, title: str, rows: Sequence[Dict[str, Cell]]) -> Table:
    """Make a table of rows as {title of the column: cell}; a column with a number in any cell is numeric."""
    numeric = {
        head: any(isinstance(row[head].value, (int, float)) for row in rows) for head in (rows[0] if rows else ())
    }
    return Table(name, title, [Column(*each) for each in numeric.items()], [list(row.values()) for row in rows])


def filled(rows: Sequence[Dict[str, Cell]]) -> List[Dict[str, Cell]]:
    """Drop the columns that are empty in every row."""
    known = {title for row in rows for title, cell in row.items() if cell.shown not in ("-", "")}
    return [{title: cell for title, cell in row.items() if title in known} for row in rows]


def words(parts: Sentence) -> str:
    """Return the sentence without its links."""
    return "".join(part.words if isinstance(part, Link) else part for part in parts)
