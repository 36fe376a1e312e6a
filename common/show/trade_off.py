"""Step time against peak memory, and the losses for which no other is both faster and smaller (the Pareto front).

Losses of other models (other lattices) and under another torch are hollow symbols, which are not ranked.  The exact
losses have a front of their own; a second one is of exact and pruned losses.  The losses on a front have their names
beside them, all have them in the legend.
"""

from __future__ import annotations

from typing import List, NamedTuple, Optional, Sequence, Tuple

from common.analysis.row import Row
from common.core.statistics import Summary
from common.present.parts import Cell, Figure, Plotly, Table, measured, tabulated
from common.present.style import INK, axis_of, layout, marker, points, shown, span, whiskers

Point = Tuple[float, float]
WHISKERS = " Whiskers: the 20th and 80th percentile of samples over their own batch's median."


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


def pareto(points: Sequence[Tuple[float, float]]) -> List[int]:
    """Return the indices of the points that no other point undercuts in both coordinates, ordered by the first
    coordinate."""
    order = sorted(range(len(points)), key=lambda index: points[index])
    front: List[int] = []
    for index in order:
        if not front or points[index][1] < points[front[-1]][1]:
            front.append(index)
    return front


def known(rows: Sequence[Row]) -> Tuple[List[Row], List[Summary], List[Point]]:
    """Return (rows, times, points) of the rows whose time and memory are known."""
    both = [(row, row.times, row.peak_mb) for row in rows if row.times and row.peak_mb is not None]
    return [row for row, *_ in both], [times for _, times, _ in both], [(times.median, mb) for _, times, mb in both]


def _is_ranked(row: Row) -> bool:
    return row.of_one_model and not row.under


def fronts(rows: Sequence[Row], at: Sequence[Point]) -> List[Front]:
    """Return the front of the exact losses and, where there are pruned ones, the front of both together."""
    of_one_model = [index for index, row in enumerate(rows) if _is_ranked(row)]
    exact = [index for index in of_one_model if rows[index].is_exact]
    kinds = [("exact losses", "dot", exact)] if exact else []
    if len(of_one_model) > len(exact):
        kinds.append(("exact and pruned losses" if exact else "pruned losses", "dash", of_one_model))
    return [
        Front(of, dash, among, [among[index] for index in pareto([at[index] for index in among])])
        for of, dash, among in kinds
    ]


def time_and_memory(rows: Sequence[Row]) -> Optional[Figure]:
    """Draw time against peak memory; a line joins the losses for which no other is both faster and smaller."""
    both, summaries, at = known(rows)
    if len(both) < 2:
        return None
    across = span([end for times in summaries for end in (times.p20, times.median, times.p80) if end])
    up = span([y for _, y in at])
    of_kinds = fronts(both, at)
    data: List[Plotly] = []
    for front in of_kinds:
        line = {"shape": "hv", "dash": front.dash, "width": 2.5 if front.dash == "dot" else 1.5, "color": INK}
        on = [at[index] for index in front.members]
        corners = [(on[0][0], up.high), *on, (across.high, on[-1][1])]
        data.append(points(f"Pareto front, {front.of}", corners, {}, mode="lines", line=line))
    named = {index for front in of_kinds for index in front.members}
    data += [_point(*each, index in named) for index, each in enumerate(zip(both, summaries, at))]
    sentences = _in_words(of_kinds, both)
    return Figure(
        "time-memory",
        "Time against memory",
        f"Lower left is better.{WHISKERS if any(times.p20 for times in summaries) else ''} {sentences}",
        f"Time against memory. {sentences}",
        data,
        layout(460, 200, xaxis=axis_of("step, ms", across), yaxis=axis_of("peak, MB", up)),
        _table(both, at, of_kinds),
    )


def _point(row: Row, times: Summary, point: Point, named: bool) -> Plotly:
    """Return the point of a row, with its name beside it where that is wanted."""
    text = {"mode": "markers+text", "text": [shown(row.label)], "textposition": "top right"} if named else {}
    spread = {**whiskers([times]), "thickness": 1, "width": 4}
    hover = "%{x:.4g} ms, %{y:.4g} MB"
    look = marker(row.look, 13, hollow=not _is_ranked(row))
    return points(row.marked, [point], look, hover, cliponaxis=False, error_x=spread, **text)


def _in_words(of_kinds: Sequence[Front], both: Sequence[Row]) -> str:
    """Return sentences on the losses on each front and on those that are not ranked."""
    sentences = []
    for front in of_kinds:
        line = "dotted" if front.dash == "dot" else "dashed"
        names = ", ".join(both[index].label for index in front.members)
        sentences.append(f"Beaten in both by no other of the {front.of} ({line} line): {names}.")
    others = [row.marked for row in both if not _is_ranked(row)]
    if others:
        sentences.append(f"Hollow, not ranked: of other models, or under another torch: {', '.join(others)}.")
    return " ".join(sentences)


def _table(both: Sequence[Row], at: Sequence[Point], of_kinds: Sequence[Front]) -> Table:
    cells = []
    for index, (row, (ms, mb)) in enumerate(zip(both, at)):
        numbers = {"median ms": measured(ms, row.results), "peak MB": measured(mb, row.results)}
        cells.append({"implementation": Cell(row.marked), **numbers})
        for front in of_kinds:
            answer = "yes" if index in front.members else "no"
            cells[-1][f"on the front of {front.of}"] = Cell(answer if index in front.among else "-")
    return tabulated("time-memory", "Time and memory", cells)
