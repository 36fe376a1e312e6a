"""Draws a step as icicles of time and memory: each label is below the one that it is part of, as wide as its share."""

from __future__ import annotations

from typing import Callable, Dict, Iterator, List, NamedTuple

from common.core.text import number
from common.present.style import PALETTE, Figure, Trace, axis, bars, layout, pattern, shown
from common.present.table import Cell, measured, tabulated
from common.tools.profile.rows import FORWARD, Node, Profile

ROW = 44  # pixels of a level
LETTER = 0.0095  # width of a letter, as a part of the figure's
GREY = "#bbbbbb"  # color of forward and backward


class Box(NamedTuple):
    """A box.  level: 0 is on top; begin, width: in ms or MB; above: the label that it lies in."""

    label: str
    phase: str
    level: int
    begin: float
    width: float
    above: str = ""

    @property
    def name(self) -> str:
        return self.label if self.label == self.phase else f"{self.label}, {self.phase}"

    @property
    def short(self) -> str:
        """Return the label, without the outer label if it begins with that."""
        return self.label.removeprefix(f"{self.above}_").removeprefix("rnnt_")


def figures(profile: Profile) -> List[Figure]:
    """Return an icicle of the time, and one of the memory that the forward leaves, where it does."""
    time = (
        "Each box is a label, as wide as its milliseconds in a mean step; what lies in it is below it, all calls of a "
    )
    time += "label together. White has no label."
    result = [
        _figure(
            "profile-time", "Time of the step", time, _boxes(profile.roots, lambda node: node.ms), "ms", profile.step_ms
        )
    ]
    left = {memory.name: memory.left_bytes / 2**20 for memory in profile.document.memory}
    forward = [node for node in profile.roots if node.phase == FORWARD]
    kept = _boxes(forward, lambda node: max(left.get(node.chain[-1], 0.0), 0.0))
    held = kept[0].width if kept else 0.0
    if held:
        memory = "What the forward of each label leaves allocated for the backward, in MB of a step, profiled."
        result.append(_figure("profile-memory", "Memory that the forward leaves", memory, kept, "MB", held))
    return result


def _boxes(roots: List[Node], size: Callable[[Node], float]) -> List[Box]:
    boxes: List[Box] = []
    at = 0.0
    for phase in dict.fromkeys(node.phase for node in roots):
        of_phase = [node for node in roots if node.phase == phase]
        width = sum(map(size, of_phase))
        boxes += [Box(phase, phase, 0, at, width), *_placed(of_phase, size, at, 1, 1.0)]
        at += width
    return boxes


def _placed(nodes: List[Node], size: Callable[[Node], float], at: float, level: int, scale: float) -> Iterator[Box]:
    """Yield the boxes of these positions, side by side from `at` on, and of what lies in them.

    scale: below 1 where what lies in a label was larger than what the label leaves in the end."""
    for node in nodes:
        width, inside = scale * size(node), sum(map(size, node.children))
        yield Box(node.chain[-1], node.phase, level, at, width, *node.chain[-2:-1])
        yield from _placed(node.children, size, at, level + 1, min(scale, width / inside) if inside else 1.0)
        at += width


def _figure(key: str, title: str, caption: str, boxes: List[Box], unit: str, end: float) -> Figure:
    """Return the figure of some boxes.  end: of the axis."""
    levels = max(box.level for box in boxes) + 1
    phases: Dict[str, List[Box]] = {"": [box for box in boxes if not box.level]}
    labels: Dict[str, List[Box]] = {}  # in the order of the boxes
    for box in boxes:
        if box.level:
            labels.setdefault(box.label, []).append(box)
    data = [
        _trace(label, index - 1, some, end, unit) for index, (label, some) in enumerate({**phases, **labels}.items())
    ]
    vertical = {"range": [0.6 - levels, 0.6], "showgrid": False, "showticklabels": False}
    across = axis(unit, range=[0, end])
    frame = layout(ROW * levels + 70, 150, xaxis=across, yaxis=vertical, barmode="overlay")
    largest = sorted((box for box in boxes if box.level), key=lambda box: -box.width)[:5]
    summary = f"{title}: " + ", ".join(f"{box.name} {number(box.width)} {unit}" for box in largest)
    rows = [{"label": Cell("· " * box.level + box.name, box.name), unit: measured(box.width)} for box in boxes]
    return Figure(key, title, caption, summary, data, frame, tabulated(key, title, rows))


def _trace(label: str, look: int, boxes: List[Box], end: float, unit: str) -> Trace:
    fill = {"color": PALETTE[look % len(PALETTE)] if label else GREY, "opacity": 0.7}
    return bars(
        label,
        [box.width for box in boxes],
        [-box.level for box in boxes],
        {**fill, "pattern": pattern(look // len(PALETTE) if label else 0)},
        f"%{{customdata}}: %{{x:.4g}} {unit}",
        orientation="h",
        base=[box.begin for box in boxes],
        width=0.92,
        text=[shown(box.short) if box.width > LETTER * (len(box.short) + 1) * end else "" for box in boxes],
        textposition="inside",
        insidetextanchor="middle",
        textangle=0,
        constraintext="none",
        customdata=[shown(box.name) for box in boxes],
        showlegend=bool(label),
    )
