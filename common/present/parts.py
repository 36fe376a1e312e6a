"""Define what is shown, as data: tables, plots, cards and sections of the page.

A Slice is what a tool (FLOPs, profile, ...) gives to the page, the summary and the verdict.  These
know the tools only by the names in TOOLS."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from rnnt_bench.core.errors import NOT_RUNNABLE
from rnnt_bench.core.text import number

#: Value of a cell, for sorting and CSV.
Value = str | int | float | None
#: A row of CSV or JSON: key or title of a column -> value.
Values = dict[str, Any]
#: A part of a plot as plotly takes it: a trace, a marker, an axis or a layout.
Plotly = dict[str, Any]


class Link(NamedTuple):
    """Hold the text of a link, and the file that it leads to."""

    words: str
    target: Path


#: The parts of a sentence, in order.
Sentence = Sequence[str | Link]
#: Names of implementations, and a sentence about them; "" if the sentence names them.
Line = tuple[str, Sentence]


class Cell(NamedTuple):
    """Hold one cell of a table.

    Attributes:
        shown: its text
        value: for sorting and CSV; None if that is `shown`
        target: the file that its value is from
        mark: a class of page.css, such as "wrong"
    """

    shown: str
    value: Value = None
    target: Path | None = None
    mark: str = ""


def measured(value: int | float | None, target: Path | None = None) -> Cell:
    """Return a cell for a number: a count as it is, other numbers with four digits, None as "-"."""
    return Cell(str(value) if type(value) is int else number(value), value, target)


class Column(NamedTuple):
    """Hold the title of a column, and how its cells are aligned: numbers to the right."""

    title: str
    numeric: bool = True
    centered: bool = False

    def value(self, cell: Cell) -> Value:
        """Return the value of a cell for sorting and CSV.

        For a cell without a value this is None in a numeric column, as its number is unknown, and
        the text of the cell in other columns."""
        return cell.shown if cell.value is None and not self.numeric else cell.value


class Table(NamedTuple):
    """Hold a table.

    Attributes:
        name: its key on the page
        title: is printed above it, or read by a screen reader
        groups: a heading for each row, printed once above successive rows with the same; () for
            none
    """

    name: str
    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    groups: Sequence[str] = ()

    def values(self) -> list[Values]:
        """Return the rows for CSV and JSON: {title of the column: value}."""
        return [
            {column.title: column.value(cell) for cell, column in zip(row, self.columns)}
            for row in self.rows
        ]


def tabulated(name: str, title: str, rows: Sequence[dict[str, Cell]]) -> Table:
    """Make a table of rows {title of the column: cell}, which all have the same columns.

    A column is numeric if one of its cells is a number."""
    columns = []
    for head in rows[0] if rows else ():
        numeric = any(isinstance(row[head].value, (int, float)) for row in rows)
        columns.append(Column(head, numeric))
    return Table(name, title, columns, [list(row.values()) for row in rows])


def filled(rows: Sequence[dict[str, Cell]]) -> list[dict[str, Cell]]:
    """Return the rows without the columns that are empty, "-" or "", in all of them."""
    titles: set[str] = set()
    for row in rows:
        titles.update(title for title, cell in row.items() if cell.shown not in ("-", ""))
    return [{title: cell for title, cell in row.items() if title in titles} for row in rows]


def words(parts: Sentence) -> str:
    """Return a sentence as text: of a link only its words."""
    return "".join(part.words if isinstance(part, Link) else part for part in parts)


@dataclass(frozen=True)
class Figure:
    """Hold one plot.

    Attributes:
        key: its name on the page
        summary: its numbers in words, for screen readers
        data, layout: of plotly
        table: the same numbers; None if another table of the page has them
    """

    key: str
    title: str
    caption: str
    summary: str
    data: list[Plotly]
    layout: Plotly
    table: Table | None = None


@dataclass(frozen=True)
class Card:
    """Hold a question of users and its answer.

    Attributes:
        answer: the name of a loss, names of those that may be the fastest, or "withheld"
        clear: whether `answer` is the name of one loss
        lines: the reasons
        code: to copy; "" for none
    """

    question: str
    answer: str
    clear: bool
    lines: Sequence[Line] = ()
    code: str = ""


class Failure(NamedTuple):
    """Hold what did not run, and the reason.

    status: of its record, such as "missing" or "oom"."""

    status: str
    name: str
    words: Sentence

    @property
    def is_error(self) -> bool:
        """Tell whether the run failed; False if it only cannot run here."""
        return self.status not in NOT_RUNNABLE


@dataclass(frozen=True)
class Section:
    """Hold a section of the page, whose fields are shown in this order.

    Attributes:
        id: its address on the page
        heading: what was measured
        loaded: a sentence about other load, also shown below the title of the page; "" for none
        lead: a plot above the tables
        notes: lines below the plots
        facts: (name, value) pairs, below "How measured"
        conditions: tables, below "How measured"
        folded: whether it is closed until its title is clicked
    """

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
        """Return all its plots, `lead` first."""
        return [self.lead, *self.figures] if self.lead else list(self.figures)


class Judged(NamedTuple):
    """Hold what `rnnt-bench check` found of a loss.

    Attributes:
        caveats: what to beware of
        version: of its package; "" if not known
        day: when it was judged, ISO 8601
    """

    caveats: Sequence[str]
    version: str
    day: str


@dataclass(frozen=True)
class Slice:
    """Hold the functions by which a tool shows its results.  Paths are log folders of a user.

    Attributes:
        sections: (folder of the page, paths) -> sections of the page
        holds: (path) -> whether a run of the tool is there
        rows: (paths) -> rows for CSV and JSON
        text: (paths, "table" or "markdown") -> a text for each run
        judged: (loss, paths) -> what it found of the loss, None for nothing
    """

    sections: Callable[[Path, Sequence[Path]], list[Section]]
    holds: Callable[[Path], bool] = lambda path: False
    rows: Callable[[Sequence[Path]], list[Values]] = lambda paths: []
    text: Callable[[Sequence[Path], str], list[str]] = lambda paths, format: []
    judged: Callable[[str, Sequence[Path]], Judged | None] | None = None


#: Modules with the SLICE of a tool, in the order of the page.  They are imported by name, since
#: this layer must not import tools.
TOOLS = (
    "rnnt_bench.tools.profile.rows",
    "rnnt_bench.tools.flops.show",
    "rnnt_bench.tools.inference.rows",
    "rnnt_bench.tools.pipelines.rows",
    "rnnt_bench.tools.largest.losses",
    "rnnt_bench.conformance.show",
)


def slices() -> list[Slice]:
    """Return the Slice of every tool."""
    return [import_module(name).SLICE for name in TOOLS]


def judged(loss: str, paths: Sequence[Path]) -> Judged | None:
    """Return what the first tool with an answer found of a loss, from these log folders; None if no
    tool has judged the loss."""
    for tool in slices():
        if tool.judged and (answer := tool.judged(loss, paths)):
            return answer
    return None
