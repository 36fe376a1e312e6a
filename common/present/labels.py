"""Place the names of points: beside their own point, off other names, points and lines; where it is crowded, farther
away with a line to the point.

Coordinates are pixels from the lower left corner of the plot.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import hypot, inf
from typing import Dict, List, NamedTuple, Sequence, Tuple

from common.present.scales import Span

Point = Tuple[float, float]
Box = Tuple[float, float, float, float]  # left, bottom, right, top

MARKER = 8.0  # from the middle of a point to its name
LINE = 2.0  # from the middle of a line to its edge
#: From a point to its name, in the order in which they are preferred: to which side half of the name is, to which side
#: it moves with the distance, and whether it is above (1), below or beside the point.
DIRECTIONS = (
    *((1, 1, 1), (-1, -1, 1), (1, 1, -1), (-1, -1, -1), (0, 0, 1), (0, 0, -1), (1, 1, 0), (-1, -1, 0)),
    *((1, 0, 1), (-1, 0, 1), (1, 0, -1), (-1, 0, -1)),
)
DISTANCES = (0, 10, 20, 32, 46, 62, 80)  # more than MARKER; 0: beside it
#: What counts as much as so many pixels of a name that are hidden: a pixel outside the plot, a pixel of a distance, a
#: name that is not nearer to its own point than to another, a point or a name below the line to a name.
OUTSIDE, DISTANT, CONFUSED, CROSSED = 4, 5, 2000, 300
NEARER = 3.0  # pixels
ROUNDS = 4  # passes over all names: in each, a name may move away from the others
LETTER, LINE_HEIGHT = 7.0, 17.0  # of a name: a letter's width, as wide fonts have it; a line's height
#: Pixels across of plots that a page may have.  A wider plot takes the places of the next narrower one: its points are
#: farther apart.
WIDTHS = (240, 280, 330, 400, 500, 620, 780, 1000, 1300)


class Spot(NamedTuple):
    """Hold the middle of a name, in pixels from its point.  far: whether a line joins the name and its point."""

    across: float
    up: float
    far: bool


@dataclass(frozen=True)
class Names:
    """Hold the names of a plot's points.  at: (x, y, name); lines: points of each line; across, up: the axes."""

    at: Sequence[Tuple[float, float, str]]
    lines: Sequence[Sequence[Point]]
    across: Span
    up: Span

    def places(self, width: float, height: float) -> List[Spot]:
        """Return the place of each name in a plot of this size in pixels."""

        def pixels(x: float, y: float) -> Point:
            return self.across.share(x) * width, self.up.share(y) * height

        return places(
            [pixels(x, y) for x, y, _ in self.at],
            [(LETTER * len(name), LINE_HEIGHT) for _, _, name in self.at],
            (width, height),
            [[pixels(*point) for point in line] for line in self.lines],
        )

    def of_a_page(self, height: float) -> Dict[int, List[Spot]]:
        """Return width -> places, for plots of this height and each of WIDTHS."""
        return {width: self.places(width, height) for width in WIDTHS}


def places(
    points: Sequence[Point], sizes: Sequence[Point], plot: Point, lines: Sequence[Sequence[Point]] = ()
) -> List[Spot]:
    """Return the spot of each name.

    Args:
        points: in pixels.
        sizes: (width, height) of the names.
        plot: (width, height) of the plot.
        lines: points of each line, which goes across and up only.
    """
    kept_free = [_edges(*pair) for line in lines for pair in zip(line, line[1:])]
    placed: List[Spot] = []
    taken: List[Box] = []
    for _ in range(ROUNDS):
        before = list(placed)
        for at, (point, size) in enumerate(zip(points, sizes)):
            others = [*points[:at], *points[at + 1 :]]
            names = [*taken[:at], *taken[at + 1 :]]
            boxes = [*names, *(_edges(other, other, MARKER) for other in others), *kept_free]

            def cost(spot: Spot, point=point, size=size, others=others, names=names, boxes=boxes) -> float:
                covered = box(point, size, spot)
                hidden = sum(shared(covered, other) for other in boxes)
                outside = shared(covered, covered) - shared(covered, (0, 0, *plot))
                end = (point[0] + spot.across, point[1] + spot.up)
                if spot.far:
                    met = sum(_from_line(other, point, end) < MARKER for other in others)
                    wrong = CROSSED * (met + sum(_meets(point, end, name) for name in names))
                else:
                    beside = from_box(point, covered) + NEARER
                    wrong = CONFUSED * sum(from_box(other, covered) < beside for other in others)
                return hidden + OUTSIDE * outside + DISTANT * _distance(spot, size) + wrong

            best, least = Spot(0.0, 0.0, False), inf
            for spot in candidates(size):  # from near to far, which costs at least the distance
                if DISTANT * _distance(spot, size) >= least:
                    break
                paid = cost(spot)
                if paid < least:
                    best, least = spot, paid
            placed[at : at + 1], taken[at : at + 1] = [best], [box(point, size, best)]
        if placed == before:
            break
    return placed


def _distance(spot: Spot, size: Point) -> float:
    """Return how many pixels farther away a name is than beside its point."""
    return max(abs(spot.across) - size[0] / 2, abs(spot.up) - size[1] / 2) - MARKER


def candidates(size: Point) -> List[Spot]:
    """Return all spots that a name of this size may have."""
    return [
        Spot(half * size[0] / 2 + side * away, up * (size[1] / 2 + away), away > MARKER)
        for away in (MARKER + distance for distance in DISTANCES)
        for half, side, up in DIRECTIONS
    ]


def box(point: Point, size: Point, spot: Spot) -> Box:
    """Return the box that the name of a point covers."""
    left, bottom = point[0] + spot.across - size[0] / 2, point[1] + spot.up - size[1] / 2
    return left, bottom, left + size[0], bottom + size[1]


def shared(first: Box, second: Box) -> float:
    """Return the area that two boxes share."""
    across = min(first[2], second[2]) - max(first[0], second[0])
    up = min(first[3], second[3]) - max(first[1], second[1])
    return max(across, 0.0) * max(up, 0.0)


def _edges(first: Point, second: Point, wide: float = LINE) -> Box:
    (left, right), (bottom, top) = (sorted(pair) for pair in zip(first, second))
    return left - wide, bottom - wide, right + wide, top + wide


def from_box(point: Point, of: Box) -> float:
    across = max(of[0] - point[0], 0.0, point[0] - of[2])
    return hypot(across, max(of[1] - point[1], 0.0, point[1] - of[3]))


def _meets(begin: Point, end: Point, of: Box) -> bool:
    """Return whether a line crosses a box."""
    steps = [(begin[0] + at * (end[0] - begin[0]) / 12, begin[1] + at * (end[1] - begin[1]) / 12) for at in range(13)]
    return any(from_box(step, of) == 0 for step in steps)


def _from_line(point: Point, begin: Point, end: Point) -> float:
    along = (end[0] - begin[0], end[1] - begin[1])
    length = along[0] ** 2 + along[1] ** 2
    share = ((point[0] - begin[0]) * along[0] + (point[1] - begin[1]) * along[1]) / length if length else 0.0
    share = min(max(share, 0.0), 1.0)
    return hypot(point[0] - begin[0] - share * along[0], point[1] - begin[1] - share * along[1])
