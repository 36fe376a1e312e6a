"""Draw changes with time, a lane for each loss: the samples over the run, and the memory within a step."""

from __future__ import annotations

import math
from collections import Counter
from typing import Dict, List, NamedTuple, Optional, Sequence

from common.analysis.row import Row
from common.analysis.times import Sample
from common.core import statistics, text
from common.present import parts, style

LANE, LOW_LANE = 130, 92  # pixels, of samples and of memory
MOST_SAMPLES = 1500  # drawn for one implementation; flagged ones are always drawn
FARTHEST = 0.34  # of a lane, up or down; the rest is for its name
MOST = 0.3  # of the median of its batch: what is farther from it is an arrow


class Lane(NamedTuple):
    row: Row
    samples: List[Sample]
    relative: List[float]

    @property
    def seconds(self) -> float:
        return max(sample.at_s for sample in self.samples)

    @property
    def range(self) -> str:
        return f"{_percent(min(self.relative) - 1)} to {_percent(max(self.relative) - 1)}"


def _percent(change: float) -> str:
    return f"{change:+.0%}".replace("-", "\u2212") if change else "0"


def _of_row(row: Row) -> Optional[Lane]:
    """Return the samples of batches that have several; a single sample always is its batch's median."""
    counts = Counter(sample.batch for sample in row.of_scope(row.scope))
    samples = [sample for sample in row.of_scope(row.scope) if counts[sample.batch] > 1]
    times = text.gathered((sample.batch, sample.ms) for sample in samples)
    medians = {batch: statistics.median(ms) for batch, ms in times.items()}
    return Lane(row, samples, [sample.ms / medians[sample.batch] for sample in samples]) if samples else None


def drift(rows: Sequence[Row]) -> Optional[parts.Figure]:
    """Draw each sample relative to the median of its batch, in the order taken."""
    sampled = [lane for lane in map(_of_row, rows) if lane]
    if not sampled:
        return None
    farthest = max(abs(value - 1) for lane in sampled for value in lane.relative)
    widest = min(farthest, MOST)
    scale = FARTHEST / max(widest, 0.05)
    data: List[parts.Plotly] = []
    shapes, names = [], []
    for at, lane in enumerate(sampled):
        data.append(_samples(lane, at, scale))
        shapes += [_line(at, 0, 1), *(_line(at, end, end) for end in _round_ends(lane))]
        names.append(f"{style.shown(lane.row.label)}  <b>{lane.range}</b>  in {text.number(lane.seconds, 3)} s")
    frame = style.lanes(names, LANE, int(LANE * FARTHEST) + 6)
    mark = next((step for step in (MOST, 0.2, 0.1, 0.05) if step <= widest), 0.05)
    ticks = [(-at + change * scale, _percent(change)) for at in range(len(sampled)) for change in (-mark, 0, mark)]
    places, words = zip(*ticks)
    frame["yaxis"].update(showticklabels=True, tickvals=places, ticktext=words, rangemode="normal")
    caption = (
        "Each sample against the median of its batch, in the order taken; dashed lines part the rounds (fresh "
        "processes). A slope is drift or throttling, a step another load. Crosses ran beside other load."
    )
    if farthest > MOST:
        caption += f" Arrows: farther than {MOST:.0%}."
    single = [row.label for row in rows if row.timed and row not in [lane.row for lane in sampled]]
    if single:
        caption += f" Not drawn, with one sample of each batch: {', '.join(single)}."
    return parts.Figure(
        "samples",
        "Samples over time",
        caption,
        "Spread of the samples around the median of their batch: "
        + "; ".join(f"{lane.row.label} {lane.range}" for lane in sampled),
        data,
        style.layout(
            LANE * len(sampled) + 90, **frame, shapes=shapes, xaxis=style.axis("of the timed work", tickformat=".0%")
        ),
        parts.tabulated("samples", "Samples over time", [_cells(lane) for lane in sampled]),
    )


def _samples(lane: Lane, at: int, scale: float) -> parts.Plotly:
    stride, look = math.ceil(len(lane.samples) / MOST_SAMPLES), lane.row.look
    pairs = enumerate(zip(lane.samples, lane.relative))
    drawn = [(sample, value - 1) for index, (sample, value) in pairs if index % stride == 0 or sample.flagged]
    symbols = [style.symbol(look)] * len(drawn)
    for index, (sample, change) in enumerate(drawn):
        if abs(change) > MOST:
            symbols[index] = "triangle-up" if change > 0 else "triangle-down"
        elif sample.flagged:
            symbols[index] = "x-thin-open"
    spots: parts.Plotly = {"opacity": 1, "color": style.color(look), "symbol": symbols}
    spots["size"] = [9 if sample.flagged or abs(change) > MOST else 6 for sample, change in drawn]
    spots["line"] = {"width": [2 if sample.flagged else 0.5 for sample, _ in drawn], "color": style.INK}
    places = [(sample.at_s / lane.seconds, -at + min(max(change, -MOST), MOST) * scale) for sample, change in drawn]
    told = [[sample.ms, f"{change:+.1%}", sample.round] for sample, change in drawn]
    hover = "%{customdata[0]:.4g} ms (%{customdata[1]}), round %{customdata[2]}"
    return style.points(lane.row.label, places, spots, hover, customdata=told)


def _line(lane: int, begin: float, end: float) -> parts.Plotly:
    """Return a line along the median of a lane; one across the lane where it begins and ends at once."""
    across = FARTHEST if begin == end else 0
    ends = {"x0": begin, "x1": end, "y0": -lane - across, "y1": -lane + across}
    look = {"width": 1, "color": style.INK, "dash": "dash" if across else "solid"}
    return {"type": "line", "layer": "below", **ends, "line": look, "opacity": 0.6}


def _round_ends(lane: Lane) -> List[float]:
    pairs = zip(lane.samples, lane.samples[1:])
    ends = [(last.at_s + first.at_s - first.ms / 1e3) / 2 for last, first in pairs if last.round != first.round]
    return [end / lane.seconds for end in ends]


def _cells(lane: Lane) -> Dict[str, parts.Cell]:
    ends = {"lowest %": 100 * min(lane.relative) - 100, "highest %": 100 * max(lane.relative) - 100}
    counts = {"samples": len(lane.samples), "beside other load": sum(sample.flagged for sample in lane.samples)}
    numbers = {title: parts.measured(value, lane.row.results) for title, value in {**ends, **counts}.items()}
    return {"implementation": parts.Cell(lane.row.label), **numbers}


def memory_within(rows: Sequence[Row]) -> Optional[parts.Figure]:
    """Draw the allocated memory within one step; None where no trace has memory events."""
    curves = [(row, row.curve) for row in rows if row.curve]
    if not curves:
        return None
    highest = max(curve.peak_mb for _, curve in curves) or 1.0
    data, names, cells = [], [], []
    for lane, (row, curve) in enumerate(curves):
        at = [(ms / curve.ms[-1], -lane + 2 * FARTHEST * mb / highest - FARTHEST) for ms, mb in zip(curve.ms, curve.mb)]
        told = list(zip(curve.ms, curve.mb))
        steps = {**style.line(row.look), "dash": "solid", "shape": "hv"}
        hover = "%{customdata[0]:.4g} ms: %{customdata[1]:.4g} MB"
        data.append(style.points(row.marked, at, {}, hover, mode="lines", line=steps, customdata=told))
        peak = curve.mb.index(curve.peak_mb)
        data.append(style.points(row.marked, [at[peak]], style.marker(row.look, 10), hover, customdata=[told[peak]]))
        words = f"at {text.number(curve.ms[peak], 3)} of {text.number(curve.ms[-1], 3)} ms"
        names.append(f"{style.shown(row.marked)}  <b>{text.number(curve.peak_mb)} MB</b>  {words}")
        trace = row.folder / curve.file
        cell = {
            "implementation": parts.Cell(row.label),
            "ProfilerStep": parts.Cell(f"#{curve.step}", curve.step, trace),
        }
        cell.update({"peak MB": parts.measured(curve.peak_mb, trace), "step ms": parts.measured(curve.ms[-1], trace)})
        stages = ", ".join(f"{stage} {text.number(mb, 3)}" for stage, mb in curve.stage_mb.items())
        cells.append({**cell, "highest MB in each stage": parts.Cell(stages or "-")})
    frame = style.lanes(names, LOW_LANE, int(LOW_LANE * FARTHEST) + 6)
    return parts.Figure(
        "memory-within",
        "Memory within a step",
        "What is allocated above the step's start, in the last step of the first trace, all to one scale of MB; the "
        "symbol is the peak. Profiled: times have the profiler's own cost in them.",
        "Highest memory within a step: "
        + "; ".join(f"{row.label} {text.number(curve.peak_mb)} megabytes" for row, curve in curves),
        data,
        style.layout(LOW_LANE * len(curves) + 90, **frame, xaxis=style.axis("of the step", tickformat=".0%")),
        parts.tabulated("memory-within", "Memory within a step", cells),
    )
