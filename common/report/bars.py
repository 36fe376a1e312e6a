"""Step time by stages, and peak memory."""

from __future__ import annotations

from typing import Dict, Iterable, List, Optional, Sequence

from common.report import scales
from common.report.collect import Entry, apart, is_positive, stage_medians
from common.report.look import CLEAR, PATTERNS, Figure, Trace, axis, color, lanes, layout, shown, symbol
from common.report.markup import Cell, Column, Table
from common.results.wording import number

LANE = 62  # pixels
INK = "#777777"  # page.css draws it in the colour of the text
GOES_ON = "A bar with an arrow goes on beyond the right edge, to the number above it."
NEUTRAL = "#7f8791"  # no stage's; black and white both show on it


def stages_of(entries: Sequence[Entry]) -> Dict[str, int]:
    """All stages in the order in which they run, each with its number: of its colour, pattern and symbol."""
    met: Dict[str, int] = {}
    order: List[str] = []
    for entry in entries:
        place = 0
        for stage in _medians(entry):
            if stage not in met:
                met[stage] = len(met)
                order.insert(place, stage)
            place = max(place, order.index(stage) + 1)
    return {stage: met[stage] for stage in order}


def _medians(entry: Entry) -> Dict[str, float]:
    return stage_medians(entry, entry.scope)


def times(entry: Entry) -> Optional[Dict[str, float]]:
    return entry.step_ms if entry.scope == "step" else entry.loss_ms


def step_times(entries: Sequence[Entry]) -> List[Figure]:
    timed = [entry for entry in entries if times(entry)]
    stages = stages_of(timed)
    found = [step_time(some, stages, key, whose) for key, whose, some in apart(timed)] or [profiled_time(entries)]
    return [figure for figure in found if figure is not None]


def step_time(timed: Sequence[Entry], stages: Dict[str, int], key: str, whose: str) -> Figure:
    """Bars of the stages' medians, and the whole's median with 20th and 80th percentile."""
    stages = {stage: place for stage, place in stages.items() if any(stage in _medians(entry) for entry in timed)}
    end = scales.cut([times(entry)["p80"] for entry in timed])
    data: List[Trace] = []
    for stage, place in stages.items():
        having = [(at, _medians(entry).get(stage)) for at, entry in enumerate(timed)]
        data.append(_bar(stage, [(at, ms) for at, ms in having if ms is not None], place, "ms"))
    without = [(at, times(entry)["median"]) for at, entry in enumerate(timed) if not _medians(entry)]
    if without:
        data.append(_bar("not split", without, len(stages), "ms"))
    medians = [times(entry)["median"] for entry in timed]
    data.append(
        {
            "type": "scatter",
            "mode": "markers",
            "name": "median of the whole",
            "x": medians,
            "y": [-at for at in range(len(timed))],
            "marker": {"symbol": "diamond", "size": 10, "color": INK},
            "error_x": {
                "type": "data",
                "symmetric": False,
                "array": [times(entry)["p80"] - times(entry)["median"] for entry in timed],
                "arrayminus": [times(entry)["median"] - times(entry)["p20"] for entry in timed],
                "color": INK,
                "thickness": 2,
                "width": 6,
            },
            "hovertemplate": "%{x:.4g} ms<extra>median</extra>",
        }
    )
    beyond = [at for at, median in enumerate(medians) if end and median > end]
    if beyond:
        data.append(arrows(end, [-at for at in beyond]))
    names = [
        f"{shown(entry.marked)}  <b>{number(times(entry)['median'])} ms</b>"
        f"  {number(times(entry)['p20'], 3)}\u2013{number(times(entry)['p80'], 3)}"
        for entry in timed
    ]
    height = LANE * len(timed) + 64
    return Figure(
        f"step-time{key}",
        f"Step time{whose}",
        "Bars: the median of each stage. Diamond and whiskers: the median of the whole, its 20th and 80th percentile "
        "over all batches and rounds. Medians do not add up, so a bar may end a little before or after its diamond."
        + (f" {GOES_ON}" if beyond else ""),
        f"Step time{whose}: "
        + "; ".join(
            f"{entry.label} {number(times(entry)['median'])} milliseconds, from {number(times(entry)['p20'])} to "
            f"{number(times(entry)['p80'])}"
            for entry in timed
        ),
        data,
        layout(height, barmode="stack", **lanes(names, LANE, 14), xaxis=until(end), legend=legend_below()),
        _time_table(timed, stages, f"step-time{key}"),
        height,
    )


def until(end: Optional[float], title: str = "ms") -> Dict[str, object]:
    """The axis of bars, up to `end` where that is known."""
    return axis(title, **({"range": [0, end]} if end else {}))


def arrows(end: float, heights: Sequence[float], size: int = 22) -> Trace:
    """At the right edge, where the bars at these heights go on."""
    return {
        "type": "scatter",
        "mode": "markers",
        "name": "goes on",
        "x": [end] * len(heights),
        "y": list(heights),
        "marker": {"symbol": "triangle-right", "size": size, "color": INK},
        "cliponaxis": False,
        "hoverinfo": "skip",
    }


def legend_below(entry_width: int = 150) -> Dict[str, object]:
    """Below the axis; page.js gives it the height that its lines take."""
    below = {"orientation": "h", "x": 0, "xanchor": "left", "y": 0, "yanchor": "bottom", "yref": "container"}
    return {**below, "entrywidth": entry_width, "font": {"size": 12}, "traceorder": "normal", "bgcolor": CLEAR}


def pattern(place: int) -> Dict[str, object]:
    """Of bars, so that no meaning is in colour alone."""
    shape = {"shape": PATTERNS[place % len(PATTERNS)], "fillmode": "overlay", "size": 7, "solidity": 0.2}
    return {**shape, "fgcolor": "#ffffff", "fgopacity": 0.75}


def _bar(name: str, points: Sequence, place: int, unit: str) -> Trace:
    return {
        "type": "bar",
        "orientation": "h",
        "name": shown(name),
        "x": [value for _, value in points],
        "y": [-at for at, _ in points],
        "width": 0.36,
        "marker": {
            "color": color(place),
            "pattern": pattern(place),
            "line": {"width": 1, "color": INK},
        },
        "hovertemplate": f"%{{x:.4g}} {unit}<extra>{shown(name)}</extra>",
    }


def _time_table(entries: Sequence[Entry], stages: Iterable[str], name: str) -> Table:
    columns = [Column("implementation", False), Column("scope", False)]
    columns += [Column(title) for title in ("median ms", "p20 ms", "p80 ms", "n")]
    columns += [Column(f"{stage} ms") for stage in stages]
    rows = []
    for entry in entries:
        described, parts = times(entry), _medians(entry)
        values = [described[key] for key in ("median", "p20", "p80")]
        cells = [Cell(number(value), value, entry.results) for value in values]
        cells.append(Cell(str(described["n"]), described["n"], entry.results))
        cells += [Cell(number(parts.get(stage)), parts.get(stage), entry.results) for stage in stages]
        rows.append([Cell(entry.label), Cell(entry.scope), *cells])
    return Table(name, "Step time and its stages", columns, rows)


def profiled_time(entries: Sequence[Entry]) -> Optional[Figure]:
    """For traces without records: all there is are steps with the profiler's cost in them."""
    traced = [entry for entry in entries if is_positive(entry.row["average_step_time_us"])]
    if not traced:
        return None
    values = [entry.row["average_step_time_us"] / 1e3 for entry in traced]
    names = [f"{shown(entry.label)}  <b>{number(value)} ms</b>" for entry, value in zip(traced, values)]
    height = LANE * len(traced) + 70
    return Figure(
        "step-time",
        "Step time, profiled",
        "The mean of the profiled steps: the profiler's own cost is in it.",
        "Profiled step time: "
        + "; ".join(f"{entry.label} {number(value)} milliseconds" for entry, value in zip(traced, values)),
        [_bar("profiled step", list(enumerate(values)), 0, "ms")],
        layout(height, **lanes(names, LANE, 14), xaxis=axis("ms"), showlegend=False),
        Table(
            "step-time-profiled",
            "Profiled step time",
            [Column("implementation", False), Column("profiled ms")],
            [[Cell(entry.label), Cell(number(value), value, entry.trace)] for entry, value in zip(traced, values)],
        ),
        height,
    )


def peak_memories(entries: Sequence[Entry]) -> List[Figure]:
    measured = [entry for entry in entries if entry.peak_mb is not None]
    stages = stages_of(entries)
    return [peak_memory(some, stages, key, whose) for key, whose, some in apart(measured)]


def peak_memory(measured: Sequence[Entry], stages: Dict[str, int], key: str, whose: str) -> Figure:
    """Bars of the highest peak, a ring for each batch, and the highest that is allocated while each stage runs."""
    data = [_bar("highest peak of a step", [(at, entry.peak_mb) for at, entry in enumerate(measured)], 5, "MB")]
    data[0]["marker"].update(color=NEUTRAL, pattern={"shape": ""})
    peaks = [(at, peak) for at, entry in enumerate(measured) for peak in _peaks(entry).values()]
    data.append(
        {
            "type": "scatter",
            "mode": "markers",
            "name": "peak of each batch",
            "x": [peak for _, peak in peaks],
            "y": [-at for at, _ in peaks],
            "marker": {"symbol": "circle-open", "size": 9, "color": INK, "line": {"width": 2}},
            "hovertemplate": "%{x:.4g} MB<extra>one batch</extra>",
        }
    )
    seen = []
    for stage, place in stages.items():
        points = [
            (at, entry.curve.stage_mb[stage])
            for at, entry in enumerate(measured)
            if entry.curve and stage in entry.curve.stage_mb
        ]
        if points:
            seen.append(stage)
            data.append(
                {
                    "type": "scatter",
                    "mode": "markers",
                    "name": f"{shown(stage)} (profiled)",
                    "x": [value for _, value in points],
                    "y": [-at - 0.31 for at, _ in points],
                    "marker": {"symbol": symbol(place), "size": 9, "color": color(place), "line": {"width": 1}},
                    "hovertemplate": f"%{{x:.4g}} MB<extra>highest while {shown(stage)} ran, profiled</extra>",
                }
            )
    names = [f"{shown(entry.marked)}  <b>{number(entry.peak_mb)} MB</b>" for entry in measured]
    height = LANE * len(measured) + 64
    return Figure(
        f"peak-memory{key}",
        f"Peak memory{whose}",
        "Bars: the highest peak above the baseline over all batches, from the memory pass; rings: the peak of each "
        "batch. Symbols below a bar: the most that was allocated while each stage ran, from one step of the trace.",
        f"Peak memory{whose}: " + "; ".join(f"{entry.label} {number(entry.peak_mb)} megabytes" for entry in measured),
        data,
        layout(height, **lanes(names, LANE, 14), xaxis=axis("MB (2<sup>20</sup> bytes)"), legend=legend_below()),
        _memory_table(measured, seen, f"peak-memory{key}"),
        height,
    )


def _peaks(entry: Entry) -> Dict[str, float]:
    return entry.peaks_mb.get("step") or entry.peaks_mb.get("loss") or {}


def _memory_table(entries: Sequence[Entry], stages: Iterable[str], name: str) -> Table:
    columns = [Column("implementation", False), Column("highest MB"), Column("lowest MB"), Column("batches")]
    columns += [Column(f"in {stage} MB (profiled)") for stage in stages]
    rows = []
    for entry in entries:
        peaks = list(_peaks(entry).values())
        cells = [Cell(number(value), value, entry.results) for value in (max(peaks), min(peaks))]
        cells.append(Cell(str(len(peaks)), len(peaks), entry.results))
        in_stages = entry.curve.stage_mb if entry.curve else {}
        cells += [Cell(number(in_stages.get(stage)), in_stages.get(stage), entry.trace) for stage in stages]
        rows.append([Cell(entry.label), *cells])
    return Table(name, "Peak memory", columns, rows)
