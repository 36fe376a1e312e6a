"""Draw the plots of a configuration or sweep: ratios, time against memory, a swept setting, what changes with time."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

from rnnt_bench.analysis import groups, metrics, standing, verdict
from rnnt_bench.analysis.row import Row
from rnnt_bench.analysis.times import Sample
from rnnt_bench.core import settings, statistics
from rnnt_bench.core.text import gathered, interval, number
from rnnt_bench.present import style
from rnnt_bench.present.parts import Cell, Failure, Figure, Link, Plotly, Section, measured, tabulated

LANE = 44  # pixels


class Dot(NamedTuple):
    """Hold one lane of a plot of ratios. hollow: something else is in the ratio too, so that it decides nothing;
    source: the file that the number is from."""

    name: str
    look: style.Look
    ratio: float
    low: Optional[float] = None
    high: Optional[float] = None
    verdict: str = ""
    hollow: bool = False
    source: Optional[Path] = None

    @property
    def interval(self) -> str:
        span = interval(self.low, self.high)
        return f" ({span})" if span else ""


def over_fastest(rows: Sequence[Row]) -> Optional[Figure]:
    """Draw each loss's time over that of the fastest exact one; None where fewer than two can be compared."""
    compared = [row.against_fastest for row in rows if row.against_fastest]
    kinds = verdict.ranked_kinds(rows)
    first = next((each for each in compared if each.row.kind in kinds), compared[0] if compared else None)
    if first is None:
        return None
    base, scope = first.baseline, first.scope
    dots = [dot for row in rows if (dot := _dot(row, base, scope))]
    if len(dots) < 2:
        return None
    sentences = [f"Dot: the time of a {scope} over that of {base.label}; line: its 95% interval over rounds."]
    if any(dot.hollow for dot in dots):
        sentences.append("Hollow: beside other load, so the ratio decides nothing.")
    others = [row.label for row in rows if row.ms and not row.of_one_model and base.of_one_model]
    if others:
        sentences.append(f"Not drawn, as they train another model: {', '.join(others)}.")
    title = f"{scope.capitalize()} time over {base.label}'s"
    return ratios("ratios", title, " ".join(sentences), dots, f"times {base.label}")


def _dot(row: Row, base: Row, scope: str) -> Optional[Dot]:
    """Return how a row stands against the fastest; None where the two are not compared."""
    against = row.against_fastest
    if row is base:
        return Dot(row.marked, row.look, 1.0, verdict="fastest", source=row.results)
    if against is None or row.of_one_model != base.of_one_model or row.under != base.under:
        return None
    word = metrics.METRICS["verdict"].shown(row)
    if against.baseline is not base or against.scope != scope:  # of another kind: an approximation
        against = standing.stand(row, base, scope)
        word = against.verdict
    ratio = against.ratio
    if ratio is None:
        return None
    return Dot(row.marked, row.look, ratio.ratio, ratio.low, ratio.high, word, against.beside_load, row.results)


def ratios(key: str, title: str, caption: str, dots: Sequence[Dot], across: str) -> Figure:
    """Draw a dot and a whisker for each ratio, the first on top, on a logarithmic axis titled `across`, with a line at
    1."""
    span = style.logarithmic([*(end for dot in dots for end in (dot.low, dot.ratio, dot.high) if end), 1.0])
    data, names, cells = [], [], []
    for lane, dot in enumerate(dots):
        ends = {}
        if dot.low is not None and dot.high is not None:
            ends = {"error_x": {"array": [dot.high - dot.ratio], "arrayminus": [dot.ratio - dot.low], "thickness": 2}}
        look = style.marker(dot.look, 12, dot.hollow)
        data.append(style.points(dot.name, [(dot.ratio, -lane)], look, "%{x:.3g} times", **ends))
        words = f"{style.shown(dot.name)}  <b>{number(dot.ratio, 3)}x</b>{dot.interval}  {dot.verdict}"
        names.append(words.rstrip())
        numbers = {name: measured(getattr(dot, name), dot.source) for name in ("ratio", "low", "high")}
        cells.append({"implementation": Cell(dot.name), **numbers, "verdict": Cell(dot.verdict or "-")})
    line = {
        **{"type": "line", "layer": "below", "x0": 1, "x1": 1, "y0": 0.5 - len(dots), "y1": 0.5},
        **{"opacity": 0.9, "line": {"width": 1.5, "color": style.INK}},
    }
    frame = {**style.lanes(names, LANE, 8), "shapes": [line], "xaxis": style.axis_of(across, span)}
    summary = f"{title}: " + "; ".join(f"{dot.name} {number(dot.ratio, 3)}{dot.interval}" for dot in dots)
    layout = style.layout(LANE * len(dots) + 70, None, **frame)
    return Figure(key, title, caption, summary, data, layout, tabulated(key, title, cells))


# Time against memory.


def known(rows: Sequence[Row]) -> Dict[str, Tuple[float, float]]:
    return {row.label: (row.ms.median, row.peak_mb) for row in rows if row.ms and row.peak_mb is not None}


def front(rows: Sequence[Row]) -> List[Row]:
    """Return the exact rows, by utterance too, for which no other is both faster and smaller, by time."""
    at, ranked = known(rows), [row for row in rows if _is_ranked(row)]
    result: List[Row] = []
    for row in sorted((row for row in ranked if row.kind != "pruned"), key=lambda row: at[row.label]):
        if not result or at[row.label][1] < at[result[-1].label][1]:
            result.append(row)
    return result


def _is_ranked(row: Row) -> bool:
    return row.of_one_model and not row.under


def time_and_memory(rows: Sequence[Row]) -> Optional[Figure]:
    """Draw step time against peak memory; a line joins the losses for which no other is both faster and smaller. Losses
    of other models and under another torch are hollow symbols, which are not ranked."""
    at = known(rows)
    rows = [row for row in rows if row.label in at]
    if len(rows) < 2:
        return None
    summaries = {row.label: summary for row in rows if (summary := row.ms)}
    across = style.span([end for of in summaries.values() for end in (of.p20, of.median, of.p80) if end])
    up = style.span([mb for _, mb in at.values()])
    data, sentences, cells, best = [], [], [], front(rows)
    if best:
        on = [at[row.label] for row in best]
        line = {"shape": "hv", "dash": "dot", "width": 2.5, "color": style.INK}
        corners = [(on[0][0], up.high), *on, (across.high, on[-1][1])]
        data.append(style.points("Pareto front", corners, {}, mode="lines", line=line))
        sentences.append(f"Beaten in both by no other exact loss (line): {', '.join(row.label for row in best)}.")
    others = [row.marked for row in rows if not _is_ranked(row)]
    if others:
        sentences.append(f"Hollow, not ranked: of other models, or under another torch: {', '.join(others)}.")
    for row in rows:
        options: Plotly = {}
        if row in best:
            options = {"mode": "markers+text", "text": [style.shown(row.label)], "textposition": "top right"}
        options["error_x"] = {**style.whiskers([summaries[row.label]]), "thickness": 1, "width": 4}
        look = style.marker(row.look, 13, hollow=not _is_ranked(row))
        hover = "%{x:.4g} ms, %{y:.4g} MB"
        data.append(style.points(row.marked, [at[row.label]], look, hover, cliponaxis=False, **options))
        ms, mb = (measured(value, row.results) for value in at[row.label])
        cells.append({"implementation": Cell(row.marked), "median ms": ms, "peak MB": mb})
        cells[-1]["on the front"] = Cell("yes" if row in best else "no")
    told, title = " ".join(sentences), "Time against memory"
    whiskers = " Whiskers: the 20th and 80th percentile of samples over their own batch's median."
    whiskers = whiskers if any(of.p20 for of in summaries.values()) else ""
    frame = {"xaxis": style.axis_of("step, ms", across), "yaxis": style.axis_of("peak, MB", up)}
    table = tabulated("time-memory", "Time and memory", cells)
    caption = f"Lower left is better.{whiskers} {told}"
    return Figure("time-memory", title, caption, f"{title}. {told}", data, style.layout(460, 200, **frame), table)


# Sweeps: with several settings there is a plot for each, at the first values of the others.

LOGARITHMIC_FROM = 4  # largest over smallest value from which both axes are logarithmic


class Point(NamedTuple):
    value: Any
    measured: statistics.Summary
    row: Row


class Quantity(NamedTuple):
    """Describe a number that is drawn of every sweep. summary: returns it of a row, None where it is not known."""

    key: str
    title: str
    unit: str
    caption: str
    summary: Callable[[Row], Optional[statistics.Summary]]


def quantities() -> List[Quantity]:
    """Return time, memory, and the metrics that are in plots."""
    times = "Median step (loss where no step was timed); whiskers: p20 to p80."
    peaks = "Highest peak of a step above its baseline, from the memory pass."
    result = [
        Quantity("time", "Step time", "ms", times, lambda row: row.ms),
        Quantity("memory", "Peak memory", "MB", peaks, lambda row: _alone(row.peak_mb)),
    ]
    for metric in metrics.METRICS.values():
        if metric.is_in("plot"):
            result.append(Quantity(metric.key, metric.title, metric.unit, "", partial(_scaled, metric)))
    return result


def _scaled(metric: metrics.Metric, row: Row) -> Optional[statistics.Summary]:
    return _alone(metric.scaled(row))


def _alone(value: Optional[float]) -> Optional[statistics.Summary]:
    return None if value is None else statistics.Summary(value)


def of_sweep(sweep: groups.Sweep, number: int) -> Section:
    failed = [(row, f"{row.label} at {settings.words(row.header.values)}") for row in sweep.rows if row.reason]
    return Section(
        f"sweep-{number}",
        f"Sweep over {' and '.join(map(settings.flag, sweep.grid))}",
        sweep.heading,
        figures=swept(sweep),
        failures=[Failure(row.status, at, [Link(row.status, row.folder), f": {row.reason}"]) for row, at in failed],
    )


def swept(sweep: groups.Sweep) -> List[Figure]:
    """Return a plot of each quantity for each setting that varies."""
    drawn = []
    for key in (key for key, values in sweep.grid.items() if len(values) > 1):
        first = {other: values[0] for other, values in sweep.grid.items() if other != key}
        rows = [row for row in sweep.rows if all(row.header.values[other] == value for other, value in first.items())]
        failed = [row for row in rows if row.status != "ok"]
        gone = gathered(((row.name, row.status), settings.worded(row.header.values[key])) for row in failed)
        listed = [f"{name} at {', '.join(values)} ({status})" for (name, status), values in gone.items()]
        below = [f"At {settings.words(first)}."] if first else []
        below += [f"Not drawn: {'; '.join(listed)}."] if listed else []
        flag = settings.flag(key)
        for quantity in quantities():
            summaries = [(row, quantity.summary(row)) for row in rows if row.status == "ok"]
            every = [Point(row.header.values[key], summary, row) for row, summary in summaries if summary]
            if every:
                name, title = f"sweep-{flag}-{quantity.key}", f"{quantity.title} over {flag}"
                figure = _over(name, title, flag, sweep.grid[key], quantity.unit, every)
                caption = " ".join(filter(None, [quantity.caption, *below]))
                drawn.append(replace(figure, caption=caption))
    return drawn


def _over(key: str, title: str, flag: str, values: Sequence[Any], unit: str, every: Sequence[Point]) -> Figure:
    """Return the plot of these points: a curve for each implementation over a numeric setting, else points alone."""
    numeric, hover = groups.is_numeric(values), f"%{{x}}: %{{y:.4g}} {unit}"
    shown = float if numeric else settings.worded
    data, words, cells = [], [], []
    for name, curve in sorted(gathered((point.row.name, point) for point in every).items()):
        told = ", ".join(f"{number(each.measured.median)} {unit} at {settings.worded(each.value)}" for each in curve)
        words.append(f"{name} {told}")
        row, at = curve[0].row, [(shown(point.value), point.measured.median) for point in curve]
        options: Plotly = {"mode": "lines+markers" if numeric else "markers", "line": style.line(row.look)}
        if all(point.measured.p20 and point.measured.p80 for point in curve):
            options["error_y"] = style.whiskers([point.measured for point in curve])
        data.append(style.points(row.marked, at, style.marker(row.look, 11), hover, **options))
    for point in every:
        value = point.value if groups.is_numeric([point.value]) else None
        line = {"implementation": Cell(point.row.label), flag: Cell(settings.worded(point.value), value)}
        for part in ("median", "p20", "p80") if unit == "ms" else ("median",):
            line[f"{part} {unit}"] = measured(getattr(point.measured, part), point.row.results)
        cells.append(line)
    layout = style.layout(420, 200, **_frame(values, flag, unit, every))
    return Figure(key, title, "", f"{title}: {'; '.join(words)}", data, layout, tabulated(key, title, cells))


def _frame(values: Sequence[Any], flag: str, unit: str, every: Sequence[Point]) -> Plotly:
    words = [settings.worded(value) for value in values]
    if not groups.is_numeric(values):
        order = {"type": "category", "categoryorder": "array", "categoryarray": words}
        return {"xaxis": style.axis(flag, **order), "yaxis": style.axis(unit)}
    ticks = {"tickvals": values, "ticktext": words}
    if min(values) <= 0 or max(values) / min(values) < LOGARITHMIC_FROM:
        return {"xaxis": style.axis(flag, **ticks), "yaxis": style.axis(unit)}
    ends = [end for point in every for end in (point.measured.p20, point.measured.median, point.measured.p80) if end]
    return {"xaxis": style.axis(flag, type="log", **ticks), "yaxis": style.axis_of(unit, style.logarithmic(ends))}


# Over time: a lane for each loss, of the samples over the run, and of the memory within a step.

WIDE_LANE, LOW_LANE = 130, 92  # pixels, of samples and of memory
MOST_SAMPLES = 1500  # drawn for one implementation; flagged ones are always drawn
FARTHEST = 0.34  # of a lane, up or down; the rest is for its name
MOST = 0.3  # of the median of its batch: what is farther from it is drawn at the edge


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
    """Return the samples beside the median of their batch; where a batch has one sample, which is its median, beside
    the median time of a cell, padded or useful, whichever agrees more."""
    samples = row.samples_of(row.scope)
    times = gathered((sample.batch, sample.ms) for sample in samples)
    if not samples or min(map(len, times.values())) > 1:
        medians = {batch: median(ms) for batch, ms in times.items()}
        return Lane(row, samples, [sample.ms / medians[sample.batch] for sample in samples]) if samples else None
    lanes = []
    for cells in ("padded_cells", "useful_cells"):
        size_of = {str(batch.index): getattr(batch, cells) for batch in row.batches}
        known = [sample for sample in samples if sample.batch in size_of]
        rates = [sample.ms / size_of[sample.batch] for sample in known]
        middle = median(rates) if rates else 1.0
        lanes.append(Lane(row, known, [rate / middle for rate in rates]))
    return min(lanes, key=lambda lane: sum(abs(value - 1) for value in lane.relative)) if lanes[0].samples else None


def drift(rows: Sequence[Row]) -> Optional[Figure]:
    """Draw each sample relative to the median of its batch, or of a cell, in the order taken."""
    sampled = [lane for lane in map(_of_row, rows) if lane and len(lane.samples) > 1]
    if not sampled:
        return None
    farthest = max(abs(value - 1) for lane in sampled for value in lane.relative)
    widest = min(farthest, MOST)
    scale = FARTHEST / max(widest, 0.05)
    data: List[Plotly] = []
    shapes, names = [], []
    for at, lane in enumerate(sampled):
        data.append(_samples(lane, at, scale))
        pairs = [pair for pair in zip(lane.samples, lane.samples[1:]) if pair[0].round != pair[1].round]
        ends = [(last.at_s + first.at_s - first.ms / 1e3) / 2 / lane.seconds for last, first in pairs]
        shapes += [_line(at, 0, 1), *(_line(at, end, end) for end in ends)]
        names.append(f"{style.shown(lane.row.label)}  <b>{lane.range}</b>  in {number(lane.seconds, 3)} s")
    frame = style.lanes(names, WIDE_LANE, int(WIDE_LANE * FARTHEST) + 6)
    mark = next((step for step in (MOST, 0.2, 0.1, 0.05) if step <= widest), 0.05)
    ticks = [(-at + change * scale, _percent(change)) for at in range(len(sampled)) for change in (-mark, 0, mark)]
    places, words = zip(*ticks)
    frame["yaxis"].update(showticklabels=True, tickvals=places, ticktext=words, rangemode="normal")
    caption = (
        "Each sample against the median of its batch, in the order taken; where a batch has one sample, its time for a "
        "cell against the median of all. Dashed lines part the rounds (fresh processes). A slope is drift or "
        "throttling, a step another load. Crosses ran beside other load."
    )
    if farthest > MOST:
        caption += f" At the edge: farther than {MOST:.0%}."
    ranges = "; ".join(f"{lane.row.label} {lane.range}" for lane in sampled)
    frame.update(shapes=shapes, xaxis=style.axis("of the timed work", tickformat=".0%"))
    table = tabulated("samples", "Samples over time", [_cells(lane) for lane in sampled])
    told = f"Spread of the samples around the median: {ranges}"
    layout = style.layout(WIDE_LANE * len(sampled) + 90, **frame)
    return Figure("samples", table.title, caption, told, data, layout, table)


def _samples(lane: Lane, at: int, scale: float) -> Plotly:
    stride, look = math.ceil(len(lane.samples) / MOST_SAMPLES), lane.row.look
    pairs = enumerate(zip(lane.samples, lane.relative))
    drawn = [(sample, value - 1) for index, (sample, value) in pairs if index % stride == 0 or sample.flagged]
    flagged = [sample.flagged for sample, _ in drawn]
    symbols = ["x-thin-open" if crossed else style.symbol(look) for crossed in flagged]
    line = {"width": [2 if crossed else 0.5 for crossed in flagged], "color": style.INK}
    spots: Plotly = {"opacity": 1, "color": style.color(look), "symbol": symbols, "line": line}
    spots["size"] = [9 if crossed else 6 for crossed in flagged]
    places = [(sample.at_s / lane.seconds, -at + min(max(change, -MOST), MOST) * scale) for sample, change in drawn]
    told = [[sample.ms, f"{change:+.1%}", sample.round] for sample, change in drawn]
    hover = "%{customdata[0]:.4g} ms (%{customdata[1]}), round %{customdata[2]}"
    return style.points(lane.row.label, places, spots, hover, customdata=told)


def _line(lane: int, begin: float, end: float) -> Plotly:
    """Return a line along the median of a lane; one across the lane where it begins and ends at once."""
    across = FARTHEST if begin == end else 0
    ends = {"x0": begin, "x1": end, "y0": -lane - across, "y1": -lane + across}
    look = {"width": 1, "color": style.INK, "dash": "dash" if across else "solid"}
    return {"type": "line", "layer": "below", **ends, "line": look, "opacity": 0.6}


def _cells(lane: Lane) -> Dict[str, Cell]:
    ends = {"lowest %": 100 * min(lane.relative) - 100, "highest %": 100 * max(lane.relative) - 100}
    counts = {"samples": len(lane.samples), "beside other load": sum(sample.flagged for sample in lane.samples)}
    numbers = {title: measured(value, lane.row.results) for title, value in {**ends, **counts}.items()}
    return {"implementation": Cell(lane.row.label), **numbers}


def memory_within(rows: Sequence[Row]) -> Optional[Figure]:
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
        words = f"at {number(curve.ms[peak], 3)} of {number(curve.ms[-1], 3)} ms"
        names.append(f"{style.shown(row.marked)}  <b>{number(curve.peak_mb)} MB</b>  {words}")
        trace = row.folder / curve.file
        stages = ", ".join(f"{stage} {number(mb, 3)}" for stage, mb in curve.stage_mb.items())
        cell = {"implementation": Cell(row.label), "ProfilerStep": Cell(f"#{curve.step}", curve.step, trace)}
        cell.update({"peak MB": measured(curve.peak_mb, trace), "step ms": measured(curve.ms[-1], trace)})
        cells.append({**cell, "highest MB in each stage": Cell(stages or "-")})
    frame = {
        **style.lanes(names, LOW_LANE, int(LOW_LANE * FARTHEST) + 6),
        "xaxis": style.axis("of the step", tickformat=".0%"),
    }
    caption = (
        "What is allocated above the step's start, in the last step of the first trace, all to one scale of MB; the "
        "symbol is the peak. Profiled: times have the profiler's own cost in them."
    )
    peaks = "; ".join(f"{row.label} {number(curve.peak_mb)} megabytes" for row, curve in curves)
    table = tabulated("memory-within", "Memory within a step", cells)
    layout = style.layout(LOW_LANE * len(curves) + 90, **frame)
    return Figure("memory-within", table.title, caption, f"Highest memory within a step: {peaks}", data, layout, table)
