"""Define how plots look: colours, symbols, and the template that all of them share.

An implementation has one look in every plot (`Row.look`): the colour of its family, which is its
package, and a form (symbol, dashes) that sets it apart within the family.  The palette is Okabe and
Ito's, which colour-blind people can tell apart, without its grey and its yellow, which is too light
for a line.  Text, grid and outlines take their colours from page.css, so that they follow light,
dark and print.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from math import ceil, floor, log10
from typing import Any, NamedTuple

from rnnt_bench.core import implementations, statistics
from rnnt_bench.present.parts import Plotly

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#A56EFF", "#8A8F00")
#: The package that a loss comes from -> the number of its colour in PALETTE.  There are more
#: packages than colours: of two with one colour the second has other forms.
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
INK = "#777777"  # page.css draws it in the colour of the text
NEUTRAL = "#7f8791"  # of no implementation; visible beside black and white

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
#: Defaults of plotly's layout.  page.js gives the legend the height that its lines take.
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
    """Hold the numbers of an implementation's colour in PALETTE and of its form."""

    color: int = 0
    form: int = 0


def looks(kinds: Mapping[str, str | None]) -> dict[str, Look]:
    """Return the look of each implementation: the colour of its family, and the form of its kind,
    the next free one where that is taken. A loss without a family has the first free colour. kinds:
    name -> kind."""
    order = {
        implementation.name: index
        for index, implementation in enumerate(implementations.with_variants())
    }

    def rank(name: str) -> tuple[bool, int, str]:
        return "@" in name, order.get(name.partition("@")[0], len(order)), name

    result: dict[str, Look] = {}
    for name in sorted(kinds, key=rank):
        taken = {look.color for look in result.values()}
        color = next((color for color in reversed(range(len(PALETTE))) if color not in taken), 0)
        implementation = implementations.BY_NAME.get(name.partition("@")[0].partition(":")[0])
        if implementation:
            color = FAMILIES.get(implementation.package, color)
        form = int(kinds[name] == "pruned")
        while Look(color, form) in result.values():
            form += 1
        result[name] = Look(color, form)
    return result


def color(look: Look) -> str:
    return PALETTE[look.color % len(PALETTE)]


def symbol(look: Look) -> str:
    return SYMBOLS[look.form % len(SYMBOLS)]


def line(look: Look, width: float = 2.2) -> Plotly:
    return {"color": color(look), "width": width, "dash": DASHES[look.form % len(DASHES)]}


def shown(label: str) -> str:
    """Escape a label for plotly, which takes some HTML in its texts."""
    return html.escape(label, quote=False)


def bars(
    name: str, x: Sequence[Any], y: Sequence[Any], look: Plotly, hover: str, **options: Any
) -> Plotly:
    """Return a trace of bars. hover: plotly's template of what is shown beside the name of a
    bar."""
    trace = {"type": "bar", "name": shown(name), "x": list(x), "y": list(y), "marker": look}
    return {**trace, "hovertemplate": f"{hover}<extra>{shown(name)}</extra>", **options}


def points(
    name: str, places: Iterable[tuple[Any, Any]], marker: Plotly, hover: str = "", **options: Any
) -> Plotly:
    """Return a trace of markers at (x, y), or of lines with another `mode`. hover: as for bars, ""
    for nothing."""
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
    if hollow:
        return {
            "symbol": f"{symbol(look)}-open",
            "size": size,
            "color": color(look),
            "line": {"width": 2},
        }
    return {"symbol": symbol(look), "size": size, "color": color(look)}


def whiskers(summaries: Sequence[statistics.Summary]) -> dict[str, list[float]]:
    """Return plotly's error bars, from p20 to p80 around the median."""
    return {
        "array": [(summary.p80 or summary.median) - summary.median for summary in summaries],
        "arrayminus": [summary.median - (summary.p20 or summary.median) for summary in summaries],
    }


#: An axis is logarithmic when its largest value is more than so many times the smallest.
WIDE = 20.0


class Span(NamedTuple):
    low: float
    high: float
    logarithmic: bool

    @property
    def ticks(self) -> list[float]:
        """Return 1, 2 and 5 times each power of ten; 1 to 9 times it where that gives fewer than
        three."""
        powers = range(floor(log10(self.low)), ceil(log10(self.high)) + 1)
        every = [(digit, digit * 10.0**power) for power in powers for digit in range(1, 10)]
        ticks = {tick: digit for digit, tick in every if self.low <= tick <= self.high}
        few = [tick for tick, digit in ticks.items() if digit in (1, 2, 5)]
        return few if len(few) > 2 else list(ticks)


def logarithmic(values: Sequence[float]) -> Span:
    """Return a logarithmic axis that shows these positive values with some room beside them."""
    return Span(min(values) / 1.4, 1.6 * max(values), True)


def span(values: Sequence[float]) -> Span:
    """Return an axis for these positive values: from zero, or logarithmic where they differ too
    much."""
    return (
        logarithmic(values)
        if max(values) > WIDE * min(values)
        else Span(0.0, 1.15 * max(values), False)
    )


def axis(title: str, **options: Any) -> Plotly:
    return {"title": {"text": title}, **options}


def axis_of(title: str, span: Span) -> Plotly:
    """Return an axis between the ends of `span`, with plain numbers at 1, 2, 5, 10, ... where it is
    logarithmic."""
    if not span.logarithmic:
        return axis(title, range=[span.low, span.high])
    ends = [log10(span.low), log10(span.high)]
    words = [f"{tick:.12g}" for tick in span.ticks]
    return axis(
        f"{title} (logarithmic)", type="log", range=ends, tickvals=span.ticks, ticktext=words
    )


def layout(height: int, legend: int | None = None, **options: Any) -> Plotly:
    """Return plotly's layout. legend: pixels of each of its entries, None for no legend."""
    entries = {"showlegend": False} if legend is None else {"legend": {"entrywidth": legend}}
    return {"template": TEMPLATE, "height": height, **entries, **options}


def lanes(names: Sequence[str], lane: int, gap: int) -> Plotly:
    """Return the layout of lanes below each other: the first at y = 0, the next at -1.  Each is
    `lane` pixels high, its name stands at the left edge, `gap` pixels above its middle."""
    above = {
        "x": 0,
        "xref": "paper",
        "xanchor": "left",
        "yanchor": "bottom",
        "yshift": gap,
        "showarrow": False,
    }
    notes = [{**above, "y": -number, "text": name} for number, name in enumerate(names)]
    span = [-(len(names) - 1) - 0.5, 0.5 + (gap + 22 - lane / 2) / lane]
    return {
        "annotations": notes,
        "yaxis": {"range": span, "showgrid": False, "showticklabels": False},
    }
