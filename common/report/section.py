"""What a section of the page shows, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Optional, Sequence, Tuple

from common.core.table import Sentence, Table
from common.plots.style import Figure

#: Names of implementations, "" where the sentence says them, and the sentence.
Line = Tuple[str, Sentence]


@dataclass(frozen=True)
class Verdict:
    """question: short; answer: a name or "unclear"; clear: whether it is sure; reason: why, in a sentence."""

    question: str
    answer: str
    clear: bool
    reason: Sentence


@dataclass(frozen=True)
class Shapes:
    """The utterances: a sentence where there are too few batches for plots, and the numbers as tables that can be
    opened, each with the words to open it by."""

    title: str
    sentence: str
    tables: Sequence[Tuple[str, Table]]


@dataclass(frozen=True)
class Section:
    """kind: templates/<kind>.html.jinja shows it; id: its address on the page; place: what the ids of its figures end
    with; link: the words of the contents that lead to it; about: what is special to its kind; the others: None or empty
    where there is nothing."""

    kind: str
    id: str
    title: str
    link: str
    place: str = ""
    heading: str = ""
    verdicts: Sequence[Verdict] = ()
    failures: Sequence[Line] = ()
    table: Optional[Table] = None
    figures: Sequence[Figure] = ()
    facts: Sequence[Tuple[str, str]] = ()
    versions: Optional[Table] = None
    load: Optional[Table] = None
    shapes: Optional[Shapes] = None
    notes: Sequence[Line] = ()
    about: Any = None
