"""What people came for, as two cards: the loss to use, and the one to use if an approximation will do."""

from __future__ import annotations

from pathlib import Path
from typing import List, Optional, Sequence

from common.analysis import verdict
from common.analysis.row import Row
from common.analysis.verdict import Pick
from common.core.text import count, number
from common.present.section import Line, Verdict
from common.present.table import Link, Sentence
from common.report.verdicts import WITHHELD, spent, time_of

NAMED = 3  # of those whose difference is not certain


def headline(rows: Sequence[Row], folders: Sequence[Path]) -> List[Verdict]:
    """Of rows of one configuration; folders: where a conformance matrix may be, besides docs/."""
    found = verdict.of(rows, folders)
    cards = []
    if found.fastest:
        lines: List[Line] = [("Speed", _speed(found.fastest)), ("Memory", _memory(found.fastest.row, found.smallest))]
        cards.append(_card("Use", found.fastest, [*lines, _beware(found.fastest)]))
    if found.approximate and _gains(found.approximate):
        lines = [*_against(found.approximate, found.fastest), *_accuracy(found.approximate.row)]
        cards.append(_card("If approximate will do", found.approximate, [*lines, _beware(found.approximate)]))
    return cards


def measured(rows: Sequence[Row]) -> List[str]:
    """Return ["20 utterances", "of the 85,617 in the shape file, in 10 batches and 5 rounds"]; empty where no batches
    are known."""
    row = next((row for row in rows if row.batches), None)
    if row is None:
        return []
    distribution = next((row.distribution for row in rows if row.distribution), None)
    utterances = sum(distribution.T.measured) if distribution else sum(batch.N for batch in row.batches)
    of = f"of the {sum(distribution.T.all):,} in the shape file" if distribution else "measured"
    batches = "1 batch" if len(row.batches) == 1 else f"{len(row.batches)} batches"
    most = max(row.rounds for row in rows)
    rounds = f" and {count(most, 'round')}" if most else ""
    return ["1 utterance" if utterances == 1 else f"{utterances:,} utterances", f"{of}, in {batches}{rounds}"]


def _card(question: str, pick: Pick, lines: Sequence[Line]) -> Verdict:
    if pick.withheld:
        return Verdict(question, "withheld", False, lines=[("Speed", [WITHHELD])])
    names = [row.marked for row in [pick.row, *pick.rivals]]
    shown = names[:NAMED] if len(names) <= NAMED + 1 else [*names[:NAMED], f"{len(names) - NAMED} more"]
    answer = " or ".join(filter(None, [", ".join(shown[:-1]), shown[-1]]))
    return Verdict(question, answer, pick.sure, lines=lines)


def _gains(pick: Pick) -> bool:
    """Whether an approximation takes less time or memory than what is exact; also where there is nothing exact."""
    known = [pick.over and pick.over.ratio, pick.memory]
    return not any(known) or any(value < 1 for value in known if value)


def _speed(pick: Pick) -> Sentence:
    """Of the first one, and how far the next is behind."""
    row, said = pick.row, spent(pick.row, pick.scope)
    if pick.next is None:
        return [*said, "; the only one measured under its torch."]
    interval = _interval(pick.next_ratio.low, pick.next_ratio.high) if pick.next_ratio else ""
    ratio = f"{number(pick.times, 3)} times as long{interval}"
    if pick.sure:
        return [*said, f"; next is {pick.next.label}, {ratio}."]
    return [*said, f" for {row.label}; {pick.next.label} takes {ratio}: these samples cannot tell them apart."]


def _interval(low: Optional[float], high: Optional[float]) -> str:
    return f" (95%: {number(low, 3)} to {number(high, 3)})" if low is not None and high is not None else ""


def _memory(row: Row, smallest: Optional[Pick]) -> Sentence:
    if row.peak_mb is None:
        return ["not measured."]
    peak = Link(f"{number(row.peak_mb)} MB", row.results)
    if smallest is None or smallest.row.peak_mb is None:
        return [peak, "."]
    if smallest.row is row and smallest.sure:
        return [peak, ", the smallest."]
    if smallest.row is row or row in smallest.rivals:
        return [peak, ", as small as any."]
    least = Link(f"{number(smallest.row.peak_mb)} MB", smallest.row.results)
    times = number(row.peak_mb / smallest.row.peak_mb, 3) if smallest.row.peak_mb else "-"
    return [peak, f", {times} times as much as {smallest.row.label} (", least, ")."]


def _against(pick: Pick, exact: Optional[Pick]) -> List[Line]:
    """An approximation against the exact one."""
    if exact is None:
        return [("Speed", _speed(pick)), ("Memory", _memory(pick.row, None))]
    lines: List[Line] = []
    if pick.over:
        interval = _interval(pick.over.low, pick.over.high)
        time = f"{number(pick.over.ratio, 2)}x the time of {exact.row.label}{interval}: "
        lines.append(("Speed", [time, time_of(pick.row, pick.scope), "."]))
    if pick.memory and pick.row.peak_mb is not None:
        peak = Link(f"{number(pick.row.peak_mb)} MB", pick.row.results)
        lines.append(("Memory", [f"{number(pick.memory, 2)}x its memory: ", peak, "."]))
    return lines


def _accuracy(row: Row) -> List[Line]:
    if row.approximation_gap is None:
        return []
    said = f"{number(100 * abs(row.approximation_gap), 2)}% off the exact loss"
    other = [f"{number(100 * abs(gap), 2)}% with {kind} logits" for kind, gap in [*row.approximation_gaps.items()][1:]]
    bounds = ". Logits of a model in training may give more or less."
    return [("Accuracy", [Link(said, row.results), "; ".join(["", *other]), bounds])]


def _beware(pick: Pick) -> Line:
    if pick.caveats is None:
        return "Corners", ["conformance.py has not judged it yet."]
    if not pick.caveats:
        return "Corners", ["conformance.py found nothing wrong with it."]
    return "Beware", ["; ".join(pick.caveats) + "."]
