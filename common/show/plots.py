"""Draw the plots of a page: ratios, time against memory, the sweep over a setting, and what changes
during a run or within a step."""

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
from rnnt_bench.traces.windows import Curve

LANE = 44  # pixels


class Dot(NamedTuple):
    """Hold one lane of a plot of ratios.

    Attributes:
        low, high: interval of the ratio, None where it has none
        hollow: whether rounds beside other load are in the ratio, so that it decides nothing
        source: the file that the ratio is from
    """

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
        """Return " (1.59 to 1.91)"; "" where the ratio has no interval."""
        span = interval(self.low, self.high)
        return f" ({span})" if span else ""


def over_fastest(rows: Rows) -> Figure | None:
    """Draw the time of each loss over that of the fastest exact one; return None where fewer than
    two losses can be compared."""
    kinds = verdict.ranked_kinds(rows)
    standings = [row.against_fastest for row in rows if row.against_fastest]
    # Keep the kinds that a verdict chooses from; if no row of these is ranked, keep all kinds.
    standings = [item for item in standings if item.row.kind in kinds] or standings
    if not standings:
        return None
    # Each kind under each torch has a fastest row.  That of the first row counts: the rows are
    # sorted by kind, the exact one first (`groups.rank`).
    fastest = standings[0].baseline
    scope = standings[0].scope
    dots = [dot for row in rows if (dot := _dot(row, fastest, scope))]
    if len(dots) < 2:
        return None
    title = f"{scope.capitalize()} time over {fastest.label}'s"
    caption = f"Dot: the time of a {scope} over that of {fastest.label}; "
    caption += "line: its 95% interval over rounds."
    other_models = [row.label for row in rows if row.ms and not row.trains_exact_model]
    if other_models and fastest.trains_exact_model:
        caption += f" Not drawn, as they train another model: {', '.join(other_models)}."
    return ratios("ratios", title, caption, dots, f"times {fastest.label}")


def _dot(row: Row, fastest: Row, scope: str) -> Dot | None:
    """Return the dot of a row's time over the fastest row's; None where the two are not
    compared."""
    if row is fastest:
        return Dot(row.marked_label, row.look, 1.0, verdict="fastest", source=row.results)
    against = row.against_fastest
    if (
        against is None
        or row.trains_exact_model != fastest.trains_exact_model
        or row.other_torch != fastest.other_torch
    ):
        return None
    if against.baseline is fastest and against.scope == scope:
        word = metrics.METRICS["verdict"].shown(row)  # as in the table
    else:  # it was ranked against another row, or in the other scope
        against = standing.stand(row, fastest, scope)
        word = against.verdict
    ratio = against.ratio
    if ratio is None:
        return None
    return Dot(
        row.marked_label,
        row.look,
        ratio.ratio,
        low=ratio.low,
        high=ratio.high,
        verdict=word,
        hollow=against.beside_load,
        source=row.results,
    )


def ratios(key: str, title: str, caption: str, dots: Sequence[Dot], across: str) -> Figure:
    """Draw a lane for each ratio, the first on top, on a logarithmic axis with a line at 1.

    Args:
        key: name of the plot within its section
        title, caption: words above the plot
        dots: the ratios
        across: title of the axis
    """
    if any(dot.hollow for dot in dots):
        caption += " Hollow: beside other load, so the ratio decides nothing."
    ends = [end for dot in dots for end in (dot.low, dot.ratio, dot.high) if end]
    data, names, summaries, cells = [], [], [], []
    for lane, dot in enumerate(dots):
        data.append(_dot_trace(dot, lane))
        value = number(dot.ratio, 3)
        name = f"{_headed(dot.name, f'{value}x')}{dot.interval}  {dot.verdict}"
        names.append(name.rstrip())
        summaries.append(f"{dot.name} {value}{dot.interval}")
        cells.append(_dot_cells(dot))
    # From the bottom of the last lane to the top of the first: each is 1 high, its middle at -lane.
    equal = _segment((1, 1), (0.5 - len(dots), 0.5), opacity=0.9, width=1.5)
    layout = style.layout(
        LANE * len(dots) + 70,
        **style.lanes(names, lane=LANE, gap=8),
        shapes=[equal],
        xaxis=style.axis_of(across, style.logarithmic([*ends, 1.0])),
    )
    summary = f"{title}: {'; '.join(summaries)}"
    return Figure(key, title, caption, summary, data, layout, tabulated(key, title, cells))


def _dot_trace(dot: Dot, lane: int) -> Plotly:
    """Return plotly's trace of a dot: its marker, with a whisker if the ratio has an interval.

    lane: the number of its lane, 0 for the top one."""
    options: Plotly = {}
    if dot.low is not None and dot.high is not None:
        options["error_x"] = {
            "array": [dot.high - dot.ratio],
            "arrayminus": [dot.ratio - dot.low],
            "thickness": 2,
        }
    look = style.marker(dot.look, size=12, hollow=dot.hollow)
    return style.points(dot.name, [(dot.ratio, -lane)], look, "%{x:.3g} times", **options)


def _dot_cells(dot: Dot) -> dict[str, Cell]:
    """Return {column: cell} of a dot, for the table that has the numbers of the plot."""
    numbers = {"ratio": dot.ratio, "low": dot.low, "high": dot.high}
    cells = {title: measured(value, dot.source) for title, value in numbers.items()}
    return {"implementation": Cell(dot.name), **cells, "verdict": Cell(dot.verdict or "-")}


def _headed(name: str, value: str) -> str:
    """Return a name and its value in bold, in plotly's HTML: the heading of a lane."""
    return f"{style.shown(name)}  <b>{value}</b>"


def _segment(x: tuple[float, float], y: tuple[float, float], opacity: float, **line: Any) -> Plotly:
    """Return a line from (x[0], y[0]) to (x[1], y[1]), behind the data. line: plotly's width and
    dash."""
    ends = {"x0": x[0], "x1": x[1], "y0": y[0], "y1": y[1]}
    look = {"opacity": opacity, "line": {"color": style.INK, **line}}
    return {"type": "line", "layer": "below", **ends, **look}


# Time against memory.


class Position(NamedTuple):
    """Hold a row with its time in ms and its peak memory in MB."""

    row: Row
    time: statistics.Summary
    mb: float

    @property
    def is_ranked(self) -> bool:
        """Tell whether the row is compared with exact losses: its loss trains the same model as
        they do, and it ran under the torch of most rows."""
        return self.row.trains_exact_model and not self.row.other_torch


def positions(rows: Rows) -> list[Position]:
    """Return the positions of the rows that have both a time and a peak."""
    return [
        Position(row, row.ms, row.peak_mb) for row in rows if row.ms and row.peak_mb is not None
    ]


def front(drawn: Sequence[Position]) -> list[Position]:
    """Return the Pareto front, the fastest first: the exact losses for which no other exact loss is
    both faster and smaller."""
    exact = [position for position in drawn if position.is_ranked and position.row.kind != "pruned"]
    result: list[Position] = []
    for position in sorted(exact, key=lambda position: (position.time.median, position.mb)):
        if not result or position.mb < result[-1].mb:
            result.append(position)
    return result


def time_and_memory(rows: Rows) -> Figure | None:
    """Draw time against peak memory, with a line along the Pareto front; return None where fewer
    than two rows have both. Rows that are not ranked have hollow symbols."""
    drawn = positions(rows)
    if len(drawn) < 2:
        return None
    across = style.span(_medians_and_percentiles(position.time for position in drawn))
    up = style.span([position.mb for position in drawn])
    best = front(drawn)
    data, sentences = [], []
    if best:
        corners = [(position.time.median, position.mb) for position in best]
        # The line goes on to both edges: up from the fastest, to the right from the smallest.
        corners = [(corners[0][0], up.high), *corners, (across.high, corners[-1][1])]
        line = {"shape": "hv", "dash": "dot", "width": 2.5, "color": style.INK}
        data.append(style.points("Pareto front", corners, {}, mode="lines", line=line))
        names = ", ".join(position.row.label for position in best)
        sentences.append(f"Beaten in both by no other exact loss (line): {names}.")
    data += [_position_trace(position, position in best) for position in drawn]
    others = ", ".join(position.row.marked_label for position in drawn if not position.is_ranked)
    if others:
        sentences.append(f"Hollow, not ranked: of other models, or under another torch: {others}.")
    title = "Time against memory"
    summary = " ".join([f"{title}.", *sentences])
    if any(position.time.p20 for position in drawn):
        whiskers = (
            "Whiskers: the 20th and 80th percentile of samples over their own batch's median."
        )
        sentences.insert(0, whiskers)
    caption = " ".join(["Lower left is better.", *sentences])
    axes = {"xaxis": style.axis_of("step, ms", across), "yaxis": style.axis_of("peak, MB", up)}
    layout = style.layout(460, legend=200, **axes)
    cells = [_position_cells(position, position in best) for position in drawn]
    table = tabulated("time-memory", "Time and memory", cells)
    return Figure("time-memory", title, caption, summary, data, layout, table)


def _position_trace(position: Position, on_front: bool) -> Plotly:
    """Return the marker of a row with whiskers of its time, and with its name if it is on the
    Pareto front."""
    row = position.row
    whiskers = {**style.whiskers([position.time]), "thickness": 1, "width": 4}
    options: Plotly = {"error_x": whiskers, "cliponaxis": False}
    if on_front:
        options.update(mode="markers+text", text=[style.shown(row.label)], textposition="top right")
    look = style.marker(row.look, size=13, hollow=not position.is_ranked)
    hover = "%{x:.4g} ms, %{y:.4g} MB"
    return style.points(
        row.marked_label, [(position.time.median, position.mb)], look, hover, **options
    )


def _position_cells(position: Position, on_front: bool) -> dict[str, Cell]:
    """Return {column: cell} of a position; on_front: whether it is on the Pareto front."""
    row = position.row
    return {
        "implementation": Cell(row.marked_label),
        "median ms": measured(position.time.median, row.results),
        "peak MB": measured(position.mb, row.results),
        "on the front": Cell("yes" if on_front else "no"),
    }


def _medians_and_percentiles(summaries: Iterable[statistics.Summary]) -> list[float]:
    """Return the medians and percentiles that an axis has to span: all but None and 0."""
    return [
        end for summary in summaries for end in (summary.p20, summary.median, summary.p80) if end
    ]


# Sweeps.

#: Both axes are logarithmic if the largest value of the setting is at least so many times the
#: smallest.
LOGARITHMIC_FROM = 4


class Point(NamedTuple):
    """Hold the value of the swept setting, and what a row measured with it."""

    value: Any
    measured: statistics.Summary
    row: Row


class Quantity(NamedTuple):
    """Describe a quantity that is drawn over a setting.

    summary: returns the quantity of a row; None where the row lacks it."""

    key: str
    title: str
    unit: str
    caption: str
    summary: Callable[[Row], statistics.Summary | None]


def quantities() -> list[Quantity]:
    """Return what is drawn of a sweep: time, memory, and the metrics that are marked for plots."""
    time_caption = "Median step (loss where no step was timed); whiskers: p20 to p80."
    memory_caption = "Highest peak of a step above its baseline, from the memory pass."
    result = [
        Quantity("time", "Step time", "ms", time_caption, lambda row: row.ms),
        Quantity("memory", "Peak memory", "MB", memory_caption, lambda row: _single(row.peak_mb)),
    ]
    for metric in metrics.METRICS.values():
        if metric.is_in("plot"):
            summary = partial(_metric_summary, metric)
            result.append(
                Quantity(metric.key, metric.title, metric.unit, caption="", summary=summary)
            )
    return result


def _metric_summary(metric: metrics.Metric, row: Row) -> statistics.Summary | None:
    return _single(metric.scaled(row))


def _single(value: float | None) -> statistics.Summary | None:
    """Return a number as a summary without percentiles; None for None."""
    return None if value is None else statistics.Summary(value)


def swept(sweep: groups.Sweep) -> list[Figure]:
    """Return a plot of each quantity over each setting that varies, at the first values of the
    other settings."""
    figures = []
    varying = [key for key, values in sweep.grid.items() if len(values) > 1]
    for key in varying:
        fixed = {other: values[0] for other, values in sweep.grid.items() if other != key}
        rows = [row for row in sweep.rows if fixed.items() <= row.header.values.items()]
        notes = [f"At {settings.words(fixed)}."] if fixed else []
        notes += _not_drawn(rows, key)
        ok = [row for row in rows if row.status == "ok"]
        for quantity in quantities():
            points = [
                Point(row.header.values[key], summary, row)
                for row in ok
                if (summary := quantity.summary(row))
            ]
            if points:
                caption = " ".join(filter(None, [quantity.caption, *notes]))
                figures.append(_over(key, sweep.grid[key], quantity, points, caption))
    return figures


def _not_drawn(rows: Rows, key: str) -> list[str]:
    """Return a sentence on the rows that failed, with their values of the setting `key`; [] if
    none did."""
    failed = gathered(
        ((row.name, row.status), settings.worded(row.header.values[key]))
        for row in rows
        if row.status != "ok"
    )
    phrases = [
        f"{name} at {', '.join(values)} ({status})" for (name, status), values in failed.items()
    ]
    return [f"Not drawn: {'; '.join(phrases)}."] if phrases else []


def _over(
    setting: str, values: Sequence[Any], quantity: Quantity, points: Sequence[Point], caption: str
) -> Figure:
    """Return the plot of a quantity over a setting: a curve for each implementation, or only its
    points if the values are not numbers.

    values: all swept values of the setting, in order."""
    flag = settings.flag(setting)
    curves = gathered((point.row.name, point) for point in points)
    names = sorted(curves)
    is_numeric = groups.is_numeric(values)
    key = f"sweep-{flag}-{quantity.key}"
    title = f"{quantity.title} over {flag}"
    summary = "; ".join(_curve_summary(name, curves[name], quantity.unit) for name in names)
    data = [_curve_trace(curves[name], is_numeric, quantity.unit) for name in names]
    layout = style.layout(height=420, legend=200, **_axes(values, flag, quantity.unit, points))
    table = tabulated(key, title, [_point_cells(point, flag, quantity.unit) for point in points])
    return Figure(key, title, caption, f"{title}: {summary}", data, layout, table)


def _curve_summary(name: str, curve: Sequence[Point], unit: str) -> str:
    """Return "k2 12.1 ms at 500, 20.3 ms at 1000"."""
    phrases = [
        f"{number(point.measured.median)} {unit} at {settings.worded(point.value)}"
        for point in curve
    ]
    return f"{name} {', '.join(phrases)}"


def _curve_trace(curve: Sequence[Point], is_numeric: bool, unit: str) -> Plotly:
    """Return the trace of one implementation: markers, with whiskers where all points have
    percentiles, and a line through them if the setting is numeric."""
    row = curve[0].row
    options: Plotly = {
        "mode": "lines+markers" if is_numeric else "markers",
        "line": style.line(row.look),
    }
    if all(point.measured.p20 and point.measured.p80 for point in curve):
        options["error_y"] = style.whiskers([point.measured for point in curve])
    shown = float if is_numeric else settings.worded
    places = [(shown(point.value), point.measured.median) for point in curve]
    hover = f"%{{x}}: %{{y:.4g}} {unit}"
    dot = style.marker(row.look, size=11)
    return style.points(row.marked_label, places, dot, hover, **options)


def _point_cells(point: Point, flag: str, unit: str) -> dict[str, Cell]:
    """Return {column: cell} of a point; only times have percentiles.

    flag: the flag of the swept setting; unit: of the measured values, "ms" for times"""
    value = point.value if groups.is_numeric([point.value]) else None
    cells = {
        "implementation": Cell(point.row.label),
        flag: Cell(settings.worded(point.value), value),
        f"median {unit}": measured(point.measured.median, point.row.results),
    }
    if unit == "ms":
        cells["p20 ms"] = measured(point.measured.p20, point.row.results)
        cells["p80 ms"] = measured(point.measured.p80, point.row.results)
    return cells


def _axes(values: Sequence[Any], flag: str, unit: str, points: Sequence[Point]) -> Plotly:
    """Return the axes of a plot over a setting: categories or numbers along x. If the numbers are
    far apart, both axes are logarithmic."""
    words = [settings.worded(value) for value in values]
    if not groups.is_numeric(values):
        order = {"type": "category", "categoryorder": "array", "categoryarray": words}
        return {"xaxis": style.axis(flag, **order), "yaxis": style.axis(unit)}
    ticks = {"tickvals": values, "ticktext": words}
    if min(values) <= 0 or max(values) / min(values) < LOGARITHMIC_FROM:
        return {"xaxis": style.axis(flag, **ticks), "yaxis": style.axis(unit)}
    span = style.logarithmic(_medians_and_percentiles(point.measured for point in points))
    return {"xaxis": style.axis(flag, type="log", **ticks), "yaxis": style.axis_of(unit, span)}


# Over time: each loss has a lane, the first at y = 0, the next at y = -1.

WIDE_LANE = 130  # pixels of a lane of samples
LOW_LANE = 92  # pixels of a lane of memory
MOST_SAMPLES = 1500  # that are drawn of one implementation, besides the flagged ones
FARTHEST = 0.34  # of a lane, up and down from its middle, is for data; the rest for its name
NAME_GAP = 6  # pixels between the data of a lane and its name above them
AROUND_LANES = 90  # pixels of a figure for the margins, the axis and the name of the first lane
# A sample that differs by a larger share of its median is drawn at the edge of its lane.
MOST = 0.3
MARKS = (MOST, 0.2, 0.1, 0.05)  # shares that an axis may be marked with: the largest that fits


class Timed(NamedTuple):
    """Hold a timed sample.

    Attributes:
        end_s: seconds of work that was timed up to the sample's end, warm-up and the other scope
            included
        relative: its time over the median that it is compared with
    """

    sample: Sample
    end_s: float
    relative: float


class Lane(NamedTuple):
    """Hold a row and its timed samples, in the order taken."""

    row: Row
    timed: list[Timed]

    @property
    def changes(self) -> list[float]:
        """Return for each sample its time less the median that it is compared with, as a share of
        this median."""
        return [item.relative - 1 for item in self.timed]

    @property
    def seconds(self) -> float:
        """Return the seconds of timed work up to the end of the last sample."""
        return self.timed[-1].end_s

    @property
    def range(self) -> str:
        """Return the lowest and the highest of the changes: "\u22123% to +12%"."""
        return f"{_percent(min(self.changes))} to {_percent(max(self.changes))}"


def _percent(change: float) -> str:
    """Return a change as "+12%" or, with a minus sign, "\u22123%"."""
    return f"{change:+.0%}".replace("-", "\u2212") if change else "0"


def _lane(row: Row) -> Lane | None:
    """Return the samples of a row against their medians; None where there are none, or where their
    batches are not recorded but needed.

    A sample is compared with the median of its batch. That tells nothing where a batch has only one
    sample. Then all samples of the row are compared by their time for a cell of the lattice, with
    the row's median of that time. The cells are the padded ones or the useful ones, whichever make
    the samples agree more.
    """
    samples = row.lines_of(Sample)
    # in seconds, on a clock that runs during all samples: warm-ups and other scopes too
    ends = accumulate(sample.ms / 1e3 for sample in samples)
    timed = [
        (sample, end)
        for sample, end in zip(samples, ends)
        if sample.scope == row.scope and not sample.warmup
    ]
    times = gathered((sample.batch, sample.ms) for sample, _ in timed)
    if min(map(len, times.values()), default=0) > 1:
        medians = {batch: median(ms) for batch, ms in times.items()}
        relative = [sample.ms / medians[sample.batch] for sample, _ in timed]
    else:
        batches = {batch.index: batch for batch in row.batches}
        timed = [(sample, end) for sample, end in timed if sample.batch in batches]
        if not timed:
            return None
        by_cells = []
        for cells in ("padded_cells", "useful_cells"):
            rates = [sample.ms / getattr(batches[sample.batch], cells) for sample, _ in timed]
            middle = median(rates)
            by_cells.append([rate / middle for rate in rates])
        relative = min(by_cells, key=lambda values: sum(abs(value - 1) for value in values))
    return Lane(row, [Timed(sample, end, value) for (sample, end), value in zip(timed, relative)])


def drift(rows: Rows) -> Figure | None:
    """Draw how far each sample is from its median, over the time of its run; a lane for each row.

    Return None where no row has two samples."""
    lanes = [lane for lane in map(_lane, rows) if lane and len(lane.timed) > 1]
    if not lanes:
        return None
    largest_change = max(abs(change) for lane in lanes for change in lane.changes)
    # The change at the edge of a lane.  At least the smallest mark fits.
    edge = min(max(largest_change, MARKS[-1]), MOST)
    scale = FARTHEST / edge  # height of a change by 100%, in lanes
    mark = next(share for share in MARKS if share <= edge)  # MARKS fall: the largest that fits
    names = [
        f"{_headed(lane.row.label, lane.range)}  in {number(lane.seconds, 3)} s" for lane in lanes
    ]
    frame = style.lanes(names, lane=WIDE_LANE, gap=int(WIDE_LANE * FARTHEST) + NAME_GAP)
    heights, words = [], []
    shapes: list[Plotly] = []
    for index, lane in enumerate(lanes):
        shapes += _lane_lines(lane, index)
        for change in (-mark, 0, mark):
            heights.append(-index + change * scale)
            words.append(_percent(change))
    frame["yaxis"].update(showticklabels=True, tickvals=heights, ticktext=words, rangemode="normal")
    frame.update(shapes=shapes, xaxis=style.axis("of the timed work", tickformat=".0%"))
    layout = style.layout(WIDE_LANE * len(lanes) + AROUND_LANES, **frame)
    caption = (
        "Each sample against the median of its batch, in the order taken; where a batch has one sample, its time for a "
        "cell against the median of all. Dashed lines part the rounds (fresh processes). A slope is drift or "
        "throttling, a step another load. Crosses ran beside other load."
    )
    if largest_change > MOST:
        caption += f" At the edge: farther than {MOST:.0%}."
    ranges = "; ".join(f"{lane.row.label} {lane.range}" for lane in lanes)
    summary = f"Spread of the samples around the median: {ranges}"
    data = [_lane_samples(lane, index, scale) for index, lane in enumerate(lanes)]
    table = tabulated("samples", "Samples over time", [_lane_cells(lane) for lane in lanes])
    return Figure("samples", table.title, caption, summary, data, layout, table)


def _lane_lines(lane: Lane, index: int) -> list[Plotly]:
    """Return a line along the middle of a lane, and a dashed one across the lane wherever a round
    ends and the next begins.

    x is the share of the lane's timed work, y is minus the lane's index."""
    lines = [_segment((0, 1), (-index, -index), opacity=0.6, width=1, dash="solid")]
    for before, after in pairwise(lane.timed):
        if before.sample.round != after.sample.round:
            # The line is in the middle of what lies between the two: the warm-ups of the new round.
            after_begins_s = after.end_s - after.sample.ms / 1e3
            between = (before.end_s + after_begins_s) / 2 / lane.seconds
            across = (-index - FARTHEST, -index + FARTHEST)
            lines.append(_segment((between, between), across, opacity=0.6, width=1, dash="dash"))
    return lines


def _lane_samples(lane: Lane, index: int, scale: float) -> Plotly:
    """Return the markers of a lane's samples, crosses for flagged ones.

    If a lane has more than MOST_SAMPLES, only each n-th sample and the flagged ones are drawn.
    scale: height of a change by 100%, in lanes."""
    stride = math.ceil(len(lane.timed) / MOST_SAMPLES)
    drawn = [
        item for turn, item in enumerate(lane.timed) if turn % stride == 0 or item.sample.is_flagged
    ]
    places, customdata, symbols, sizes, widths = [], [], [], [], []
    for sample, end_s, relative in drawn:
        change = relative - 1
        height = min(max(change, -MOST), MOST) * scale
        places.append((end_s / lane.seconds, -index + height))
        customdata.append([sample.ms, f"{change:+.1%}", sample.round])
        symbols.append("x-thin-open" if sample.is_flagged else style.symbol(lane.row.look))
        sizes.append(9 if sample.is_flagged else 6)
        widths.append(2 if sample.is_flagged else 0.5)
    look: Plotly = {
        "opacity": 1,
        "color": style.color(lane.row.look),
        "symbol": symbols,
        "size": sizes,
        "line": {"width": widths, "color": style.INK},
    }
    hover = "%{customdata[0]:.4g} ms (%{customdata[1]}), round %{customdata[2]}"
    return style.points(lane.row.label, places, look, hover, customdata=customdata)


def _lane_cells(lane: Lane) -> dict[str, Cell]:
    """Return {column: cell} of a lane: the range of its changes, and how many samples it has."""
    numbers = {
        "lowest %": 100 * min(lane.changes),
        "highest %": 100 * max(lane.changes),
        "samples": len(lane.timed),
        "beside other load": sum(item.sample.is_flagged for item in lane.timed),
    }
    cells = {title: measured(value, lane.row.results) for title, value in numbers.items()}
    return {"implementation": Cell(lane.row.label), **cells}


def memory_within(rows: Rows) -> Figure | None:
    """Draw the allocated memory within one step of each row; return None where no trace has memory
    events."""
    curves = [(row, row.curve) for row in rows if row.curve]
    if not curves:
        return None
    highest_mb = max(curve.peak_mb for _, curve in curves) or 1.0  # not 0: it divides
    # Height of 1 MB, in lanes: 0 is at -FARTHEST, the highest peak at FARTHEST.
    scale = 2 * FARTHEST / highest_mb
    data, names = [], []
    for index, (row, curve) in enumerate(curves):
        data += _curve_and_peak(row, curve, index, scale)
        peak_ms = number(curve.ms[curve.mb.index(curve.peak_mb)], 3)
        heading = _headed(row.marked_label, f"{number(curve.peak_mb)} MB")
        names.append(f"{heading}  at {peak_ms} of {number(curve.ms[-1], 3)} ms")
    frame = style.lanes(names, lane=LOW_LANE, gap=int(LOW_LANE * FARTHEST) + NAME_GAP)
    frame["xaxis"] = style.axis("of the step", tickformat=".0%")
    layout = style.layout(LOW_LANE * len(curves) + AROUND_LANES, **frame)
    caption = (
        "What is allocated above the step's start, in the last step of the first trace, all to one scale of MB; the "
        "symbol is the peak. Profiled: times have the profiler's own cost in them."
    )
    peaks = "; ".join(f"{row.label} {number(curve.peak_mb)} megabytes" for row, curve in curves)
    summary = f"Highest memory within a step: {peaks}"
    cells = [_memory_cells(row, curve) for row, curve in curves]
    table = tabulated("memory-within", "Memory within a step", cells)
    return Figure("memory-within", table.title, caption, summary, data, layout, table)


def _curve_and_peak(row: Row, curve: Curve, index: int, scale: float) -> list[Plotly]:
    """Return the curve of a lane and the marker of its peak.

    x is the share of the step's time. y is in lanes: 0 MB is FARTHEST below the middle of the lane,
    which is at minus its index. scale: height of 1 MB, in lanes."""
    numbers = list(zip(curve.ms, curve.mb))
    places = [(ms / curve.ms[-1], -index + scale * mb - FARTHEST) for ms, mb in numbers]
    hover = "%{customdata[0]:.4g} ms: %{customdata[1]:.4g} MB"
    line = {**style.line(row.look), "dash": "solid", "shape": "hv"}
    options: Plotly = {"mode": "lines", "line": line, "customdata": numbers}
    peak = curve.mb.index(curve.peak_mb)
    dot = style.marker(row.look, size=10)
    return [
        style.points(row.marked_label, places, {}, hover, **options),
        style.points(row.marked_label, [places[peak]], dot, hover, customdata=[numbers[peak]]),
    ]


def _memory_cells(row: Row, curve: Curve) -> dict[str, Cell]:
    """Return {column: cell} of a row's curve; numbers link to the trace."""
    trace = row.folder / curve.file
    stages = ", ".join(f"{stage} {number(mb, 3)}" for stage, mb in curve.stage_mb.items())
    return {
        "implementation": Cell(row.label),
        "ProfilerStep": Cell(f"#{curve.step}", curve.step, trace),
        "peak MB": measured(curve.peak_mb, trace),
        "step ms": measured(curve.ms[-1], trace),
        "highest MB in each stage": Cell(stages or "-"),
    }
