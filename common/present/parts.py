"""Define what is shown as data: tables, plots, cards, sections of a page, and what a tool of its
own gives to them. The page, the summary and the verdict know the tools by the names of TOOLS
alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from rnnt_bench.core.errors import NOT_RUNNABLE
from rnnt_bench.core.text import number

Value = str | int | float | None
#: A row as CSV and JSON have it: key or title -> value.
Values = dict[str, Any]
#: A part of a plot as plotly takes it: a trace, a marker, an axis, a layout.
Plotly = dict[str, Any]


class Link(NamedTuple):
    words: str
    target: Path


Sentence = Sequence[str | Link]
#: Names of implementations, "" where the sentence says them, and the sentence.
Line = tuple[str, Sentence]


class Cell(NamedTuple):
    """Hold one cell. value: for sorting and CSV, None for `shown`; target: the file that it is
    from; mark: a class of page.css."""

    shown: str
    value: Value = None
    target: Path | None = None
    mark: str = ""


def measured(value: int | float | None, target: Path | None = None) -> Cell:
    return Cell(str(value) if type(value) is int else number(value), value, target)


class Column(NamedTuple):
    title: str
    numeric: bool = True
    centered: bool = False

    def value(self, cell: Cell) -> Value:
        """Return the value of `cell` for sorting and CSV; None for a number that is not known."""
        return cell.shown if cell.value is None and not self.numeric else cell.value


class Table(NamedTuple):
    """Hold a table. title: printed above, or read by a screen reader; groups: the words above the
    rows that have the same."""

    name: str
    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    groups: Sequence[str] = ()

    def values(self) -> list[Values]:
        return [
            {column.title: column.value(cell) for cell, column in zip(row, self.columns)}
            for row in self.rows
        ]


def tabulated(name: str, title: str, rows: Sequence[dict[str, Cell]]) -> Table:
    """Make a table of rows as {title of the column: cell}; a column with a number in any cell is
    numeric."""
    columns = []
    for head in rows[0] if rows else ():
        columns.append(Column(head, any(isinstance(row[head].value, (int, float)) for row in rows)))
    return Table(name, title, columns, [list(row.values()) for row in rows])


def filled(rows: Sequence[dict[str, Cell]]) -> list[dict[str, Cell]]:
    """Drop the columns that are empty in every row."""
    titles = {title for row in rows for title, cell in row.items() if cell.shown not in ("-", "")}
    return [{title: cell for title, cell in row.items() if title in titles} for row in rows]


def words(parts: Sentence) -> str:
    """Return the sentence without its links."""
    return "".join(part.words if isinstance(part, Link) else part for part in parts)


@dataclass(frozen=True)
class Figure:
    """Hold one plot. summary: its numbers in words, for screen readers; data, layout: for plotly;
    table: the same numbers, None where the page shows them already."""

    key: str
    title: str
    caption: str
    summary: str
    data: list[Plotly]
    layout: Plotly
    table: Table | None = None


@dataclass(frozen=True)
class Card:
    """Answer a question in a name or "unclear", with reasons and code to copy."""

    question: str
    answer: str
    clear: bool
    lines: Sequence[Line] = ()
    code: str = ""


class Failure(NamedTuple):
    """Describe something that did not run.  status: as in the records; words: the reason."""

    status: str
    name: str
    words: Sentence

    @property
    def is_error(self) -> bool:
        """Tell whether it failed, where others just cannot run here."""
        return self.status not in NOT_RUNNABLE


@dataclass(frozen=True)
class Section:
    """Describe a section of the page; its fields are shown in their order. id: its address;
    heading: what was measured;
    loaded: a line on other load, which also stands below the page's title; lead: the plot above the
      tables; facts,
    conditions: below "How measured"; folded: it is opened by its title."""

    id: str
    title: str
    heading: str = ""
    loaded: str = ""
    cards: Sequence[Card] = ()
    lead: Figure | None = None
    tables: Sequence[Table] = ()
    failures: Sequence[Failure] = ()
    figures: Sequence[Figure] = ()
    notes: Sequence[Line] = ()
    facts: Sequence[tuple[str, str]] = ()
    conditions: Sequence[Table] = ()
    folded: bool = False

    @property
    def plots(self) -> list[Figure]:
        return [*([self.lead] if self.lead else []), *self.figures]


class Judged(NamedTuple):
    """Hold what to beware of in a loss, the version that was judged ("": not known) and the day,
    ISO 8601."""

    caveats: Sequence[str]
    version: str
    day: str


@dataclass(frozen=True)
class Slice:
    """Describe a tool to those that show results. sections: (folder of the page, log folders) ->
    sections; holds: whether a run of the tool is at or under a path; rows: for csv and json; text:
    (paths, "table" or "markdown") -> a string a run; judged: (loss, paths) -> what to beware of,
    None where the tool never judged it."""

    sections: Callable[[Path, Sequence[Path]], list[Section]]
    holds: Callable[[Path], bool] = lambda path: False
    rows: Callable[[Sequence[Path]], list[Values]] = lambda paths: []
    text: Callable[[Sequence[Path], str], list[str]] = lambda paths, format: []
    judged: Callable[[str, Sequence[Path]], Judged | None] | None = None


#: The modules that hold the SLICE of a tool, in the order of the page.  Words, since no tool is
#: below this.
TOOLS = (
    "rnnt_bench.tools.profile.rows",
    "rnnt_bench.tools.flops.show",
    "rnnt_bench.tools.inference.rows",
    "rnnt_bench.tools.pipelines.rows",
    "rnnt_bench.tools.largest.losses",
    "rnnt_bench.conformance.show",
)


def slices() -> list[Slice]:
    """Return what the page, the summary and the verdict know of every tool."""
    return [import_module(name).SLICE for name in TOOLS]


def judged(loss: str, paths: Sequence[Path]) -> Judged | None:
    """Return what to beware of in a loss; None where no tool judged it."""
    answers = (tool.judged(loss, paths) for tool in slices() if tool.judged)
    return next(filter(None, answers), None)
