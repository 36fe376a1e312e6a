"""Draws a step as an icicle of time: each label is below the one that it is part of, as wide as its share."""

from __future__ import annotations

from typing import Dict, Iterator, List, NamedTuple, Union

from common.core.statistics import mean
from common.core.text import number
from common.present.style import PALETTE, Figure, axis, bars, layout, pattern, shown
from common.tools.profile.choice import Measured, Place

ROW = 44  # pixels of a level
LETTER = 0.0095  # width of a letter, as a part of the figure's
GREY = "#bbbbbb"  # color of forward and backward
CAPTION = (
    "Each box is a label, as wide as its milliseconds in a mean step; what lies in it is below it, all calls of a "
    "label together. White has no label."
)


class Box(NamedTuple):
    """A box.  level: 0 is on top; begin, width: in ms; short: the name in it."""

    label: str
    name: str
    short: str
    level: int
    begin: float
    width: float


def mean_ms(of: Union[Measured, Place], cuda: bool) -> float:
    """Return the milliseconds of a mean step, or of a label in it; on CUDA of the device."""
    return mean([ns or 0.0 for ns in (of.device_ns if cuda else of.host_ns)]) / 1e6


def boxes(found: Measured, cuda: bool) -> Iterator[Box]:
    """Yield the boxes of each phase, of its labels side by side below it, and of what lies in these."""
    at, chains = 0.0, [(span.chain, span.phase) for span in found.spans]

    def placed(spans: List[Place], begin: float, level: int) -> Iterator[Box]:
        for span in spans:
            label, outer = span.chain[-1], span.chain[-2] if span.chain[1:] else ""
            short = label.removeprefix(f"{outer}_").removeprefix("rnnt_")
            yield Box(label, f"{label}, {span.phase}", short, level, begin, mean_ms(span, cuda))
            inside = [each for each in found.spans if (each.chain[:-1], each.phase) == (span.chain, span.phase)]
            yield from placed(inside, begin, level + 1)
            begin += mean_ms(span, cuda)

    for phase in dict.fromkeys(span.phase for span in found.spans):
        of_phase = [span for span in found.spans if span.phase == phase]
        roots = [span for span in of_phase if (span.chain[:-1], phase) not in chains]
        width = sum(mean_ms(span, cuda) for span in roots)
        yield Box("", phase, phase, 0, at, width)
        yield from placed(roots, at, 1)
        at += width


def figure(title: str, found: Measured, cuda: bool) -> Figure:
    """Return the icicle of a step."""
    of_label: Dict[str, List[Box]] = {"": []}
    for box in boxes(found, cuda):
        of_label.setdefault(box.label, []).append(box)
    every = [box for some in of_label.values() for box in some]
    levels, end = max(box.level for box in every) + 1, mean_ms(found, cuda)
    data = []
    for index, (label, some) in enumerate(of_label.items()):
        color = PALETTE[(index - 1) % len(PALETTE)] if label else GREY
        look = {"color": color, "opacity": 0.7, "pattern": pattern((index - 1) // len(PALETTE) if label else 0)}
        data.append(
            bars(
                label,
                [box.width for box in some],
                [-box.level for box in some],
                look,
                "%{customdata}: %{x:.4g} ms",
                orientation="h",
                base=[box.begin for box in some],
                width=0.92,
                text=[shown(box.short) if box.width > LETTER * (len(box.short) + 1) * end else "" for box in some],
                textposition="inside",
                insidetextanchor="middle",
                textangle=0,
                constraintext="none",
                customdata=[shown(box.name) for box in some],
                showlegend=bool(label),
            )
        )
    vertical = {"range": [0.6 - levels, 0.6], "showgrid": False, "showticklabels": False}
    frame = layout(ROW * levels + 70, 150, xaxis=axis("ms", range=[0, end]), yaxis=vertical, barmode="overlay")
    largest = sorted((box for box in every if box.level), key=lambda box: -box.width)[:5]
    summary = "Time of the step: " + ", ".join(f"{box.name} {number(box.width)} ms" for box in largest)
    key = f"profile-time-{title.replace(' ', '-')}"
    return Figure(key, f"Time of the step, {title}", CAPTION, summary, data, frame)
