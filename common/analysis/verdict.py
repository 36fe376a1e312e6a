"""What people came for, of rows of one configuration: the fastest loss, the smallest, the fastest approximation.

Times as in the tables (see ranking.py): a loss is surely the fastest when every other of its torch is "slower".  Memory
and largest batches are measured in one process and have no interval: there a margin decides.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Dict, Hashable, List, NamedTuple, Optional, Sequence, Tuple

from common.analysis import conformance, ranking
from common.analysis.row import Row
from common.core import ratios, statistics
from common.core.ratios import Ratio

#: Peaks that differ by less count as equal: the two ways to measure them differ as much.
MEMORY_MARGIN = 0.02
#: Largest batches likewise: the search stops when it knows them to 5%.
SIZE_MARGIN = 0.05
#: Kinds of exact rows; None: not known, of traces alone.
EXACT = ("exact", None)


@dataclass(frozen=True)
class Pick:
    """row: the best; rivals: those whose difference from it is not certain, the nearest first; next: the first rival,
    or else the first that is worse; times: how many times the best's time or peak (largest batch) that takes (has).
    Of an approximation, over and memory: its time and its peak over those of the fastest exact row; None where they
    have nothing in common.  Of trains_fastest, over: the next one's time.  caveats: what to beware of in it, None where
    no conformance matrix judged it.  withheld: its rounds, or a rival's, ran beside so much other load that none is the
    fastest for sure: then there is no `times` and no `over`."""

    row: Row
    rivals: List[Row] = field(default_factory=list)
    next: Optional[Row] = None
    times: Optional[float] = None
    over: Optional[Ratio] = None
    memory: Optional[float] = None
    caveats: Optional[List[str]] = None
    withheld: bool = False

    @property
    def sure(self) -> bool:
        return not self.rivals and not self.withheld


class Verdict(NamedTuple):
    """None where there is none, or it was not measured."""

    fastest: Optional[Pick]
    smallest: Optional[Pick]
    approximate: Optional[Pick]


def of(rows: Sequence[Row], folders: Sequence[Path] = ()) -> Verdict:
    """Of rows of one group (see groups.py).  folders: where a conformance matrix may be, besides docs/."""
    quick, small, approximate = fastest(rows, EXACT), smallest(rows), fastest(rows, ("pruned",))
    if approximate:
        approximate = replace(approximate, caveats=conformance.caveats(approximate.row.loss, folders))
    if approximate and quick:
        over = ranking.over(quick.row, approximate.row, approximate.row.against_fastest["scope"])
        peaks = approximate.row.peak_mb, quick.row.peak_mb
        approximate = replace(approximate, over=over, memory=peaks[0] / peaks[1] if peaks[0] and peaks[1] else None)
    if quick:
        quick = replace(quick, caveats=conformance.caveats(quick.row.loss, folders))
    return Verdict(quick, small, approximate)


def fastest(rows: Sequence[Row], kinds: Sequence[Optional[str]] = EXACT) -> Optional[Pick]:
    """Of rows of these kinds that are ok, as compared with the fastest; None where nothing was timed."""
    rows = _ok(rows, kinds)
    firsts = [row for row in rows if row.against_fastest.get("is_fastest")]
    if not firsts:
        return None
    best = min(firsts, key=lambda row: row.against_fastest["scope"] != "step")
    others = [row for row in rows if row.against_fastest.get("fastest") == best.name and row is not best]
    others = [row for row in others if row.over_fastest is not None and not row.against_fastest["other_torch"]]
    others.sort(key=lambda row: row.over_fastest or math.inf)
    keys = ("verdict", "ratio", "low")
    rivals = [row for row in others if ranking.may_be_as_fast(*map(row.against_fastest.__getitem__, keys))]
    first = next(iter(rivals or others), None)
    if best.against_fastest["beside_load"]:
        return Pick(best, rivals, first, withheld=True)
    if first and first.against_fastest["beside_load"]:  # far behind, by a ratio that other load made
        first = next((row for row in others if not row.against_fastest["beside_load"]), None)
    return Pick(best, rivals, first, first.over_fastest if first else None)


def smallest(rows: Sequence[Row], kinds: Sequence[Optional[str]] = EXACT) -> Optional[Pick]:
    """By the highest peak over the batches."""
    return _by_size([(row, peak) for row in _ok(rows, kinds) if (peak := row.peak_mb)], MEMORY_MARGIN)


def largest(rows: Sequence[Row], kinds: Sequence[Optional[str]] = EXACT) -> Optional[Pick]:
    """Of --find-largest."""
    return _by_size([(row, size) for row in _ok(rows, kinds) if (size := row.largest["size"])], SIZE_MARGIN, most=True)


def trains_fastest(rows: Sequence[Row], kinds: Sequence[Optional[str]] = EXACT) -> Optional[Pick]:
    """Of --find-largest: by utterances per second, each at its own largest size; None where none was timed, or not all
    over the same utterances."""
    timed = ranking.of_one_torch([row for row in _ok(rows, kinds) if row.largest["utterances_per_second"]])
    if not timed or any(row.largest["timed_over"] != timed[0].largest["timed_over"] for row in timed):
        return None
    best = max(timed, key=lambda row: float(row.largest["utterances_per_second"]))
    found = [(row, ratio) for row in timed if row is not best and (ratio := _slowdown(best, row))]
    found.sort(key=lambda each: each[1].ratio)
    rivals = [(row, ratio) for row, ratio in found if statistics.verdict(ratio.low, ratio.high) != "slower"]
    if any(row.is_beside_load(row.largest["scope"]) for row in timed):
        return Pick(best, [row for row, _ in rivals], withheld=True)
    first, over = next(iter(rivals or found), (None, None))
    return Pick(best, [row for row, _ in rivals], first, over and over.ratio, over)


def _ok(rows: Sequence[Row], kinds: Sequence[Optional[str]]) -> List[Row]:
    return [row for row in rows if row.is_comparable and row.kind in kinds]


def _slowdown(best: Row, other: Row) -> Optional[Ratio]:
    """How many times the time of an utterance the other takes.  Rounds are paired within one run only."""
    compare = ratios.paired_ratio if best.run_id == other.run_id else ratios.independent_ratio
    loaded = {name for row in (best, other) for name in row.loaded_rounds.get(row.largest["scope"], ())}
    (before, after), _ = ratios.without_load([_rounds(best), _rounds(other)], loaded)
    return compare(before, after)


def _rounds(row: Row) -> Dict[Hashable, Dict[Hashable, List[float]]]:
    """round -> the one thing compared -> seconds of an utterance."""
    rates = row.largest["utterances_per_second_rounds"]
    return {name: {"utterance": [1 / rate]} for name, rate in rates.items()}


def _by_size(found: List[Tuple[Row, float]], margin: float, most: bool = False) -> Optional[Pick]:
    """The smallest, or with `most` the largest."""
    if not found:
        return None
    (best, size), *others = sorted(found, key=lambda each: -each[1] if most else each[1])
    rivals = [row for row, other in others if max(size, other) / min(size, other) <= 1 + margin]
    return Pick(best, rivals, *((others[0][0], others[0][1] / size) if others else ()))
