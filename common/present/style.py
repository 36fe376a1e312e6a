"""Define how plots look: colours, symbols, axes, and the template that all of them share.

An implementation looks the same in every plot (`Row.look`): it has the colour of its package, and a
form, which is a symbol and a dash, that no other loss of that colour has.  The palette is that of
Okabe and Ito, which colour-blind people can tell apart.  It lacks their grey, and their yellow,
which is too light for a line.  Text, grid and outlines take their colours from page.css, so that
they follow light, dark and print.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from math import ceil, floor, log10
from typing import Any, NamedTuple

from rnnt_bench.core import implementations, statistics
from rnnt_bench.present.parts import Plotly

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#A56EFF", "#8A8F00")
#: Package -> the number of its colour in PALETTE.  There are more packages than colours; losses of
#: two packages with one colour have different forms.
FAMILIES = {
    "torchaudio": 0,
    "optimized_transducer": 1,
    "fast_rnnt": 2,
    "warprnnt_numba": 3,
    "k2": 4,
    "speechbrain": 5,
    "fused_transducer": 6,
    "torch": 7,
    "nemo": 5,
    "transformers": 1,
    "warp_rnnt": 7,
    "warprnnt_pytorch": 3,
    "apex": 0,
    "transducer": 6,
}
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "x", "star")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Liberation Sans', sans-serif"
CLEAR = "rgba(0,0,0,0)"
#: page.css replaces this colour by that of the text.
INK = "#777777"
#: Colour of what is no implementation; visible on black and on white.
NEUTRAL = "#7f8791"

_AXIS: Plotly = {
    "title": {"font": {"size": 13}},
    "automargin": True,
    "zeroline": False,
    "fixedrange": True,
    "ticks": "",
    "rangemode": "tozero",
}
_WHISKERS: Plotly = {"type": "data", "symmetric": False, "color": INK, "thickness": 1.5, "width": 5}
_POINTS = {"error_x": _WHISKERS, "error_y": _WHISKERS, "marker": {"line": {"width": 1}}}
#: Defaults of plotly's layout.  page.js sets the height of the legend to that of its lines.
TEMPLATE: Plotly = {
    "layout": {
        "autosize": True,
        "hovermode": "closest",
        "dragmode": False,
        "showlegend": True,
        "paper_bgcolor": CLEAR,
        "plot_bgcolor": CLEAR,
        "xaxis": _AXIS,
        "yaxis": _AXIS,
        "margin": {"l": 12, "r": 18, "t": 10, "b": 46},
        "font": {"family": FONT, "size": 13},
        "legend": {
            "orientation": "h",
            "x": 0,
            "xanchor": "left",
            "y": 0,
            "yanchor": "bottom",
            "yref": "container",
            "font": {"size": 12},
            "traceorder": "normal",
            "bgcolor": CLEAR,
        },
    },
    "data": {"bar": [{"marker": {"line": {"width": 1, "color": INK}}}], "scatter": [_POINTS]},
}


class Look(NamedTuple):
    """Hold the number of an implementation's colour in PALETTE, and that of its form.

    Form 0 is the first of SYMBOLS and of DASHES, form 1 the second."""

    color: int = 0
    form: int = 0


def looks_of(kinds: Mapping[str, str | None]) -> dict[str, Look]:
    """Return a different look for each implementation.

    The colour is that of its package, or one that is still free for a package without a colour.
    The form is the first free one of that colour.  Pruned losses begin at form 1.

    kinds: name -> kind of the loss."""
    names = [implementation.name for implementation in implementations.with_variants()]

    def rank(name: str) -> tuple[bool, int, str]:
        """Return the key that sorts losses: those without @CONDITION first, then those with one.

        Within each group they are in the order of the implementations, unknown ones last."""
        base = name.partition("@")[0]
        return "@" in name, names.index(base) if base in names else len(names), name

    chosen: dict[str, Look] = {}
    for name in sorted(kinds, key=rank):
        color = _color_number(name, {look.color for look in chosen.values()})
        form = 1 if kinds[name] == "pruned" else 0
        while Look(color, form) in chosen.values():
            form += 1
        chosen[name] = Look(color, form)
    return chosen


def _color_number(name: str, taken: set[int]) -> int:
    """Return the number of the colour of a loss's package.

    For a package that is not in FAMILIES it is the highest number that is not in `taken`; 0 if all
    are."""
    base = name.partition("@")[0].partition(":")[0]
    if base in implementations.BY_NAME:
        package = implementations.BY_NAME[base].package
        if package in FAMILIES:
            return FAMILIES[package]
    return max({*range(len(PALETTE))} - taken, default=0)


def color(look: Look) -> str:
    return PALETTE[look.color % len(PALETTE)]


def symbol(look: Look) -> str:
    return SYMBOLS[look.form % len(SYMBOLS)]


def line(look: Look, width: float = 2.2) -> Plotly:
    """Return plotly's style of a line.  width: in pixels."""
    return {"color": color(look), "width": width, "dash": DASHES[look.form % len(DASHES)]}


def shown(label: str) -> str:
    """Escape a label for plotly, which would read tags such as <b> in it."""
    return html.escape(label, quote=False)


def bars(
    name: str, x: Sequence[Any], y: Sequence[Any], look: Plotly, hover: str, **options: Any
) -> Plotly:
    """Return plotly's trace of a set of bars.

    Args:
        name: of the set, in the legend.
        look: plotly's marker.
        hover: plotly's template of the text beside the mouse; `name` is added.
        options: other entries of the trace."""
    trace = {"type": "bar", "name": shown(name), "x": list(x), "y": list(y), "marker": look}
    return {**trace, "hovertemplate": f"{hover}<extra>{shown(name)}</extra>", **options}


def points(
    name: str, places: Iterable[tuple[Any, Any]], marker: Plotly, hover: str = "", **options: Any
) -> Plotly:
    """Return plotly's trace of markers; with the option `mode` also of lines.

    Args:
        name: of the trace, in the legend.
        places: (x, y) of each marker, at least one.
        hover: plotly's template of the text beside the mouse, to which `name` is added; "" for no
            text.
        options: other entries of the trace."""
    x, y = zip(*places)
    trace = {
        "type": "scatter",
        "mode": "markers",
        "name": shown(name),
        "x": list(x),
        "y": list(y),
        "marker": marker,
    }
    if hover:
        trace["hovertemplate"] = f"{hover}<extra>{shown(name)}</extra>"
    else:
        trace["hoverinfo"] = "skip"
    return {**trace, **options}


def marker(look: Look, size: int, hollow: bool = False) -> Plotly:
    """Return plotly's style of markers.  size: in pixels; hollow: draw only the outline."""
    if hollow:
        return {
            "symbol": f"{symbol(look)}-open",
            "size": size,
            "color": color(look),
            "line": {"width": 2},
        }
    return {"symbol": symbol(look), "size": size, "color": color(look)}


def whiskers(summaries: Sequence[statistics.Summary]) -> dict[str, list[float]]:
    """Return the lengths of plotly's error bars: from each median to its p80, and to its p20.

    They are 0 for a summary without percentiles."""
    return {
        "array": [(summary.p80 or summary.median) - summary.median for summary in summaries],
        "arrayminus": [summary.median - (summary.p20 or summary.median) for summary in summaries],
    }


#: An axis is logarithmic if its largest value is more than this many times the smallest.
WIDE = 20.0


class Span(NamedTuple):
    """Hold the ends of an axis, and whether it is logarithmic."""

    low: float
    high: float
    logarithmic: bool

    @property
    def ticks(self) -> list[float]:
        """Return the ticks of a logarithmic axis: 1, 2 and 5 times each power of ten.

        If these are fewer than three, 1 to 9 times each power of ten."""
        powers = range(floor(log10(self.low)), ceil(log10(self.high)) + 1)
        for digits in ((1, 2, 5), range(1, 10)):
            every = [digit * 10.0**power for power in powers for digit in digits]
            ticks = [tick for tick in every if self.low <= tick <= self.high]
            if len(ticks) > 2:
                break
        return ticks


def logarithmic(values: Sequence[float]) -> Span:
    """Return a logarithmic axis that shows these positive values, with some room beside them."""
    return Span(min(values) / 1.4, 1.6 * max(values), logarithmic=True)


def span(values: Sequence[float]) -> Span:
    """Return an axis for positive values: from zero, or logarithmic if they are far apart."""
    if max(values) > WIDE * min(values):
        return logarithmic(values)
    return Span(0.0, 1.15 * max(values), logarithmic=False)


def axis(title: str, **options: Any) -> Plotly:
    """Return plotly's axis with a title.  options: its other entries."""
    return {"title": {"text": title}, **options}


def axis_of(title: str, span: Span) -> Plotly:
    """Return plotly's axis for a span.

    The title of a logarithmic axis says so, and its ticks show plain numbers: 0.5, 1, 2."""
    if not span.logarithmic:
        return axis(title, range=[span.low, span.high])
    ends = [log10(span.low), log10(span.high)]
    texts = [f"{tick:.12g}" for tick in span.ticks]
    return axis(
        f"{title} (logarithmic)", type="log", range=ends, tickvals=span.ticks, ticktext=texts
    )


def layout(height: int, legend: int | None = None, **options: Any) -> Plotly:
    """Return plotly's layout.

    height: in pixels; legend: pixels of each entry of the legend, None for no legend; options:
    other entries of the layout."""
    entries = {"showlegend": False} if legend is None else {"legend": {"entrywidth": legend}}
    return {"template": TEMPLATE, "height": height, **entries, **options}


#: The height of a line of text, in pixels.
NAME_PIXELS = 22


def lanes(names: Sequence[str], lane: int, gap: int) -> Plotly:
    """Return the part of a layout that makes lanes below each other, at y = 0, -1, -2 and so on.

    lane: pixels from one to the next; gap: pixels from the middle of a lane up to its name, which
    is at the left edge."""
    above = {
        "x": 0,
        "xref": "paper",
        "xanchor": "left",
        "yanchor": "bottom",
        "yshift": gap,
        "showarrow": False,
    }
    notes = [{**above, "y": -number, "text": name} for number, name in enumerate(names)]
    # Half a lane below the last one; above the first one, room for its name.
    span = [0.5 - len(names), (gap + NAME_PIXELS) / lane]
    return {
        "annotations": notes,
        "yaxis": {"range": span, "showgrid": False, "showticklabels": False},
    }
