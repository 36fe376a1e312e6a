"""Draw ratios with their intervals: a dot and a whisker for each row, on a logarithmic axis with a line at 1."""

from __future__ import annotations

from pathlib import Path
from typing import Dict, NamedTuple, Optional, Sequence

from common.analysis import verdict
from common.analysis.metrics import METRICS
from common.analysis.row import Row
from common.analysis.standing import stand
from common.core.text import number
from common.present.parts import Cell, Figure, Plotly, measured, tabulated
from common.present.style import INK, Look, axis_of, lanes, layout, logarithmic, marker, points, shown

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

    @property
    def interval(self) -> str:
        """Return " (1.54 to 2.08)"; empty where there is none."""
        return "" if self.low is None else f" ({number(self.low, 3)} to {number(self.high, 3)})"


def over_fastest(rows: Sequence[Row]) -> Optional[Figure]:
    """Draw the time of each loss over that of the fastest exact one; return None where fewer than two can be
    compared."""
    compared = [(row.kind, row.against_fastest) for row in rows if row.against_fastest]
    kinds = verdict.ranked_kinds(rows)
    standing = next((standing for kind, standing in compared if kind in kinds), compared[0][1] if compared else None)
    if standing is None:
        return None
    base, scope = standing.baseline, standing.scope
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
    return figure("ratios", title, " ".join(sentences), dots, f"times {base.label}")


def _dot(row: Row, base: Row, scope: str) -> Optional[Dot]:
    """Return how a row stands against the fastest; None where the two are not compared."""
    standing = row.against_fastest
    if row is base:
        return Dot(row.marked, row.look, 1.0, verdict="fastest", source=row.results)
    if standing is None or row.of_one_model != base.of_one_model or row.torch != base.torch:
        return None
    if standing.baseline is not base or standing.scope != scope:  # of another kind: an approximation
        standing = stand(row, base, scope)
    ratio = standing.ratio
    if ratio is None:
        return None
    word = METRICS["verdict"].shown(row) if standing is row.against_fastest else standing.verdict
    return Dot(row.marked, row.look, ratio.ratio, ratio.low, ratio.high, word, standing.beside_load, row.results)


def figure(key: str, title: str, caption: str, dots: Sequence[Dot], across: str) -> Figure:
    """Draw the dots, the first on top.  across: the title of the axis."""
    span = logarithmic([*(end for dot in dots for end in (dot.low, dot.ratio, dot.high) if end), 1.0])
    names = [f"{shown(dot.name)}  <b>{number(dot.ratio, 3)}x</b>{dot.interval}  {dot.verdict}".rstrip() for dot in dots]
    ends = {"x0": 1, "x1": 1, "y0": 0.5 - len(dots), "y1": 0.5}
    line = {"type": "line", "layer": "below", **ends, "opacity": 0.9, "line": {"width": 1.5, "color": INK}}
    return Figure(
        key,
        title,
        caption,
        f"{title}: " + "; ".join(f"{dot.name} {number(dot.ratio, 3)}{dot.interval}" for dot in dots),
        [_trace(dot, lane) for lane, dot in enumerate(dots)],
        layout(LANE * len(dots) + 70, None, **lanes(names, LANE, ABOVE), shapes=[line], xaxis=axis_of(across, span)),
        tabulated(key, title, [_cells(dot) for dot in dots]),
    )


def _trace(dot: Dot, lane: int) -> Plotly:
    ends = {}
    if dot.low is not None and dot.high is not None:
        ends = {"error_x": {"array": [dot.high - dot.ratio], "arrayminus": [dot.ratio - dot.low], "thickness": 2}}
    return points(dot.name, [(dot.ratio, -lane)], marker(dot.look, 12, dot.hollow), "%{x:.3g} times", **ends)


def _cells(dot: Dot) -> Dict[str, Cell]:
    numbers = {"ratio": dot.ratio, "low": dot.low, "high": dot.high}
    cells = {title: measured(value, dot.source) for title, value in numbers.items()}
    return {"implementation": Cell(dot.name), **cells, "verdict": Cell(dot.verdict or "-")}
