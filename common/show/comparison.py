"""Make the page of a comparison: what changed, the ratios with their intervals, every number and its reason."""

from __future__ import annotations

from pathlib import Path
from typing import List, Optional, Sequence

from common.analysis.comparison import Change, TimeChange
from common.analysis.groups import look_of_each
from common.analysis.standing import BESIDE_LOAD, percent
from common.core.errors import UserError
from common.core.files import another, make_folder, write_whole
from common.core.text import gathered
from common.present.section import Card, Line, Section
from common.present.style import Figure
from common.show import changes as tables
from common.show import ratios
from common.show.page import assembled
from common.show.ratios import Dot

TITLE = "What changed"
#: The verdicts with a card, in their order, and the words above it.
CARDS = {
    **{"slower": "Slower", "faster": "Faster", "wrong": "Wrong", "worse": "Less accurate", "better": "More accurate"},
    **{"more": "More memory", "less": "Less memory", "unclear": "Unclear"},
    BESIDE_LOAD: BESIDE_LOAD.capitalize(),
}
MOST_NAMED = 6  # in the answer of a card


def write(rows: Sequence[Change], remarks: Sequence[str], output: Path) -> Path:
    """Write the page, whole or not at all; return its path.  remarks: as below the table.  Raises UserError."""
    if not rows:
        raise UserError("no page: nothing was compared")
    advice = another("--output")
    make_folder(output.parent, advice)
    write_whole(advice, (output, page(rows, remarks, output.parent)))
    return output


def page(rows: Sequence[Change], remarks: Sequence[str], base: Path, library: Optional[str] = None) -> str:
    """Return the page as text.  base: the folder that it will be in; library: JavaScript in place of plotly.js."""
    shown = [row for row in rows if tables.is_measured(row)] or rows
    cards = _cards(shown)
    section = Section(
        "comparison",
        TITLE,
        "" if cards else "Nothing changed by more than the tolerance.",
        cards=cards,
        lead=_figure(shown),
        tables=[tables.table(shown)],
        notes=_notes(shown, remarks),
    )
    lead = " ".join(f"{line}." for line in tables.origins(shown)[:2])
    return assembled([section], base, title(shown), lead, library, overline="Two measurements, compared")


def title(rows: Sequence[Change]) -> str:
    """Return "a: 20% more time (12% to 28%)" of one time that surely changed, else "2 faster, 1 slower, 3 unclear"."""
    times = [(row.name, scope, time) for row in rows for scope, time in row.time.items() if time.ratio is not None]
    changed = [each for each in times if each[2].verdict in ("faster", "slower")]
    if len(times) == len(changed) == 1:
        name, _, time = changed[0]
        return f"{name}: {_in_words(time)}"
    counts = gathered((time.verdict, name) for name, _, time in times)
    words = [f"{len(names)} {verdict}" for verdict, names in counts.items()]
    return f"Times: {', '.join(words)}" if words else "No times to compare"


def _in_words(time: TimeChange) -> str:
    """Return "20% more time (12% to 28%)" of a time that changed for sure."""
    assert time.ratio is not None and time.low is not None and time.high is not None
    ends = sorted(abs(end - 1) for end in (time.low, time.high))
    span = " to ".join(percent(end, 2) for end in ends)
    return f"{percent(abs(time.ratio - 1), 2)} {'more' if time.ratio > 1 else 'less'} time ({span})"


def _cards(rows: Sequence[Change]) -> List[Card]:
    """Return a card for each verdict except "same", with the reason for each of its lines."""
    lines = [(row.name, line) for row in rows for line in tables.lines_of(row)]
    of_verdict = gathered((line.verdict, (name, line)) for name, line in lines)
    cards = []
    for verdict, question in CARDS.items():
        named = [(f"{name}, {line.what}", line.reason) for name, line in of_verdict.get(verdict, [])]
        if named:
            names = [name for name, _ in named[:MOST_NAMED]]
            names += [f"{len(named) - MOST_NAMED} more"] if len(named) > MOST_NAMED else []
            reasons: List[Line] = [(name, [f"{reason}."]) for name, reason in named]
            is_sure, is_bad = verdict not in ("unclear", BESIDE_LOAD), tables.MARKS.get(verdict) == "bad"
            cards.append(Card(question, "; ".join(names), is_sure, reasons, bad=is_bad))
    return cards


def _figure(rows: Sequence[Change]) -> Optional[Figure]:
    """Return the plot of the ratios of all times; None where there are none."""
    look_of = look_of_each({row.pair.new.name: row.pair.new.kind for row in rows})
    dots = [
        Dot(
            f"{row.name}, {scope}",
            look_of[row.pair.new.name],
            time.ratio,
            time.low,
            time.high,
            time.verdict,
            time.verdict == BESIDE_LOAD,
            row.pair.new.results,
        )
        for row in rows
        for scope, time in row.time.items()
        if time.ratio is not None
    ]
    if not dots:
        return None
    caption = "Dot: the time of the new side over that of the baseline; line: its interval over rounds."
    if any(dot.hollow for dot in dots):
        caption += " Hollow: beside other load, so the ratio decides nothing."
    return ratios.figure("changes", "Time, new over baseline", caption, dots, "times the baseline")


def _notes(rows: Sequence[Change], remarks: Sequence[str]) -> List[Line]:
    """Return how it was compared, what changed in the code, and the remarks."""
    lines = [*tables.origins(rows)[2:], *tables.all_notes(rows), *remarks]
    return [("", [line if line.endswith(".") else f"{line}."]) for line in lines]
