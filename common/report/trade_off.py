"""Step time against peak memory, and who is beaten in both by nobody."""

from __future__ import annotations

import math
from typing import Any, Dict, List, Optional, Sequence

from common.report import labels, scales
from common.report.bars import INK, times
from common.report.collect import Entry, pareto
from common.report.look import Figure, Trace, axis, color, layout, shown, symbol
from common.report.markup import Cell, Column, Table
from common.results.tables import number


def time_and_memory(entries: Sequence[Entry]) -> Optional[Figure]:
    """Median time against peak memory; the line joins those that no other beats in both."""
    both = [entry for entry in entries if times(entry) and entry.peak_mb is not None]
    if len(both) < 2:
        return None
    points = [(times(entry)["median"], entry.peak_mb) for entry in both]
    front = pareto(points)
    across = scales.span([value for entry in both for value in (times(entry)["p20"], times(entry)["p80"])])
    up = scales.span([y for _, y in points])
    names = [shown(entry.label) for entry in both]
    places = labels.places([(700 * across.share(x), 330 * up.share(y)) for x, y in points], names, 700, 330)
    best = {both[place].label for place in front}
    data: List[Trace] = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": "Pareto front",
            "x": [points[front[0]][0], *(points[place][0] for place in front), across.high],
            "y": [up.high, *(points[place][1] for place in front), points[front[-1]][1]],
            "line": {"shape": "hv", "dash": "dot", "width": 2, "color": INK},
            "hoverinfo": "skip",
        }
    ]
    for place, (entry, (x, y)) in enumerate(zip(both, points)):
        data.append(
            {
                "type": "scatter",
                "mode": "markers+text",
                "name": shown(entry.label),
                "x": [x],
                "y": [y],
                "text": [names[place]],
                "textposition": places[place],
                "cliponaxis": False,
                "showlegend": False,
                "marker": {"symbol": symbol(place), "size": 13, "color": color(place), "line": {"width": 1}},
                "error_x": {
                    "type": "data",
                    "symmetric": False,
                    "array": [times(entry)["p80"] - x],
                    "arrayminus": [x - times(entry)["p20"]],
                    "thickness": 1,
                    "width": 4,
                    "color": INK,
                },
                "hovertemplate": "%{x:.4g} ms, %{y:.4g} MB<extra>%{text}</extra>",
            }
        )
    height = 400
    said = ", ".join(both[place].label for place in front)
    exact = [at for at, entry in enumerate(both) if entry.exact]
    if 0 < len(exact) < len(both):
        of_exact = pareto([points[at] for at in exact])
        said += "; among the exact ones: " + ", ".join(both[exact[at]].label for at in of_exact)
    rows = [
        [
            Cell(entry.label),
            Cell(number(x), x, entry.results),
            Cell(number(y), y, entry.results),
            Cell("yes" if entry.label in best else "no"),
        ]
        for entry, (x, y) in zip(both, points)
    ]
    columns = [Column("implementation", False), Column("median ms"), Column("peak MB"), Column("on the front", False)]
    return Figure(
        "time-memory",
        "Time against memory",
        "Lower left is better; nobody is beyond the dotted line (the Pareto front, by medians). Whiskers: 20th to 80th "
        f"percentile. Beaten in both by nobody: {said}.",
        f"Beaten in both time and memory by nobody: {said}",
        data,
        layout(
            height,
            xaxis=_axis("step, ms", across),
            yaxis=_axis("peak, MB", up),
            legend={"x": 1, "xanchor": "right", "y": 0, "yanchor": "bottom", "bgcolor": "rgba(0,0,0,0)"},
        ),
        Table("time-memory", "Time and memory", columns, rows),
        height,
    )


def _axis(title: str, span: scales.Span) -> Dict[str, Any]:
    if not span.logarithmic:
        return axis(title, range=[span.low, span.high])
    ends = [math.log10(span.low), math.log10(span.high)]
    ticks = {"tickvals": span.ticks, "ticktext": [f"{tick:g}" for tick in span.ticks]}
    return axis(f"{title} (logarithmic)", type="log", range=ends, **ticks)
