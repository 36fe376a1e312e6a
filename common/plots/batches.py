"""Times batch by batch: the ratio to the fastest loss against padding and against size, and the time against size."""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

from common.analysis.groups import apart
from common.analysis.row import Row
from common.core import statistics
from common.core.table import Cell, Table, measured, tabulated
from common.core.text import gathered, number
from common.plots import scales
from common.plots.style import Figure, axis, axis_of, color, dash, layout, marker, points
from common.records.schema import Batch

HEIGHT = 420
FEWEST = 3  # batches
PADDED = "What rises to the left is slow on padding."
Axis = Dict[str, Any]


class Point(NamedTuple):
    """One loss on one batch.  ms: of the step, or of the loss where no step was timed; ratio: to the fastest's, None
    under another torch than the fastest's."""

    row: Row
    batch: Batch
    ms: float
    ratio: Optional[float]

    @property
    def useful(self) -> float:
        """Percent of the padded cells."""
        return 100 * self.batch.useful_cells / self.batch.padded_cells

    @property
    def cells(self) -> int:
        """Of the longest T and U of the batch."""
        return self.batch.T_max * (self.batch.U_max + 1)


def over_batches(rows: Sequence[Row]) -> List[Figure]:
    return [figure for key, whose, some in apart(rows) for figure in _figures(_points(some), key, whose)]


def _points(rows: Sequence[Row]) -> List[Point]:
    """Of the rows that are compared, over the batches that the fastest of their kind has too."""
    fastest = {row.kind: row for row in rows if row.against_fastest.get("is_fastest")}
    found = []
    for row in rows:
        if row.against_fastest.get("ratio") is None:
            continue
        scope = row.against_fastest["scope"]
        best, mine = _medians(fastest[row.kind], scope), _medians(row, scope)
        same_torch = row.torch == fastest[row.kind].torch
        both = [batch for batch in row.batches if str(batch.index) in best.keys() & mine.keys()]
        times = [(mine[str(batch.index)], best[str(batch.index)]) for batch in both]
        found += [Point(row, batch, ms, ms / base if same_torch else None) for batch, (ms, base) in zip(both, times)]
    return found


def _medians(row: Row, scope: str) -> Dict[str, float]:
    """batch -> ms, the median over rounds."""
    rounds = row.round_medians_ms[scope].values()
    found = gathered((batch, ms) for batches in rounds for batch, ms in batches.items())
    return {batch: statistics.median(times) for batch, times in found.items()}


def _figures(found: Sequence[Point], key: str, whose: str) -> List[Figure]:
    if len({point.batch.index for point in found}) < FEWEST:
        return []
    of_row = list(gathered((point.row.label, point) for point in found).values())
    padding, size = axis("useful % of the padded cells", range=[0, 103]), "T x (U+1) of the batch"
    cells = axis_of(size, scales.span([point.cells for point in found]))
    ratios = axis_of("times the fastest", scales.logarithmic([point.ratio for point in found if point.ratio]))
    times = axis_of("ms", scales.span([point.ms for point in found]))
    against, each = (
        "Step time over the fastest, against",
        "Each mark is a batch: the loss over the fastest of its kind, where both ran under one torch.",
    )
    kinds: List[Tuple[str, str, str, str, str, Axis, Axis]] = [
        ("ratio-useful", f"{against} padding", f"{each} {PADDED}", "useful", "ratio", padding, ratios),
        ("ratio-cells", f"{against} size", each, "cells", "ratio", cells, ratios),
        ("time-cells", "Step time against size", "Each mark is a batch.", "cells", "ms", cells, times),
    ]
    figures: List[Figure] = []
    for name, title, caption, x, y, across, up in kinds:
        data = []
        known = [(place, [point for point in some if getattr(point, y)]) for place, some in enumerate(of_row)]
        drawn = [(place, some) for place, some in known if some]
        for place, some in drawn:
            at = sorted((getattr(point, x), getattr(point, y)) for point in some)
            line = {"color": color(place), "width": 1.5, "dash": dash(place)}
            joined = {"mode": "lines+markers", "line": line} if y == "ms" else {}
            data.append(points(some[0].row.marked, at, marker(place, 9), "%{x:.4g}: %{y:.4g}", **joined))
        ends = [[number(end([getattr(point, y) for point in some]), 3) for end in (min, max)] for _, some in drawn]
        said = "; ".join(f"{some[0].row.label} {' to '.join(span)}" for (_, some), span in zip(drawn, ends))
        table = None if figures else _table(found, f"batch-times{key}")
        frame = layout(HEIGHT, 200, xaxis=across, yaxis=up)
        figures.append(Figure(f"{name}{key}", title + whose, caption, f"{title}{whose}: {said}", data, frame, table))
    return figures


def _table(found: Sequence[Point], name: str) -> Table:
    cells = []
    for point in found:
        values = {"batch": point.batch.index, "useful %": point.useful, "T x (U+1)": point.cells, "ms": point.ms}
        numbers = {title: measured(value, point.row.results) for title, value in values.items()}
        ratio = {"times the fastest": measured(point.ratio, point.row.results)}
        cells.append({"implementation": Cell(point.row.label), **numbers, **ratio})
    return tabulated(name, "Times batch by batch", cells)
