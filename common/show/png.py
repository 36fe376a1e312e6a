"""Draw figures as PNGs for READMEs and papers, from the data that the page's plotly takes: light, 200 dots per inch.

matplotlib draws, so no browser is needed.  Supports what this suite's figures use: bars, stacked or grouped; markers,
lines, steps, error bars and bands; names beside points; logarithmic axes and categories; notes; small plots beside each
other.
"""

from __future__ import annotations

import io
import logging
import re
import warnings
from html import unescape
from pathlib import Path
from typing import Any, Dict, Iterable, Iterator, List, Optional, Sequence, Tuple

from common.analysis.groups import Group
from common.analysis.sweep import Sweep
from common.core.errors import UserError
from common.core.files import another, make_folder, write_whole
from common.present.labels import Names
from common.present.style import DASHES, INK, MARKS, PATTERNS, Figure, Plotly, Trace
from common.show import runs, search
from common.show import sweep_plot as sweep

#: plotly's names of markers, lines and patterns -> matplotlib's.
MARKERS = {**dict(zip(MARKS, "osD^PX*vph")), "triangle-right": ">", "x-thin": "x"}
LINES = dict(zip(DASHES, ("-", "--", ":", "-.", (0, (8, 2)), (0, (5, 1, 1, 1, 1, 1)))))
HATCHES = dict(zip(PATTERNS, ("", "//", "..", "xx", "--", "\\\\", "++")))

DARK, QUIET = "#1c2128", "#57606a"
WIDTH, SMALL = 7.0, 4.0  # inches
BESIDE = 3  # small plots
POINT = 9 / 13  # of a pixel: text of 13 pixels on the page has 9 points here
PIXELS = 72 / POINT  # of an inch
STYLE: Any = {  # of matplotlib's names
    **{"font.size": 9, "text.color": DARK, "text.parse_math": False},  # a $ in a name is a $
    **{"axes.edgecolor": QUIET, "axes.labelcolor": QUIET, "xtick.color": QUIET, "ytick.color": QUIET},
    **{"axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True, "grid.color": "#e3e1db"},
    **{"hatch.linewidth": 0.6, "legend.frameon": False, "legend.fontsize": 8},
    **{"savefig.dpi": 200, "savefig.bbox": "tight"},
}
NOT_DRAWN = "samples"  # of a run: a reader of a paper asks for no drift


def write(groups: Sequence[Group], folder: Path, swept: Sequence[Sweep] = ()) -> List[Path]:
    """Write a PNG for each main plot that has data: step-time.png, ...; step-time-2.png for a second configuration.

    Likewise for searches and sweeps (sweep-vocab-size-time.png).  Raises UserError without matplotlib, or when the
    folder cannot be written.
    """
    return save(_named(groups, swept), folder)


def save(named: Iterable[Tuple[str, Figure]], folder: Path) -> List[Path]:
    """Write a PNG for each figure, by name.  Raises UserError without matplotlib or where they cannot be written."""
    try:
        import matplotlib
    except ImportError:
        advice = "`make report` uses one that does, or pip install matplotlib"
        raise UserError(f"--png needs matplotlib, which this Python does not have; {advice}") from None
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    advice = another("--png", "folder")
    make_folder(folder, advice)
    written: List[Path] = []
    for name, figure in named:
        drawn = io.BytesIO()
        with matplotlib.rc_context(STYLE), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a font without a character draws a box
            draw(figure).savefig(drawn, format="png")
        write_whole(advice, (folder / f"{name}.png", drawn.getvalue()))
        written.append(folder / f"{name}.png")
    return written


def _named(groups: Sequence[Group], swept: Sequence[Sweep]) -> Iterator[Tuple[str, Figure]]:
    """Yield each plot with the name of its file."""
    of_runs = [runs.figures(group.rows) for group in groups if not group.search]
    of_searches = [search.figures(group.rows) for group in groups if group.search]
    for sets in (of_runs, of_searches, [sweep.figures(each) for each in swept]):
        for index, figures in enumerate(sets):
            for figure in figures:
                if figure.key != NOT_DRAWN:
                    yield f"{figure.key}-{index + 1}" if index else figure.key, figure


def draw(figure: Figure) -> Any:
    """Return a plot as a figure of matplotlib."""
    if figure.parts:
        return _parts(figure)
    layout = figure.layout
    ups = list(dict.fromkeys(trace.get("yaxis", "y") for trace in figure.data))
    axes_of = {up: layout.get(f"yaxis{up[1:]}", {}) for up in ups}
    shares = [high - low for low, high in (of.get("domain", (0, 1)) for of in axes_of.values())]
    legend = _legend_lines(figure)
    drawn = _sheet(SMALL if figure.small else WIDTH, figure.height + 30 + 19 * legend)
    rows = drawn.subplots(len(ups), squeeze=False, sharex=True, height_ratios=shares)[:, 0]
    for (up, of), axes in zip(axes_of.items(), rows):
        traces = [trace for trace in figure.data if trace.get("yaxis", "y") == up]
        _plot(axes, traces, layout, of, labelled=axes is rows[-1])
    _title(drawn, figure)
    if legend:
        handles = dict(zip(*reversed(rows[0].get_legend_handles_labels())))
        names = [name for name in map(_label, figure.data) if name in handles]
        drawn.legend([handles[name] for name in names], names, loc="outside lower left", ncols=_legend_columns(figure))
    if figure.names:
        _names(drawn, rows[0], figure.names)
    return drawn


def _sheet(width: float, height: float) -> Any:
    """Return an empty figure of matplotlib.  width: inches; height: pixels."""
    from matplotlib.figure import Figure as Drawn

    drawn = Drawn(figsize=(width, height / PIXELS))
    drawn.set_layout_engine("constrained")
    return drawn


def _title(drawn: Any, figure: Figure) -> None:
    drawn.suptitle(figure.title, x=0.01, ha="left", fontsize=10, fontweight="bold")


def _parts(figure: Figure) -> Any:
    """Draw small plots beside and below each other."""
    columns = min(len(figure.parts), BESIDE)
    lines = -(-len(figure.parts) // columns)
    drawn = _sheet(WIDTH, 30 + lines * (figure.parts[0].height + 40))
    cells = list(drawn.subplots(lines, columns, squeeze=False).flat)
    for axes, part in zip(cells, figure.parts):
        _plot(axes, part.data, part.layout, part.layout["yaxis"])
        axes.set_title(part.title, fontsize=8, loc="left")
    for axes in cells[len(figure.parts) :]:
        axes.set_visible(False)
    _title(drawn, figure)
    return drawn


def _plot(axes: Any, traces: Sequence[Trace], layout: Plotly, up: Plotly, labelled: bool = True) -> None:
    """Draw one plot.  up: the y axis; labelled: whether the x axis has its title."""
    for line in layout.get("shapes", ()):
        _background(axes, line)
    _bars(axes, [trace for trace in traces if trace["type"] == "bar"], layout)
    for trace in traces:
        if trace["type"] == "scatter":
            _points(axes, trace)
    _axis(axes, "x", layout["xaxis"], labelled)
    _axis(axes, "y", up)
    for note in layout.get("annotations", ()):
        _note(axes, note)


def _legend_columns(figure: Figure) -> int:
    return max(int(WIDTH * PIXELS / (figure.layout["legend"]["entrywidth"] + 44)), 1)


def _legend_lines(figure: Figure) -> int:
    if not figure.layout.get("showlegend", True):
        return 0
    return -(-sum(trace.get("showlegend", True) for trace in figure.data) // _legend_columns(figure))


def _bars(axes: Any, traces: Sequence[Trace], layout: Plotly) -> None:
    """Fill bars with a white pattern, then outline them, as the pattern has the colour of the edge."""
    ends: Dict[Any, float] = {}
    for index, trace in enumerate(traces):
        across = trace.get("orientation") == "h"
        at, lengths = (trace["y"], trace["x"]) if across else (trace["x"], trace["y"])
        width = trace.get("width")
        if width is None:  # side by side above a category
            order = layout["xaxis"]["categoryarray"]
            width = (1 - layout["bargap"]) / len(traces)
            at = [order.index(value) + (index - (len(traces) - 1) / 2) * width for value in at]
        stacked = layout.get("barmode") == "stack"
        starts = trace.get("base") or [ends.get(middle, 0.0) if stacked else 0.0 for middle in at]
        ends.update((middle, start + length) for middle, start, length in zip(at, starts, lengths))
        marker, hatch = trace["marker"], _hatch(trace["marker"].get("pattern", {}))
        bar = axes.barh if across else axes.bar
        base = {"left" if across else "bottom": starts, "alpha": marker.get("opacity", 1)}
        inks = marker["color"]
        colors = [_ink(ink) for ink in inks] if isinstance(inks, list) else _ink(inks)
        bar(at, lengths, width, **base, color=colors, hatch=hatch, edgecolor="white", lw=0, label=_label(trace))
        bar(at, lengths, width, **base, fill=False, edgecolor=DARK, lw=0.5)
        for words, middle, start, length in zip(trace.get("text", ()), at, starts, lengths):
            axes.text(start + length / 2, middle, unescape(words), ha="center", va="center", fontsize=7)
        if not across:
            _whiskers(axes, trace, at)


def _hatch(pattern: Plotly) -> str:
    return HATCHES[pattern.get("shape", "")][: 1 if "size" in pattern else 2]


def _points(axes: Any, trace: Trace) -> None:
    x, y, marker, line = trace["x"], trace["y"], trace["marker"], trace.get("line", {})
    if "fill" in trace:
        axes.fill(x, y, color=trace["fillcolor"], lw=0, label="_")
        return
    style: Plotly = {"clip_on": trace.get("cliponaxis", True), "label": _label(trace)}
    if "lines" in trace["mode"]:
        style.update(color=_ink(line["color"]), lw=POINT * line["width"], ls=LINES[line["dash"]])
        style["drawstyle"] = "steps-post" if line.get("shape") == "hv" else "default"
    else:
        style["ls"] = "none"
    _whiskers(axes, trace, x)
    given = (marker.get("symbol"), marker.get("size"))
    pairs = list(zip(*(each if isinstance(each, list) else [each] * len(x) for each in given)))
    for kind, size in dict.fromkeys(pairs):  # one for all points, but where ones are marked out
        some = [at for at, pair in enumerate(pairs) if pair == (kind, size)]
        axes.plot([x[at] for at in some], [y[at] for at in some], **style, **_marker(kind, size, marker))
        style["label"] = "_"


def _names(drawn: Any, axes: Any, names: Names) -> None:
    """Write each name beside its point, or farther away with a line to it, once everything else is in place."""
    drawn.draw_without_rendering()
    frame, scale = axes.get_window_extent(), drawn.dpi * POINT / 72
    style = {"textcoords": "offset points", "ha": "center", "va": "center", "fontsize": 8}
    arrow = {"arrowstyle": "-", "lw": 0.6, "color": QUIET, "shrinkB": 4}
    for (x, y, name), spot in zip(names.at, names.places(frame.width / scale, frame.height / scale)):
        offset = (POINT * spot.across, POINT * spot.up)
        text = axes.annotate(name, (x, y), offset, arrowprops=arrow if spot.far else None, **style)
        text.set_in_layout(False)


def _marker(kind: Optional[str], size: float, marker: Plotly) -> Plotly:
    if not kind:
        return {}
    name, hollow, _ = kind.partition("-open")
    style = {"marker": MARKERS[name], "ms": 0.92 * POINT * size}
    if hollow:
        return {**style, "mfc": "none", "mec": _ink(marker["color"]), "mew": 1.2}
    return {**style, "mfc": _ink(marker["color"]), "mec": DARK, "mew": 0.6}


def _whiskers(axes: Any, trace: Trace, x: Sequence[float]) -> None:
    for letter in "xy":
        whiskers = trace.get(f"error_{letter}")
        if whiskers:
            ends = {f"{letter}err": [whiskers["arrayminus"], whiskers["array"]]}
            axes.errorbar(x, trace["y"], **ends, fmt="none", ecolor=DARK, elinewidth=0.9, capsize=2.5, zorder=3)


def _axis(axes: Any, letter: str, of: Plotly, labelled: bool = True) -> None:
    from matplotlib.ticker import MaxNLocator, NullLocator, PercentFormatter

    line, limit = getattr(axes, f"{letter}axis"), getattr(axes, f"set_{letter}lim")
    logarithmic = of.get("type") == "log"
    if logarithmic:
        getattr(axes, f"set_{letter}scale")("log")
        line.set_minor_locator(NullLocator())
    if "categoryarray" in of:
        line.set_ticks(range(len(of["categoryarray"])), of["categoryarray"])
        limit(-0.5, len(of["categoryarray"]) - 0.5)
    elif "tickvals" in of:
        line.set_ticks(of["tickvals"], of["ticktext"])
    elif "nticks" in of:
        line.set_major_locator(MaxNLocator(of["nticks"], integer=True))
    if "range" in of:
        limit(*(10**end if logarithmic else end for end in of["range"]))
    elif not logarithmic and "categoryarray" not in of and of.get("rangemode") != "normal":
        limit(0, None)
    if of.get("tickformat") == ".0%":
        line.set_major_formatter(PercentFormatter(1, 0))
    if not of.get("showticklabels", True):
        line.set_ticks([])
        axes.spines["left" if letter == "y" else "bottom"].set_visible(False)
    if of.get("showgrid", "categoryarray" not in of):
        axes.grid(axis=letter)
    line.set_tick_params(length=0)
    if labelled and "title" in of:
        line.set_label_text(unescape(of["title"]["text"]))


def _note(axes: Any, note: Plotly) -> None:
    """Write the name of a lane at the left edge; text that is bold on the page is plain here."""
    name, offset = unescape(re.sub("</?b>", "", note["text"])), (0, POINT * note["yshift"])
    where = {"xycoords": axes.get_yaxis_transform(), "textcoords": "offset points", "va": "bottom"}
    axes.annotate(name, (0, note["y"]), offset, annotation_clip=False, **where)


def _background(axes: Any, line: Plotly) -> None:
    ends = ([line["x0"], line["x1"]], [line["y0"], line["y1"]])
    of = line["line"]
    style = {"ls": LINES[of["dash"]], "lw": POINT * of["width"], "alpha": line["opacity"], "zorder": 0.9}
    axes.plot(*ends, color=QUIET, label="_", **style)


def _label(trace: Trace) -> str:
    return unescape(trace["name"]) if trace.get("showlegend", True) else "_"


def _ink(color: str) -> str:
    return DARK if color == INK else color
