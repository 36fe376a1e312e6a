"""Draw how time and memory change with one swept setting: curves over a numeric one, grouped bars over any other.

With several settings there is a plot for each, at the first values of the others; the table of the section has all
cells.
"""

from __future__ import annotations

from typing import Any, Callable, List, NamedTuple, Optional, Sequence

from common.analysis.identity import grouped
from common.analysis.metrics import METRICS, Metric, others
from common.analysis.row import Row
from common.analysis.sweep import Sweep, along, growth, is_number, is_numeric, median_ms
from common.core import grid
from common.core.setting import worded
from common.core.statistics import Summary
from common.core.text import gathered, number
from common.present import scales
from common.present.style import (
    Figure,
    Plotly,
    Trace,
    axis,
    axis_of,
    bar_of,
    bars,
    layout,
    line,
    marker,
    points,
    whiskers,
)
from common.present.table import Cell, Table, measured, tabulated

HEIGHT = 420
LOGARITHMIC_FROM = 4  # largest over smallest value from which both axes are logarithmic
SAME = 0.03  # values that differ by less are within the width of a line


class Point(NamedTuple):
    """Hold one implementation at one value of the setting.  measured: only its median is set where it is no time."""

    value: Any
    measured: Summary
    row: Row


Curve = Sequence[Point]  # of one implementation


class Quantity(NamedTuple):
    """Describe a number that is drawn.  of: returns a row's summary, None where it is not known."""

    key: str
    title: str
    unit: str
    caption: str
    of: Callable[[Row], Optional[Summary]]


def _time(row: Row) -> Optional[Summary]:
    timed = median_ms(row)
    return timed[1] if timed else None


def _number(metric: Metric) -> Callable[[Row], Optional[Summary]]:
    """Return a function that returns a metric of a run that ended well."""

    def of(row: Row) -> Optional[Summary]:
        value = metric.value(row) if row.status == "ok" else None
        return None if value is None else Summary(value)

    return of


def quantities() -> List[Quantity]:
    """Return time, memory, and the metrics that no table's list names."""
    time = "Median step (loss where no step was timed); whiskers: p20 to p80."
    memory = "Highest peak of a step above its baseline, from the memory pass."
    return [
        Quantity("time", "Step time", "ms", time, _time),
        Quantity("memory", "Peak memory", "MB", memory, _number(METRICS["peak_mb"])),
        *(
            Quantity(each.key, each.title, each.unit or each.title, f"{each.title}.", _number(each))
            for each in others()
        ),
    ]


def figures(sweep: Sweep) -> List[Figure]:
    """Return a plot of each quantity for each setting that varies."""
    drawn = []
    for key in (key for key, values in sweep.grid.items() if len(values) > 1):
        for quantity in quantities():
            measured = ((run, quantity.of(run.row)) for run in along(sweep, key))
            every = [Point(run.values[key], summary, run.row) for run, summary in measured if summary]
            of_name = gathered((point.row.name, point) for point in every)
            if of_name:
                drawn.append(_figure(sweep, key, quantity, [of_name[name] for name in sorted(of_name)]))
    return drawn


def _figure(sweep: Sweep, key: str, quantity: Quantity, curves: Sequence[Curve]) -> Figure:
    flag, unit = grid.flag(key), quantity.unit
    together: List[List[Curve]] = []
    if is_numeric(sweep.grid[key]):
        frame = _curve_frame(sweep.grid[key], flag, unit, curves)
        together = coinciding(curves)
        widened = {id(curve): len(same) - 1 - at for same in together for at, curve in enumerate(same)}
        data = [_curve(curve, unit, widened.get(id(curve), 0)) for curve in curves]
    else:
        frame = _bar_frame(sweep.grid[key], flag, unit)
        data = [_bars(curve, unit) for curve in curves]
    title = f"{quantity.title} over {flag}"
    summary = "; ".join(f"{curve[0].row.label} {_in_words(curve, unit)}" for curve in curves)
    return Figure(
        f"sweep-{flag}-{quantity.key}",
        title,
        " ".join(_caption(sweep, key, quantity, together)),
        f"{title}: {summary}",
        data,
        layout(HEIGHT, 200, **frame),
        _table(sweep.name, flag, title, quantity, curves),
    )


def _caption(sweep: Sweep, key: str, quantity: Quantity, together: Sequence[Sequence[Curve]]) -> List[str]:
    sentences = [quantity.caption]
    others = {other: values[0] for other, values in sweep.grid.items() if other != key}
    if others:
        sentences.append(f"At {grid.words(others)}.")
    if quantity.key == "time":
        sentences += [f"{line[0].upper()}{line[1:]}." for line in growth(sweep, key)]
    failed = [run for run in along(sweep, key) if run.row.status != "ok"]
    gone = gathered(((run.row.name, run.row.status), worded(run.values[key])) for run in failed)
    if gone:
        listed = "; ".join(f"{name} at {', '.join(values)} ({status})" for (name, status), values in gone.items())
        sentences.append(f"Not drawn: {listed}.")
    if together:
        names = "; ".join(" and ".join(curve[0].row.label for curve in same) for same in together)
        sentences.append(f"Almost the same, so drawn as a thin line on a thick one: {names}.")
    return sentences


def coinciding(curves: Sequence[Curve]) -> List[List[Curve]]:
    """Group the curves that would hide one another: those that are the same at half of their values or more."""
    groups = grouped(curves, lambda others, curve: any(_is_same(curve, other) for other in others))
    return [same for same in groups if len(same) > 1]


def _is_same(first: Curve, second: Curve) -> bool:
    median_at = {point.value: point.measured.median for point in first}
    pairs = [(median_at[point.value], point.measured.median) for point in second if point.value in median_at]
    close = sum(abs(mine - yours) <= SAME * max(mine, yours) for mine, yours in pairs)
    return bool(pairs) and 2 * close >= len(pairs)


def _in_words(curve: Curve, unit: str) -> str:
    return ", ".join(f"{number(point.measured.median)} {unit} at {worded(point.value)}" for point in curve)


def _curve_frame(values: Sequence[float], flag: str, unit: str, curves: Sequence[Curve]) -> Plotly:
    ticks = {"tickvals": sorted(values), "ticktext": [worded(value) for value in sorted(values)]}
    if min(values) <= 0 or max(values) / min(values) < LOGARITHMIC_FROM:
        return {"xaxis": axis(flag, **ticks), "yaxis": axis(unit)}
    summaries = [point.measured for curve in curves for point in curve]
    ends = [end for each in summaries for end in (each.p20, each.median, each.p80) if end]
    return {"xaxis": axis(flag, type="log", **ticks), "yaxis": axis_of(unit, scales.logarithmic(ends))}


def _bar_frame(values: Sequence[Any], flag: str, unit: str) -> Plotly:
    order = {"type": "category", "categoryorder": "array", "categoryarray": [worded(value) for value in values]}
    return {"xaxis": axis(flag, **order), "yaxis": axis(unit), "barmode": "group", "bargap": 0.25}


def _spread(curve: Curve) -> Plotly:
    known = all(point.measured.p20 and point.measured.p80 for point in curve)
    return {"error_y": whiskers([point.measured for point in curve])} if known else {}


def _curve(curve: Curve, unit: str, widened: int) -> Trace:
    """Return a curve.  widened: how many other curves are drawn over this one."""
    curve, look = sorted(curve, key=lambda point: point.value), curve[0].row.look
    drawn = line(look, 2.2 + 4.5 * widened)
    drawn["color"] += "80" if widened else ""  # half transparent
    symbol, hover = marker(look, 11 + 8 * widened), f"%{{x}}: %{{y:.4g}} {unit}"
    medians = [(point.value, point.measured.median) for point in curve]
    return points(curve[0].row.marked, medians, symbol, hover, mode="lines+markers", line=drawn, **_spread(curve))


def _bars(curve: Curve, unit: str) -> Trace:
    x, y = [worded(point.value) for point in curve], [point.measured.median for point in curve]
    return bars(curve[0].row.marked, x, y, bar_of(curve[0].row.look), f"%{{x}}: %{{y:.4g}} {unit}", **_spread(curve))


def _table(name: str, flag: str, title: str, quantity: Quantity, curves: Sequence[Curve]) -> Table:
    rows = []
    for point in (point for curve in curves for point in curve):
        row = {"implementation": Cell(point.row.label)}
        row[flag] = Cell(worded(point.value), point.value if is_number(point.value) else None)
        numbers = {quantity.unit: point.measured.median}
        if quantity.key == "time":
            numbers = {f"{part} ms": getattr(point.measured, part) for part in ("median", "p20", "p80")}
        row.update({head: measured(value, point.row.results) for head, value in numbers.items()})
        rows.append(row)
    return tabulated(f"{name}-{quantity.key}", title, rows)
