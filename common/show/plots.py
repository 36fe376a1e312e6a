"""Draw the plots of one configuration or sweep: ratios with their intervals, time against memory, a swept setting."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

from common.analysis import groups, metrics, standing, verdict
from common.analysis.row import Row
from common.core import settings, statistics
from common.core.text import gathered, number
from common.present import style
from common.present.parts import Cell, Failure, Figure, Link, Plotly, Section, measured, tabulated

LANE = 44  # pixels
ABOVE = 8  # pixels from the middle of a lane to its name


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
        return "" if self.low is None else f" ({number(self.low, 3)} to {number(self.high, 3)})"


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
    others = [row.label for row in rows if row.times and not row.of_one_model and base.of_one_model]
    if others:
        sentences.append(f"Not drawn, as they train another model: {', '.join(others)}.")
    title = f"{scope.capitalize()} time over {base.label}'s"
    return ratios("ratios", title, " ".join(sentences), dots, f"times {base.label}")


def _dot(row: Row, base: Row, scope: str) -> Optional[Dot]:
    """Return how a row stands against the fastest; None where the two are not compared."""
    against = row.against_fastest
    if row is base:
        return Dot(row.marked, row.look, 1.0, verdict="fastest", source=row.results)
    if against is None or row.of_one_model != base.of_one_model or row.torch != base.torch:
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
    frame = {**style.lanes(names, LANE, ABOVE), "shapes": [line], "xaxis": style.axis_of(across, span)}
    summary = f"{title}: " + "; ".join(f"{dot.name} {number(dot.ratio, 3)}{dot.interval}" for dot in dots)
    layout = style.layout(LANE * len(dots) + 70, None, **frame)
    return Figure(key, title, caption, summary, data, layout, tabulated(key, title, cells))


# Time against memory.

WHISKERS = " Whiskers: the 20th and 80th percentile of samples over their own batch's median."


def known(rows: Sequence[Row]) -> Dict[str, Tuple[float, float]]:
    return {row.label: (row.times.median, row.peak_mb) for row in rows if row.times and row.peak_mb is not None}


def front(rows: Sequence[Row]) -> List[Row]:
    """Return the exact rows for which no other is both faster and smaller, by time; the pruned ones where there are
    none."""
    at, ranked = known(rows), [row for row in rows if _is_ranked(row)]
    result: List[Row] = []
    for row in sorted([row for row in ranked if row.is_exact] or ranked, key=lambda row: at[row.label]):
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
    summaries = {row.label: times for row in rows if (times := row.times)}
    across = style.span([end for of in summaries.values() for end in (of.p20, of.median, of.p80) if end])
    up = style.span([mb for _, mb in at.values()])
    data, sentences, cells, best = [], [], [], front(rows)
    if best:
        on = [at[row.label] for row in best]
        line = {"shape": "hv", "dash": "dot", "width": 2.5, "color": style.INK}
        corners = [(on[0][0], up.high), *on, (across.high, on[-1][1])]
        data.append(style.points("Pareto front", corners, {}, mode="lines", line=line))
        kind = "exact losses" if best[0].is_exact else "pruned losses"
        sentences.append(f"Beaten in both by no other of the {kind} (line): {', '.join(row.label for row in best)}.")
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
    whiskers = WHISKERS if any(of.p20 for of in summaries.values()) else ""
    frame = {"xaxis": style.axis_of("step, ms", across), "yaxis": style.axis_of("peak, MB", up)}
    table = tabulated("time-memory", "Time and memory", cells)
    caption = f"Lower left is better.{whiskers} {told}"
    return Figure("time-memory", title, caption, f"{title}. {told}", data, style.layout(460, 200, **frame), table)


# Sweeps: with several settings there is a plot for each, at the first values of the others.

HEIGHT = 420
LOGARITHMIC_FROM = 4  # largest over smallest value from which both axes are logarithmic


class Point(NamedTuple):
    value: Any
    measured: statistics.Summary
    row: Row


#: Key, title, unit and caption of each number that is drawn, and what returns a row's summary, None where not known.
QUANTITIES: Sequence[Tuple[str, str, str, str, Callable[[Row], Optional[statistics.Summary]]]] = (
    (
        "time",
        "Step time",
        "ms",
        "Median step (loss where no step was timed); whiskers: p20 to p80.",
        lambda row: row.times,
    ),
    (
        "memory",
        "Peak memory",
        "MB",
        "Highest peak of a step above its baseline, from the memory pass.",
        lambda row: None if row.peak_mb is None else statistics.Summary(row.peak_mb),
    ),
)


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
        for name, title, unit, caption, of in QUANTITIES:
            summaries = [(row, of(row)) for row in rows if row.status == "ok"]
            every = [Point(row.header.values[key], summary, row) for row, summary in summaries if summary]
            if every:
                place, flag = f"sweep-{settings.flag(key)}-{name}", settings.flag(key)
                drawn.append(_over(place, f"{title} over {flag}", flag, sweep.grid[key], unit, every))
                drawn[-1] = replace(drawn[-1], caption=" ".join([caption, *below]))
    return drawn


def _over(key: str, title: str, flag: str, values: Sequence[Any], unit: str, every: Sequence[Point]) -> Figure:
    """Return the plot of these points: a curve for each implementation over a numeric setting, else a colour of
    bars."""
    numeric, hover = groups.is_numeric(values), f"%{{x}}: %{{y:.4g}} {unit}"
    data, words, cells = [], [], []
    for name, curve in sorted(gathered((point.row.name, point) for point in every).items()):
        told = ", ".join(f"{number(each.measured.median)} {unit} at {settings.worded(each.value)}" for each in curve)
        words.append(f"{name} {told}")
        row = curve[0].row
        spread: Plotly = {}
        if all(point.measured.p20 and point.measured.p80 for point in curve):
            spread = {"error_y": style.whiskers([point.measured for point in curve])}
        medians = [point.measured.median for point in curve]
        if numeric:
            options = {"mode": "lines+markers", "line": style.line(row.look), **spread}
            at = zip((point.value for point in curve), medians)
            data.append(style.points(row.marked, at, style.marker(row.look, 11), hover, **options))
        else:
            x = [settings.worded(point.value) for point in curve]
            bar = {"color": style.color(row.look), "pattern": style.pattern(row.look.form)}
            data.append(style.bars(row.marked, x, medians, bar, hover, **spread))
    for point in every:
        value = point.value if groups.is_numeric([point.value]) else None
        line = {"implementation": Cell(point.row.label), flag: Cell(settings.worded(point.value), value)}
        for part in ("median", "p20", "p80") if unit == "ms" else ("median",):
            line[f"{part} {unit}"] = measured(getattr(point.measured, part), point.row.results)
        cells.append(line)
    layout = style.layout(HEIGHT, 200, **_frame(values, flag, unit, every))
    return Figure(key, title, "", f"{title}: {'; '.join(words)}", data, layout, tabulated(key, title, cells))


def _frame(values: Sequence[Any], flag: str, unit: str, every: Sequence[Point]) -> Plotly:
    words = [settings.worded(value) for value in values]
    if not groups.is_numeric(values):
        order = {"type": "category", "categoryorder": "array", "categoryarray": words}
        return {"xaxis": style.axis(flag, **order), "yaxis": style.axis(unit), "barmode": "group", "bargap": 0.25}
    ticks = {"tickvals": values, "ticktext": words}
    if min(values) <= 0 or max(values) / min(values) < LOGARITHMIC_FROM:
        return {"xaxis": style.axis(flag, **ticks), "yaxis": style.axis(unit)}
    ends = [end for point in every for end in (point.measured.p20, point.measured.median, point.measured.p80) if end]
    return {"xaxis": style.axis(flag, type="log", **ticks), "yaxis": style.axis_of(unit, style.logarithmic(ends))}
