"""Rows of one configuration against the fastest of their kind: a ratio of times, its interval and a verdict.

Kinds are ranked apart: an approximation that is faster is not the faster loss.  Only rows that are ok are compared.
Ratios are over the batches that both rows have (see common.core.ratios).  The intervals of a kind hold together for all
pairs of its rows: the fastest is chosen by the same times, so any pair could have been the one that is shown.
"""

from __future__ import annotations

import math
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

from common.analysis.row import Row
from common.core import ratios, statistics
from common.core.ratios import Ratio


class Standing(NamedTuple):
    """One row against the fastest.  ratio: how many times the fastest's time it takes; None where they have no batch or
    round in common, and for the fastest itself.  paired: their rounds ran beside each other."""

    row: Row
    ratio: Optional[Ratio]
    paired: bool


def standings(rows: Sequence[Row], scope: str) -> List[Standing]:
    """Those rows that are ok and have times of the scope: the fastest first, then the others by their ratio."""
    timed = [row for row in rows if row.status == "ok" and row.round_medians_ms.get(scope)]
    if not timed:
        return []
    confidence = statistics.confidence_of_each(len(timed) * (len(timed) - 1) // 2)

    def against(baseline: Row, row: Row) -> Standing:
        return Standing(row, *_ratio(baseline, row, scope, confidence))

    counts = [len({batch for one in row.round_medians_ms[scope].values() for batch in one}) for row in timed]
    whole = [row for row, count in zip(timed, counts) if count == max(counts)]  # a few batches make none the fastest
    fastest = min(whole, key=lambda row: _size(against(whole[0], row).ratio))
    others = [against(fastest, row) for row in timed if row is not fastest]
    return [Standing(fastest, None, True), *sorted(others, key=lambda standing: _size(standing.ratio))]


def over(baseline: Row, row: Row, scope: str) -> Optional[Ratio]:
    """How many times the time of `baseline` a row takes, over the batches that both have; None where there are none."""
    return _ratio(baseline, row, scope, statistics.CONFIDENCE)[0]


def _ratio(baseline: Row, row: Row, scope: str, confidence: float) -> Tuple[Optional[Ratio], bool]:
    before, after = (
        {name: {batch: [median] for batch, median in batches.items()} for name, batches in rounds.items()}
        for rounds in (one.round_medians_ms.get(scope) or {} for one in (baseline, row))
    )
    return ratios.ratio(before, after, baseline.run_id == row.run_id, confidence, row.padding)


def _size(ratio: Optional[Ratio]) -> float:
    return ratio.ratio if ratio else math.inf


def verdict(ratio: Optional[Ratio]) -> str:
    """ "faster", "slower", "same" (within 2%) or "unclear"."""
    return statistics.verdict(ratio.low, ratio.high, statistics.TOLERANCE) if ratio else "unclear"


def rank_times(group: Sequence[Row]) -> None:
    """Set "against_fastest" of the rows of one configuration: of the step, or of the loss where a row has no step."""
    for row in group:
        row.against_fastest = {}
    for kind in dict.fromkeys(row.kind for row in group):
        of_kind = [row for row in group if row.kind == kind]
        for scope in ("loss", "step"):  # where both are there the step stays
            found = standings(of_kind, scope)
            for standing in found:
                standing.row.against_fastest = _described(standing, found[0].row, scope)


def _described(standing: Standing, fastest: Row, scope: str) -> Dict[str, Any]:
    ratio = standing.ratio
    is_fastest = standing.row is fastest
    return {
        "scope": scope,
        "fastest": fastest.name,
        "is_fastest": is_fastest,
        "ratio": 1.0 if is_fastest else ratio and ratio.ratio,
        "low": ratio and ratio.low,
        "high": ratio and ratio.high,
        "verdict": "fastest" if is_fastest else verdict(ratio),
        "paired": standing.paired,
        "rounds": len(ratio.new) if ratio else None,
        "batches": ratio.batches if ratio else None,
        "of_file": bool(ratio and ratio.of_file),
        "least": ratio and ratio.least,
        "most": ratio and ratio.most,
    }
