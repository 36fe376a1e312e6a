"""Draw how time and memory change with a swept setting: curves over a numeric one, grouped bars over any other.

With several settings there is a plot for each, at the first values of the others.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence

from common.analysis.groups import Sweep, is_numeric
from common.analysis.metrics import METRICS
from common.analysis.row import Row
from common.core import grid
from common.core.setting import worded
from common.core.statistics import Summary
from common.core.text import gathered, number
from common.present.parts import Cell, Failure, Figure, Link, Plotly, Section, measured, tabulated
from common.present.style import axis, axis_of, bar_of, bars, layout, line, logarithmic, marker, points, whiskers

HEIGHT = 420
LOGARITHMIC_FROM = 4  # largest over smallest value from which both axes are logarithmic


class Point(NamedTuple):
    """Hold one implementation at one value of the setting.  measured: only its median is set where it is no time."""

    value: Any
    measured: Summary
    row: Row


class Quantity(NamedTuple):
    """Describe a number that is drawn.  of: returns a row's summary, None where it is not known."""

    key: str
    title: str
    unit: str
    caption: str
    of: Callable[[Row], Optional[Summary]]


def _peak(row: Row) -> Optional[Summary]:
    peak = METRICS["peak_mb"].value(row)
    return None if peak is None else Summary(peak)


QUANTITIES = (
    Quantity(
        "time",
        "Step time",
        "ms",
        "Median step (loss where no step was timed); whiskers: p20 to p80.",
        lambda row: row.times,
    ),
    Quantity("memory", "Peak memory", "MB", "Highest peak of a step above its baseline, from the memory pass.", _peak),
)


def section(sweep: Sweep, number: int) -> Section:
    """Return the section of a sweep.  number: its number among such sections."""
    failed = [(row, f"{row.label} at {grid.words(row.header.values)}") for row in sweep.rows if row.reason]
    return Section(
        f"sweep-{number}",
        f"Sweep over {' and '.join(map(grid.flag, sweep.grid))}",
        sweep.heading,
        figures=figures(sweep),
        failures=[Failure(row.status, at, [Link(row.status, row.folder), f": {row.reason}"]) for row, at in failed],
    )


def figures(sweep: Sweep) -> List[Figure]:
    """Return a plot of each quantity for each setting that varies."""
    drawn = []
    for key in (key for key, values in sweep.grid.items() if len(values) > 1):
        first = {other: values[0] for other, values in sweep.grid.items() if other != key}
        rows = sweep.along(key)
        for quantity in QUANTITIES:
            known = [(row, quantity.of(row)) for row in rows if row.status == "ok"]
            every = [Point(row.header.values[key], summary, row) for row, summary in known if summary]
            if every:
                caption = [quantity.caption, *([f"At {grid.words(first)}."] if first else []), *_not_drawn(rows, key)]
                drawn.append(_figure(grid.flag(key), sweep.grid[key], quantity, every, " ".join(caption)))
    return drawn


def _not_drawn(rows: Sequence[Row], key: str) -> List[str]:
    """Return a sentence on the runs that failed; none where all ended well."""
    failed = [row for row in rows if row.status != "ok"]
    gone = gathered(((row.name, row.status), worded(row.header.values[key])) for row in failed)
    listed = [f"{name} at {', '.join(values)} ({status})" for (name, status), values in gone.items()]
    return [f"Not drawn: {'; '.join(listed)}."] if listed else []


def _figure(flag: str, values: Sequence[Any], quantity: Quantity, every: Sequence[Point], caption: str) -> Figure:
    """Return the plot of these points, a curve or a colour of bars for each implementation."""
    title, unit = f"{quantity.title} over {flag}", quantity.unit
    curves = sorted(gathered((point.row.name, point) for point in every).items())
    numeric = is_numeric(values)
    frame = _curve_frame(values, flag, unit, every) if numeric else _bar_frame(values, flag, unit)
    words = [
        f"{name} " + ", ".join(f"{number(each.measured.median)} {unit} at {worded(each.value)}" for each in points)
        for name, points in curves
    ]
    return Figure(
        f"sweep-{flag}-{quantity.key}",
        title,
        caption,
        f"{title}: {'; '.join(words)}",
        [_trace(points, unit, numeric) for _, points in curves],
        layout(HEIGHT, 200, **frame),
        tabulated(f"sweep-{flag}-{quantity.key}", title, [_cells(point, flag, unit) for point in every]),
    )


def _curve_frame(values: Sequence[float], flag: str, unit: str, every: Sequence[Point]) -> Plotly:
    ticks = {"tickvals": sorted(values), "ticktext": [worded(value) for value in sorted(values)]}
    if min(values) <= 0 or max(values) / min(values) < LOGARITHMIC_FROM:
        return {"xaxis": axis(flag, **ticks), "yaxis": axis(unit)}
    ends = [end for point in every for end in (point.measured.p20, point.measured.median, point.measured.p80) if end]
    return {"xaxis": axis(flag, type="log", **ticks), "yaxis": axis_of(unit, logarithmic(ends))}


def _bar_frame(values: Sequence[Any], flag: str, unit: str) -> Plotly:
    order = {"type": "category", "categoryorder": "array", "categoryarray": [worded(value) for value in values]}
    return {"xaxis": axis(flag, **order), "yaxis": axis(unit), "barmode": "group", "bargap": 0.25}


def _trace(curve: Sequence[Point], unit: str, numeric: bool) -> Plotly:
    """Return the curve or the bars of one implementation."""
    curve = sorted(curve, key=lambda point: point.value) if numeric else curve
    row, hover = curve[0].row, f"%{{x}}: %{{y:.4g}} {unit}"
    spread: Plotly = {}
    if all(point.measured.p20 and point.measured.p80 for point in curve):
        spread = {"error_y": whiskers([point.measured for point in curve])}
    if not numeric:
        x, y = [worded(point.value) for point in curve], [point.measured.median for point in curve]
        return bars(row.marked, x, y, bar_of(row.look), hover, **spread)
    at = [(point.value, point.measured.median) for point in curve]
    return points(row.marked, at, marker(row.look, 11), hover, mode="lines+markers", line=line(row.look), **spread)


def _cells(point: Point, flag: str, unit: str) -> Dict[str, Cell]:
    value = point.value if is_numeric([point.value]) else None
    cells = {"implementation": Cell(point.row.label), flag: Cell(worded(point.value), value)}
    parts = ("median", "p20", "p80") if unit == "ms" else ("median",)
    cells.update({f"{part} {unit}": measured(getattr(point.measured, part), point.row.results) for part in parts})
    return cells
