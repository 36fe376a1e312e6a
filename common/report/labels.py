"""Where the names of points stand, so that they hide neither each other nor the points."""

from __future__ import annotations

from typing import List, Sequence, Tuple

Box = Tuple[float, float, float, float]  # left, bottom, right, top, in pixels

LETTER, LINE = 7.2, 17.0  # pixels: about the width of a letter and the height of a line
MARKER = 8.0  # from the middle of a point to its name

#: What plotly calls the place of a name -> where it is from its point: -1 left or below, 0 centred, 1 right or above.
PLACES = {
    "top right": (1, 1),
    "top left": (-1, 1),
    "bottom right": (1, -1),
    "bottom left": (-1, -1),
    "middle right": (1, 0),
    "middle left": (-1, 0),
    "top center": (0, 1),
    "bottom center": (0, -1),
}


def places(points: Sequence[Tuple[float, float]], names: Sequence[str], width: float, height: float) -> List[str]:
    """For each point (pixels from the lower left corner of a plot of this width and height) the first of PLACES with
    the least in the way."""
    markers = [(x - MARKER, y - MARKER, x + MARKER, y + MARKER) for x, y in points]
    taken: List[Box] = []
    chosen: List[str] = []
    for at, (point, name) in enumerate(zip(points, names)):
        others = [*taken, *markers[:at], *markers[at + 1 :]]

        def hidden(place: str, point=point, name=name, others=others) -> float:
            box = _box(point, name, PLACES[place])
            outside = _area(box) - _shared(box, (0, 0, width, height))
            return outside + sum(_shared(box, other) for other in others)

        chosen.append(min(PLACES, key=hidden))
        taken.append(_box(point, name, PLACES[chosen[-1]]))
    return chosen


def _box(point: Tuple[float, float], name: str, place: Tuple[int, int]) -> Box:
    across, up = LETTER * len(name), LINE
    left = point[0] + (place[0] - 1) * across / 2 + place[0] * MARKER
    bottom = point[1] + (place[1] - 1) * up / 2 + place[1] * MARKER
    return left, bottom, left + across, bottom + up


def _area(box: Box) -> float:
    return (box[2] - box[0]) * (box[3] - box[1])


def _shared(one: Box, other: Box) -> float:
    """The area that two boxes share."""
    across = min(one[2], other[2]) - max(one[0], other[0])
    up = min(one[3], other[3]) - max(one[1], other[1])
    return max(across, 0.0) * max(up, 0.0)
