"""Where the names of points go: beside their own point, off each other, off other points and off lines; where it is
crowded farther away, with a line to the point.  page.js does the same with the sizes that the browser measures.

Pixels from the lower left corner of the plot.
"""

from __future__ import annotations

from math import hypot
from typing import List, NamedTuple, Sequence, Tuple

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


class Place(NamedTuple):
    """The middle of a name, from its point; far: there is a line between them."""

    across: float
    up: float
    far: bool


def places(
    points: Sequence[Point], sizes: Sequence[Point], plot: Point, lines: Sequence[Sequence[Point]] = ()
) -> List[Place]:
    """Of each name.  sizes: width and height of the names; plot: of the plot; lines: each goes across and up only."""
    kept_free = [_edges(*pair) for line in lines for pair in zip(line, line[1:])]
    placed: List[Place] = []
    taken: List[Box] = []
    for _ in range(ROUNDS):
        for at, (point, size) in enumerate(zip(points, sizes)):
            others = [*points[:at], *points[at + 1 :]]
            names = [*taken[:at], *taken[at + 1 :]]
            boxes = [*names, *(_edges(one, one, MARKER) for one in others), *kept_free]

            def cost(place: Place, point=point, size=size, others=others, names=names, boxes=boxes) -> float:
                own = box(point, size, place)
                hidden = sum(shared(own, other) for other in boxes)
                outside = shared(own, own) - shared(own, (0, 0, *plot))
                away = max(abs(place.across) - size[0] / 2, abs(place.up) - size[1] / 2) - MARKER
                end = (point[0] + place.across, point[1] + place.up)
                if place.far:
                    met = sum(_from_line(one, point, end) < MARKER for one in others)
                    wrong = CROSSED * (met + sum(_meets(point, end, one) for one in names))
                else:
                    beside = from_box(point, own) + NEARER
                    wrong = CONFUSED * sum(from_box(one, own) < beside for one in others)
                return hidden + OUTSIDE * outside + DISTANT * away + wrong

            best = min(candidates(size), key=cost)
            placed[at : at + 1], taken[at : at + 1] = [best], [box(point, size, best)]
    return placed


def candidates(size: Point) -> List[Place]:
    """All places of a name of this size."""
    return [
        Place(half * size[0] / 2 + side * away, up * (size[1] / 2 + away), away > MARKER)
        for away in (MARKER + distance for distance in DISTANCES)
        for half, side, up in DIRECTIONS
    ]


def box(point: Point, size: Point, place: Place) -> Box:
    """What the name of a point covers."""
    left, bottom = point[0] + place.across - size[0] / 2, point[1] + place.up - size[1] / 2
    return left, bottom, left + size[0], bottom + size[1]


def shared(one: Box, other: Box) -> float:
    """The area that two boxes share."""
    across = min(one[2], other[2]) - max(one[0], other[0])
    up = min(one[3], other[3]) - max(one[1], other[1])
    return max(across, 0.0) * max(up, 0.0)


def _edges(one: Point, other: Point, wide: float = LINE) -> Box:
    (left, right), (bottom, top) = (sorted(pair) for pair in zip(one, other))
    return left - wide, bottom - wide, right + wide, top + wide


def from_box(point: Point, of: Box) -> float:
    across = max(of[0] - point[0], 0.0, point[0] - of[2])
    return hypot(across, max(of[1] - point[1], 0.0, point[1] - of[3]))


def _meets(begin: Point, end: Point, of: Box) -> bool:
    """Does a line go through a box?"""
    steps = [(begin[0] + at * (end[0] - begin[0]) / 12, begin[1] + at * (end[1] - begin[1]) / 12) for at in range(13)]
    return any(from_box(step, of) == 0 for step in steps)


def _from_line(point: Point, begin: Point, end: Point) -> float:
    along = (end[0] - begin[0], end[1] - begin[1])
    length = along[0] ** 2 + along[1] ** 2
    share = ((point[0] - begin[0]) * along[0] + (point[1] - begin[1]) * along[1]) / length if length else 0.0
    share = min(max(share, 0.0), 1.0)
    return hypot(point[0] - begin[0] - share * along[0], point[1] - begin[1] - share * along[1])
