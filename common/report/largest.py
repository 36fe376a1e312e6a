"""What --find-largest found: who holds the largest batch, who trains fastest with it, and the table."""

from __future__ import annotations

import math
from typing import Dict, List, Optional, Sequence

from common.report.collect import Entry
from common.report.markup import Cell, Column, Link, Table
from common.report.verdicts import Verdict
from common.results import largest_tables, statistics
from common.results.exports import plain
from common.results.statistics import Ratio
from common.results.wording import number

#: Sizes closer than this are not told apart: the search ends at 5%.
SIZE_MARGIN = 0.05


def verdicts(entries: Sequence[Entry]) -> List[Verdict]:
    """Of exact losses alone: what another kind fits or trains is no answer to which exact one to take."""
    exact = [entry for entry in entries if entry.exact]
    found = [largest_batch(exact), trains_fastest(exact)]
    return [verdict for verdict in found if verdict is not None]


def largest_batch(entries: Sequence[Entry]) -> Optional[Verdict]:
    """None when no search came to its end."""
    ended = [entry for entry in entries if entry.row["status"] == "ok"]
    if not ended:
        return None
    ordered = sorted(ended, key=lambda entry: -entry.row["largest"]["size"])
    best, question = ordered[0], "Largest batch, exact losses"
    size, remark = _said(best), _left_out(entries)
    if len(ordered) == 1:
        return Verdict(question, best.marked, True, ["The only one that was searched to the end: ", size, ".", remark])
    second = ordered[1]
    ratio = best.row["largest"]["size"] / second.row["largest"]["size"]
    if ratio > 1 + SIZE_MARGIN:
        reason = ["It holds ", size, f". Next is {second.label} with ", _said(second), ".", remark]
        return Verdict(question, best.marked, True, reason)
    close = [f"{best.label} (", size, f") and {second.label} (", _said(second), ") are within 5% of each other."]
    return Verdict(question, "unclear", False, [*close, remark])


def trains_fastest(entries: Sequence[Entry]) -> Optional[Verdict]:
    """By utterances per second over the same utterances, each at its own largest size; None when none was timed."""
    timed = [entry for entry in entries if entry.row["status"] == "ok" and _rate(entry)]
    if not timed:
        return None
    best, question = max(timed, key=_rate), "Trains fastest with its largest batch, exact losses"
    if any(entry.row["largest"]["timed_over"] != best.row["largest"]["timed_over"] for entry in timed):
        reason = "They were not timed over the same utterances: search them in one run."
        return Verdict(question, "unclear", False, [reason])
    rivals = [(entry, slowdown(best, entry)) for entry in timed if entry is not best]
    rivals.sort(key=lambda rival: rival[1].ratio if rival[1] else math.inf)
    pace, remark = Link(f"{number(_rate(best))} utterances/s", best.results), _left_out(entries)
    if not rivals:
        return Verdict(question, best.marked, True, ["The only one timed: ", pace, ".", remark])
    entry, ratio = next((rival for rival in rivals if not _is_slower(rival[1])), rivals[0])
    said = f"{entry.label} at {number(ratio.ratio, 3) if ratio else '-'} times the time of an utterance"
    if ratio and ratio.low is not None:
        said += f" (95% interval over rounds: {number(ratio.low, 3)} to {number(ratio.high, 3)})"
    if _is_slower(ratio):
        return Verdict(question, best.marked, True, ["It trains ", pace, f". Next is {said}.", remark])
    advice = " More --rounds would tell." if ratio and ratio.low is not None else " Measure with --rounds 3 or more."
    return Verdict(question, "unclear", False, [f"{best.label} trains ", pace, f", but {said}.", advice, remark])


def slowdown(best: Entry, other: Entry) -> Optional[Ratio]:
    """How many times the time of an utterance the other takes.  Rounds pair within one run only."""
    compare = statistics.paired_ratio if best.row["run_id"] == other.row["run_id"] else statistics.independent_ratio
    return compare(_rounds(best), _rounds(other))


def _rounds(entry: Entry) -> Dict[str, Dict[str, List[float]]]:
    """round -> the one thing compared -> seconds of an utterance."""
    rates = entry.row["largest"]["utterances_per_second_rounds"]
    return {name: {"utterance": [1 / rate]} for name, rate in rates.items()}


def _rate(entry: Entry) -> float:
    return entry.row["largest"]["utterances_per_second"] or 0.0


def _is_slower(ratio: Optional[Ratio]) -> bool:
    return ratio is not None and statistics.verdict(ratio.low, ratio.high) == "slower"


def _said(entry: Entry) -> Link:
    return Link(largest_tables.said(entry.row), entry.results)


def _left_out(entries: Sequence[Entry]) -> str:
    names = [f"{entry.label} ({entry.row['status']})" for entry in entries if entry.row["status"] != "ok"]
    return f" Left out: {', '.join(names)}." if names else ""


def results(entries: Sequence[Entry]) -> Table:
    """The table of the search (see largest_tables.py), each number with the file it is from."""
    columns = [Column(column.title, column.numeric) for column in largest_tables.COLUMNS]
    return Table("largest", "Largest batch that fits", columns, [_result(entry) for entry in entries])


def _result(entry: Entry) -> List[Cell]:
    cells = []
    for column in largest_tables.COLUMNS:
        if column.title == "implementation":
            cells.append(Cell(entry.marked, mark="name"))
        elif column.title == "status":
            cells.append(Cell(plain(entry.row["status"]), mark="good" if entry.row["status"] == "ok" else "bad"))
        else:
            value = largest_tables.VALUES.get(column.title, lambda row: None)(entry.row)
            cells.append(Cell(plain(column.text(entry.row)), value, entry.results))
    return cells
