"""Draw the largest batch against memory: a line for each loss, through the sizes that were tried."""

from __future__ import annotations

from typing import List, Sequence

from common.analysis.row import Row, search_of
from common.analysis.search import peaks_mb
from common.core.text import gathered, number
from common.core.units import MB
from common.present import scales
from common.present.style import INK, Figure, axis_of, color, dash, layout, marker, points
from common.present.table import Cell, measured, tabulated

HEIGHT = 420


def figures(rows: Sequence[Row]) -> List[Figure]:
    """Return a plot of sizes in utterances and one of sizes in frames, without losses that no size fits."""
    by_unit = gathered((search_of(row).of, row) for row in rows if peaks_mb(row))
    return [_figure(some, of) for of, some in by_unit.items()]


def _figure(rows: Sequence[Row], of: str) -> Figure:
    tried = [(row, peaks_mb(row)) for row in rows]
    up = scales.span([size for _, peaks in tried for size in peaks])
    limits = sorted({limit / MB for row in rows if (limit := search_of(row).limit_bytes)})
    across = scales.span([*(peak for _, peaks in tried for peak in peaks.values()), *limits])
    data = []
    for limit_mb in limits:
        line = {"color": INK, "width": 1.5, "dash": "dash"}
        data.append(
            points(
                f"limit, {number(limit_mb)} MB",
                [(limit_mb, up.low), (limit_mb, up.high)],
                {},
                mode="lines",
                line=line,
            )
        )
    for row, peaks in tried:
        line = {"color": color(row.look), "width": 2.2, "dash": dash(row.look)}
        at = [(peak, size) for size, peak in sorted(peaks.items())]
        hover = f"%{{y}} {of} in %{{x:.4g}} MB"
        data.append(points(row.marked, at, marker(row.look, 10), hover, mode="lines+markers", line=line))
    summary = "; ".join(f"{row.label} {max(peaks)} in {number(peaks[max(peaks)])} megabytes" for row, peaks in tried)
    title = "Largest batch against memory"
    cells = [
        {"implementation": Cell(row.label), of: measured(size, row.results), "peak MB": measured(peak, row.results)}
        for row, peaks in tried
        for size, peak in sorted(peaks.items())
    ]
    return Figure(
        f"largest-memory-{of}",
        title,
        "Each mark is a size that fitted, and the most that a step with its heaviest batches took; lines end at the "
        "largest.",
        f"{title}, {of}: {summary}",
        data,
        layout(HEIGHT, 200, xaxis=axis_of("peak, MB", across), yaxis=axis_of(of, up)),
        tabulated(f"largest-memory-{of}", title, cells),
    )
