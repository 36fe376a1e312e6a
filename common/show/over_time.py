"""Draw changes with time: samples over the run, and memory within a step."""

from __future__ import annotations

import math
from collections import Counter
from typing import Dict, List, Optional, Sequence

from common.analysis.groups import apart
from common.analysis.parts import Sample
from common.analysis.row import Row
from common.core import statistics
from common.core.text import gathered, number
from common.present.style import INK, Figure, Plotly, Trace, axis, color, lanes, layout, marker, points, shown, symbol
from common.present.table import Cell, measured, tabulated
from common.traces.memory_curve import Curve

LANE = 130  # pixels
MOST_SAMPLES = 1500  # drawn for one implementation; flagged ones are always drawn
FARTHEST = 0.34  # of a lane, up or down; the rest is for its name
MOST = 0.3  # of the median of its batch: what is farther from it is an arrow
SMALL = 170  # pixels: the height of one of several small plots


def drift(rows: Sequence[Row]) -> Optional[Figure]:
    """Draw each sample relative to the median of its batch, in the order taken, a lane for each implementation."""
    timed = [(row, row.of_scope(row.scope)) for row in rows]
    sampled = [(row, samples) for row, samples in ((row, _repeated(samples)) for row, samples in timed) if samples]
    if not sampled:
        return None
    single = [row.label for row, samples in timed if samples and row not in [kept for kept, _ in sampled]]
    relative = [_relative(samples) for _, samples in sampled]
    farthest = max(max(abs(value - 1) for value in values) for values in relative)
    widest = min(farthest, MOST)
    scale = FARTHEST / max(widest, 0.05)
    data: List[Trace] = []
    shapes, names = [], []
    for lane, ((row, samples), values) in enumerate(zip(sampled, relative)):
        data.append(_samples(row, lane, samples, values, scale))
        shapes += [_line(lane, 0, 1), *(_line(lane, at, at) for at in _round_ends(samples))]
        names.append(f"{shown(row.label)}  <b>{_range(values)}</b>  in {number(_duration(samples), 3)} s")
    frame = lanes(names, LANE, int(LANE * FARTHEST) + 6)
    mark = next((step for step in (MOST, 0.2, 0.1, 0.05) if step <= widest), 0.05)
    ticks = [(lane, change) for lane in range(len(sampled)) for change in (-mark, 0, mark)]
    notes = ""
    if farthest > MOST:
        notes += f" Arrows: farther than {MOST:.0%}; the words above a lane have the whole range."
    if single:
        notes += f" Not drawn, with one sample of each batch: {', '.join(single)}."
    tick_values, tick_words = zip(*((-lane + change * scale, _percent(change)) for lane, change in ticks))
    frame["yaxis"].update(showticklabels=True, tickvals=tick_values, ticktext=tick_words, rangemode="normal")
    x = axis("of the timed work", tickformat=".0%")
    return Figure(
        "samples",
        "Samples over time",
        "Each timed sample against the median of its batch, where that has several, in the order taken; dashed lines "
        "part the rounds (fresh processes). A slope is drift or throttling, a step another load. Crosses ran beside "
        "other load. Warm-up is left out of the samples but not of the time, of which each lane shows its own, from "
        f"begin to end.{notes}",
        "Spread of the samples around the median of their batch: "
        + "; ".join(f"{row.label} {_range(values)}" for (row, _), values in zip(sampled, relative)),
        data,
        layout(LANE * len(sampled) + 90, **frame, shapes=shapes, xaxis=x),
        tabulated("samples", "Samples over time", [_cells(*each, of) for each, of in zip(sampled, relative)]),
    )


def _repeated(samples: Sequence[Sample]) -> List[Sample]:
    """Return the samples of batches with several samples; a single sample always is its batch's median."""
    counts = Counter(sample.batch for sample in samples)
    return [sample for sample in samples if counts[sample.batch] > 1]


def _relative(samples: Sequence[Sample]) -> List[float]:
    medians = {
        batch: statistics.median(ms) for batch, ms in gathered((sample.batch, sample.ms) for sample in samples).items()
    }
    return [sample.ms / medians[sample.batch] for sample in samples]


def _range(values: Sequence[float]) -> str:
    return f"{_percent(min(values) - 1)} to {_percent(max(values) - 1)}"


def _percent(change: float) -> str:
    return f"{change:+.0%}".replace("-", "\u2212") if change else "0"


def _samples(row: Row, lane: int, samples: Sequence[Sample], values: Sequence[float], scale: float) -> Trace:
    stride, whole = math.ceil(len(samples) / MOST_SAMPLES), _duration(samples)
    pairs = enumerate(zip(samples, values))
    drawn = [(sample, value) for at, (sample, value) in pairs if at % stride == 0 or sample.flagged]
    flags = [sample.flagged for sample, _ in drawn]
    symbols = [_symbol(row, *each) for each in drawn]
    sizes = [9 if sample.flagged or abs(value - 1) > MOST else 6 for sample, value in drawn]
    marker: Plotly = {"opacity": 1, "color": color(row.look), "size": sizes, "symbol": symbols}
    marker["line"] = {"width": [2 if flagged else 0.5 for flagged in flags], "color": INK}
    shares = [min(max(value - 1, -MOST), MOST) for _, value in drawn]
    at = [(sample.at_s / whole, -lane + share * scale) for (sample, _), share in zip(drawn, shares)]
    hover = "%{customdata[0]:.4g} ms (%{customdata[1]}), round %{customdata[2]}<extra></extra>"
    told = [[sample.ms, f"{value - 1:+.1%}", sample.round] for sample, value in drawn]
    return points(row.label, at, marker, hover, customdata=told)


def _symbol(row: Row, sample: Sample, value: float) -> str:
    if abs(value - 1) > MOST:
        return "triangle-up" if value > 1 else "triangle-down"
    return "x-thin-open" if sample.flagged else symbol(row.look)


def _line(lane: int, begin: float, end: float) -> Plotly:
    """Return a line along the median of a lane; one across the lane where it begins and ends at once."""
    across = FARTHEST if begin == end else 0
    ends = {"x0": begin, "x1": end, "y0": -lane - across, "y1": -lane + across}
    line = {"width": 1, "color": INK, "dash": "dash" if across else "solid"}
    return {"type": "line", "layer": "below", **ends, "line": line, "opacity": 0.6}


def _duration(samples: Sequence[Sample]) -> float:
    """Return the seconds of timed work up to the last of these samples."""
    return max(sample.at_s for sample in samples)


def _round_ends(samples: Sequence[Sample]) -> List[float]:
    pairs, whole = zip(samples, samples[1:]), _duration(samples)
    return [(last.at_s + first.at_s - first.ms / 1e3) / 2 / whole for last, first in pairs if last.round != first.round]


def _cells(row: Row, samples: Sequence[Sample], values: Sequence[float]) -> Dict[str, Cell]:
    third = max(len(values) // 3, 1)
    last_to_first = statistics.median(values[-third:]) / statistics.median(values[:third])
    ratios = {"lowest %": min(values), "highest %": max(values), "last third to first %": last_to_first}
    percents = {title: 100 * (ratio - 1) for title, ratio in ratios.items()}
    cells = {"implementation": Cell(row.label), "samples": measured(len(values), row.results)}
    cells.update((title, Cell(f"{value:+.1f}", value, row.results)) for title, value in percents.items())
    return {**cells, "beside other load": measured(sum(sample.flagged for sample in samples), row.results)}


def memory_within(rows: Sequence[Row]) -> List[Figure]:
    """Draw the allocated memory within one step, a small plot for each implementation."""
    return [_memory_within(some, key, whose) for key, whose, some in apart([row for row in rows if row.curve])]


def _memory_within(rows: Sequence[Row], key: str, whose: str) -> Figure:
    curves = [(row, row.curve) for row in rows if row.curve]
    lowest, highest = min(0.0, *(min(curve.mb) for _, curve in curves)), max(curve.peak_mb for _, curve in curves)
    up = axis("MB", range=[lowest, 1.1 * highest if highest > 0 else 1])
    parts = [_small(row, curve, up, f"memory-within{key}-part{at}") for at, (row, curve) in enumerate(curves)]
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
        "What is allocated above the step's start, in the last step of the first trace, all to one scale of MB; the "
        "symbol is the peak. Profiled: times have the profiler's own cost in them.",
        f"Highest memory within a step{whose}: "
        + "; ".join(f"{row.label} {number(curve.peak_mb)} megabytes" for row, curve in curves),
        [],
        {},
        tabulated(f"memory-within{key}", "Memory within a step", cells),
        parts=parts,
    )


def _small(row: Row, curve: Curve, up: Plotly, key: str) -> Figure:
    line = {"color": color(row.look), "width": 2.2, "shape": "hv", "dash": "solid"}
    top = [(curve.ms[curve.mb.index(curve.peak_mb)], curve.peak_mb)]
    data = [
        points(row.marked, zip(curve.ms, curve.mb), {}, "%{x:.4g} ms: %{y:.4g} MB", mode="lines", line=line),
        points(row.marked, top, marker(row.look, 10), "peak: %{y:.4g} MB at %{x:.4g} ms"),
    ]
    caption = f"{number(curve.peak_mb)} MB at {number(top[0][0], 3)} of {number(curve.ms[-1], 3)} ms"
    frame = layout(SMALL, xaxis=axis("ms", nticks=5), yaxis={**up, "nticks": 4})
    return Figure(key, row.marked, caption, f"{row.marked}: {caption}", data, frame, None, small=True)
