"""Rows of one configuration against the fastest of their kind: a ratio of times, its interval and a verdict.

Kinds are ranked apart: an approximation that is faster is not the faster loss.  Only rows that are ok are compared, and
only over the batches that all of these have, since a mean that skips the batches on which one died makes it look fast.
Ratios are paired by batch, and by round where the rounds are of one run.
"""

from __future__ import annotations

import math
from typing import Any, Dict, List, NamedTuple, Optional, Sequence

from common.results import statistics
from common.results.statistics import Ratio

Row = Dict[str, Any]


class Standing(NamedTuple):
    """One row against the fastest.  ratio: how many times the fastest's time it takes; None where they have no batch or
    round in common, and for the fastest itself.  paired: their rounds ran beside each other."""

    row: Row
    ratio: Optional[Ratio]
    paired: bool


def standings(rows: Sequence[Row], scope: str) -> List[Standing]:
    """Those rows that are ok and have times of the scope: the fastest first, then the others by their ratio."""
    timed = [row for row in rows if row["status"] == "ok" and row["round_medians_ms"].get(scope)]
    if not timed:
        return []
    common = set.intersection(*(set(batches) for row in timed for batches in row["round_medians_ms"][scope].values()))
    times = {id(row): _samples(row, scope, common) for row in timed}

    def against(baseline: Row, row: Row) -> Standing:
        together = baseline["run_id"] == row["run_id"]
        return Standing(row, *statistics.ratio(times[id(baseline)], times[id(row)], together))

    fastest = min(timed, key=lambda row: _size(against(timed[0], row).ratio))
    others = [against(fastest, row) for row in timed if row is not fastest]
    return [Standing(fastest, None, True), *sorted(others, key=lambda standing: _size(standing.ratio))]


def over(baseline: Row, row: Row, scope: str) -> Optional[Ratio]:
    """How many times the time of `baseline` a row takes, over the batches that both have; None where there are none."""
    found = [one["round_medians_ms"].get(scope) or {} for one in (baseline, row)]
    common = set.intersection(*(set(batches) for rounds in found for batches in (rounds.values() or [()])))
    sides = [_samples(one, scope, common) for one in (baseline, row)]
    return statistics.ratio(*sides, baseline["run_id"] == row["run_id"])[0] if common else None


def _samples(row: Row, scope: str, common: set) -> Dict[str, Dict[str, List[float]]]:
    """round -> batch -> its median as the only sample, over the batches in `common`."""
    rounds = row["round_medians_ms"][scope]
    return {
        name: {batch: [median] for batch, median in batches.items() if batch in common}
        for name, batches in rounds.items()
    }


def _size(ratio: Optional[Ratio]) -> float:
    return ratio.ratio if ratio else math.inf


def verdict(ratio: Optional[Ratio]) -> str:
    """ "faster", "slower", "same" (within 2%) or "unclear"."""
    return statistics.verdict(ratio.low, ratio.high, statistics.TOLERANCE) if ratio else "unclear"


def fill(group: Sequence[Row]) -> None:
    """Set "against_fastest" of the rows of one configuration: of the step, or of the loss where a row has no step."""
    for row in group:
        row["against_fastest"] = {}
    for kind in dict.fromkeys(row["kind"] for row in group):
        of_kind = [row for row in group if row["kind"] == kind]
        for scope in ("loss", "step"):  # where both are there the step stays
            found = standings(of_kind, scope)
            for standing in found:
                standing.row["against_fastest"] = _described(standing, found[0].row, scope)


def _described(standing: Standing, fastest: Row, scope: str) -> Dict[str, Any]:
    ratio = standing.ratio
    is_fastest = standing.row is fastest
    return {
        "scope": scope,
        "fastest": fastest["name"],
        "is_fastest": is_fastest,
        "ratio": 1.0 if is_fastest else ratio and ratio.ratio,
        "low": ratio and ratio.low,
        "high": ratio and ratio.high,
        "verdict": "fastest" if is_fastest else verdict(ratio),
        "paired": standing.paired,
        "rounds": len(ratio.new) if ratio else None,
        "batches": ratio.batches if ratio else None,
    }
