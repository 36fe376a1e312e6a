"""All plots of the runs of one configuration."""

from __future__ import annotations

from typing import List, Sequence

from common.analysis.row import Row
from common.plots import bars, batches, over_time, trade_off
from common.present.style import Figure


def figures(rows: Sequence[Row]) -> List[Figure]:
    """Return the plots there is data for, in the order of the page: the most important first."""
    drawn = [trade_off.time_and_memory(rows), *batches.over_batches(rows)]
    drawn += [*bars.step_times(rows), *bars.peak_memories(rows), *over_time.memory_within(rows), over_time.drift(rows)]
    return [figure for figure in drawn if figure is not None]
