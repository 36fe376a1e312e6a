"""Draw histograms of T, U and padding."""

from __future__ import annotations

import math
from typing import List, NamedTuple, Sequence

from common.analysis.row import Row
from common.core import statistics
from common.core.text import number
from common.present.style import INK, NEUTRAL, Figure, Trace, axis, bars, layout
from common.present.table import Cell, Table, measured, tabulated
from common.records.schema import Batch, Histogram

ALONE, BOTH = 210, 270  # pixels: the height of one histogram, and of two above each other
MOST_BINS = 20


class Quantity(NamedTuple):
    """Describe a quantity of the shapes.  key: in the records; title, unit: of its plot; whose: what is counted."""

    key: str
    title: str
    unit: str
    whose: str


QUANTITIES = (
    Quantity("T", "T", "frames", "utterances"),
    Quantity("U", "U", "tokens", "utterances"),
    Quantity("padding_percent", "Padding", "% of the cells of the batch", "batches"),
)


def distributions(row: Row) -> List[Figure]:
    """Draw a histogram of all values of each quantity, and below it, with the same bins, one of the measured values."""
    return [_distribution(quantity, row) for quantity in QUANTITIES]


def _distribution(quantity: Quantity, row: Row) -> Figure:
    histogram = getattr(row.distribution, quantity.key)
    count, measured_count = sum(histogram.all), sum(histogram.measured)
    words = [_plain(getattr(histogram, part)) for part in ("lowest", "highest", "median")]
    numbers = f"{count:,} {quantity.whose}, {words[0]} to {words[1]}, median {words[2]}"
    below = f"{measured_count:,} of them measured, {_ends(histogram)}"
    begin, width = histogram.begin, histogram.width
    above = _bars("all", begin, width, histogram.all, quantity.whose, NEUTRAL)
    beside = _bars("measured", begin, width, histogram.measured, quantity.whose, INK)
    data = [above, {**beside, "yaxis": "y2"}]
    few = {"dtick": 1} if max(histogram.measured) < 3 else {}
    frame = layout(
        BOTH,
        bargap=0.06,
        xaxis=axis(quantity.unit, rangemode="normal", anchor="y2"),
        yaxis=axis("all", domain=[0.42, 1], tickformat="~s", nticks=4),
        yaxis2=axis("measured", domain=[0, 0.28], tickformat="d", nticks=3, **few),
    )
    key = f"shape-{quantity.key.partition('_')[0].lower()}"
    summary = f"{quantity.title}, {quantity.unit}: {numbers}; {below}"
    return Figure(
        key, quantity.title, f"Above: {numbers}. Below: {below}.", summary, data, frame, bins(row), small=True
    )


def _bars(name: str, begin: float, width: float, counts: Sequence[int], whose: str, color: str) -> Trace:
    edges = [begin + at * width for at in range(len(counts) + 1)]
    middles = [(low + high) / 2 for low, high in zip(edges, edges[1:])]
    words = [f"{_plain(low)} to {_plain(high)}" for low, high in zip(edges, edges[1:])]
    look, hover = {"color": color, "line": {"width": 0.5}}, f"%{{y}} {whose} with %{{customdata}}"
    return bars(name, middles, counts, look, hover, customdata=words, width=width * 0.94)


def _ends(histogram: Histogram) -> str:
    """Return the ends of the range of bins that have something measured."""
    filled = [at for at, count in enumerate(histogram.measured) if count]
    low, high = (histogram.begin + at * histogram.width for at in (filled[0], filled[-1] + 1))
    return f"within {_plain(low)} to {_plain(high)}"


def _plain(value: float) -> str:
    return f"{round(value, 1):,g}"


def bins(row: Row) -> Table:
    cells = []
    for quantity in QUANTITIES:
        histogram = getattr(row.distribution, quantity.key)
        for at, counts in enumerate(zip(histogram.all, histogram.measured)):
            edges = (histogram.begin + edge * histogram.width for edge in (at, at + 1))
            numbers = [Cell(_plain(value), round(value, 6), row.results) for value in edges]
            numbers += [measured(value, row.results) for value in counts]
            of_bin = dict(zip(("from", "to below", "all", "measured"), numbers))
            cells.append({"of": Cell(f"{quantity.title}, {quantity.unit}"), **of_bin, "counted": Cell(quantity.whose)})
    return tabulated("shapes", "T, U and padding", cells)


def of_batches(row: Row) -> List[Figure]:
    """Draw the lengths of the longest utterances of the measured batches, and the padding of the batches."""
    table = batch_table(row)
    return [
        _histogram("shape-t", "Longest T", "frames", [batch.T_max for batch in row.batches], table),
        _histogram("shape-u", "Longest U", "tokens", [batch.U_max for batch in row.batches], table),
        _histogram("shape-padding", "Padding", QUANTITIES[-1].unit, [padding(batch) for batch in row.batches], table),
    ]


def batch_table(row: Row) -> Table:
    cells = []
    for batch in row.batches:
        values = {"batch": batch.index, "N": batch.N, "longest T": batch.T_max, "longest U": batch.U_max}
        numbers = {title: measured(value, row.results) for title, value in values.items()}
        numbers["padding %"] = Cell(number(padding(batch), 3), padding(batch), row.results)
        cells.append({**numbers, "padded cells": measured(batch.padded_cells, row.results)})
    return tabulated("batches", "The measured batches", cells)


def padding(batch: Batch) -> float:
    """Return the padding of a batch in percent."""
    return 100 * (1 - batch.useful_cells / batch.padded_cells)


def _histogram(key: str, title: str, unit: str, values: Sequence[float], table: Table) -> Figure:
    described = f"median {number(statistics.median(values), 3)}, {number(min(values), 3)} to {number(max(values), 3)}"
    width = _bin_width(max(values) - min(values))
    begin = math.floor(min(values) / width) * width
    bins = [math.floor((value - begin) / width) for value in values]
    counts = [bins.count(number) for number in range(max(bins) + 1)]
    across, up = axis(unit, rangemode="normal"), axis("batches", tickformat="d", nticks=4)
    frame = layout(ALONE, bargap=0.06, xaxis=across, yaxis=up)
    summary = f"{title} of {len(values)} batches, {unit}: {described}"
    data = [_bars("measured", begin, width, counts, "batches", NEUTRAL)]
    return Figure(key, title, described + ".", summary, data, frame, table, small=True)


def _bin_width(spread: float) -> float:
    """Return 1, 2 or 5 times a power of ten, at least 1, such that about MOST_BINS bins cover the spread."""
    power = 10.0 ** math.floor(math.log10(max(spread / MOST_BINS, 1)))
    return next(of * power for of in (1, 2, 5, 10) if of * power * MOST_BINS >= spread)
