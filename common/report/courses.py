"""What has a course: samples over the run, and memory within a step."""

from __future__ import annotations

import math
from typing import Any, Dict, List, Optional, Sequence

from common.report.bars import INK
from common.report.collect import Entry, Sample, apart
from common.report.look import DASHES, Figure, Trace, axis, color, lanes, layout, shown, symbol
from common.report.markup import Cell, Column, Table
from common.results import statistics
from common.results.wording import number

LANE = 130  # pixels
MOST_SAMPLES = 1500  # drawn for one implementation; flagged ones are always drawn
FARTHEST = 0.34  # of a lane, up or down; the rest is for its name


def drift(entries: Sequence[Entry]) -> Optional[Figure]:
    """Each sample relative to the median of its batch, in the order taken, one lane for each implementation."""
    timed = [entry for entry in entries if entry.of_scope(entry.scope)]
    if not timed:
        return None
    relative = [_relative(entry.of_scope(entry.scope)) for entry in timed]
    widest = max(max(abs(value - 1) for value in values) for values in relative)
    scale = FARTHEST / max(widest, 0.05)
    data: List[Trace] = []
    shapes: List[Dict[str, Any]] = []
    for place, (entry, values) in enumerate(zip(timed, relative)):
        samples = entry.of_scope(entry.scope)
        stride = math.ceil(len(samples) / MOST_SAMPLES)
        drawn = [at for at, sample in enumerate(samples) if at % stride == 0 or sample.flagged]
        data.append(_samples_of(entry, place, [samples[at] for at in drawn], [values[at] for at in drawn], scale))
        shapes.append(_line(place, 0, 1))
        shapes += [_line(place, at, at) for at in _round_ends(samples)]
    names = [
        f"{shown(entry.label)}  <b>{_range(values)}</b>  in {number(_duration(entry.of_scope(entry.scope)), 3)} s"
        for entry, values in zip(timed, relative)
    ]
    frame = lanes(names, LANE, int(LANE * FARTHEST) + 6)
    ticks = [(-place + change * scale, _percent(change)) for place in range(len(timed)) for change in _marks(widest)]
    frame["yaxis"].update(
        showticklabels=True,
        tickvals=[at for at, _ in ticks],
        ticktext=[words for _, words in ticks],
        rangemode="normal",
    )
    height = LANE * len(timed) + 90
    rows = [_drift_row(entry, values) for entry, values in zip(timed, relative)]
    columns = [Column("implementation", False)]
    columns += [
        Column(title) for title in ("samples", "lowest %", "highest %", "last third to first %", "beside other load")
    ]
    return Figure(
        "samples",
        "Samples over time",
        "Each timed sample against the median of its batch, in the order taken; dashed lines part the rounds (fresh "
        "processes). A slope is drift or throttling, a step another load. Crosses ran beside other load. "
        "Warm-up is left out of the samples but not of the time, of which each lane shows its own, from begin to end.",
        "Spread of the samples around the median of their batch: "
        + "; ".join(f"{entry.label} {_range(values)}" for entry, values in zip(timed, relative)),
        data,
        layout(height, **frame, shapes=shapes, showlegend=False, xaxis=axis("of the timed work", tickformat=".0%")),
        Table("samples", "Samples over time", columns, rows),
        height,
    )


def _relative(samples: Sequence[Sample]) -> List[float]:
    by_batch: Dict[str, List[float]] = {}
    for sample in samples:
        by_batch.setdefault(sample.batch, []).append(sample.ms)
    medians = {batch: statistics.median(values) for batch, values in by_batch.items()}
    return [sample.ms / medians[sample.batch] for sample in samples]


def _range(values: Sequence[float]) -> str:
    return f"{_percent(min(values) - 1)} to {_percent(max(values) - 1)}"


def _percent(change: float) -> str:
    return f"{change:+.0%}".replace("-", "\u2212") if change else "0"


def _marks(widest: float) -> List[float]:
    """A round change above and below the median, and the median itself."""
    round_one = next((step for step in (10, 5, 2, 1, 0.5, 0.2, 0.1, 0.05) if step <= widest), 0.05)
    return [-round_one, 0, round_one]


def _samples_of(entry: Entry, place: int, samples: Sequence[Sample], values: Sequence[float], scale: float) -> Trace:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": shown(entry.label),
        "x": [sample.at_s / _duration(entry.of_scope(entry.scope)) for sample in samples],
        "y": [-place + (value - 1) * scale for value in values],
        "customdata": [[sample.ms, f"{value - 1:+.1%}", sample.round] for sample, value in zip(samples, values)],
        "marker": {
            "opacity": 1,
            "symbol": ["x-thin-open" if sample.flagged else symbol(place) for sample in samples],
            "size": [9 if sample.flagged else 6 for sample in samples],
            "color": color(place),
            "line": {"width": [2 if sample.flagged else 0.5 for sample in samples], "color": INK},
        },
        "hovertemplate": "%{customdata[0]:.4g} ms (%{customdata[1]}), round %{customdata[2]}<extra></extra>",
    }


def _line(place: int, begin: float, end: float) -> Dict[str, Any]:
    """Along the median of a lane, or, where it begins and ends at one time, across the lane."""
    across = FARTHEST if begin == end else 0
    return {
        "type": "line",
        "layer": "below",
        "x0": begin,
        "x1": end,
        "y0": -place - across,
        "y1": -place + across,
        "line": {"width": 1, "color": INK, "dash": "dash" if across else "solid"},
        "opacity": 0.6,
    }


def _duration(samples: Sequence[Sample]) -> float:
    """Seconds of timed work up to the last of these samples."""
    return max(sample.at_s for sample in samples)


def _round_ends(samples: Sequence[Sample]) -> List[float]:
    pairs, whole = zip(samples, samples[1:]), _duration(samples)
    return [(one.at_s + two.at_s - two.ms / 1e3) / 2 / whole for one, two in pairs if one.round != two.round]


def _drift_row(entry: Entry, values: Sequence[float]) -> List[Cell]:
    third = max(len(values) // 3, 1)
    change = statistics.median(values[-third:]) / statistics.median(values[:third]) - 1
    flagged = sum(sample.flagged for sample in entry.of_scope(entry.scope))
    percents = (min(values) - 1, max(values) - 1, change)
    cells = [Cell(f"{100 * value:+.1f}", 100 * value, entry.results) for value in percents]
    counts = [Cell(str(count), count, entry.results) for count in (len(values), flagged)]
    return [Cell(entry.label), counts[0], *cells, counts[1]]


def memory_within(entries: Sequence[Entry]) -> List[Figure]:
    """What is allocated within one step, one line for each implementation."""
    return [_memory_within(some, key, whose) for key, whose, some in apart([one for one in entries if one.curve])]


def _memory_within(entries: Sequence[Entry], key: str, whose: str) -> Figure:
    curves = [(entry, entry.curve) for entry in entries if entry.curve]
    data: List[Trace] = []
    for place, (entry, curve) in enumerate(curves):
        top = curve.mb.index(curve.peak_mb)
        line = {"color": color(place), "width": 2.2, "shape": "hv", "dash": DASHES[place % len(DASHES)]}
        data.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": shown(entry.label),
                "legendgroup": str(place),
                "showlegend": False,
                "x": curve.ms,
                "y": curve.mb,
                "line": line,
                "hovertemplate": f"%{{x:.4g}} ms: %{{y:.4g}} MB<extra>{shown(entry.label)}</extra>",
            }
        )
        data.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": shown(entry.label),
                "legendgroup": str(place),
                "x": [curve.ms[top]],
                "y": [curve.peak_mb],
                "line": line,
                "marker": {"symbol": symbol(place), "size": 11, "color": color(place), "line": {"width": 1}},
                "hovertemplate": f"peak: %{{y:.4g}} MB at %{{x:.4g}} ms<extra>{shown(entry.label)}</extra>",
            }
        )
    rows = [
        [
            Cell(entry.label),
            Cell(f"#{curve.step}", curve.step, entry.folder / curve.file),
            Cell(number(curve.peak_mb), curve.peak_mb, entry.folder / curve.file),
            Cell(number(curve.ms[-1]), curve.ms[-1], entry.folder / curve.file),
            Cell(", ".join(f"{stage} {number(mb, 3)}" for stage, mb in curve.stage_mb.items()) or "-"),
        ]
        for entry, curve in curves
    ]
    columns = [Column("implementation", False), Column("ProfilerStep"), Column("peak MB"), Column("step ms")]
    columns.append(Column("highest MB in each stage", False))
    height = 420
    return Figure(
        f"memory-within{key}",
        f"Memory within a step{whose}",
        "What is allocated above the step's start, in the last step of the first trace; the symbol is the peak. "
        "Profiled: times have the profiler's own cost in them.",
        f"Highest memory within a step{whose}: "
        + "; ".join(f"{entry.label} {number(curve.peak_mb)} megabytes" for entry, curve in curves),
        data,
        layout(height, xaxis=axis("ms since the step began"), yaxis=axis("MB", rangemode="normal")),
        Table(f"memory-within{key}", "Memory within a step", columns, rows),
        height,
    )
