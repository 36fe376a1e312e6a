"""Answer the page's first question: the best loss as a title, and a card with its code for each case.

The cases: any loss, a loss that takes logits, and an approximation; and the largest batch of --find-largest.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import List, Optional, Sequence

from common.analysis import verdict
from common.analysis.row import Row
from common.analysis.verdict import LogitsPick, Pick
from common.core import snippets
from common.core.implementations import BY_NAME
from common.core.text import count, number
from common.present import parts
from common.present.parts import Card, Line, Link

OURS = "fused_transducer"  # the package that comes with the suite


def title(rows: Sequence[Row]) -> str:
    """Return the answer as the title of the page; "" where nothing exact was timed."""
    pick = verdict.fastest(rows)
    return verdict.headline(pick) if pick else ""


def cards(rows: Sequence[Row], folders: Sequence[Path]) -> List[Card]:
    """Return the cards for rows of one configuration.  folders: where a conformance matrix may be, besides docs/."""
    picks = verdict.of(rows, folders)
    result = []
    if picks.fastest:
        lines = [_speed(picks.fastest), _memory(picks.fastest.row, picks.smallest)]
        result.append(_card("Use", picks.fastest, [*lines, _corners(picks.fastest)]))
    if picks.logits and picks.logits.row is not (picks.fastest and picks.fastest.row):
        result.append(_given_logits(picks.logits, picks.smallest, folders))
    if picks.approximate and _gains(picks.approximate):
        lines = _against(picks.approximate, picks.fastest)
        words = verdict.accuracy(picks.approximate.row)
        if words:
            lines.append(("Accuracy", [Link(f"Its loss is {words}", picks.approximate.row.results), "."]))
        result.append(_card("If an approximation will do", picks.approximate, [*lines, _corners(picks.approximate)]))
    return result


def of_search(rows: Sequence[Row]) -> List[Card]:
    """Return the card for rows of --find-largest, among the exact losses alone."""
    pick = verdict.largest([row for row in rows if row.is_exact])
    return [_card("Largest batch, exact losses", pick, [_value("Size", pick, verdict.SIZE)])] if pick else []


def _card(question: str, pick: Pick, lines: Sequence[Line]) -> Card:
    if pick.withheld:
        return Card(question, "withheld", False, lines=[("Speed", [f"{verdict.WITHHELD}."])])
    answer = verdict.either([row.marked for row in [pick.row, *pick.rivals]])
    if pick.row.loss in BY_NAME and BY_NAME[pick.row.loss].package == OURS:
        lines = [*lines, ("Origin", [f"{pick.row.loss} is this repository's own."])]
    code = snippets.snippet(pick.row.name)
    if not code and pick.row.loss in BY_NAME:
        lines = [*lines, ("Code", [f"{BY_NAME[pick.row.loss].file} shows how it is called."])]
    return Card(question, answer, pick.sure, lines, code)


def _given_logits(pick: LogitsPick, smallest: Optional[Pick], folders: Sequence[Path]) -> Card:
    question = "If you need logits"
    scopes = [each for each in (pick.step, pick.loss) if each is not None]
    if pick.withheld:
        return _card(question, replace(scopes[0], withheld=True), [])
    lines: List[Line] = []
    for each in scopes:
        words = [*verdict.named(each, verdict.time_of(each.scope)), "."]
        lines.append(("Step" if each.scope == "step" else "Loss alone", words))
    if pick.row is None:
        names = dict.fromkeys(row.marked for each in scopes for row in [each.row, *each.rivals])
        return Card(question, verdict.either(list(names)), False, lines)
    best = Pick(pick.row, caveats=parts.caveats(pick.row.loss, folders))
    return _card(question, best, [*lines, _memory(pick.row, smallest), _corners(best)])


def _gains(pick: Pick) -> bool:
    """Return whether an approximation takes less time or memory than the best exact loss; true where there is none."""
    known = [pick.over and pick.over.ratio, pick.memory]
    return not any(known) or any(value < 1 for value in known if value)


def _value(title: str, pick: Pick, measure: verdict.Measure) -> Line:
    return title, [*(verdict.against_next if pick.sure else verdict.named)(pick, measure), "."]


def _speed(pick: Pick) -> Line:
    return _value("Speed", pick, verdict.time_of(pick.scope))


def _memory(row: Row, smallest: Optional[Pick]) -> Line:
    return "Memory", [*verdict.memory(row, smallest), "."]


def _corners(pick: Pick) -> Line:
    title, words = verdict.corners(pick)
    return title.capitalize(), [f"{words}."]


def _against(pick: Pick, exact: Optional[Pick]) -> List[Line]:
    """Return lines on an approximation's time and memory beside those of the fastest exact loss."""
    if exact is None:
        return [_speed(pick), _memory(pick.row, None)]
    name = verdict.name_of(exact.row)
    lines: List[Line] = []
    if pick.over:
        ratio = f"{number(pick.over.ratio, 2)}x the time of {name}{verdict.interval(pick.over)}: "
        lines.append(("Speed", [ratio, verdict.value(pick.row, verdict.time_of(pick.scope)), "."]))
    if pick.memory and pick.row.peak_mb is not None:
        ratio = f"{number(pick.memory, 2)}x the peak of {name}: "
        lines.append(("Memory", [ratio, verdict.value(pick.row, verdict.PEAK), "."]))
    return lines


def measured(rows: Sequence[Row]) -> List[str]:
    """Return ["20 utterances of the 85,617 in the shape file, in 10 batches and 5 rounds"]; empty where no batches are
    known."""
    row = next((row for row in rows if row.batches), None)
    if row is None:
        return []
    utterances = sum(batch.N for batch in row.batches)
    of = f"of the {row.totals.utterances:,} in the shape file" if row.totals else "measured"
    batches = "1 batch" if len(row.batches) == 1 else f"{len(row.batches)} batches"
    most = max(row.rounds for row in rows)
    rounds = f" and {count(most, 'round')}" if most else ""
    return [f"{utterances:,} utterance{'' if utterances == 1 else 's'} {of}, in {batches}{rounds}."]
