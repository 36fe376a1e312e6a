"""Draws heat maps of a profile of inference: audio by batch size, coloured by real-time factor and by memory.

A cell is a bar at its place, since the page's plotly has no heat map; colours are of fixed ranges, so that two maps can
be compared.
"""

from __future__ import annotations

from typing import Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

from common.core.text import number
from common.core.units import MB
from common.present.style import Figure, Trace, axis, bars, layout, shown
from common.present.table import Cell, measured, tabulated
from common.tools.inference import grid
from common.tools.inference.rows import GridCell, Inference

ROW, LEGEND = 44, 150  # pixels: height of a duration, width of the legend
SIDE = 0.94  # of a cell that is 1 wide
GREY = "#d5d5d5"  # not measured
#: The upper end of each range with its colour, light enough for dark words.
FACTORS = (
    (0.01, "below 0.01", "#c7e9c0"),
    (0.03, "0.01 to 0.03", "#a1d99b"),
    (0.1, "0.03 to 0.1", "#74c476"),
    (0.3, "0.1 to 0.3", "#fee391"),
    (1.0, "0.3 to 1", "#fdae6b"),
    (float("inf"), "slower than real time", "#fb8a6a"),
)
MEGABYTES = (
    (16.0, "below 16 MB", "#deebf7"),
    (64.0, "16 to 64 MB", "#c6dbef"),
    (256.0, "64 to 256 MB", "#9ecae1"),
    (1024.0, "256 MB to 1 GB", "#6baed6"),
    (4096.0, "1 to 4 GB", "#bcbddc"),
    (float("inf"), "above 4 GB", "#9e9ac8"),
)
Range = Tuple[float, str, str]


class Quantity(NamedTuple):
    """A quantity that is drawn.  of: returns its value of a cell, in the unit of the ranges; words: writes a value."""

    key: str
    title: str
    caption: str
    unit: str
    ranges: Sequence[Range]
    of: Callable[[GridCell], Optional[float]]
    words: Callable[[float], str]


QUANTITIES = (
    Quantity(
        "rtf",
        "Real-time factor",
        "Seconds of computing for a second of audio, the median of calls; below 1 is faster than real time. Durations "
        "below each other, batch sizes side by side.",
        "RTF",
        FACTORS,
        lambda cell: cell.rtf,
        lambda value: f"{value:.2E}",
    ),
    Quantity(
        "inference-memory",
        "Memory peak",
        "The highest running sum of allocations within a batch, profiled, without the model itself; of the GPU where "
        "there is one.",
        "MB",
        MEGABYTES,
        lambda cell: _megabytes(cell.cuda_peak_bytes or cell.cpu_peak_bytes),
        lambda value: f"{number(value, 3)} MB",
    ),
)


def _megabytes(value: Optional[int]) -> Optional[float]:
    return None if value is None else value / MB


def figures(profile: Inference) -> List[Figure]:
    """Return a map of each quantity and each variant that has one."""
    variants, result = profile.variants(), []
    for quantity in QUANTITIES:
        for index, (variant, cells) in enumerate(variants):
            if any(quantity.of(cell) is not None for cell in cells):
                words = variant.in_words() if len(variants) > 1 else ""
                suffix = f"-{index + 1}" if index else ""
                result.append(_map(quantity, cells, profile.axes, words, suffix))
    return result


def _map(quantity: Quantity, cells: Sequence[GridCell], axes: grid.Grid, variant: str, suffix: str) -> Figure:
    durations, sizes = list(axes[grid.SECONDS]), list(axes[grid.BATCH])
    data: List[Trace] = []
    for name, colour, some in _by_range(quantity, cells):
        words = [_words(quantity, cell) for cell in some]
        data.append(
            bars(
                name,
                [SIDE] * len(some),
                [-durations.index(cell.position.seconds) for cell in some],
                {"color": colour},
                "%{customdata}",
                orientation="h",
                base=[sizes.index(cell.size) - SIDE / 2 for cell in some],
                width=SIDE,
                text=[shown(text) for text in words],
                textposition="inside",
                insidetextanchor="middle",
                textangle=0,
                constraintext="none",
                customdata=[shown(f"{_label(cell)}: {text}") for cell, text in zip(some, words)],
            )
        )
    across = axis(
        "batch size", range=[-0.5, len(sizes) - 0.5], tickvals=list(range(len(sizes))), ticktext=list(map(str, sizes))
    )
    down = axis(
        "audio",
        range=[0.5 - len(durations), 0.5],
        tickvals=[-index for index in range(len(durations))],
        ticktext=[f"{seconds:g} s" for seconds in durations],
    )
    frame = layout(
        ROW * len(durations) + 96, LEGEND, xaxis={**across, "showgrid": False}, yaxis={**down, "showgrid": False}
    )
    title = f"{quantity.title}{f', {variant}' if variant else ''}"
    summary = f"{title}: " + "; ".join(f"{_label(cell)} {_words(quantity, cell)}" for cell in cells)
    rows = [_row(quantity, cell) for cell in cells]
    key = f"{quantity.key}{suffix}"
    return Figure(
        key, title, quantity.caption, summary, data, {**frame, "barmode": "overlay"}, tabulated(key, title, rows)
    )


def _by_range(quantity: Quantity, cells: Sequence[GridCell]) -> List[Tuple[str, str, List[GridCell]]]:
    """Return (name, colour, cells) of each range that has some, and of what was not measured."""
    cells_of: Dict[str, List[GridCell]] = {}
    for cell in cells:
        value = quantity.of(cell)
        name = "" if value is None else next(name for end, name, _ in quantity.ranges if value < end)
        cells_of.setdefault(name, []).append(cell)
    every = [*((name, colour) for _, name, colour in quantity.ranges), ("", GREY)]
    return [(name or "not measured", colour, cells_of[name]) for name, colour in every if name in cells_of]


def _words(quantity: Quantity, cell: GridCell) -> str:
    value = quantity.of(cell)
    return cell.status if value is None else quantity.words(value)


def _label(cell: GridCell) -> str:
    return f"{cell.seconds:g} s x {cell.size}"


def _row(quantity: Quantity, cell: GridCell) -> Dict[str, Cell]:
    return {
        "audio s": measured(cell.seconds),
        "batch": measured(cell.size),
        quantity.unit: measured(quantity.of(cell)),
        "status": Cell(cell.status),
    }
