"""Where the names of points stand, so that they hide neither each other nor the points."""

from __future__ import annotations

from typing import List, Sequence, Tuple

Point = Tuple[float, float]
Box = Tuple[float, float, float, float]  # left, bottom, right, top, in pixels

LETTER, LINE = 7.2, 17.0  # pixels: about the width of a letter and the height of a line
MARKER = 8.0  # from the middle of a point to its name

#: What plotly calls the place of a name -> where it is from its point: -1 left or below, 0 centred, 1 right or above.
PLACES = {
    **{"top right": (1, 1), "top left": (-1, 1), "bottom right": (1, -1), "bottom left": (-1, -1)},
    **{"top center": (0, 1), "bottom center": (0, -1), "middle right": (1, 0), "middle left": (-1, 0)},
}
OUTSIDE = 4  # the area of a name outside the plot counts so many times as much as one behind another name
ROUNDS = 3  # passes over all names: in each, a name may move away from the others


def places(points: Sequence[Point], names: Sequence[str], size: Point, kept_free: Sequence[Box] = ()) -> List[str]:
    """The place of each name: the first of PLACES where it covers least of other names, of points and of `kept_free`.
    points: pixels from the lower left corner of a plot of this size."""
    markers = [(x - MARKER, y - MARKER, x + MARKER, y + MARKER) for x, y in points]
    placed: List[str] = []
    taken: List[Box] = []
    for _ in range(ROUNDS):
        for at, (point, name) in enumerate(zip(points, names)):
            boxes = {place: box(point, name, side) for place, side in PLACES.items()}
            others = [each for boxed in (markers, taken) for each in (*boxed[:at], *boxed[at + 1 :])]

            def hidden(place: str, boxes=boxes, others=(*others, *kept_free)) -> float:
                outside = shared(boxes[place], boxes[place]) - shared(boxes[place], (0, 0, *size))
                return OUTSIDE * outside + sum(shared(boxes[place], other) for other in others)

            best = min(PLACES, key=hidden)
            placed[at : at + 1], taken[at : at + 1] = [best], [boxes[best]]
    return placed


def box(point: Point, name: str, place: Tuple[int, int]) -> Box:
    """What the name of a point covers.  place: a value of PLACES."""
    across, up = LETTER * len(name), LINE
    left = point[0] + (place[0] - 1) * across / 2 + place[0] * MARKER
    bottom = point[1] + (place[1] - 1) * up / 2 + place[1] * MARKER
    return left, bottom, left + across, bottom + up


def shared(one: Box, other: Box) -> float:
    """The area that two boxes share."""
    across = min(one[2], other[2]) - max(one[0], other[0])
    up = min(one[3], other[3]) - max(one[1], other[1])
    return max(across, 0.0) * max(up, 0.0)
