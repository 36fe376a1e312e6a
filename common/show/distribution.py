"""Draw how the samples of each loss are distributed: a lane each, with the density of its times and a tick at their
median."""

from __future__ import annotations

import math
from typing import List, Optional, Sequence, Tuple

from common.analysis.row import Row
from common.core import statistics
from common.core.text import number
from common.present import scales
from common.present.style import INK, Figure, Plotly, Trace, axis_of, color, lanes, layout, points, shown
from common.present.table import Cell, Table, measured, tabulated

FEWEST = 20  # samples: of fewer a density shows little but its own width
LANE = 62  # pixels
BOTTOM, HIGHEST = 0.4, 0.45  # of a lane: the foot of a density below the lane's middle, and its height
MOST = 60  # samples of a lane that are drawn, evenly spaced among the sorted ones
STEPS = 32  # points of a density


def of_samples(rows: Sequence[Row]) -> Optional[Figure]:
    """Draw a density for each row with enough samples of its step, or of its loss where no step was timed; return None
    where no row has enough."""
    timed = [(row, [sample.ms for sample in row.of_scope(row.scope)]) for row in rows]
    sampled = [(row, times) for row, times in timed if len(times) >= FEWEST and min(times) > 0]
    if not sampled:
        return None
    sampled.sort(key=lambda pair: statistics.median(pair[1]))
    span = scales.span([time for _, times in sampled for time in times])
    data: List[Trace] = []
    names = []
    for lane, (row, times) in enumerate(sampled):
        data += _lane(row, times, lane, span.logarithmic)
        names.append(f"{shown(row.marked)}  <b>{number(statistics.median(times), 3)} ms</b>  {len(times)} samples")
    few = [row.label for row, times in timed if times and len(times) < FEWEST]
    caption = (
        "Dots: the samples; shape: how dense they are; tick: their median. Batches differ in size, so a wide shape is "
        "not noise alone: Samples over time shows each sample against its own batch."
    )
    if few:
        caption += f" Not drawn, with fewer than {FEWEST} samples: {', '.join(few)}."
    title = "Distribution of the samples"
    words = [f"{row.label} {' to '.join(number(end, 3) for end in _middle(times))} ms" for row, times in sampled]
    return Figure(
        "distribution",
        title,
        caption,
        f"{title}, 20th to 80th percentile: {'; '.join(words)}",
        data,
        layout(LANE * len(sampled) + 64, None, **lanes(names, LANE, 6), xaxis=axis_of("ms", span)),
        _table(sampled, title),
    )


def _middle(times: Sequence[float]) -> List[float]:
    return [statistics.quantile(times, part) for part in (0.2, 0.8)]


def _lane(row: Row, times: Sequence[float], lane: int, logarithmic: bool) -> List[Trace]:
    """Return the area under the density with the samples at its foot, and the tick at the median."""
    bottom = -lane - BOTTOM
    curve = density(times, logarithmic)
    highest = max(height for _, height in curve)
    edge = [(time, bottom + HIGHEST * height / highest) for time, height in curve]
    outline = [(edge[0][0], bottom), *edge, (edge[-1][0], bottom)]
    tint = color(row.look)
    fill: Plotly = {"mode": "lines", "line": {"width": 1, "color": tint}, "fill": "toself", "fillcolor": tint + "88"}
    ordered = sorted(times)
    drawn = ordered[:: math.ceil(len(ordered) / MOST)]
    spots = {"symbol": "circle", "size": 4, "color": tint}
    median = statistics.median(times)
    tick: Plotly = {"mode": "lines", "line": {"width": 2, "color": INK, "dash": "solid"}}
    hover = f"median {number(median, 3)} ms<extra>{shown(row.marked)}</extra>"
    return [
        points(row.marked, outline, {}, showlegend=False, **fill),
        points(row.marked, [(time, bottom) for time in drawn], spots, "%{x:.4g} ms", showlegend=False),
        points(row.marked, [(median, bottom), (median, bottom + HIGHEST)], {}, hover, showlegend=False, **tick),
    ]


def density(times: Sequence[float], logarithmic: bool) -> List[Tuple[float, float]]:
    """Return (time, density) at STEPS times, by Gaussian kernels of Silverman's width; over logarithms for a
    logarithmic axis."""
    values = [math.log(time) for time in times] if logarithmic else list(times)
    low, high = (statistics.quantile(values, part) for part in (0.25, 0.75))
    middle = statistics.mean(values)
    deviation = math.sqrt(statistics.mean([(value - middle) ** 2 for value in values]))
    spread = min([each for each in (deviation, (high - low) / 1.34) if each > 0], default=0.0)
    width = max(0.9 * spread * len(values) ** -0.2, 1e-3 * (abs(middle) or 1.0))
    first, last = min(values) - 2 * width, max(values) + 2 * width
    grid = [first + (last - first) * step / (STEPS - 1) for step in range(STEPS)]
    curve = [sum(math.exp(-0.5 * ((at - value) / width) ** 2) for value in values) for at in grid]
    scale = [math.exp(at) if logarithmic else at for at in grid]
    return list(zip(scale, curve))


def _table(sampled: Sequence[Tuple[Row, Sequence[float]]], title: str) -> Table:
    cells = []
    for row, times in sampled:
        parts = {"median ms": 0.5, "p20 ms": 0.2, "p80 ms": 0.8}
        values = {name: measured(statistics.quantile(times, part), row.results) for name, part in parts.items()}
        ends = {"least ms": measured(min(times), row.results), "most ms": measured(max(times), row.results)}
        cells.append(
            {"implementation": Cell(row.label), "samples": measured(len(times), row.results), **values, **ends}
        )
    return tabulated("distribution", title, cells)
