"""Define a section of the page, as data: page.html.jinja is the one template that shows it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Optional, Sequence, Tuple

from common.core.errors import NOT_RUNNABLE
from common.present.style import Figure
from common.present.table import Sentence, Table

#: Names of implementations, "" where the sentence says them, and the sentence.
Line = Tuple[str, Sentence]


@dataclass(frozen=True)
class Card:
    """Answer a question.

    Attributes:
        question: short.
        answer: a name or "unclear".
        clear: whether it is sure.
        lines: the reasons, each with its title.
        code: for the user to copy.
        bad: whether the answer is bad news.
    """

    question: str
    answer: str
    clear: bool
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
        """Return whether it failed, where others just cannot run here."""
        return self.status not in NOT_RUNNABLE


@dataclass(frozen=True)
class Section:
    """Describe a section of the page; a field is empty where it has nothing to show.  Shown in the order of the fields.

    Attributes:
        id: its address on the page.
        heading: what was measured.
        loaded: a line on samples that ran beside other load; it also stands below the page's title.
        cards: the answers.
        lead: the plot above the tables.
        tables: each with its title above it.
        facts, conditions: terms and tables below "How measured".
        folded: whether it is opened by its title.
    """

    id: str
    title: str
    heading: str = ""
    loaded: str = ""
    cards: Sequence[Card] = ()
    lead: Optional[Figure] = None
    tables: Sequence[Table] = ()
    failures: Sequence[Failure] = ()
    figures: Sequence[Figure] = ()
    notes: Sequence[Line] = ()
    facts: Sequence[Tuple[str, str]] = ()
    conditions: Sequence[Table] = ()
    folded: bool = False
