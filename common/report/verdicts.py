"""One sentence per question: which loss is fastest, which needs least memory, and whether that is sure.

Times are compared pair by pair over the same batches and rounds (see common.analysis.ranking).  A loss is called the
fastest only when the 95% interval over rounds (fresh processes) of the ratio to every other candidate under its torch
is above 1.02; else the answer is "unclear".  Memory and largest batches are measured in one process and have no
interval; there a margin decides.
"""

from __future__ import annotations

from typing import Callable, List, Optional, Sequence, Union

from common.analysis import ranking, verdict
from common.analysis.row import Row, Standing
from common.analysis.verdict import MEMORY_MARGIN, SIZE_MARGIN, Pick
from common.core.errors import NOT_RUNNABLE
from common.core.text import number
from common.present.section import Verdict
from common.present.table import Link
from common.tables import search

Words = List[Union[str, Link]]

#: In the place of a winner, where other load may have made it one.
WITHHELD = "The samples ran beside other load: measure again when the machine is quiet."


def verdicts(rows: Sequence[Row]) -> List[Verdict]:
    """The answers for rows of one configuration, without those to questions that were not measured."""
    exact = [row for row in rows if row.is_exact]
    of_one_model = [row for row in rows if row.of_one_model]
    found = [
        fastest("Fastest exact loss, whole step", exact, "step"),
        given_logits("Fastest exact loss, given logits", exact),
        least_memory("Least memory, exact losses", exact),
    ]
    if len(exact) < len(of_one_model):
        found.append(fastest("Fastest overall, approximate too", of_one_model, "step"))
        found.append(least_memory("Least memory overall, approximate too", of_one_model))
    return [one for one in found if one is not None]


def of_search(rows: Sequence[Row]) -> List[Verdict]:
    """The answers for rows of --find-largest, of the exact losses alone."""
    exact = [row for row in rows if row.is_exact]
    return [one for one in (largest_batch(exact), trains_fastest(exact)) if one is not None]


# Times.


def fastest(question: str, rows: Sequence[Row], scope: str) -> Optional[Verdict]:
    """None when none of them has samples of the scope."""
    standings = ranking.standings(rows, scope)
    if not standings:
        return None
    if standings[0].beside_load:
        return Verdict(question, "withheld", False, [WITHHELD])
    best, rivals = standings[0].row, standings[1:]
    rivals = [one for one in rivals if not one.other_torch and not one.beside_load]
    taken: Words = ["takes ", *spent(best, scope)]
    remark = _left_out(rows) + _other_runs([standing.row for standing in standings])
    remark += _other_torch([one.row for one in standings if one.other_torch])
    close = [one for one in rivals if one.may_be_as_fast]
    if not close:
        return _clear(question, best, ["It ", *taken], _times(rivals[0], scope) if rivals else [], remark)
    more = f"; for {len(close) - 1} more it is unclear too" if len(close) > 1 else ""
    lowest: Words = [f"{best.label} has the lowest times and ", *taken, ", but ", *_times(close[0], scope)]
    return _unclear(question, *lowest, f"{more}. ", _advice(close[0]), remark)


def given_logits(question: str, rows: Sequence[Row]) -> Optional[Verdict]:
    """Return the answer by the loss alone and by the step of the losses that take logits, with what it rests on."""
    pick, alone = verdict.given_logits(rows), fastest(question, rows, "loss")
    if pick is None or alone is None or pick.step is None:
        return alone
    taking = [row for row in rows if row.loss_ms]
    whole = fastest(question, taking, "step")
    if whole is None:
        return alone
    if pick.loss.withheld or pick.step.withheld:
        return Verdict(question, "withheld", False, [WITHHELD])
    rests = {
        "both": "It rests on the loss alone and the step. ",
        "loss": "It rests on the loss alone. ",
        "step": "It rests on the step. ",
        "": "The loss alone and the step name no one loss. ",
    }[pick.basis]
    reason: Words = [rests, "By the loss alone: ", *alone.reason, " By the step: ", *whole.reason]
    return Verdict(question, pick.row.marked if pick.row else "unclear", bool(pick.row), reason)


def _clear(question: str, best: Row, did: Words, rival: Words, remark: str) -> Verdict:
    """did: a sentence on the best one, without its dot; rival: the next one in words, empty where there is none."""
    reason = [*did, ". Next is ", *rival, "."] if rival else ["The only one measured under its torch. ", *did, "."]
    return Verdict(question, best.marked, True, [*reason, remark])


def _unclear(question: str, *reason: Union[str, Link]) -> Verdict:
    return Verdict(question, "unclear", False, reason)


def time_of(row: Row, scope: str) -> Link:
    return Link(f"{number(row.median_ms(scope))} ms", row.results)


def spent(row: Row, scope: str) -> Words:
    """ "12.3 ms a step"."""
    return [time_of(row, scope), " a step" if scope == "step" else " from logits to their gradient"]


def _times(standing: Standing, scope: str) -> Words:
    row, ratio = standing.row, standing.ratio
    if ratio is None:
        return [f"{row.label} has no round or batch in common with it (", time_of(row, scope), ")"]
    said = f"{row.label} at {number(ratio.ratio, 3)} times as long ("
    if ratio.low is not None:
        interval = f"{number(ratio.low, 3)} to {number(ratio.high, 3)}"
        said += f"95% interval over {len(ratio.new)} rounds: {interval}; "
    return [said, time_of(row, scope), ")"]


def _advice(standing: Standing) -> str:
    ratio = standing.ratio
    if ratio is None:
        return "Measure both again in one run."
    if ratio.low is None:
        return "One round gives no interval: measure with --rounds 3 or more."
    if standing.verdict == "same":
        return "All of the interval is within 2%: they are equally fast."
    return "The interval begins below 1.02, where both count as equally fast; more --rounds would narrow it."


def _left_out(rows: Sequence[Row]) -> str:
    """Those that failed.  Those that cannot run on this machine are in the list below the answers."""
    fine = ("ok", *NOT_RUNNABLE)
    names = [f"{row.label} ({row.status})" for row in rows if row.status not in fine]
    return f" Left out: {', '.join(names)}." if names else ""


def _other_runs(rows: Sequence[Row]) -> str:
    several = len({row.run_id for row in rows}) > 1
    return " These are from different runs: measure them in one to be sure." if several else ""


def _other_torch(rows: Sequence[Row]) -> str:
    said = ", ".join(f"{row.label} ({row.torch})" for row in rows)
    return f" Under another torch, so not judged: {said}." if rows else ""


def trains_fastest(rows: Sequence[Row]) -> Optional[Verdict]:
    """By utterances per second over the same utterances, each at its own largest size; None when none was timed."""
    every = [row for row in rows if row.status == "ok" and row.utterances_per_second]
    timed = ranking.of_one_torch(every)
    question, pick = "Trains fastest with its largest batch, exact losses", verdict.trains_fastest(timed)
    if pick is None:
        other = "They were not timed over the same utterances: search them in one run."
        return _unclear(question, other) if timed else None
    if pick.withheld:
        return Verdict(question, "withheld", False, [WITHHELD])
    best, remark = pick.row, _left_out(rows) + _other_torch([row for row in every if row not in timed])
    pace = Link(f"{number(best.utterances_per_second)} utterances/s", best.results)
    if pick.next is None:
        return _clear(question, best, ["It trains ", pace], [], remark)
    said, ratio = f"{pick.next.label} at {number(pick.times, 3)} times the time of an utterance", pick.next_ratio
    if ratio and ratio.low is not None:
        said += f" (95% interval over rounds: {number(ratio.low, 3)} to {number(ratio.high, 3)})"
    if pick.sure:
        return _clear(question, best, ["It trains ", pace], [said], remark)
    advice = " Measure with more --rounds." if ratio and ratio.low is not None else " Measure with --rounds 3 or more."
    return _unclear(question, f"{best.label} trains ", pace, f", but {said}.", advice, remark)


# Sizes.


def least_memory(question: str, rows: Sequence[Row]) -> Optional[Verdict]:
    """By the highest peak over the batches; None when no memory was measured."""
    pick = verdict.smallest(rows, (*verdict.EXACT, "pruned"))
    return _by_size(question, pick, MEMORY_MARGIN, "Its peak is ", lambda row: f"{number(row.peak_mb)} MB", rows)


def largest_batch(rows: Sequence[Row]) -> Optional[Verdict]:
    """None when no search came to its end."""
    pick = verdict.largest(rows)
    return _by_size("Largest batch, exact losses", pick, SIZE_MARGIN, "It holds ", search.said, rows)


def _by_size(
    question: str, pick: Optional[Pick], margin: float, begin: str, words: Callable[[Row], str], rows: Sequence[Row]
) -> Optional[Verdict]:
    """rows: of which the best was picked."""
    if pick is None:
        return None
    best, other, remark = pick.row, pick.next, _left_out(rows)
    said = Link(words(best), best.results)
    if other is None:
        return _clear(question, best, [begin, said], [], remark)
    other_said = Link(words(other), other.results)
    if pick.sure:
        times = f" ({number(pick.times, 3)} times as much)"
        return _clear(question, best, [begin, said], [f"{other.label} with ", other_said, times], remark)
    close = f") are within {margin:.0%} of each other."
    return _unclear(question, f"{best.label} (", said, f") and {other.label} (", other_said, close, remark)
