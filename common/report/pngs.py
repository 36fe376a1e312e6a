"""The main plots as PNGs for READMEs and papers, drawn by matplotlib: no browser is needed.

Light, 200 dots per inch, one configuration a set.  The interactive plots are in bars.py and courses.py.
"""

from __future__ import annotations

import logging
import warnings
from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

from common.errors import UserError
from common.report import labels, scales, sweep_curves, sweep_pngs, sweep_section, trade_off
from common.report.bars import stages_of, times
from common.report.collect import Entry, Group, apart, stage_medians
from common.report.look import PALETTE, color
from common.results.sweeps import Sweep
from common.results.wording import number

MARKERS = ("o", "s", "D", "^", "P", "X", "*")
HATCHES = ("", "//", "..", "xx", "--", "\\\\", "++")
DASHES = ("-", "--", ":", "-.", (0, (8, 2)), (0, (5, 1, 1, 1, 1, 1)))
FRONTS = {"dot": ":", "dash": "--"}  # plotly's names -> matplotlib's
INK, QUIET = "#1c2128", "#57606a"
STYLE: Dict[str, Any] = {
    "font.size": 9,
    "text.parse_math": False,  # a $ in a name is a $
    "text.color": INK,
    "axes.edgecolor": QUIET,
    "axes.labelcolor": QUIET,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "xtick.color": QUIET,
    "ytick.color": QUIET,
    "grid.color": "#e3e1db",
    "hatch.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "savefig.dpi": 200,
    "savefig.bbox": "tight",
}


def write(groups: Sequence[Group], folder: Path, swept: Sequence[Sweep] = ()) -> List[Path]:
    """One PNG for each plot there is data for: step-time.png, ...; step-time-2.png for a second configuration, and
    likewise sweep-vocab-size-time.png, ... of sweeps.

    Raises UserError without matplotlib, or when the folder cannot be written.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError(
            "--png needs matplotlib, which this Python does not have; `make report` uses one that does, "
            "or pip install matplotlib"
        ) from None
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    written: List[Path] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, draw in _plots(groups, swept):
            with matplotlib.rc_context(STYLE), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a font without a character draws a box
                figure = Figure(figsize=(7, 3.6))
                if draw(figure.add_subplot()):
                    figure.savefig(folder / f"{name}.png")
                    written.append(folder / f"{name}.png")
    except OSError as error:
        raise UserError(f"cannot write {folder}: {error.strerror or error}; name another folder with --png") from error
    return written


def _plots(groups: Sequence[Group], swept: Sequence[Sweep]) -> Iterator[Tuple[str, Callable[[Any], Optional[bool]]]]:
    """(name of the file, what draws it on the axes it is given)."""
    for place, group in enumerate(group for group in groups if not group.search):
        for name, draw in PLOTS.items():
            for end, _, entries in apart(group.entries) if name in APART else [("", "", group.entries)]:
                yield _numbered(f"{name}{end}", place), partial(draw, entries=entries)
    for place, sweep in enumerate(swept):
        for figure in sweep_curves.figures(sweep, sweep_section.entries_of(sweep)):
            yield _numbered(figure.key, place), partial(sweep_pngs.draw, figure=figure)


def _numbered(name: str, place: int) -> str:
    return f"{name}-{place + 1}" if place else name


def _lanes(axes: Any, labels: Sequence[str]) -> None:
    axes.set_yticks(range(len(labels)), labels, color=INK)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.grid(axis="x")
    axes.figure.set_size_inches(7, 1.3 + 0.55 * len(labels))


def step_time(axes: Any, entries: Sequence[Entry]) -> bool:
    timed = [entry for entry in entries if times(entry)]
    if not timed:
        return False
    ends = [0.0] * len(timed)
    for stage, place in stages_of(timed).items():
        parts = [stage_medians(entry, entry.scope).get(stage, 0.0) for entry in timed]
        style = {"color": color(place), "hatch": HATCHES[place % len(HATCHES)], "edgecolor": "white", "linewidth": 0.4}
        axes.barh(range(len(timed)), parts, 0.5, left=ends, label=stage, **style)
        ends = [end + part for end, part in zip(ends, parts)]
    medians = [times(entry)["median"] for entry in timed]
    below = [median - times(entry)["p20"] for entry, median in zip(timed, medians)]
    above = [times(entry)["p80"] - median for entry, median in zip(timed, medians)]
    whole = {"fmt": "D", "color": INK, "ms": 4, "capsize": 3, "lw": 1.2, "label": "median, p20 to p80"}
    axes.errorbar(medians, range(len(timed)), xerr=[below, above], **whole)
    _lanes(axes, [f"{entry.marked}\n{number(median)} ms" for entry, median in zip(timed, medians)])
    end = scales.cut([median + more for median, more in zip(medians, above)])
    axes.set_xlim(0, end)
    if end:
        beyond = [place for place, median in enumerate(medians) if median > end]
        axes.plot([end] * len(beyond), beyond, ">", color=INK, ms=11, clip_on=False)
    axes.set_xlabel("step time, ms" + (" (arrow: goes on to the number at its left end)" if end else ""))
    axes.legend(loc="upper left", bbox_to_anchor=(0, -0.28), ncols=4, borderaxespad=0)
    return True


def peak_memory(axes: Any, entries: Sequence[Entry]) -> bool:
    measured = [(entry, entry.peak_mb) for entry in entries if entry.peak_mb is not None]
    if not measured:
        return False
    axes.barh(range(len(measured)), [peak for _, peak in measured], 0.5, color=PALETTE[5], edgecolor=INK, linewidth=0.6)
    _lanes(axes, [f"{entry.marked}\n{number(peak)} MB" for entry, peak in measured])
    axes.set_xlabel("peak memory of a step above its baseline, MB")
    return True


#: -1, 0 or 1 of labels.PLACES -> how a text is aligned there, across and up.
ALIGNED = {-1: ("right", "top"), 0: ("center", "center"), 1: ("left", "bottom")}


def time_and_memory(axes: Any, entries: Sequence[Entry]) -> bool:
    from matplotlib.ticker import NullLocator

    both, points = trade_off.measured(entries)
    if len(both) < 2:
        return False
    axes.figure.set_size_inches(7, 4.4)
    found = trade_off.fronts(both, points)
    across, up = scales.span([x for x, _ in points]), scales.span([y for _, y in points])
    names = [entry.marked for entry in both]
    places = trade_off.name_places(names, points, found, (across, up), (500, 370))
    for front in found:
        line = {"ls": FRONTS[front.dash], "lw": 1.8 if front.dash == "dot" else 1.2, "color": QUIET}
        axes.step(*zip(*front.corners(points, across, up)), where="post", label=f"Pareto front, {front.of}", **line)
    for place, (entry, (x, y)) in enumerate(zip(both, points)):
        filled = {"color": color(place), "mec": INK, "mew": 0.6}
        look = filled if entry.of_one_model else {"mfc": "none", "mec": INK, "mew": 1.2}
        axes.plot([x], [y], MARKERS[place % len(MARKERS)], ms=8, **look)
        side = labels.PLACES[places[place]]
        turned = {"ha": ALIGNED[side[0]][0], "va": ALIGNED[side[1]][1]}
        axes.annotate(names[place], (x, y), (7 * side[0], 6 * side[1]), textcoords="offset points", **turned)
    for one, ends, set_scale in ((axes.xaxis, across, axes.set_xscale), (axes.yaxis, up, axes.set_yscale)):
        if ends.logarithmic:
            set_scale("log")
            one.set_ticks(ends.ticks, ends.words)
            one.set_minor_locator(NullLocator())
    axes.set_xlim(across.low, across.high)
    axes.set_ylim(up.low, up.high)
    axes.set_xlabel("step time, ms" + ", logarithmic" * across.logarithmic)
    axes.set_ylabel("peak memory, MB" + ", logarithmic" * up.logarithmic)
    axes.grid()
    if not all(entry.of_one_model for entry in both):
        axes.plot([], [], "o", mfc="none", mec=INK, mew=1.2, ms=7, label="loss of another model: on no front")
    axes.legend(loc="upper left", bbox_to_anchor=(0, -0.15), ncols=2, borderaxespad=0)
    return True


def memory_within(axes: Any, entries: Sequence[Entry]) -> bool:
    curves = [(entry, entry.curve) for entry in entries if entry.curve]
    for place, (entry, curve) in enumerate(curves):
        axes.step(curve.ms, curve.mb, where="post", color=color(place), ls=DASHES[place % len(DASHES)], lw=1.4)
        peak = (curve.ms[curve.mb.index(curve.peak_mb)], curve.peak_mb)
        style = {"color": color(place), "mec": INK, "mew": 0.6, "ls": DASHES[place % len(DASHES)]}
        axes.plot(*peak, marker=MARKERS[place % len(MARKERS)], label=entry.marked, **style)
    if curves:
        axes.set_xlabel("ms since the step began (profiled)")
        axes.set_ylabel("allocated above the start, MB")
        axes.grid()
        axes.legend()
    return bool(curves)


PLOTS: Dict[str, Callable[[Any, Sequence[Entry]], Optional[bool]]] = {
    "step-time": step_time,
    "peak-memory": peak_memory,
    "time-memory": time_and_memory,
    "memory-within": memory_within,
}
#: Those with a picture of the exact losses and one of the others.
APART = ("step-time", "peak-memory", "memory-within")
