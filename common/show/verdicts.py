"""Answer one question in one sentence: which loss is fastest, which needs least memory, and whether that is sure.

Times are compared pair by pair over the same batches and rounds (see common.analysis.ranking).  A loss is called the
fastest only when the 95% interval over rounds (fresh processes) of the ratio to every other candidate under its torch
is above 1.02; else the answer is "unclear".  Memory and largest batches are measured in one process and have no
interval; there a margin decides.
"""

from __future__ import annotations

from typing import List, Optional, Sequence

from common.analysis import ranking, verdict, wording
from common.analysis.row import Row
from common.analysis.verdict import Pick
from common.analysis.wording import Measure
from common.present.section import Verdict

TRAINS_FASTEST = "Trains fastest with its largest batch, exact losses"


def verdicts(rows: Sequence[Row]) -> List[Verdict]:
    """Return the answers for rows of one configuration, without questions that were not measured."""
    exact = [row for row in rows if row.is_exact]
    of_one_model = [row for row in rows if row.of_one_model]
    answers = [
        fastest("Fastest exact loss, whole step", exact, "step"),
        given_logits("Fastest exact loss, given logits", exact),
        least_memory("Least memory, exact losses", exact),
    ]
    if len(exact) < len(of_one_model):
        answers.append(fastest("Fastest overall, approximate too", of_one_model, "step"))
        answers.append(least_memory("Least memory overall, approximate too", of_one_model))
    return [answer for answer in answers if answer is not None]


def of_search(rows: Sequence[Row]) -> List[Verdict]:
    """Return the answers for rows of --find-largest, among the exact losses alone."""
    exact = [row for row in rows if row.is_exact]
    size = _answer("Largest batch, exact losses", verdict.largest(exact), wording.SIZE, [wording.left_out(exact)])
    return [answer for answer in (size, trains_fastest(exact)) if answer is not None]


def fastest(question: str, rows: Sequence[Row], scope: str) -> Optional[Verdict]:
    """Return the answer by the times of a scope; None where none of the rows was timed in it."""
    pick = verdict.by_time(rows, scope)
    remarks = [wording.advice(pick), wording.left_out(rows), *wording.not_judged(pick)] if pick else []
    return _answer(question, pick, wording.time_of(scope), remarks)


def given_logits(question: str, rows: Sequence[Row]) -> Optional[Verdict]:
    """Return the answer by the loss alone and by the step of the losses that take logits, with its reason."""
    pick = verdict.given_logits(rows)
    if pick is None or pick.step is None:
        return fastest(question, rows, "loss")
    if pick.withheld:
        return Verdict(question, "withheld", False, [f"{wording.WITHHELD}."])
    remarks = filter(None, [wording.left_out(rows), *wording.not_judged(pick.loss)])
    answer = pick.row.marked if pick.row else "unclear"
    return Verdict(question, answer, bool(pick.row), [*wording.given_logits(pick), " ".join([".", *remarks])])


def trains_fastest(rows: Sequence[Row]) -> Optional[Verdict]:
    """Return the answer by utterances per second over the same utterances, each row at its own largest size; None where
    none was timed."""
    every = [row for row in rows if row.status == "ok" and row.utterances_per_second]
    timed = ranking.of_one_torch(every)
    pick = verdict.trains_fastest(timed)
    if pick is None and timed:
        advice = "They were not timed over the same utterances: search them in one run."
        return Verdict(TRAINS_FASTEST, "unclear", False, [advice])
    remarks = [wording.left_out(rows), *wording.other_torch([row for row in every if row not in timed])]
    return _answer(TRAINS_FASTEST, pick, wording.PACE, remarks)


def least_memory(question: str, rows: Sequence[Row]) -> Optional[Verdict]:
    """Return the answer by the highest peak over the batches; None where no memory was measured."""
    pick = verdict.smallest(rows, (*verdict.ranked_kinds(rows), "pruned"))
    return _answer(question, pick, wording.PEAK, [wording.left_out(rows)])


def _answer(question: str, pick: Optional[Pick], measure: Measure, remarks: Sequence[str]) -> Optional[Verdict]:
    """Return the verdict of a pick, with its reason and further sentences; None without a pick."""
    if pick is None:
        return None
    if pick.withheld:
        return Verdict(question, "withheld", False, [f"{wording.WITHHELD}."])
    reason = wording.against_next(pick, measure) if pick.sure else wording.named(pick, measure)
    answer = pick.row.marked if pick.sure else "unclear"
    return Verdict(question, answer, pick.sure, [*reason, " ".join([".", *filter(None, remarks)])])
