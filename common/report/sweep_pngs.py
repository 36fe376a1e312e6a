"""The plots of sweeps for matplotlib: the same numbers as the page's, in its symbols and colours."""

from __future__ import annotations

from html import unescape
from typing import Any, Dict, List, Optional

from common.report.look import DASHES, PATTERNS, SYMBOLS, Figure, Trace

#: plotly's names -> matplotlib's.
MARKERS = dict(zip(SYMBOLS, ("o", "s", "D", "^", "P", "X", "*", "v")))
LINES = dict(zip(DASHES, ("-", "--", ":", "-.", (0, (8, 2)), (0, (5, 1, 1, 1, 1, 1)))))
HATCHES = dict(zip(PATTERNS, ("", "//", "..", "xx", "--", "\\\\", "++", "||")))
INK = "#1c2128"
GROUP = 0.8  # width of the bars of one value


def draw(axes: Any, figure: Figure) -> bool:
    """A figure of sweep_curves on matplotlib's `axes`."""
    x, y = figure.layout["xaxis"], figure.layout["yaxis"]
    if figure.data[0]["type"] == "bar":
        _bars(axes, figure.data, x["categoryarray"])
    else:
        _curves(axes, figure.data)
        if x.get("type") == "log":
            axes.set_xscale("log")
            axes.set_yscale("log")
            axes.minorticks_off()
            axes.set_yticks(y["tickvals"], y["ticktext"])
            axes.set_ylim(*(10**end for end in y["range"]))
        axes.set_xticks(x["tickvals"], x["ticktext"])
    if y.get("type") != "log":
        axes.set_ylim(bottom=0)
    axes.set_xlabel(x["title"]["text"])
    axes.set_ylabel(f"{figure.title.partition(' over ')[0].lower()}, {y['title']['text']}")
    axes.grid(axis="y")
    axes.legend(loc="upper left", bbox_to_anchor=(0, -0.18), ncols=3, borderaxespad=0)
    return True


def _spread(trace: Trace) -> Optional[List[List[float]]]:
    whiskers = trace.get("error_y")
    return [whiskers["arrayminus"], whiskers["array"]] if whiskers else None


def _curves(axes: Any, data: List[Trace]) -> None:
    for trace in data:
        line, marker = trace["line"], trace["marker"]
        look: Dict[str, Any] = {"color": line["color"], "ls": LINES[line["dash"]], "lw": 0.72 * line["width"]}
        look.update(marker=MARKERS[marker["symbol"]], ms=0.64 * marker["size"], mfc=marker["color"], mec=INK, mew=0.6)
        look.update(ecolor=INK, elinewidth=0.9)
        axes.errorbar(trace["x"], trace["y"], yerr=_spread(trace), label=unescape(trace["name"]), capsize=2.5, **look)


def _bars(axes: Any, data: List[Trace], values: List[str]) -> None:
    width = GROUP / len(data)
    for place, trace in enumerate(data):
        at = [values.index(value) + (place - (len(data) - 1) / 2) * width for value in trace["x"]]
        look = {"color": trace["marker"]["color"], "hatch": HATCHES[trace["marker"]["pattern"]["shape"]]}
        look.update(label=unescape(trace["name"]), edgecolor="white", ecolor=INK, capsize=2.5)
        axes.bar(at, trace["y"], width, yerr=_spread(trace), error_kw={"elinewidth": 0.9}, **look)
    axes.set_xticks(range(len(values)), values)
    axes.set_xlim(-0.5, len(values) - 0.5)
