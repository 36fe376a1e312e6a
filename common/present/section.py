"""Define a section of the page, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, List, NamedTuple, Optional, Sequence, Tuple

from common.core.errors import NOT_RUNNABLE
from common.present.style import Figure
from common.present.table import Sentence, Table

#: Names of implementations, "" where the sentence says them, and the sentence.
Line = Tuple[str, Sentence]


@dataclass(frozen=True)
class Verdict:
    """Answer a question.

    Attributes:
        question: short.
        answer: a name or "unclear".
        clear: whether it is sure.
        reason: why, in a sentence.
        lines: further facts, each with its title.
        code: for the user to copy.
        bad: whether the answer is bad news.
    """

    question: str
    answer: str
    clear: bool
    reason: Sentence = ()
    lines: Sequence[Line] = ()
    code: str = ""
    bad: bool = False


class Failure(NamedTuple):
    """Describe something that did not run.  status: as in the records; words: the reason."""

    status: str
    name: str
    words: Sentence

    @property
    def is_error(self) -> bool:
        return self.status not in NOT_RUNNABLE


@dataclass(frozen=True)
class Shapes:
    """Describe the utterances.

    Attributes:
        sentence: in the place of plots, where there are too few batches for these; else "".
        tables: (words to open it by, table) of the numbers.
    """

    title: str
    sentence: str
    tables: Sequence[Tuple[str, Table]]


#: Template of a section that has a table, figures, failures and notes.
TABLES = "present/templates/tables.html.jinja"


@dataclass(frozen=True)
class Section:
    """Describe a section of the page; fields are None or empty where it has nothing to show.

    Attributes:
        template: that shows it, as a path below common/.
        id: its address on the page.
        suffix: of the ids of its figures.
        headline: which loss to use.
        measured: how much of the data was measured.
        beside_load: a line on samples that ran beside other load.
        content: data for its template alone.
        short: its title in the contents, where that differs.
        title_is_above: its title is the title of the page.
    """

    template: str
    id: str
    title: str
    suffix: str = ""
    heading: str = ""
    headline: Sequence[Verdict] = ()
    measured: Sequence[str] = ()
    beside_load: str = ""
    verdicts: Sequence[Verdict] = ()
    failures: Sequence[Failure] = ()
    table: Optional[Table] = None
    figures: Sequence[Figure] = ()
    facts: Sequence[Tuple[str, str]] = ()
    versions: Optional[Table] = None
    load: Optional[Table] = None
    shapes: Optional[Shapes] = None
    notes: Sequence[Line] = ()
    content: Any = None
    short: str = ""
    title_is_above: bool = False

    @property
    def chapters(self) -> List[Tuple[str, str, List[Figure]]]:
        """Return (id, title, figures) of each chapter of figures."""
        titles = dict.fromkeys(figure.chapter for figure in self.figures if figure.chapter)
        return [
            (f"{self.id}-{title.lower()}", title, [figure for figure in self.figures if figure.chapter == title])
            for title in titles
        ]

    @property
    def contents(self) -> List[Tuple[str, str]]:
        """Return (id, title) of each part."""
        parts = [
            (f"{self.id}-table", "Table", self.table),
            *self.chapters,
            *((f"{figure.key}-{self.suffix}", figure.title, self._is_part(figure)) for figure in self.figures),
            (f"{self.id}-conditions", "How measured", self.versions),
        ]
        return [(name, title) for name, title, is_there in parts if is_there]

    @staticmethod
    def _is_part(figure: Figure) -> bool:
        """Return whether a figure has an entry of its own in the contents."""
        return not figure.small and not figure.chapter
