"""Choose the plots for runs of one configuration."""

from __future__ import annotations

from dataclasses import replace
from typing import Dict, List, Optional, Sequence, Set

from common.analysis.row import Row
from common.present.style import Figure
from common.show import bars, batches, distribution, over_time, ratios, trade_off

#: Keys of the figures that are seen at once, else the first of its chapter; the others are opened.
SHOWN: Set[str] = {"ratios", "distribution", "time-memory"}


def figures(rows: Sequence[Row]) -> List[Figure]:
    """Return the plots that have data, in the order of the page: the most important of each chapter first."""
    chapters: Dict[str, List[Optional[Figure]]] = {
        "Speed": [
            ratios.over_fastest(rows),
            distribution.of_samples(rows),
            *bars.step_times(rows),
            *batches.over_batches(rows),
            over_time.drift(rows),
        ],
        "Memory": [trade_off.time_and_memory(rows), *bars.peak_memories(rows), *over_time.memory_within(rows)],
    }
    drawn: List[Figure] = []
    for chapter, every in chapters.items():
        known = [figure for figure in every if figure is not None]
        shown = SHOWN & {figure.key for figure in known} or {figure.key for figure in known[:1]}
        for figure in known:
            on_paper = figure.key != "distribution"
            drawn.append(replace(figure, chapter=chapter, folded=figure.key not in shown, on_paper=on_paper))
    return drawn
