"""Draw ratios with their intervals: a dot and a whisker for each row, on a logarithmic axis with a line at 1."""

from __future__ import annotations

from pathlib import Path
from typing import Dict, NamedTuple, Optional, Sequence

from common.analysis import ranking, verdict
from common.analysis.metrics import METRICS
from common.analysis.ratios import Ratio
from common.analysis.row import OTHER_TORCH, Row
from common.core import statistics
from common.core.text import number
from common.present import scales
from common.present.style import INK, Figure, Look, Trace, axis_of, color, lanes, layout, marker, points, shown, symbol
from common.present.table import Cell, measured, tabulated

LANE = 44  # pixels
ABOVE = 8  # pixels from the middle of a lane to its name


class Dot(NamedTuple):
    """Hold one lane.

    Attributes:
        name: of the lane.
        look: its colour and form.
        ratio: its time over that of the row it is compared with.
        low, high: the ends of the interval; None where there is none.
        verdict: in a word; "" where there is none.
        hollow: whether something else is in the ratio too, so that it decides nothing.
        source: the file that the number is from.
    """

    name: str
    look: Look
    ratio: float
    low: Optional[float] = None
    high: Optional[float] = None
    verdict: str = ""
    hollow: bool = False
    source: Optional[Path] = None


def over_fastest(rows: Sequence[Row]) -> Optional[Figure]:
    """Draw the time of each loss over that of the fastest exact one; return None where fewer than two can be
    compared."""
    compared = [(row.kind, row.against_fastest) for row in rows if row.against_fastest]
    kinds = verdict.ranked_kinds(rows)
    standing = next((standing for kind, standing in compared if kind in kinds), compared[0][1] if compared else None)
    if standing is None:
        return None
    base, scope = standing.fastest, standing.scope
    dots = [dot for row in rows if (dot := _dot(row, base, scope))]
    if len(dots) < 2:
        return None
    others = [row.label for row in rows if row.times and not row.of_one_model and base.of_one_model]
    sentences = [f"Dot: the time of a {scope} over that of {base.label}; line: its 95% interval over rounds."]
    if any(dot.hollow for dot in dots):
        sentences.append("Hollow: under another torch, or beside other load, so the ratio decides nothing.")
    if others:
        sentences.append(f"Not drawn, as they train another model: {', '.join(others)}.")
    title = f"{scope.capitalize()} time over {base.label}'s"
    return figure("ratios", title, " ".join(sentences), dots, f"times {base.label}")


def _dot(row: Row, base: Row, scope: str) -> Optional[Dot]:
    """Return how a row stands against the fastest; None where the two are not compared."""
    standing = row.against_fastest
    if row is base:
        return Dot(row.marked, row.look, 1.0, verdict="fastest", source=row.results)
    if standing and standing.fastest is base and standing.scope == scope and standing.ratio:
        hollow = standing.other_torch or standing.beside_load
        return _of_ratio(row, standing.ratio, METRICS["verdict"].shown(row), hollow)
    if standing is None or row.kind == base.kind or row.of_one_model != base.of_one_model:
        return None
    ratio = ranking.over(base, row, scope)
    if ratio is None:
        return None
    if row.torch != base.torch:
        return _of_ratio(row, ratio, OTHER_TORCH, True)
    word = statistics.verdict(ratio.low, ratio.high, statistics.TOLERANCE)
    return _of_ratio(row, ratio, word, False)


def _of_ratio(row: Row, ratio: Ratio, word: str, hollow: bool) -> Dot:
    return Dot(row.marked, row.look, ratio.ratio, ratio.low, ratio.high, word, hollow, row.results)


def figure(key: str, title: str, caption: str, dots: Sequence[Dot], across: str) -> Figure:
    """Draw the dots, the first on top.  across: the title of the axis."""
    ends = [end for dot in dots for end in (dot.low, dot.ratio, dot.high) if end]
    span = scales.logarithmic([*ends, 1.0])
    names = [_lane(dot) for dot in dots]
    frame = lanes(names, LANE, ABOVE)
    line = {"type": "line", "layer": "below", "x0": 1, "x1": 1, "y0": 0.5 - len(dots), "y1": 0.5, "opacity": 0.9}
    shapes = [{**line, "line": {"width": 1.5, "color": INK, "dash": "solid"}}]
    rows = [_cells(dot) for dot in dots]
    return Figure(
        key,
        title,
        caption,
        f"{title}: " + "; ".join(f"{dot.name} {number(dot.ratio, 3)}{_interval(dot)}" for dot in dots),
        [_trace(dot, lane) for lane, dot in enumerate(dots)],
        layout(LANE * len(dots) + 70, None, **frame, shapes=shapes, xaxis=axis_of(across, span)),
        tabulated(key, title, rows),
    )


def _interval(dot: Dot) -> str:
    """Return " (1.54 to 2.08)"; empty where there is none."""
    return "" if dot.low is None else f" ({number(dot.low, 3)} to {number(dot.high, 3)})"


def _lane(dot: Dot) -> str:
    words = f"{shown(dot.name)}  <b>{number(dot.ratio, 3)}x</b>{_interval(dot)}"
    return f"{words}  {dot.verdict}" if dot.verdict else words


def _trace(dot: Dot, lane: int) -> Trace:
    look = marker(dot.look, 12)
    if dot.hollow:
        look = {**look, "symbol": f"{symbol(dot.look)}-open", "line": {"width": 2}, "color": color(dot.look)}
    ends = {}
    if dot.low is not None and dot.high is not None:
        ends = {"error_x": {"array": [dot.high - dot.ratio], "arrayminus": [dot.ratio - dot.low], "thickness": 2}}
    return points(dot.name, [(dot.ratio, -lane)], look, "%{x:.3g} times", showlegend=False, **ends)


def _cells(dot: Dot) -> Dict[str, Cell]:
    numbers = {"ratio": dot.ratio, "low": dot.low, "high": dot.high}
    cells = {title: measured(value, dot.source) for title, value in numbers.items()}
    return {"implementation": Cell(dot.name), **cells, "verdict": Cell(dot.verdict or "-")}
