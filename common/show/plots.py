"""Draw the plots of a configuration or sweep: ratios, time against memory, a swept setting, what
changes with time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from rnnt_bench.analysis import groups, metrics, standing, verdict
from rnnt_bench.analysis.row import Row, Rows
from rnnt_bench.core import settings, statistics
from rnnt_bench.core.text import gathered, interval, number
from rnnt_bench.present import style
from rnnt_bench.present.parts import Cell, Figure, Plotly, measured, tabulated
from rnnt_bench.records.schema import Sample

LANE = 44  # pixels


class Dot(NamedTuple):
    """Hold one lane of a plot of ratios. hollow: something else is in the ratio too, so that it
    decides nothing;
    source: the file that the number is from."""

    name: str
    look: style.Look
    ratio: float
    low: float | None = None
    high: float | None = None
    verdict: str = ""
    hollow: bool = False
    source: Path | None = None

    @property
    def interval(self) -> str:
        span = interval(self.low, self.high)
        return f" ({span})" if span else ""


def over_fastest(rows: Rows) -> Figure | None:
    """Draw each loss's time over that of the fastest exact one; None where fewer than two can be
    compared."""
    compared = [row.against_fastest for row in rows if row.against_fastest]
    kinds = verdict.ranked_kinds(rows)
    ranked = [against for against in compared if against.row.kind in kinds] or compared
    if not ranked:
        return None
    base = ranked[0].baseline
    scope = ranked[0].scope
    dots = [dot for row in rows if (dot := _dot(row, base, scope))]
    if len(dots) < 2:
        return None
    caption = (
        f"Dot: the time of a {scope} over that of {base.label}; line: its 95% interval over rounds."
    )
    if any(dot.hollow for dot in dots):
        caption += " Hollow: beside other load, so the ratio decides nothing."
    others = [
        row.label
        for row in rows
        if row.ms and not row.trains_exact_model and base.trains_exact_model
    ]
    if others:
        caption += f" Not drawn, as they train another model: {', '.join(others)}."
    return ratios(
        "ratios",
        f"{scope.capitalize()} time over {base.label}'s",
        caption,
        dots,
        f"times {base.label}",
    )


def _dot(row: Row, base: Row, scope: str) -> Dot | None:
    """Return how a row stands against the fastest; None where the two are not compared."""
    against = row.against_fastest
    if row is base:
        return Dot(row.marked_label, row.look, 1.0, verdict="fastest", source=row.results)
    if (
        against is None
        or row.trains_exact_model != base.trains_exact_model
        or row.other_torch != base.other_torch
    ):
        return None
    word = metrics.METRICS["verdict"].shown(row)
    if against.baseline is not base or against.scope != scope:  # ranked among another kind
        against = standing.stand(row, base, scope)
        word = against.verdict
    ratio = against.ratio
    if ratio is None:
        return None
    return Dot(
        row.marked_label,
        row.look,
        ratio.ratio,
        ratio.low,
        ratio.high,
        word,
        against.beside_load,
        row.results,
    )


def ratios(key: str, title: str, caption: str, dots: Sequence[Dot], across: str) -> Figure:
    """Draw a dot and a whisker for each ratio, the first on top, on a logarithmic axis titled
    `across`, with a line at 1."""
    span = style.logarithmic(
        [*(end for dot in dots for end in (dot.low, dot.ratio, dot.high) if end), 1.0]
    )
    data, names, cells = [], [], []
    for lane, dot in enumerate(dots):
        options: Plotly = {}
        if dot.low is not None and dot.high is not None:
            options["error_x"] = {
                "array": [dot.high - dot.ratio],
                "arrayminus": [dot.ratio - dot.low],
                "thickness": 2,
            }
        look = style.marker(dot.look, 12, dot.hollow)
        data.append(style.points(dot.name, [(dot.ratio, -lane)], look, "%{x:.3g} times", **options))
        words = (
            f"{style.shown(dot.name)}  <b>{number(dot.ratio, 3)}x</b>{dot.interval}  {dot.verdict}"
        )
        names.append(words.rstrip())
        numbers = {
            name: measured(getattr(dot, name), dot.source) for name in ("ratio", "low", "high")
        }
        cells.append(
            {"implementation": Cell(dot.name), **numbers, "verdict": Cell(dot.verdict or "-")}
        )
    line = {
        "type": "line",
        "layer": "below",
        "x0": 1,
        "x1": 1,
        "y0": 0.5 - len(dots),
        "y1": 0.5,
        "opacity": 0.9,
        "line": {"width": 1.5, "color": style.INK},
    }
    frame = {**style.lanes(names, LANE, 8), "shapes": [line], "xaxis": style.axis_of(across, span)}
    summary = f"{title}: " + "; ".join(
        f"{dot.name} {number(dot.ratio, 3)}{dot.interval}" for dot in dots
    )
    layout = style.layout(LANE * len(dots) + 70, None, **frame)
    return Figure(key, title, caption, summary, data, layout, tabulated(key, title, cells))


# Time against memory.


class Position(NamedTuple):
    """Hold the median time and the peak memory of a row."""

    ms: float
    mb: float


def positions(rows: Rows) -> dict[str, Position]:
    """Return the position of each row that has a time and a peak, by its label."""
    return {
        row.label: Position(row.ms.median, row.peak_mb)
        for row in rows
        if row.ms and row.peak_mb is not None
    }


def front(rows: Rows) -> list[Row]:
    """Return the Pareto front, the fastest first: the rows of exact losses, in batches or by
    utterance, for which no other is both faster and smaller."""
    at = positions(rows)
    ranked = [row for row in rows if _is_ranked(row) and row.kind != "pruned"]
    result: list[Row] = []
    for row in sorted(ranked, key=lambda row: at[row.label]):
        if not result or at[row.label].mb < at[result[-1].label].mb:
            result.append(row)
    return result


def _is_ranked(row: Row) -> bool:
    return row.trains_exact_model and not row.other_torch


def _ends(summaries: Iterable[statistics.Summary]) -> list[float]:
    """Return the medians and percentiles that an axis has to show."""
    return [
        end for summary in summaries for end in (summary.p20, summary.median, summary.p80) if end
    ]


def time_and_memory(rows: Rows) -> Figure | None:
    """Draw step time against peak memory; a line joins the losses for which no other is both faster
    and smaller. Losses of other models and under another torch are hollow symbols, which are not
    ranked."""
    places = positions(rows)
    rows = [row for row in rows if row.label in places]
    if len(rows) < 2:
        return None
    summaries = {row.label: summary for row in rows if (summary := row.ms)}
    across = style.span(_ends(summaries.values()))
    up = style.span([position.mb for position in places.values()])
    data, sentences, cells = [], [], []
    best = front(rows)
    if best:
        on = [places[row.label] for row in best]
        corners = [(on[0].ms, up.high), *on, (across.high, on[-1].mb)]
        line = {"shape": "hv", "dash": "dot", "width": 2.5, "color": style.INK}
        data.append(style.points("Pareto front", corners, {}, mode="lines", line=line))
        sentences.append(
            f"Beaten in both by no other exact loss (line): {', '.join(row.label for row in best)}."
        )
    others = [row.marked_label for row in rows if not _is_ranked(row)]
    if others:
        sentences.append(
            f"Hollow, not ranked: of other models, or under another torch: {', '.join(others)}."
        )
    for row in rows:
        options: Plotly = {
            "error_x": {**style.whiskers([summaries[row.label]]), "thickness": 1, "width": 4}
        }
        if row in best:
            options.update(
                mode="markers+text", text=[style.shown(row.label)], textposition="top right"
            )
        look = style.marker(row.look, 13, hollow=not _is_ranked(row))
        hover = "%{x:.4g} ms, %{y:.4g} MB"
        data.append(
            style.points(
                row.marked_label, [places[row.label]], look, hover, cliponaxis=False, **options
            )
        )
        ms, mb = (measured(value, row.results) for value in places[row.label])
        on_front = Cell("yes" if row in best else "no")
        name = Cell(row.marked_label)
        cells.append(
            {"implementation": name, "median ms": ms, "peak MB": mb, "on the front": on_front}
        )
    title, text = "Time against memory", " ".join(sentences)
    caption = f"Lower left is better. {text}"
    if any(summary.p20 for summary in summaries.values()):
        whiskers = (
            "Whiskers: the 20th and 80th percentile of samples over their own batch's median."
        )
        caption = f"Lower left is better. {whiskers} {text}"
    frame = {"xaxis": style.axis_of("step, ms", across), "yaxis": style.axis_of("peak, MB", up)}
    table = tabulated("time-memory", "Time and memory", cells)
    return Figure(
        "time-memory",
        title,
        caption,
        f"{title}. {text}",
        data,
        style.layout(460, 200, **frame),
        table,
    )


# Sweeps: with several settings there is a plot for each, at the first values of the others.

LOGARITHMIC_FROM = 4  # largest over smallest value from which both axes are logarithmic


class Point(NamedTuple):
    value: Any
    measured: statistics.Summary
    row: Row


class Quantity(NamedTuple):
    """Describe a number that is drawn of every sweep. summary: returns it of a row, None where it
    is not known."""

    key: str
    title: str
    unit: str
    caption: str
    summary: Callable[[Row], statistics.Summary | None]


def quantities() -> list[Quantity]:
    """Return time, memory, and the metrics that are in plots."""
    times = "Median step (loss where no step was timed); whiskers: p20 to p80."
    peaks = "Highest peak of a step above its baseline, from the memory pass."
    result = [
        Quantity("time", "Step time", "ms", times, lambda row: row.ms),
        Quantity("memory", "Peak memory", "MB", peaks, lambda row: _alone(row.peak_mb)),
    ]
    for metric in metrics.METRICS.values():
        if metric.is_in("plot"):
            result.append(
                Quantity(metric.key, metric.title, metric.unit, "", partial(_scaled, metric))
            )
    return result


def _scaled(metric: metrics.Metric, row: Row) -> statistics.Summary | None:
    return _alone(metric.scaled(row))


def _alone(value: float | None) -> statistics.Summary | None:
    return None if value is None else statistics.Summary(value)


def swept(sweep: groups.Sweep) -> list[Figure]:
    """Return a plot of each quantity for each setting that varies."""
    figures = []
    for key in (key for key, values in sweep.grid.items() if len(values) > 1):
        first = {other: values[0] for other, values in sweep.grid.items() if other != key}
        rows = [row for row in sweep.rows if first.items() <= row.header.values.items()]
        notes = [f"At {settings.words(first)}."] if first else []
        failed = [row for row in rows if row.status != "ok"]
        places = gathered(
            ((row.name, row.status), settings.worded(row.header.values[key])) for row in failed
        )
        if places:
            missing = [
                f"{name} at {', '.join(values)} ({status})"
                for (name, status), values in places.items()
            ]
            notes.append(f"Not drawn: {'; '.join(missing)}.")
        for quantity in quantities():
            summaries = [(row, quantity.summary(row)) for row in rows if row.status == "ok"]
            points = [
                Point(row.header.values[key], summary, row) for row, summary in summaries if summary
            ]
            if points:
                caption = " ".join(filter(None, [quantity.caption, *notes]))
                figures.append(
                    _over(settings.flag(key), sweep.grid[key], quantity, points, caption)
                )
    return figures


def _over(
    flag: str, values: Sequence[Any], quantity: Quantity, points: Sequence[Point], caption: str
) -> Figure:
    """Return the plot of these points: a curve for each implementation over a numeric setting, else
    points alone."""
    unit = quantity.unit
    is_numeric = groups.is_numeric(values)
    shown = float if is_numeric else settings.worded
    data, words, cells = [], [], []
    for name, curve in sorted(gathered((point.row.name, point) for point in points).items()):
        numbers = [
            f"{number(point.measured.median)} {unit} at {settings.worded(point.value)}"
            for point in curve
        ]
        words.append(f"{name} {', '.join(numbers)}")
        row = curve[0].row
        options: Plotly = {
            "mode": "lines+markers" if is_numeric else "markers",
            "line": style.line(row.look),
        }
        if all(point.measured.p20 and point.measured.p80 for point in curve):
            options["error_y"] = style.whiskers([point.measured for point in curve])
        places = [(shown(point.value), point.measured.median) for point in curve]
        hover = f"%{{x}}: %{{y:.4g}} {unit}"
        data.append(
            style.points(row.marked_label, places, style.marker(row.look, 11), hover, **options)
        )
    for point in points:
        value = point.value if groups.is_numeric([point.value]) else None
        cell = {
            "implementation": Cell(point.row.label),
            flag: Cell(settings.worded(point.value), value),
        }
        for part in ("median", "p20", "p80") if unit == "ms" else ("median",):
            cell[f"{part} {unit}"] = measured(getattr(point.measured, part), point.row.results)
        cells.append(cell)
    title = f"{quantity.title} over {flag}"
    key = f"sweep-{flag}-{quantity.key}"
    layout = style.layout(420, 200, **_frame(values, flag, unit, points))
    return Figure(
        key,
        title,
        caption,
        f"{title}: {'; '.join(words)}",
        data,
        layout,
        tabulated(key, title, cells),
    )


def _frame(values: Sequence[Any], flag: str, unit: str, points: Sequence[Point]) -> Plotly:
    """Return the axes of a plot over the setting `flag`."""
    words = [settings.worded(value) for value in values]
    if not groups.is_numeric(values):
        order = {"type": "category", "categoryorder": "array", "categoryarray": words}
        return {"xaxis": style.axis(flag, **order), "yaxis": style.axis(unit)}
    ticks = {"tickvals": values, "ticktext": words}
    if min(values) <= 0 or max(values) / min(values) < LOGARITHMIC_FROM:
        return {"xaxis": style.axis(flag, **ticks), "yaxis": style.axis(unit)}
    up = style.logarithmic(_ends(point.measured for point in points))
    return {"xaxis": style.axis(flag, type="log", **ticks), "yaxis": style.axis_of(unit, up)}


# Over time: a lane for each loss, of the samples over the run, and of the memory within a step.

WIDE_LANE = 130  # pixels, of samples
LOW_LANE = 92  # pixels, of memory
MOST_SAMPLES = 1500  # drawn for one implementation; flagged ones are always drawn
FARTHEST = 0.34  # of a lane, up or down; the rest is for its name
MOST = 0.3  # of the median of its batch: what is farther from it is drawn at the edge


class Lane(NamedTuple):
    """Hold the samples of a row, each with its time over the median that it is compared with.

    Attributes:
        ends: seconds of timed work up to the end of each, warm-up and the other scope included
    """

    row: Row
    samples: list[Sample]
    ends: list[float]
    relative: list[float]

    @property
    def seconds(self) -> float:
        return max(self.ends)

    @property
    def range(self) -> str:
        return f"{_percent(min(self.relative) - 1)} to {_percent(max(self.relative) - 1)}"


def _percent(change: float) -> str:
    return f"{change:+.0%}".replace("-", "\u2212") if change else "0"


def _lane(row: Row) -> Lane | None:
    """Return the samples beside the median of their batch; where a batch has one sample, which is
    its median, beside the median time of a cell, padded or useful, whichever agrees more."""
    lines = row.lines_of(Sample)
    taken = zip(lines, accumulate(line.ms / 1e3 for line in lines))
    timed = [(line, end) for line, end in taken if line.scope == row.scope and not line.warmup]
    times = gathered((sample.batch, sample.ms) for sample, _ in timed)
    batches = {batch.index: batch for batch in row.batches}
    is_repeated = min(map(len, times.values()), default=0) > 1
    if not is_repeated:
        timed = [(sample, end) for sample, end in timed if sample.batch in batches]
    if not timed:
        return None
    samples = [sample for sample, _ in timed]
    ends = [end for _, end in timed]
    if is_repeated:
        medians = {batch: median(ms) for batch, ms in times.items()}
        return Lane(row, samples, ends, [sample.ms / medians[sample.batch] for sample in samples])
    lanes = []
    for cells in ("padded_cells", "useful_cells"):
        rates = [sample.ms / getattr(batches[sample.batch], cells) for sample in samples]
        middle = median(rates)
        lanes.append(Lane(row, samples, ends, [rate / middle for rate in rates]))
    return min(lanes, key=lambda lane: sum(abs(value - 1) for value in lane.relative))


def drift(rows: Rows) -> Figure | None:
    """Draw each sample relative to the median of its batch, or of a cell, in the order taken."""
    lanes = [lane for lane in map(_lane, rows) if lane and len(lane.samples) > 1]
    if not lanes:
        return None
    farthest = max(abs(value - 1) for lane in lanes for value in lane.relative)
    widest = min(farthest, MOST)
    scale = FARTHEST / max(widest, 0.05)
    data: list[Plotly] = []
    shapes, names = [], []
    for index, lane in enumerate(lanes):
        data.append(_samples(lane, index, scale))
        shapes.append(_line(index, 0, 1))
        for (last, end_last), (first, end_first) in pairwise(zip(lane.samples, lane.ends)):
            if last.round != first.round:
                end = (end_last + end_first - first.ms / 1e3) / 2 / lane.seconds
                shapes.append(_line(index, end, end))
        names.append(
            f"{style.shown(lane.row.label)}  <b>{lane.range}</b>  in {number(lane.seconds, 3)} s"
        )
    frame = style.lanes(names, WIDE_LANE, int(WIDE_LANE * FARTHEST) + 6)
    mark = next((step for step in (MOST, 0.2, 0.1, 0.05) if step <= widest), 0.05)
    ticks = [
        (-index + change * scale, _percent(change))
        for index in range(len(lanes))
        for change in (-mark, 0, mark)
    ]
    heights, words = zip(*ticks)
    frame["yaxis"].update(showticklabels=True, tickvals=heights, ticktext=words, rangemode="normal")
    frame.update(shapes=shapes, xaxis=style.axis("of the timed work", tickformat=".0%"))
    caption = (
        "Each sample against the median of its batch, in the order taken; where a batch has one sample, its time for a "
        "cell against the median of all. Dashed lines part the rounds (fresh processes). A slope is drift or "
        "throttling, a step another load. Crosses ran beside other load."
    )
    if farthest > MOST:
        caption += f" At the edge: farther than {MOST:.0%}."
    ranges = "; ".join(f"{lane.row.label} {lane.range}" for lane in lanes)
    summary = f"Spread of the samples around the median: {ranges}"
    table = tabulated("samples", "Samples over time", [_cells(lane) for lane in lanes])
    layout = style.layout(WIDE_LANE * len(lanes) + 90, **frame)
    return Figure("samples", table.title, caption, summary, data, layout, table)


def _samples(lane: Lane, index: int, scale: float) -> Plotly:
    """Return the samples of the lane with this index, some left out where there are too many."""
    stride = math.ceil(len(lane.samples) / MOST_SAMPLES)
    drawn = [
        (sample, end / lane.seconds, value - 1)
        for turn, (sample, end, value) in enumerate(zip(lane.samples, lane.ends, lane.relative))
        if turn % stride == 0 or sample.is_flagged
    ]
    flagged = [sample.is_flagged for sample, _, _ in drawn]
    look: Plotly = {"opacity": 1, "color": style.color(lane.row.look)}
    look["symbol"] = [
        "x-thin-open" if crossed else style.symbol(lane.row.look) for crossed in flagged
    ]
    look["size"] = [9 if crossed else 6 for crossed in flagged]
    look["line"] = {"width": [2 if crossed else 0.5 for crossed in flagged], "color": style.INK}
    places = [(share, -index + min(max(change, -MOST), MOST) * scale) for _, share, change in drawn]
    numbers = [[sample.ms, f"{change:+.1%}", sample.round] for sample, _, change in drawn]
    hover = "%{customdata[0]:.4g} ms (%{customdata[1]}), round %{customdata[2]}"
    return style.points(lane.row.label, places, look, hover, customdata=numbers)


def _line(index: int, begin: float, end: float) -> Plotly:
    """Return a line along the median of a lane; one across the lane where it begins and ends at
    once."""
    across = FARTHEST if begin == end else 0
    look = {"width": 1, "color": style.INK, "dash": "dash" if across else "solid"}
    ends = {"x0": begin, "x1": end, "y0": -index - across, "y1": -index + across}
    return {"type": "line", "layer": "below", **ends, "line": look, "opacity": 0.6}


def _cells(lane: Lane) -> dict[str, Cell]:
    numbers = {
        "lowest %": 100 * min(lane.relative) - 100,
        "highest %": 100 * max(lane.relative) - 100,
        "samples": len(lane.samples),
        "beside other load": sum(sample.is_flagged for sample in lane.samples),
    }
    cells = {title: measured(value, lane.row.results) for title, value in numbers.items()}
    return {"implementation": Cell(lane.row.label), **cells}


def memory_within(rows: Rows) -> Figure | None:
    """Draw the allocated memory within one step; None where no trace has memory events."""
    curves = [(row, row.curve) for row in rows if row.curve]
    if not curves:
        return None
    highest = max(curve.peak_mb for _, curve in curves) or 1.0
    hover = "%{customdata[0]:.4g} ms: %{customdata[1]:.4g} MB"
    data, names, cells = [], [], []
    for index, (row, curve) in enumerate(curves):
        numbers = list(zip(curve.ms, curve.mb))
        step_ms = curve.ms[-1]
        places = [
            (ms / step_ms, -index + 2 * FARTHEST * mb / highest - FARTHEST) for ms, mb in numbers
        ]
        line = {**style.line(row.look), "dash": "solid", "shape": "hv"}
        data.append(
            style.points(
                row.marked_label, places, {}, hover, mode="lines", line=line, customdata=numbers
            )
        )
        peak = curve.mb.index(curve.peak_mb)
        dot = style.marker(row.look, 10)
        data.append(
            style.points(row.marked_label, [places[peak]], dot, hover, customdata=[numbers[peak]])
        )
        words = f"at {number(curve.ms[peak], 3)} of {number(step_ms, 3)} ms"
        names.append(f"{style.shown(row.marked_label)}  <b>{number(curve.peak_mb)} MB</b>  {words}")
        trace = row.folder / curve.file
        stages = ", ".join(f"{stage} {number(mb, 3)}" for stage, mb in curve.stage_mb.items())
        cells.append(
            {
                "implementation": Cell(row.label),
                "ProfilerStep": Cell(f"#{curve.step}", curve.step, trace),
                "peak MB": measured(curve.peak_mb, trace),
                "step ms": measured(step_ms, trace),
                "highest MB in each stage": Cell(stages or "-"),
            }
        )
    frame = style.lanes(names, LOW_LANE, int(LOW_LANE * FARTHEST) + 6)
    frame["xaxis"] = style.axis("of the step", tickformat=".0%")
    caption = (
        "What is allocated above the step's start, in the last step of the first trace, all to one scale of MB; the "
        "symbol is the peak. Profiled: times have the profiler's own cost in them."
    )
    peaks = "; ".join(f"{row.label} {number(curve.peak_mb)} megabytes" for row, curve in curves)
    table = tabulated("memory-within", "Memory within a step", cells)
    layout = style.layout(LOW_LANE * len(curves) + 90, **frame)
    return Figure(
        "memory-within",
        table.title,
        caption,
        f"Highest memory within a step: {peaks}",
        data,
        layout,
        table,
    )
