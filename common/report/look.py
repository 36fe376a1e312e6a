"""What the plots look like: colours, symbols, patterns, and plotly's settings.  The page and the PNGs share it.

Okabe and Ito's palette, which colour-blind people can tell apart, in an order in which the first four have a contrast
of 3:1 or more on light and on dark ground.  No meaning is in colour alone: each has a symbol or a pattern beside it, of
which there are 7 to 8 colours, so that 56 differ.
Text, grid and outlines take their colours from the page (page.css), so that they follow light, dark and print.
"""

from __future__ import annotations

import html
import math
from dataclasses import dataclass
from typing import Any, Dict, List, Optional, Sequence

from common.report import scales
from common.report.markup import Table

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#F0E442", "#999999")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "x", "star")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
PATTERNS = ("", "/", ".", "x", "-", "\\", "+")
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Liberation Sans', sans-serif"
CLEAR = "rgba(0,0,0,0)"

Trace = Dict[str, Any]


@dataclass(frozen=True)
class Figure:
    """One plot.  title, caption: shown with it; summary: the numbers in words, for who does not see it; table: the
    numbers behind it, None where they stand beside it; data, layout: as plotly takes them; height: pixels; small: three
    fit beside each other."""

    key: str
    title: str
    caption: str
    summary: str
    data: List[Trace]
    layout: Dict[str, Any]
    table: Optional[Table]
    height: int
    small: bool = False


def color(place: int) -> str:
    return PALETTE[place % len(PALETTE)]


def symbol(place: int) -> str:
    return SYMBOLS[place % len(SYMBOLS)]


def shown(label: str) -> str:
    """A label for plotly, which takes some HTML in its texts."""
    return html.escape(label, quote=False)


def axis(title: str = "", **more: Any) -> Dict[str, Any]:
    base = {
        "title": {"text": title, "font": {"size": 13}},
        "automargin": True,
        "zeroline": False,
        "fixedrange": True,
        "ticks": "",
    }
    return {**base, "rangemode": "tozero", **more}


def axis_of(title: str, span: scales.Span) -> Dict[str, Any]:
    """An axis between the ends of `span`, with plain numbers at 1, 2, 5, 10, ... where it is logarithmic."""
    if not span.logarithmic:
        return axis(title, range=[span.low, span.high])
    ends = [math.log10(span.low), math.log10(span.high)]
    ticks = {"tickvals": span.ticks, "ticktext": span.words}
    return axis(f"{title} (logarithmic)", type="log", range=ends, **ticks)


def layout(height: int, **more: Any) -> Dict[str, Any]:
    base = {
        "height": height,
        "autosize": True,
        "margin": {"l": 2, "r": 18, "t": 10, "b": 46},
        "paper_bgcolor": CLEAR,
        "plot_bgcolor": CLEAR,
        "font": {"family": FONT, "size": 13},
        "hovermode": "closest",
        "dragmode": False,
        "showlegend": True,
        "legend": {"orientation": "h", "x": 0, "xanchor": "left", "y": 1, "yanchor": "bottom", "bgcolor": CLEAR},
    }
    return {**base, **more}


def lanes(names: Sequence[str], lane: int, gap: int) -> Dict[str, Any]:
    """Layout of lanes under each other, the first on top at y = 0, the next at -1: each `lane` pixels high with its
    name `gap` pixels above its middle, at the left edge, so that long names leave the whole width to the plot."""
    notes = [
        {
            "x": 0,
            "xref": "paper",
            "xanchor": "left",
            "y": -place,
            "yanchor": "bottom",
            "yshift": gap,
            "text": name,
            "showarrow": False,
            "align": "left",
        }
        for place, name in enumerate(names)
    ]
    span = [-(len(names) - 1) - 0.5, 0.5 + (gap + 22 - lane / 2) / lane]
    return {"annotations": notes, "yaxis": axis(range=span, showgrid=False, showticklabels=False)}
