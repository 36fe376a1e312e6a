"""Step time by stages, and peak memory."""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from common.analysis.groups import apart
from common.analysis.row import Row, is_positive
from common.core.statistics import Summary
from common.core.text import number
from common.present import scales
from common.present.style import (
    INK,
    Figure,
    Plotly,
    Trace,
    about_whiskers,
    axis,
    lanes,
    layout,
    mark,
    parts,
    points,
    shown,
    whiskers,
)
from common.present.table import Cell, Table, measured, tabulated

LANE = 62  # pixels
ABOVE = 14  # pixels from the middle of a lane to its name
WIDTH = 0.36  # of a bar, in lanes
LEGEND = 150  # pixels
GOES_ON = "A bar with an arrow goes on beyond the right edge, to the number above it."


def stages_of(rows: Sequence[Row]) -> Dict[str, int]:
    """Return all stages in the order in which they run, each with the number of its pattern and symbol."""
    met: Dict[str, int] = {}
    order: List[str] = []
    for row in rows:
        index = 0
        for stage in _medians(row):
            if stage not in met:
                met[stage] = len(met)
                order.insert(index, stage)
            index = max(index, order.index(stage) + 1)
    return {stage: met[stage] for stage in order}


def _medians(row: Row) -> Dict[str, float]:
    return row.stage_medians(row.scope)


def _times(row: Row) -> Summary:
    """Return the times of a row that has some."""
    assert row.times
    return row.times


def step_times(rows: Sequence[Row]) -> List[Figure]:
    timed = sorted((row for row in rows if row.times), key=lambda row: _times(row).median)
    stages = stages_of(timed)
    return [step_time(some, stages, key, whose) for key, whose, some in apart(timed)] or profiled_times(rows)


def step_time(timed: Sequence[Row], stages: Dict[str, int], key: str, whose: str) -> Figure:
    """Draw a bar for each row, made of its stages, with the 20th and 80th percentile of the whole."""
    summaries = [_times(row) for row in timed]
    shares = [_medians(row) or {"not split": each.median} for row, each in zip(timed, summaries)]
    data = []
    for stage, number_of_stage in {**stages, "not split": len(stages)}.items():
        lengths = [(at, share[stage]) for at, share in enumerate(shares) if stage in share]
        data += _bars(stage, timed, lengths, number_of_stage, "ms") if lengths else []
    diamond = {"symbol": "diamond", "size": 10, "color": INK}
    medians = [(each.median, -at) for at, each in enumerate(summaries)]
    data.append(points("mean of the batches' medians", medians, diamond, "%{x:.4g} ms", error_x=whiskers(summaries)))
    end = scales.cut([each.p80 or each.median for each in summaries])
    beyond = [height for median, height in medians if end and median > end]
    data += [arrows(end, beyond)] if beyond else []
    names, sentences = [], []
    for row, each in zip(timed, summaries):
        span = [number(each.p20, 3), number(each.p80, 3)] if each.p20 else []
        names.append(f"{_lane(row, each.median, 'ms')}  " + "\u2013".join(span))
        sentences.append(
            f"{row.label} {number(each.median)} milliseconds{', from ' if span else ''}{' to '.join(span)}"
        )
    return Figure(
        f"step-time{key}",
        f"Step time{whose}",
        "Diamond: the mean of the batches' medians; patterns: likewise of each stage. Medians do not add up, so a bar "
        f"may end a little before or after its diamond.{about_whiskers(summaries)}" + (f" {GOES_ON}" if beyond else ""),
        f"Step time{whose}: {'; '.join(sentences)}",
        data,
        _layout(names, until(end), barmode="stack"),
        _time_table(timed, [stage for stage in stages if any(stage in share for share in shares)], f"step-time{key}"),
    )


def _lane(row: Row, value: Optional[float], unit: str) -> str:
    """Return the words above a row's lane."""
    return f"{shown(row.marked)}  <b>{number(value)} {unit}</b>"


def _layout(names: Sequence[str], x: Plotly, legend: Optional[int] = LEGEND, **options: Any) -> Plotly:
    return layout(LANE * len(names) + 64, legend, **lanes(names, LANE, ABOVE), xaxis=x, **options)


def until(end: Optional[float], title: str = "ms") -> Plotly:
    """Return the axis of bars, up to `end` where that is known."""
    return axis(title, range=[0, end]) if end else axis(title)


def arrows(end: Optional[float], heights: Sequence[float], size: int = 22) -> Trace:
    """Return arrows at the right edge, at the heights of the bars that go on beyond it."""
    marker = {"symbol": "triangle-right", "size": size, "color": INK}
    return points("goes on", [(end, height) for height in heights], marker, cliponaxis=False)


def _bars(name: str, rows: Sequence[Row], lengths: Sequence[Tuple[int, float]], number: int, unit: str) -> List[Trace]:
    """Return bars with their entry in the legend.  lengths: (lane, value); number: that of the pattern."""
    x, y, markers = [value for _, value in lengths], [-at for at, _ in lengths], [rows[at].look for at, _ in lengths]
    return parts(name, x, y, markers, number, f"%{{x:.4g}} {unit}", WIDTH)


def _time_table(rows: Sequence[Row], stages: Sequence[str], name: str) -> Table:
    cells = []
    for row in rows:
        times, medians = _times(row), _medians(row)
        values = {"median ms": times.median, "p20 ms": times.p20, "p80 ms": times.p80, "n": times.n}
        values.update({f"{stage} ms": medians.get(stage) for stage in stages})
        numbers = {title: measured(value, row.results) for title, value in values.items()}
        cells.append({"implementation": Cell(row.label), "scope": Cell(row.scope), **numbers})
    return tabulated(name, "Step time and its stages", cells)


def profiled_times(rows: Sequence[Row]) -> List[Figure]:
    """Return the plot for traces without records: steps that include the profiler's cost."""
    traced = [row for row in rows if is_positive(row.average_step_time_us)]
    if not traced:
        return []
    values = [(row.average_step_time_us or 0) / 1e3 for row in traced]
    both = list(zip(traced, values))
    summary = "; ".join(f"{row.label} {number(value)} milliseconds" for row, value in both)
    cells = [{"implementation": Cell(row.label), "profiled ms": measured(value, row.trace)} for row, value in both]
    caption = "The mean of the profiled steps: the profiler's own cost is in it."
    data = _bars("profiled step", traced, list(enumerate(values)), 0, "ms")
    frame = _layout([_lane(row, value, "ms") for row, value in both], axis("ms"), legend=None)
    table = tabulated("step-time-profiled", "Profiled step time", cells)
    return [Figure("step-time", "Step time, profiled", caption, f"Profiled step time: {summary}", data, frame, table)]


def peak_memories(rows: Sequence[Row]) -> List[Figure]:
    known = [row for row in rows if row.peak_mb is not None]
    stages = stages_of(rows)
    return [peak_memory(some, stages, key, whose) for key, whose, some in apart(known)]


def peak_memory(rows: Sequence[Row], stages: Dict[str, int], key: str, whose: str) -> Figure:
    """Draw bars of the highest peak, with a ring for each batch and the highest allocation of each stage."""
    highest = [(at, row.peak_mb or 0) for at, row in enumerate(rows)]
    peaks = [(peak, -at) for at, row in enumerate(rows) for peak in row.peaks.values()]
    ring = {"symbol": "circle-open", "size": 9, "color": INK, "line": {"width": 2}}
    data = _bars("highest peak of a step", rows, highest, 0, "MB")
    data.append(points("peak of each batch", peaks, ring, "%{x:.4g} MB<extra>one batch</extra>"))
    profiled = [row.curve.stage_mb if row.curve else {} for row in rows]
    seen = [stage for stage in stages if any(stage in inside for inside in profiled)]
    for stage in seen:
        highest_inside = [(inside[stage], -at - 0.31) for at, inside in enumerate(profiled) if stage in inside]
        hover = f"%{{x:.4g}} MB<extra>highest while {shown(stage)} ran, profiled</extra>"
        data.append(points(f"{stage} (profiled)", highest_inside, mark(stages[stage], 9), hover))
    return Figure(
        f"peak-memory{key}",
        f"Peak memory{whose}",
        "Bars: the highest peak above the baseline over all batches, from the memory pass; rings: the peak of each "
        "batch. Symbols below a bar: the most that was allocated while each stage ran, from one step of the trace.",
        f"Peak memory{whose}: " + "; ".join(f"{row.label} {number(row.peak_mb)} megabytes" for row in rows),
        data,
        _layout([_lane(row, row.peak_mb, "MB") for row in rows], axis("MB (2\u00b2\u2070 bytes)")),
        tabulated(f"peak-memory{key}", "Peak memory", [_peaks(*each, seen) for each in zip(rows, profiled)]),
    )


def _peaks(row: Row, profiled: Mapping[str, float], stages: Sequence[str]) -> Dict[str, Cell]:
    peaks = list(row.peaks.values())
    numbers = {"highest MB": max(peaks), "lowest MB": min(peaks), "batches": len(peaks)}
    cells = {"implementation": Cell(row.label), **{key: measured(value, row.results) for key, value in numbers.items()}}
    return {**cells, **{f"in {stage} MB (profiled)": measured(profiled.get(stage), row.trace) for stage in stages}}
