"""Step time against peak memory, and the losses for which no other is both faster and smaller (the
Pareto front).

Losses of other models (additive ones, other lattices) are shown as hollow symbols and are not ranked: with one of them,
another model is trained.  The exact losses have a front of their own; a second one is of exact and pruned losses.
"""

from __future__ import annotations

from typing import List, NamedTuple, Optional, Sequence, Tuple

from common.analysis.groups import pareto
from common.analysis.row import Row
from common.core.statistics import Summary
from common.present import scales
from common.present.labels import Names, Point
from common.present.style import (
    INK,
    Figure,
    Look,
    Plotly,
    Trace,
    about_whiskers,
    axis_of,
    color,
    layout,
    marker,
    points,
    symbol,
    whiskers,
)
from common.present.table import Cell, Table, measured, tabulated


class Front(NamedTuple):
    """Hold a Pareto front: the losses that no other is both faster and smaller than.

    Attributes:
        of: the name of the losses that compete.
        dash: of its line.
        among: indices of these losses among the points.
        members: indices of those on the front, by time.
    """

    of: str
    dash: str
    among: List[int]
    members: List[int]

    def corners(self, all_points: Sequence[Point], across: scales.Span, up: scales.Span) -> List[Point]:
        """Return the corners of its line, a step after each, from one end of the plot to the other."""
        on = [all_points[index] for index in self.members]
        return [(on[0][0], up.high), *on, (across.high, on[-1][1])]


def known(rows: Sequence[Row]) -> Tuple[List[Row], List[Summary], List[Point]]:
    """Return (rows, times, points) of the rows whose time and memory are known."""
    both = [(row, row.times, row.peak_mb) for row in rows if row.times and row.peak_mb is not None]
    return [row for row, *_ in both], [times for _, times, _ in both], [(times.median, mb) for _, times, mb in both]


def fronts(rows: Sequence[Row], all_points: Sequence[Point]) -> List[Front]:
    """Return the front of the exact losses and, where there are pruned ones, the front of both together."""
    exact = [index for index, row in enumerate(rows) if row.is_exact]
    of_one_model = [index for index, row in enumerate(rows) if row.of_one_model]
    kinds = [("exact losses", "dot", exact)] if exact else []
    if len(of_one_model) > len(exact):
        kinds.append(("exact and pruned losses" if exact else "pruned losses", "dash", of_one_model))
    return [
        Front(of, dash, among, [among[index] for index in pareto([all_points[index] for index in among])])
        for of, dash, among in kinds
    ]


def time_and_memory(rows: Sequence[Row]) -> Optional[Figure]:
    """Draw time against peak memory; a line joins the losses for which no other is both faster and smaller."""
    both, summaries, all_points = known(rows)
    if len(both) < 2:
        return None
    ends = [end for times in summaries for end in (times.p20, times.median, times.p80)]
    across = scales.span([end for end in ends if end is not None])
    up = scales.span([y for _, y in all_points])
    of = fronts(both, all_points)
    data: List[Trace] = []
    lines: List[Sequence[Point]] = [_whiskers(*each) for each in zip(summaries, all_points)]
    for front in of:
        line = {"shape": "hv", "dash": front.dash, "width": 2.5 if front.dash == "dot" else 1.5, "color": INK}
        corners = front.corners(all_points, across, up)
        data.append(points(f"Pareto front, {front.of}", corners, {}, mode="lines", line=line))
        lines.append(_steps(corners))
    data += [_point(*each) for each in zip(both, summaries, all_points)]
    if not all(row.of_one_model for row in both):
        data.append(points("another model: not ranked", [(None, None)], _hollow(Look(), INK)))
    sentences = _in_words(of, both)
    return Figure(
        "time-memory",
        "Time against memory",
        f"Lower left is better.{about_whiskers(summaries)} {sentences}",
        f"Time against memory. {sentences}",
        data,
        layout(460, 240, xaxis=axis_of("step, ms", across), yaxis=axis_of("peak, MB", up)),
        _table(both, all_points, of),
        names=Names([(*point, row.label) for row, point in zip(both, all_points)], lines, across, up),
    )


def _hollow(look: Look, ink: str) -> Plotly:
    return {"symbol": f"{symbol(look)}-open", "size": 13, "color": ink, "line": {"width": 2}}


def _point(row: Row, times: Summary, point: Point) -> Trace:
    look = marker(row.look, 13) if row.of_one_model else _hollow(row.look, color(row.look))
    spread = {**whiskers([times]), "thickness": 1, "width": 4}
    hover = "%{x:.4g} ms, %{y:.4g} MB"
    return points(row.label, [point], look, hover, showlegend=False, cliponaxis=False, error_x=spread)


def _whiskers(times: Summary, point: Point) -> List[Point]:
    """Return the ends of the line from p20 to p80 through a point."""
    return [(end or times.median, point[1]) for end in (times.p20, times.p80)]


def _steps(corners: Sequence[Point]) -> List[Point]:
    """Return the line in steps, each first across, then up or down."""
    between = [[left, (right[0], left[1])] for left, right in zip(corners, corners[1:])]
    return [*(corner for pair in between for corner in pair), corners[-1]]


def _in_words(of: Sequence[Front], both: Sequence[Row]) -> str:
    """Return sentences on the losses on each front and on those that are not ranked."""
    sentences = []
    for front in of:
        line = "dotted" if front.dash == "dot" else "dashed"
        names = ", ".join(both[index].label for index in front.members)
        sentences.append(f"Beaten in both by no other of the {front.of} ({line} line): {names}.")
    others = [row.marked for row in both if not row.of_one_model]
    if others:
        sentences.append(f"Hollow: losses of other models, which are not ranked: {', '.join(others)}.")
    return " ".join(sentences)


def _table(both: Sequence[Row], all_points: Sequence[Point], of: Sequence[Front]) -> Table:
    cells = []
    for index, (row, (ms, mb)) in enumerate(zip(both, all_points)):
        numbers = {"median ms": measured(ms, row.results), "peak MB": measured(mb, row.results)}
        cells.append({"implementation": Cell(row.marked), **numbers})
        for front in of:
            answer = "yes" if index in front.members else "no"
            cells[-1][f"on the front of {front.of}"] = Cell(answer if index in front.among else "-")
    return tabulated("time-memory", "Time and memory", cells)
