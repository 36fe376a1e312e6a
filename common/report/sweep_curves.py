"""How time and memory change with one swept setting: curves over a numeric one, grouped bars over any other.

Several settings: one plot for each, the others at the first of their values; the table of the section has all cells.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

from common import grid
from common.report import scales
from common.report.bars import INK, legend_below, pattern
from common.report.collect import Entry
from common.report.look import DASHES, Figure, Trace, axis, axis_of, color, layout, shown, symbol
from common.report.markup import Cell, Column, Table
from common.results import sweep_tables, sweeps
from common.results.sweeps import Sweep
from common.results.wording import number

HEIGHT = 420
LOGARITHMIC_FROM = 4  # largest over smallest value from which both axes are logarithmic
SAME = 0.03  # values that differ by less are within the width of a line


class Point(NamedTuple):
    """One implementation at one value of the setting; low and high: of its spread, where it has one."""

    value: Any
    middle: float
    low: Optional[float]
    high: Optional[float]
    entry: Entry


class Quantity(NamedTuple):
    """What is drawn: its name, unit and the words for it; of: (median, p20, p80) of an entry, or None."""

    key: str
    title: str
    unit: str
    caption: str
    of: Callable[[Entry], Optional[Tuple[float, Optional[float], Optional[float]]]]


def _time(entry: Entry) -> Optional[Tuple[float, float, float]]:
    timed = sweeps.median_ms(entry.row)
    described = timed and (entry.step_ms if timed[0] == "step" else entry.loss_ms)
    return (described["median"], described["p20"], described["p80"]) if described else None


def _memory(entry: Entry) -> Optional[Tuple[float, None, None]]:
    peak = entry.peak_mb
    return (peak, None, None) if peak is not None and entry.row["status"] == "ok" else None


QUANTITIES = (
    Quantity("time", "Step time", "ms", "Median step (loss where no step was timed); whiskers: p20 to p80.", _time),
    Quantity(
        "memory", "Peak memory", "MB", "Highest peak of a step above its baseline, from the memory pass.", _memory
    ),
)


def figures(sweep: Sweep, entries: Sequence[Entry]) -> List[Figure]:
    """For each setting that varies one plot of time and one of memory.  entries: of sweep.runs, in their order."""
    names = list(dict.fromkeys(run.row["name"] for run in sweep.runs))
    entry_of = {id(run): entry for run, entry in zip(sweep.runs, entries)}
    found = []
    for key in (key for key, values in sweep.grid.items() if len(values) > 1):
        for quantity in QUANTITIES:
            series: Dict[str, List[Point]] = {name: [] for name in sorted(names)}
            for run in sweeps.along(sweep, key):
                entry = entry_of[id(run)]
                values = quantity.of(entry)
                if values:
                    series[run.row["name"]].append(Point(run.values[key], *values, entry))
            if any(series.values()):
                found.append(_figure(sweep, key, quantity, list(series.values())))
    return found


def _figure(sweep: Sweep, key: str, quantity: Quantity, series: Sequence[List[Point]]) -> Figure:
    flag = grid.flag(key)
    listed = [points for points in series if points]
    together = coinciding(listed)
    if sweeps.is_numeric(sweep.grid[key]):
        frame = _curve_frame(sweep.grid[key], flag, quantity.unit, listed)
        widened = {id(points): len(same) - 1 - at for same in together for at, points in enumerate(same)}
        data = [
            _curve(points, place, quantity.unit, widened.get(id(points), 0))
            for place, points in enumerate(series)
            if points
        ]
    else:
        together = []  # bars stand beside each other
        frame = _bar_frame(sweep.grid[key], flag, quantity.unit)
        data = [_bars(points, place, quantity.unit) for place, points in enumerate(series) if points]
    others = {other: values[0] for other, values in sweep.grid.items() if other != key}
    caption = [quantity.caption]
    if others:
        caption.append(f"At {grid.words(others)}.")
    if quantity.key == "time":
        caption += [f"{line[0].upper()}{line[1:]}." for line in sweep_tables.exponents(sweep, key)]
    caption += _absent(sweep, key)
    if together:
        names = "; ".join(" and ".join(points[0].entry.label for points in same) for same in together)
        caption.append(f"All but the same, so drawn as a thin line on a thick one: {names}.")
    title = f"{quantity.title} over {flag}"
    summary = "; ".join(f"{points[0].entry.label} {_in_words(points, quantity.unit)}" for points in listed)
    return Figure(
        f"sweep-{flag}-{quantity.key}",
        title,
        " ".join(caption),
        f"{title}: {summary}",
        data,
        layout(HEIGHT, legend=legend_below(200), **frame),
        _table(sweep.name, flag, title, quantity, listed),
        HEIGHT,
    )


def coinciding(series: Sequence[List[Point]]) -> List[List[List[Point]]]:
    """Those series, together, of which one would hide another: at half of their values or more they are the same."""
    found: List[List[List[Point]]] = []
    for points in series:
        same = next((others for others in found if any(_is_same(points, other) for other in others)), None)
        if same is None:
            found.append([points])
        else:
            same.append(points)
    return [same for same in found if len(same) > 1]


def _is_same(one: Sequence[Point], other: Sequence[Point]) -> bool:
    middle_at = {point.value: point.middle for point in one}
    pairs = [(middle_at[point.value], point.middle) for point in other if point.value in middle_at]
    close = sum(abs(mine - yours) <= SAME * max(mine, yours) for mine, yours in pairs)
    return bool(pairs) and 2 * close >= len(pairs)


def _in_words(points: Sequence[Point], unit: str) -> str:
    return ", ".join(f"{number(point.middle)} {unit} at {grid.said(point.value)}" for point in points)


def _absent(sweep: Sweep, key: str) -> List[str]:
    """What is not drawn because it did not run."""
    gone: Dict[Tuple[str, str], List[str]] = {}
    for run in sweeps.along(sweep, key):
        if run.row["status"] != "ok":
            gone.setdefault((run.row["name"], run.row["status"]), []).append(grid.said(run.values[key]))
    if not gone:
        return []
    listed = "; ".join(f"{name} at {', '.join(values)} ({status})" for (name, status), values in gone.items())
    return [f"Not drawn: {listed}."]


def _curve_frame(values: Sequence[float], flag: str, unit: str, series: Sequence[Sequence[Point]]) -> Dict[str, Any]:
    ticks = {"tickvals": sorted(values), "ticktext": [grid.said(value) for value in sorted(values)]}
    if min(values) <= 0 or max(values) / min(values) < LOGARITHMIC_FROM:
        return {"xaxis": axis(flag, **ticks), "yaxis": axis(unit)}
    ends = [end for points in series for point in points for end in (point.low, point.middle, point.high) if end]
    up = axis_of(unit, scales.logarithmic(ends))
    return {"xaxis": axis(flag, type="log", rangemode="normal", **ticks), "yaxis": up}


def _bar_frame(values: Sequence[Any], flag: str, unit: str) -> Dict[str, Any]:
    order = {"type": "category", "categoryorder": "array", "categoryarray": [grid.said(value) for value in values]}
    return {"xaxis": axis(flag, **order), "yaxis": axis(unit), "barmode": "group", "bargap": 0.25}


def _spread(points: Sequence[Point]) -> Dict[str, Any]:
    if any(point.low is None or point.high is None for point in points):
        return {}
    above = [point.high - point.middle for point in points]
    below = [point.middle - point.low for point in points]
    whiskers = {"type": "data", "symmetric": False, "array": above, "arrayminus": below}
    return {"error_y": {**whiskers, "thickness": 1.5, "width": 5, "color": INK}}


def _name(points: Sequence[Point]) -> str:
    return shown(points[0].entry.marked)


def _curve(points: Sequence[Point], place: int, unit: str, widened: int) -> Trace:
    """widened: how many curves are drawn on this one."""
    line_color = color(place) + ("80" if widened else "")  # half transparent
    points = sorted(points, key=lambda point: point.value)
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": _name(points),
        "x": [point.value for point in points],
        "y": [point.middle for point in points],
        **_spread(points),
        "line": {"color": line_color, "width": 2.2 + 4.5 * widened, "dash": DASHES[place % len(DASHES)]},
        "marker": {"symbol": symbol(place), "size": 11 + 8 * widened, "color": color(place), "line": {"width": 1}},
        "hovertemplate": f"%{{x}}: %{{y:.4g}} {unit}<extra>{_name(points)}</extra>",
    }


def _bars(points: Sequence[Point], place: int, unit: str) -> Trace:
    return {
        "type": "bar",
        "name": _name(points),
        "x": [grid.said(point.value) for point in points],
        "y": [point.middle for point in points],
        **_spread(points),
        "marker": {"color": color(place), "pattern": pattern(place), "line": {"width": 1, "color": INK}},
        "hovertemplate": f"%{{x}}: %{{y:.4g}} {unit}<extra>{_name(points)}</extra>",
    }


def _table(name: str, flag: str, title: str, quantity: Quantity, series: Sequence[Sequence[Point]]) -> Table:
    spread = any(point.low is not None for points in series for point in points)
    parts = ("middle", "low", "high") if spread else ("middle",)
    titles = [f"median {quantity.unit}", f"p20 {quantity.unit}", f"p80 {quantity.unit}"] if spread else [quantity.unit]
    rows = []
    for points in series:
        for point in points:
            value = point.value if sweeps.is_number(point.value) else None
            cells = [Cell(point.entry.label), Cell(grid.said(point.value), value)]
            for part in parts:
                found = getattr(point, part)
                cells.append(Cell(number(found), found, point.entry.results))
            rows.append(cells)
    numeric = all(sweeps.is_number(point.value) for points in series for point in points)
    columns = [Column("implementation", False), Column(flag, numeric), *(Column(words) for words in titles)]
    return Table(f"{name}-{quantity.key}", title, columns, rows)
