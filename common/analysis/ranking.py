"""Rank rows of one configuration against the fastest of their kind: a ratio of times, its interval and a verdict.

Kinds are ranked apart: an approximation that is faster is not the faster loss.  Only rows with status ok are compared,
and interrupted ones over their complete rounds.  Ratios are over the batches that both rows have (see
common.analysis.ratios).  The intervals of a kind hold together for all pairs of its rows, since any row could have come
out as the fastest.

Verdicts are between rows of one torch version: the ratio to a row of another torch is also the ratio of the torches.
Where one loss was measured under both (the control: fast_rnnt and fast_rnnt@k2), two assumptions give the row's ratio
under the fastest's torch; no measurement shows which of the two holds.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Callable, Dict, List, Optional, Sequence, Tuple

from common.analysis import ratios
from common.analysis.ratios import Ratio
from common.analysis.row import Row, Standing
from common.core import statistics

Times = Dict[str, Dict[str, float]]  # round -> batch -> median ms


def standings(rows: Sequence[Row], scope: str, confidence: Optional[float] = None) -> List[Standing]:
    """Return the standings of the rows that can be compared: the fastest first, then the others by their ratio.

    The first is `beside_load` where other load may have changed which row is the fastest.  confidence: of each
    interval; None: such that the intervals of all pairs hold together.
    """
    timed = [row for row in rows if row.is_comparable and row.round_medians_ms.get(scope)]
    if not timed:
        return []
    each = confidence or statistics.confidence_of_each(len(timed) * (len(timed) - 1) // 2)

    def against(baseline: Row, row: Row) -> Standing:
        return _standing(baseline, row, timed, scope, each)

    home = of_one_torch(timed)
    counts = [len({batch for medians in row.round_medians_ms[scope].values() for batch in medians}) for row in home]
    whole = [row for row, count in zip(home, counts) if count == max(counts)]  # a few batches make none the fastest
    fastest = min(whole, key=lambda row: _size(against(whole[0], row).ratio))
    others = sorted((against(fastest, row) for row in timed if row is not fastest), key=lambda each: _size(each.ratio))
    rivals = [each for each in others if not each.other_torch and each.may_be_as_fast]
    withheld = fastest.is_beside_load(scope) or any(each.beside_load for each in rivals)
    return [Standing(fastest, fastest, scope, beside_load=withheld), *others]


def of_one_torch(rows: Sequence[Row]) -> List[Row]:
    """Return the rows under the torch version that most losses have in their own environment, the newest of equals."""
    torches = [row.torch for row in rows if row.loss == row.name] or [row.torch for row in rows]

    def weight(torch: str) -> Tuple[int, List[int]]:
        return torches.count(torch), [int(part) for part in torch.split(".") if part.isdigit()]

    home = max(torches, key=weight, default="")
    return [row for row in rows if row.torch == home]


def over(baseline: Row, row: Row, scope: str) -> Optional[Ratio]:
    """Return a row's time over that of `baseline`, as measured, over the batches that both have; None where there are
    none, or where they ran beside other load."""
    (before, after), beside_load = _comparable([baseline, row], scope)
    return None if beside_load else _ratio(before, after, baseline, row, statistics.CONFIDENCE)[0]


def _standing(baseline: Row, row: Row, rows: Sequence[Row], scope: str, confidence: float) -> Standing:
    (before, after), beside_load = _comparable([baseline, row], scope)
    ratio, paired = _ratio(before, after, baseline, row, confidence)
    standing = Standing(row, baseline, scope, ratio, paired, row.torch != baseline.torch, beside_load=beside_load)
    pair = _control(baseline, row, rows, scope) if standing.other_torch else None
    if pair is None:
        return standing
    (before, after, here, control), beside_load = _comparable([baseline, row, *pair], scope)

    def combined(*powers: float) -> Optional[Ratio]:
        """Return the ratio with its interval of after^a here^b control^c / before, for powers (a, b, c)."""
        return _ratio(before, _product((after, here, control), powers), baseline, row, confidence)[0]

    divided = _ratio(_product((before, control), (1, 1)), _product((after, here), (1, 1)), baseline, row, confidence)[0]
    if divided is None:
        return standing
    kept, beside_load = _surplus_kept(combined), beside_load or standing.beside_load
    return replace(standing, control=pair[1], through_control=divided, surplus_kept=kept, beside_load=beside_load)


def _surplus_kept(combined: Callable[..., Optional[Ratio]]) -> Optional[Ratio]:
    """Return (row - there + here) / baseline; None where that is not positive.

    combined: see ``_standing``.  The sum is of three ratios, each over all batches: in a difference for each batch the
    noise of single samples would bias it.  Its logarithm is linearised for the interval: d log(sum) is the sum of share
    x d log(ratio).
    """
    parts = [combined(*powers) for powers in ((1, 0, 0), (0, 1, 0), (0, 0, 1))]
    terms = [sign * part.ratio for sign, part in zip((1, 1, -1), parts) if part]
    total = sum(terms)
    linear = combined(*(term / total for term in terms)) if len(terms) == len(parts) and total > 0 else None
    return linear and ratios.scaled(linear, total / linear.ratio)


def _comparable(rows: Sequence[Row], scope: str) -> Tuple[List[Times], bool]:
    """Return (times of the rows, whether other load remains), without rounds beside other load where enough others are
    left."""
    loaded = {name for row in rows for name in row.loaded_rounds.get(scope, ())}
    sides, beside_load = ratios.without_load([_times(row, scope) for row in rows], loaded)
    return [dict(side) for side in sides], beside_load


def _control(baseline: Row, row: Row, rows: Sequence[Row], scope: str) -> Optional[Tuple[Row, Row]]:
    """Return two rows of one loss from one run: the first under the baseline's torch, the second under the row's."""
    fitting = [
        each
        for each in rows
        if each.is_comparable and each.kind == row.kind and each.run_id == row.run_id == baseline.run_id
        if each.round_medians_ms.get(scope)
    ]
    pairs = [
        (here, control)
        for here in fitting
        for control in fitting
        if (here.torch, control.torch) == (baseline.torch, row.torch)
        and here.loss == control.loss
        and control is not row
    ]
    return min(pairs, key=lambda pair: pair[1].name, default=None)


def _times(row: Row, scope: str) -> Times:
    return row.round_medians_ms.get(scope) or {}


def _product(sides: Sequence[Times], powers: Sequence[float]) -> Times:
    """Return the product of the sides, each to its power, over the rounds and batches that all of them have."""
    first, *others = sides
    return {
        name: {
            batch: math.prod(side[name][batch] ** power for side, power in zip(sides, powers))
            for batch in batches
            if all(batch in side[name] for side in others)
        }
        for name, batches in first.items()
        if all(name in side for side in others)
    }


def _ratio(before: Times, after: Times, baseline: Row, row: Row, confidence: float) -> Tuple[Optional[Ratio], bool]:
    first, other = (
        {name: {batch: [median] for batch, median in batches.items()} for name, batches in rounds.items()}
        for rounds in (before, after)
    )
    return ratios.ratio(first, other, baseline.run_id == row.run_id, confidence, row.padding)


def _size(ratio: Optional[Ratio]) -> float:
    return ratio.ratio if ratio else math.inf


def rank_times(group: Sequence[Row]) -> None:
    """Set `against_fastest` of the rows of one configuration by the step, or by the loss for a row without a step."""
    for row in group:
        row.against_fastest = row.loss_against_fastest = None
    for kind in dict.fromkeys(row.kind for row in group):
        of_kind = [row for row in group if row.kind == kind]
        for standing in standings(of_kind, "loss"):
            standing.row.against_fastest = standing.row.loss_against_fastest = standing
        for standing in standings(of_kind, "step"):
            standing.row.against_fastest = standing


def drifts(rows: Sequence[Row]) -> List[Tuple[Standing, ratios.Drift]]:
    """Return (standing, drift) of the rows whose ratio surely changes along the rounds of the run.

    The intervals hold together for all rows that were compared.
    """
    standings = [row.against_fastest for row in rows if row.against_fastest]
    compared = [standing for standing in standings if standing.paired and standing.by_round]
    confidence = statistics.confidence_of_each(len(compared))
    drifts = [(standing, ratios.drift(standing.by_round, confidence)) for standing in compared]
    return [(standing, drift) for standing, drift in drifts if drift and drift.is_sure]
