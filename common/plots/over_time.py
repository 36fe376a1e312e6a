"""What changes with time: samples over the run, and memory within a step."""

from __future__ import annotations

import math
from typing import Any, Dict, List, Optional, Sequence

from common.analysis.groups import apart
from common.analysis.row import Row, Sample
from common.core import statistics
from common.core.table import Cell, measured, tabulated
from common.core.text import gathered, number
from common.plots.style import INK, Figure, Trace, axis, color, dash, lanes, layout, marker, points, shown, symbol

LANE = 130  # pixels
MOST_SAMPLES = 1500  # drawn for one implementation; flagged ones are always drawn
FARTHEST = 0.34  # of a lane, up or down; the rest is for its name


def drift(rows: Sequence[Row]) -> Optional[Figure]:
    """Each sample relative to the median of its batch, in the order taken, one lane for each implementation."""
    sampled = [(row, row.of_scope(row.scope)) for row in rows]
    sampled = [(row, samples) for row, samples in sampled if samples]
    if not sampled:
        return None
    relative = [_relative(samples) for _, samples in sampled]
    widest = max(max(abs(value - 1) for value in values) for values in relative)
    scale = FARTHEST / max(widest, 0.05)
    data: List[Trace] = []
    shapes, names = [], []
    for place, ((row, samples), values) in enumerate(zip(sampled, relative)):
        data.append(_samples(row.label, place, samples, values, scale))
        shapes += [_line(place, 0, 1), *(_line(place, at, at) for at in _round_ends(samples))]
        names.append(f"{shown(row.label)}  <b>{_range(values)}</b>  in {number(_duration(samples), 3)} s")
    frame = lanes(names, LANE, int(LANE * FARTHEST) + 6)
    mark = next((step for step in (10, 5, 2, 1, 0.5, 0.2, 0.1, 0.05) if step <= widest), 0.05)
    places = [(place, change) for place in range(len(sampled)) for change in (-mark, 0, mark)]
    tick_values, tick_words = zip(*((-place + change * scale, _percent(change)) for place, change in places))
    frame["yaxis"].update(showticklabels=True, tickvals=tick_values, ticktext=tick_words, rangemode="normal")
    x = axis("of the timed work", tickformat=".0%")
    return Figure(
        "samples",
        "Samples over time",
        "Each timed sample against the median of its batch, in the order taken; dashed lines part the rounds (fresh "
        "processes). A slope is drift or throttling, a step another load. Crosses ran beside other load. "
        "Warm-up is left out of the samples but not of the time, of which each lane shows its own, from begin to end.",
        "Spread of the samples around the median of their batch: "
        + "; ".join(f"{row.label} {_range(values)}" for (row, _), values in zip(sampled, relative)),
        data,
        layout(LANE * len(sampled) + 90, **frame, shapes=shapes, xaxis=x),
        tabulated("samples", "Samples over time", [_cells(*each, of) for each, of in zip(sampled, relative)]),
    )


def _relative(samples: Sequence[Sample]) -> List[float]:
    medians = {batch: statistics.median(ms) for batch, ms in gathered((one.batch, one.ms) for one in samples).items()}
    return [sample.ms / medians[sample.batch] for sample in samples]


def _range(values: Sequence[float]) -> str:
    return f"{_percent(min(values) - 1)} to {_percent(max(values) - 1)}"


def _percent(change: float) -> str:
    return f"{change:+.0%}".replace("-", "\u2212") if change else "0"


def _samples(label: str, place: int, samples: Sequence[Sample], values: Sequence[float], scale: float) -> Trace:
    stride, whole = math.ceil(len(samples) / MOST_SAMPLES), _duration(samples)
    pairs = enumerate(zip(samples, values))
    drawn = [(sample, value) for at, (sample, value) in pairs if at % stride == 0 or sample.flagged]
    flags = [sample.flagged for sample, _ in drawn]
    looks: Dict[str, Any] = {"opacity": 1, "color": color(place), "size": [9 if flagged else 6 for flagged in flags]}
    looks["symbol"] = ["x-thin-open" if flagged else symbol(place) for flagged in flags]
    looks["line"] = {"width": [2 if flagged else 0.5 for flagged in flags], "color": INK}
    at = [(sample.at_s / whole, -place + (value - 1) * scale) for sample, value in drawn]
    hover = "%{customdata[0]:.4g} ms (%{customdata[1]}), round %{customdata[2]}<extra></extra>"
    told = [[sample.ms, f"{value - 1:+.1%}", sample.round] for sample, value in drawn]
    return points(label, at, looks, hover, customdata=told)


def _line(place: int, begin: float, end: float) -> Dict[str, Any]:
    """Along the median of a lane; across the lane where it begins and ends at the same time."""
    across = FARTHEST if begin == end else 0
    ends = {"x0": begin, "x1": end, "y0": -place - across, "y1": -place + across}
    line = {"width": 1, "color": INK, "dash": "dash" if across else "solid"}
    return {"type": "line", "layer": "below", **ends, "line": line, "opacity": 0.6}


def _duration(samples: Sequence[Sample]) -> float:
    """Seconds of timed work up to the last of these samples."""
    return max(sample.at_s for sample in samples)


def _round_ends(samples: Sequence[Sample]) -> List[float]:
    pairs, whole = zip(samples, samples[1:]), _duration(samples)
    return [(one.at_s + two.at_s - two.ms / 1e3) / 2 / whole for one, two in pairs if one.round != two.round]


def _cells(row: Row, samples: Sequence[Sample], values: Sequence[float]) -> Dict[str, Cell]:
    third = max(len(values) // 3, 1)
    last_to_first = statistics.median(values[-third:]) / statistics.median(values[:third])
    ratios = {"lowest %": min(values), "highest %": max(values), "last third to first %": last_to_first}
    percents = {title: 100 * (ratio - 1) for title, ratio in ratios.items()}
    found = {"implementation": Cell(row.label), "samples": measured(len(values), row.results)}
    found.update((title, Cell(f"{value:+.1f}", value, row.results)) for title, value in percents.items())
    return {**found, "beside other load": measured(sum(sample.flagged for sample in samples), row.results)}


def memory_within(rows: Sequence[Row]) -> List[Figure]:
    """What is allocated within one step, one line for each implementation."""
    return [_memory_within(some, key, whose) for key, whose, some in apart([row for row in rows if row.curve])]


def _memory_within(rows: Sequence[Row], key: str, whose: str) -> Figure:
    curves = [(row, row.curve) for row in rows if row.curve]
    data: List[Trace] = []
    for place, (row, curve) in enumerate(curves):
        line = {"color": color(place), "width": 2.2, "shape": "hv", "dash": dash(place)}
        together: Dict[str, Any] = {"legendgroup": str(place), "line": line}
        hover = "%{x:.4g} ms: %{y:.4g} MB"
        data.append(points(row.marked, zip(curve.ms, curve.mb), {}, hover, mode="lines", showlegend=False, **together))
        top = [(curve.ms[curve.mb.index(curve.peak_mb)], curve.peak_mb)]
        hover = "peak: %{y:.4g} MB at %{x:.4g} ms"
        data.append(points(row.marked, top, marker(place, 11), hover, mode="lines+markers", **together))
    cells = []
    for row, curve in curves:
        trace = row.folder / curve.file
        stages = ", ".join(f"{stage} {number(mb, 3)}" for stage, mb in curve.stage_mb.items()) or "-"
        cell = {"implementation": Cell(row.label), "ProfilerStep": Cell(f"#{curve.step}", curve.step, trace)}
        cell.update({"peak MB": measured(curve.peak_mb, trace), "step ms": measured(curve.ms[-1], trace)})
        cells.append({**cell, "highest MB in each stage": Cell(stages)})
    return Figure(
        f"memory-within{key}",
        f"Memory within a step{whose}",
        "What is allocated above the step's start, in the last step of the first trace; the symbol is the peak. "
        "Profiled: times have the profiler's own cost in them.",
        f"Highest memory within a step{whose}: "
        + "; ".join(f"{row.label} {number(curve.peak_mb)} megabytes" for row, curve in curves),
        data,
        layout(420, 200, xaxis=axis("ms since the step began"), yaxis=axis("MB", rangemode="normal")),
        tabulated(f"memory-within{key}", "Memory within a step", cells),
    )
