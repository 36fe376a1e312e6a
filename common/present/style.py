"""Define how plots look: colours, symbols, patterns, and the template that all of them share.

An implementation has one look in every plot (`Row.look`): the colour of its family, which is its package, and a form
(symbol, pattern, dashes) that sets it apart within the family.  The palette is Okabe and Ito's, which colour-blind
people can tell apart, without its grey and its yellow, which is too light for a line.  Text, grid and outlines take
their colours from page.css, so that they follow light, dark and print.
"""

from __future__ import annotations

import html
import math
from dataclasses import dataclass
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Sequence, Tuple

from common.core.statistics import Summary
from common.present import scales
from common.present.labels import Names
from common.present.table import Table

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#A56EFF", "#8A8F00")
#: The package that a loss comes from -> the number of its colour in PALETTE.  There are more packages than colours: of
#: two with one colour the second has other forms.
FAMILIES = {
    **{"torchaudio": 0, "optimized_transducer": 1, "fast_rnnt": 2, "warprnnt_numba": 3, "k2": 4, "speechbrain": 5},
    **{"fused_transducer": 6, "torch": 7, "nemo": 5, "transformers": 1, "warp_rnnt": 7, "warprnnt_pytorch": 3},
    **{"apex": 0, "transducer": 6},
}
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "x", "star")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
PATTERNS = ("", "/", ".", "x", "-", "\\", "+")
MARKS = (*SYMBOLS, "triangle-down", "pentagon", "hexagon")  # of what has no colour
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Liberation Sans', sans-serif"
CLEAR = "rgba(0,0,0,0)"
INK = "#777777"  # page.css and the PNGs draw it in the colour of the text
NEUTRAL = "#7f8791"  # of no implementation; visible beside black and white

#: A part of a figure as plotly takes it: a trace, a marker, an axis, a layout.
Plotly = Dict[str, Any]
Trace = Plotly
_AXIS: Plotly = {
    **{"title": {"font": {"size": 13}}, "automargin": True, "zeroline": False, "fixedrange": True},
    **{"ticks": "", "rangemode": "tozero"},
}
_WHISKERS: Plotly = {"type": "data", "symmetric": False, "color": INK, "thickness": 1.5, "width": 5}
_PATTERN = {"fillmode": "overlay", "size": 7, "solidity": 0.25, "fgcolor": "#ffffff", "fgopacity": 0.85}
_BAR = {"error_y": _WHISKERS, "marker": {"line": {"width": 1, "color": INK}, "pattern": _PATTERN}}
_POINTS = {"error_x": _WHISKERS, "error_y": _WHISKERS, "marker": {"line": {"width": 1}}}
#: What plotly takes where a figure does not say it.  page.js gives the legend the height that its lines take.
TEMPLATE: Plotly = {
    "layout": {
        **{"autosize": True, "hovermode": "closest", "dragmode": False, "showlegend": True},
        **{"paper_bgcolor": CLEAR, "plot_bgcolor": CLEAR, "xaxis": _AXIS, "yaxis": _AXIS},
        "margin": {"l": 12, "r": 18, "t": 10, "b": 46},
        "font": {"family": FONT, "size": 13},
        "legend": {
            **{"orientation": "h", "x": 0, "xanchor": "left", "y": 0, "yanchor": "bottom", "yref": "container"},
            **{"font": {"size": 12}, "traceorder": "normal", "bgcolor": CLEAR},
        },
    },
    "data": {"bar": [_BAR], "scatter": [_POINTS]},
}


@dataclass(frozen=True)
class Figure:
    """Hold one plot.

    Attributes:
        title, caption: shown with it.
        summary: its numbers in words, for screen readers.
        data, layout: for plotly.
        table: the same numbers; None where the page shows them already.
        small: three fit side by side.
        names: of its points.
        parts: the small plots that it consists of; it then has no data of its own.
        chapter: of its section, "" for none.
        folded: shown only when opened.
        on_paper: printed, unless it is folded.
    """

    key: str
    title: str
    caption: str
    summary: str
    data: List[Trace]
    layout: Plotly
    table: Optional[Table]
    small: bool = False
    names: Optional[Names] = None
    parts: Sequence[Figure] = ()
    chapter: str = ""
    folded: bool = False
    on_paper: bool = True

    @property
    def height(self) -> int:
        """Return its height in pixels, without the lines of the legend."""
        return self.layout["height"]

    @property
    def drawn(self) -> Sequence[Figure]:
        """Return its parts, or itself where it has none."""
        return self.parts or [self]


class Look(NamedTuple):
    """Hold how an implementation is drawn: the numbers of its colour in PALETTE and of its form."""

    color: int = 0
    form: int = 0


def color(look: Look) -> str:
    return PALETTE[look.color % len(PALETTE)]


def symbol(look: Look) -> str:
    return SYMBOLS[look.form % len(SYMBOLS)]


def dash(look: Look) -> str:
    return DASHES[look.form % len(DASHES)]


def pattern(number: int) -> Plotly:
    """Return plotly's pattern `number`; after the last, all but the plain one again with larger tiles."""
    turn = number - len(PATTERNS)
    return {"shape": PATTERNS[number]} if turn < 0 else {"shape": PATTERNS[1 + turn % (len(PATTERNS) - 1)], "size": 14}


def shown(label: str) -> str:
    """Escape a label for plotly, which takes some HTML in its texts."""
    return html.escape(label, quote=False)


def bars(name: str, x: Sequence[Any], y: Sequence[Any], look: Plotly, hover: str, **options: Any) -> Trace:
    """Return a trace of bars.

    look: plotly's marker; hover: plotly's template of what is shown beside the name of the bar under the pointer;
    options: of the trace.
    """
    trace = {"type": "bar", "name": shown(name), "x": list(x), "y": list(y), "marker": look}
    return {**trace, "hovertemplate": f"{hover}<extra>{shown(name)}</extra>", **options}


def bar_of(look: Look) -> Plotly:
    """Return the marker of an implementation's bars."""
    return {"color": color(look), "pattern": pattern(look.form)}


def parts(
    name: str, x: Sequence[Any], y: Sequence[Any], each: Sequence[Look], number: int, hover: str, width: float
) -> List[Trace]:
    """Return the horizontal bars of one stage or machine, each in its implementation's colour, and their neutral entry
    in the legend: a bar without length, above the plot.

    each: the look of each bar; number: that of the pattern.
    """
    colored = {"color": [color(look) for look in each], "pattern": pattern(number)}
    drawn = bars(name, x, y, colored, hover, orientation="h", width=width, showlegend=False)
    neutral = {"color": NEUTRAL, "pattern": pattern(number)}
    return [drawn, bars(name, [0], [10 + number], neutral, "", orientation="h", width=width)]


def points(name: str, at: Iterable[Tuple[Any, Any]], marker: Plotly, hover: str = "", **options: Any) -> Trace:
    """Return a trace of markers, or of lines with another `mode`.

    at: (x, y) of each point; hover: as for bars, a name after <extra> replaces the trace's, "" shows nothing; options:
    of the trace.
    """
    x, y = zip(*at)
    known = hover if "<extra>" in hover else f"{hover}<extra>{shown(name)}</extra>"
    trace = {"type": "scatter", "mode": "markers", "name": shown(name), "x": list(x), "y": list(y), "marker": marker}
    return {**trace, **({"hovertemplate": known} if hover else {"hoverinfo": "skip"}), **options}


def band(name: str, x: Sequence[float], low: Sequence[float], high: Sequence[float], look: Look) -> Trace:
    """Return the area between two curves, in the colour of an implementation."""
    edge = [*zip(x, low), *reversed(list(zip(x, high)))]
    drawn: Plotly = {"mode": "lines", "line": {"width": 0}, "fill": "toself", "fillcolor": color(look) + "33"}
    return points(name, edge, {}, showlegend=False, **drawn)


def marker(look: Look, size: int) -> Plotly:
    return {"symbol": symbol(look), "size": size, "color": color(look)}


def mark(number: int, size: int) -> Plotly:
    """Return the marker of a symbol without a colour of its own."""
    return {"symbol": MARKS[number % len(MARKS)], "size": size, "color": INK}


def whiskers(summaries: Sequence[Summary]) -> Dict[str, List[float]]:
    """Return plotly's error bars, from p20 to p80 around the median; without length where these are not known."""
    return {
        "array": [(each.p80 or each.median) - each.median for each in summaries],
        "arrayminus": [each.median - (each.p20 or each.median) for each in summaries],
    }


def about_whiskers(summaries: Sequence[Summary]) -> str:
    """Return the sentence of a caption that explains `whiskers`; "" where there are none."""
    drawn = sum(each.p20 is not None for each in summaries)
    if not drawn:
        return ""
    whose = "" if drawn == len(summaries) else f", where a batch has several samples ({drawn} of {len(summaries)})"
    return f" Whiskers{whose}: the 20th and 80th percentile of samples over their own batch's median."


def axis(title: str, **options: Any) -> Plotly:
    return {"title": {"text": title}, **options}


def axis_of(title: str, span: scales.Span) -> Plotly:
    """Return an axis between the ends of `span`, with plain numbers at 1, 2, 5, 10, ... where it is logarithmic."""
    if not span.logarithmic:
        return axis(title, range=[span.low, span.high])
    ends = [math.log10(span.low), math.log10(span.high)]
    return axis(f"{title} (logarithmic)", type="log", range=ends, tickvals=span.ticks, ticktext=span.words)


def layout(height: int, legend: Optional[int] = None, **options: Any) -> Plotly:
    """Return plotly's layout.  height: pixels; legend: pixels of each of its entries, None for no legend."""
    of_legend = {"showlegend": False} if legend is None else {"legend": {"entrywidth": legend}}
    return {"template": TEMPLATE, "height": height, **of_legend, **options}


def lanes(names: Sequence[str], lane: int, gap: int) -> Plotly:
    """Return the layout of lanes below each other: the first at y = 0 on top, the next at -1.

    Each is `lane` pixels high, with its name at the left edge, `gap` pixels above its middle, so that the plot has the
    whole width.
    """
    above = {"x": 0, "xref": "paper", "xanchor": "left", "yanchor": "bottom", "yshift": gap, "showarrow": False}
    notes = [{**above, "y": -number, "text": name} for number, name in enumerate(names)]
    span = [-(len(names) - 1) - 0.5, 0.5 + (gap + 22 - lane / 2) / lane]
    return {"annotations": notes, "yaxis": {"range": span, "showgrid": False, "showticklabels": False}}
