"""One sentence per question: which is fastest, which needs least memory, and whether that is sure.

Times are compared pair by pair over the same batches and rounds (see common.results.ranking); only when the 95%
interval over rounds (fresh processes) of the ratio to every other candidate is above 1.02 is one of them called the
fastest.  Else the answer is "unclear".  Memory is measured in one process, so a margin decides there.
"""

from __future__ import annotations

from typing import List, NamedTuple, Optional, Sequence, Tuple

from common.report.collect import Entry
from common.report.markup import Link, Sentence
from common.results import ranking
from common.results.statistics import Ratio
from common.results.wording import number

#: Peaks closer than this are not told apart: the two ways of measuring them agree no better.
MEMORY_MARGIN = 0.02


class Verdict(NamedTuple):
    """question: short; answer: a name or "unclear"; clear: whether it is sure; reason: why, in a sentence."""

    question: str
    answer: str
    clear: bool
    reason: Sentence


def verdicts(entries: Sequence[Entry]) -> List[Verdict]:
    """The answers for entries of one configuration; questions nobody measured are left out."""
    exact = [entry for entry in entries if entry.exact]
    found = [
        fastest("Fastest exact loss, whole step", exact, "step"),
        fastest("Fastest exact loss, given logits", exact, "loss"),
        least_memory("Least memory, exact losses", exact),
    ]
    of_one_model = [entry for entry in entries if entry.of_one_model]
    if len(exact) < len(of_one_model):
        found.append(fastest("Fastest overall, approximate too", of_one_model, "step"))
        found.append(least_memory("Least memory overall, approximate too", of_one_model))
    else:
        found.append(_same_overall(found[0]))
    return [verdict for verdict in found if verdict is not None]


def _same_overall(of_exact: Optional[Verdict]) -> Optional[Verdict]:
    if of_exact is None:
        return None
    return of_exact._replace(
        question="Fastest overall", reason=["The same question here: every loss measured is exact."]
    )


def fastest(question: str, entries: Sequence[Entry], scope: str) -> Optional[Verdict]:
    """None when none of them has samples of the scope."""
    entry_of = {id(entry.row): entry for entry in entries}
    standings = ranking.standings([entry.row for entry in entries], scope)
    if not standings:
        return None
    candidates = [entry_of[id(standing.row)] for standing in standings]
    best, rivals = candidates[0], [(entry_of[id(one.row)], one.ratio) for one in standings[1:]]
    taken = ["takes ", _time(best, scope), " " + ("a step" if scope == "step" else "from logits to their gradient")]
    remark = _left_out(entries) + _other_runs(candidates)
    if not rivals:
        return Verdict(question, best.marked, True, ["The only one measured: it ", *taken, ".", remark])
    close = [(entry, ratio) for entry, ratio in rivals if ranking.verdict(ratio) != "slower"]
    if not close:
        reason = ["It ", *taken, ". Next is ", *_times(rivals[0], scope), ".", remark]
        return Verdict(question, best.marked, True, reason)
    reason = [f"{best.label} has the lowest times and ", *taken, ", but ", *_times(close[0], scope)]
    if len(close) > 1:
        reason.append(f"; {len(close) - 1} more cannot be told from it either")
    return Verdict(question, "unclear", False, [*reason, ". ", _advice(close[0][1]), remark])


def _time(entry: Entry, scope: str) -> Link:
    described = entry.step_ms if scope == "step" else entry.loss_ms
    return Link(f"{number(described['median']) if described else '-'} ms", entry.results)


def _times(rival: Tuple[Entry, Optional[Ratio]], scope: str) -> List:
    entry, ratio = rival
    if ratio is None:
        return [f"{entry.label} has no round or batch in common with it (", _time(entry, scope), ")"]
    said = [f"{entry.label} at {number(ratio.ratio, 3)} times as long ("]
    if ratio.low is not None:
        interval = f"{number(ratio.low, 3)} to {number(ratio.high, 3)}"
        said.append(f"95% interval over {len(ratio.new)} rounds: {interval}; ")
    return [*said, _time(entry, scope), ")"]


def _advice(ratio: Optional[Ratio]) -> str:
    if ratio is None:
        return "Measure both again in one run."
    if ratio.low is None:
        return "One round gives no interval: measure with --rounds 3 or more."
    if ranking.verdict(ratio) == "same":
        return "All of the interval is within 2%: they are equally fast."
    return "The interval begins below 1.02, where both count as equally fast; more --rounds would narrow it."


def _left_out(entries: Sequence[Entry]) -> str:
    """Those that failed; who could not run here stands below."""
    fine = ("ok", "missing", "unsupported")
    names = [f"{entry.label} ({entry.row['status']})" for entry in entries if entry.row["status"] not in fine]
    return f" Left out: {', '.join(names)}." if names else ""


def _other_runs(candidates: Sequence[Entry]) -> str:
    runs = {entry.row["run_id"] for entry in candidates}
    return " These are from different runs: measure them in one to be sure." if len(runs) > 1 else ""


def least_memory(question: str, entries: Sequence[Entry]) -> Optional[Verdict]:
    """By the highest peak over the batches; None when nobody's memory was measured."""
    candidates = [entry for entry in entries if entry.row["status"] == "ok" and entry.peak_mb is not None]
    if not candidates:
        return None
    ordered = sorted(candidates, key=lambda entry: entry.peak_mb)
    best, remark = ordered[0], _left_out(entries)
    peak = Link(f"{number(best.peak_mb)} MB", best.results)
    if len(ordered) == 1:
        return Verdict(question, best.marked, True, ["The only one measured: its peak is ", peak, ".", remark])
    second = ordered[1]
    ratio = second.peak_mb / best.peak_mb
    other = Link(f"{number(second.peak_mb)} MB", second.results)
    if ratio > 1 + MEMORY_MARGIN:
        reason = [
            "Its peak is ",
            peak,
            f". Next is {second.label} at {number(ratio, 3)} times as much (",
            other,
            ").",
            remark,
        ]
        return Verdict(question, best.marked, True, reason)
    reason = [f"{best.label} (", peak, f") and {second.label} (", other, ") are within 2% of each other.", remark]
    return Verdict(question, "unclear", False, reason)
