"""Step time against peak memory, and who is beaten in both by nobody.

Losses of other models (additive ones, other lattices) are shown, hollow, but are on no front: whoever takes one trains
another model, so they beat nobody.  Pruned losses approximate the exact ones, which have a front of their own.
"""

from __future__ import annotations

from typing import List, NamedTuple, Optional, Sequence, Tuple

from common.report import labels, scales
from common.report.bars import INK, legend_below, times
from common.report.collect import Entry, pareto
from common.report.look import Figure, Trace, axis_of, color, layout, shown, symbol
from common.report.markup import Cell, Column, Table
from common.results.wording import number

#: Pixels, about, within the axes on a phone: names that do not meet there do not meet where there is more room.
PHONE = (310, 390)

Point = Tuple[float, float]  # median ms, peak MB


class Front(NamedTuple):
    """Those whom no other of the same losses beats in both.  of: which losses; dash: of its line; among: places of
    these losses among the points; places: of those on the front, by time."""

    of: str
    dash: str
    among: List[int]
    places: List[int]

    def corners(self, points: Sequence[Point], across: scales.Span, up: scales.Span) -> List[Point]:
        """Of its line, a step after each, from one end of the plot to the other."""
        on = [points[place] for place in self.places]
        return [(on[0][0], up.high), *on, (across.high, on[-1][1])]


def measured(entries: Sequence[Entry]) -> Tuple[List[Entry], List[Point]]:
    """Those whose time and memory are known, and their points."""
    both = [entry for entry in entries if times(entry) and entry.peak_mb is not None]
    return both, [(times(entry)["median"], entry.peak_mb) for entry in both]


def fronts(entries: Sequence[Entry], points: Sequence[Point]) -> List[Front]:
    """Of the exact losses, and, where there are pruned ones, of exact and pruned ones together."""
    exact = [place for place, entry in enumerate(entries) if entry.exact]
    of_one_model = [place for place, entry in enumerate(entries) if entry.of_one_model]
    kinds = [("exact losses", "dot", exact)] if exact else []
    if len(of_one_model) > len(exact):
        kinds.append(("exact and pruned losses" if exact else "pruned losses", "dash", of_one_model))
    return [
        Front(of, dash, among, [among[place] for place in pareto([points[place] for place in among])])
        for of, dash, among in kinds
    ]


def name_places(
    names: Sequence[str],
    points: Sequence[Point],
    found: Sequence[Front],
    ends: Tuple[scales.Span, scales.Span],
    size: Tuple[float, float],
) -> List[str]:
    """Where each point's name stands (see labels.py), off the lines of the fronts too.  ends: of both axes; size: of
    what is within them, in pixels."""

    def pixels(point: Point) -> Point:
        return size[0] * ends[0].share(point[0]), size[1] * ends[1].share(point[1])

    lines: List[labels.Box] = []
    for front in found:
        corners = [pixels(corner) for corner in front.corners(points, *ends)]
        for (x, y), (next_x, next_y) in zip(corners, corners[1:]):
            lines += [(x, y - 4, next_x, y + 4), (next_x - 4, min(y, next_y), next_x + 4, max(y, next_y))]
    return labels.places([pixels(point) for point in points], names, *size, lines)


def time_and_memory(entries: Sequence[Entry]) -> Optional[Figure]:
    """Median time against peak memory; a line joins those of its losses that no other beats in both."""
    both, points = measured(entries)
    if len(both) < 2:
        return None
    across = scales.span([value for entry in both for value in (times(entry)["p20"], times(entry)["p80"])])
    up = scales.span([y for _, y in points])
    found = fronts(both, points)
    names = [shown(entry.label) for entry in both]
    places = name_places(names, points, found, (across, up), PHONE)
    data: List[Trace] = [_line(front, front.corners(points, across, up)) for front in found]
    for place, (entry, point) in enumerate(zip(both, points)):
        data.append(_point(entry, point, place, places[place]))
    said = _in_words(found, both)
    height = 460
    return Figure(
        "time-memory",
        "Time against memory",
        f"Lower left is better. Whiskers: 20th to 80th percentile. {said}",
        f"Time against memory. {said}",
        data,
        layout(height, xaxis=axis_of("step, ms", across), yaxis=axis_of("peak, MB", up), legend=legend_below(240)),
        _table(both, points, found),
        height,
    )


def _line(front: Front, corners: Sequence[Point]) -> Trace:
    return {
        "type": "scatter",
        "mode": "lines",
        "name": f"Pareto front, {front.of}",
        "x": [x for x, _ in corners],
        "y": [y for _, y in corners],
        "line": {"shape": "hv", "dash": front.dash, "width": 2.5 if front.dash == "dot" else 1.5, "color": INK},
        "hoverinfo": "skip",
    }


def _point(entry: Entry, point: Point, place: int, name_place: str) -> Trace:
    (x, y), described = point, times(entry)
    whiskers = {"array": [described["p80"] - x], "arrayminus": [x - described["p20"]]}
    return {
        "type": "scatter",
        "mode": "markers+text",
        "name": shown(entry.label),
        "x": [x],
        "y": [y],
        "text": [shown(entry.label)],
        "textposition": name_place,
        "cliponaxis": False,
        "showlegend": False,
        "marker": {
            "symbol": symbol(place) + "-open" * (not entry.of_one_model),
            "size": 13,
            "color": color(place) if entry.of_one_model else INK,
            "line": {"width": 1 if entry.of_one_model else 2},
        },
        "error_x": {"type": "data", "symmetric": False, **whiskers, "thickness": 1, "width": 4, "color": INK},
        "hovertemplate": "%{x:.4g} ms, %{y:.4g} MB<extra>%{text}</extra>",
    }


def _in_words(found: Sequence[Front], both: Sequence[Entry]) -> str:
    """Who is on the fronts, and whose points are on none."""
    sentences = [
        f"Beaten in both by no other of the {front.of} ({'dotted' if front.dash == 'dot' else 'dashed'} line): "
        f"{', '.join(both[place].label for place in front.places)}."
        for front in found
    ]
    others = [entry.marked for entry in both if not entry.of_one_model]
    if others:
        sentences.append(f"Hollow: losses of other models, which beat nobody here: {', '.join(others)}.")
    return " ".join(sentences)


def _table(both: Sequence[Entry], points: Sequence[Point], found: Sequence[Front]) -> Table:
    columns = [Column("implementation", False), Column("median ms"), Column("peak MB")]
    columns += [Column(f"on the front of {front.of}", False) for front in found]
    rows = []
    for place, (entry, (x, y)) in enumerate(zip(both, points)):
        cells = [Cell(entry.marked), Cell(number(x), x, entry.results), Cell(number(y), y, entry.results)]
        for front in found:
            cells.append(Cell("-" if place not in front.among else "yes" if place in front.places else "no"))
        rows.append(cells)
    return Table("time-memory", "Time and memory", columns, rows)
