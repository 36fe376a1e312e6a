"""Times batch by batch: the step against the size of the batch, a line for each loss with its interval."""

from __future__ import annotations

from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple

from common.analysis import by_size
from common.analysis.groups import apart
from common.analysis.row import Row
from common.core import statistics
from common.core.text import gathered, number
from common.present import scales
from common.present.style import Figure, Plotly, Trace, axis_of, band, color, dash, layout, marker, points
from common.present.table import Cell, Table, measured, tabulated
from common.records.schema import Batch

HEIGHT = 420
FEWEST = 3  # batches
LINES = "Lines: a power of the size through the medians of the batches; bands: its 95% interval over rounds."


class Point(NamedTuple):
    """Hold one loss on one batch.

    Attributes:
        ms: of the step, or of the loss where no step was timed.
        ratio: to the fastest's; None under another torch than the fastest's.
    """

    row: Row
    batch: Batch
    ms: float
    ratio: Optional[float]

    @property
    def useful(self) -> float:
        """Return the useful cells in percent of the padded ones."""
        return 100 * self.batch.useful_cells / self.batch.padded_cells

    @property
    def cells(self) -> int:
        """Return the number of cells of the batch's longest T and U."""
        return self.batch.T_max * (self.batch.U_max + 1)

    @property
    def padded(self) -> int:
        """Return the number of cells of all utterances of the batch, padded."""
        return self.batch.N * self.cells


def over_batches(rows: Sequence[Row]) -> List[Figure]:
    return [figure for key, whose, some in apart(rows) for figure in _figures(_points(some), key, whose)]


def _points(rows: Sequence[Row]) -> List[Point]:
    """Return the points of the rows that are compared, over the batches that the fastest of their kind also has."""
    compared = []
    for row in rows:
        standing = row.against_fastest
        if standing is None or standing.times is None:
            continue
        best, mine = _medians(standing.fastest, standing.scope), _medians(row, standing.scope)
        same_torch = row.torch == standing.fastest.torch
        both = [batch for batch in row.batches if str(batch.index) in best.keys() & mine.keys()]
        times = [(mine[str(batch.index)], best[str(batch.index)]) for batch in both]
        compared += [Point(row, batch, ms, ms / base if same_torch else None) for batch, (ms, base) in zip(both, times)]
    return compared


def _medians(row: Row, scope: str) -> Dict[str, float]:
    """Return batch -> ms, the median over rounds."""
    rounds = row.round_medians_ms[scope].values()
    by_batch = gathered((batch, ms) for batches in rounds for batch, ms in batches.items())
    return {batch: statistics.median(times) for batch, times in by_batch.items()}


def _figures(compared: Sequence[Point], key: str, whose: str) -> List[Figure]:
    if len({point.batch.index for point in compared}) < FEWEST:
        return []
    of_row = list(gathered((point.row.label, point) for point in compared).values())
    size = "cells" if len({point.batch.N for point in compared}) == 1 else "padded"
    title = "T x (U+1) of the batch" if size == "cells" else "N x T x (U+1) of the batch"
    sizes = axis_of(title, scales.span([getattr(point, size) for point in compared]))
    return [_time_over_size(of_row, size, sizes, key, whose)]


def _time_over_size(of_row: Sequence[Sequence[Point]], size: str, across: Plotly, key: str, whose: str) -> Figure:
    """Draw a line with its band for each loss, through marks for its batches.

    Where there are too few rounds for a line, the marks are joined instead.
    """
    data: List[Trace] = []
    ends: List[float] = []
    known, fitted = [], False
    for some in of_row:
        row, at = some[0].row, sorted((getattr(point, size), point.ms) for point in some)
        sizes = {str(point.batch.index): getattr(point, size) for point in some}
        scope = row.against_fastest.scope if row.against_fastest else row.scope
        fit = by_size.line(row.round_medians_ms[scope], sizes)
        line: Plotly = {"color": color(row.look), "width": 2.2, "dash": dash(row.look)}
        marks: Plotly = {} if fit else {"mode": "lines+markers", "line": {**line, "width": 1.5}}
        if fit:
            x, ms, low, high = zip(*fit)
            together: Plotly = {"legendgroup": row.label, "showlegend": False}
            data.append({**band(row.marked, x, low, high, row.look), **together})
            data.append(points(row.marked, zip(x, ms), {}, mode="lines", line=line, **together))
            marks, fitted = {"opacity": 0.75}, True
            ends += ms
        ends += [ms for _, ms in at]
        known.append((row, at))
        hover = "%{x:.4g}: %{y:.4g} ms"
        data.append(points(row.marked, at, marker(row.look, 8), hover, legendgroup=row.label, **marks))
    title = f"Step time against T x U{whose}"
    table = _table([point for some in of_row for point in some], f"batch-times{key}")
    caption = f"Each mark is a batch. {LINES}" if fitted else "Each mark is a batch."
    frame = layout(HEIGHT, 200, xaxis=across, yaxis=axis_of("ms", scales.span(ends)))
    return Figure(f"time-cells{key}", title, caption, _in_words(title, known), data, frame, table)


def _in_words(title: str, known: Sequence[Tuple[Row, Sequence[Tuple[float, float]]]]) -> str:
    """Return a sentence with the least and the most of each row."""
    spans = [(row, [number(end([y for _, y in at]), 3) for end in (min, max)]) for row, at in known]
    return f"{title}: " + "; ".join(f"{row.label} {' to '.join(span)}" for row, span in spans)


def _table(compared: Sequence[Point], name: str) -> Table:
    cells = []
    for point in compared:
        values = {"batch": point.batch.index, "useful %": point.useful, "T x (U+1)": point.cells, "ms": point.ms}
        numbers = {title: measured(value, point.row.results) for title, value in values.items()}
        ratio = {"times the fastest": measured(point.ratio, point.row.results)}
        cells.append({"implementation": Cell(point.row.label), **numbers, **ratio})
    return tabulated(name, "Times batch by batch", cells)
