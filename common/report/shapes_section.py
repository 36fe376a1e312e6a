"""How long the utterances are and how much of their batches is padding: all of the run's kind, and the measured ones.

The distributions are recorded with the run (see common.data.distribution), not read from the shape file, which need not
be here.  Runs from before that have their measured batches alone: histograms of ten and more, else a sentence.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Sequence

from common.report.bars import INK
from common.report.collect import Entry
from common.report.look import Figure, Trace, axis, color, layout
from common.report.markup import Cell, Column, Table, text
from common.report.plots import numbers_of, plot
from common.results import statistics
from common.results.wording import number

FEWEST = 10  # batches: a histogram of fewer shows less than their table
ALONE, BOTH = 210, 270  # pixels: the height of one histogram, and of two above each other


class Quantity(NamedTuple):
    """key: in the records; title, unit: of its plot; whose: what is counted."""

    key: str
    title: str
    unit: str
    whose: str


QUANTITIES = (
    Quantity("T", "T", "frames", "utterances"),
    Quantity("U", "U", "tokens", "utterances"),
    Quantity("padding_percent", "Padding", "% of the cells of the batch", "batches"),
)


def section(entries: Sequence[Entry], place: int, figures: Dict[str, Figure], base: Path) -> str:
    """A part of the section of a configuration; its plots are added to `figures`.  "" where no batches are known."""
    measured = next((entry for entry in entries if entry.batches), None)
    known = next((entry for entry in entries if entry.distribution), None)
    if measured is None:
        return ""
    if known is not None:
        title = "Shapes of all utterances, and of the measured ones"
        drawn = distributions(known)
    else:
        title = "Shapes of the measured batches"
        drawn = of_batches(measured) if len(measured.batches) >= FEWEST else []
    small = "".join(plot(figure, place, figures, base) for figure in drawn)
    parts = [f"<h4>{title}</h4>\n", f'<div class="smalls">{small}</div>\n' if small else _sentence(measured)]
    if known is not None:
        parts.append(numbers_of(_bins(known), base, "The numbers of these plots"))
    parts.append(numbers_of(_batch_table(measured), base, "The measured batches"))
    return "".join(parts)


def distributions(entry: Entry) -> List[Figure]:
    """Of each quantity a histogram of all there are, and below it, on the same bins, of what was measured."""
    return [_distribution(quantity, entry) for quantity in QUANTITIES]


def _distribution(quantity: Quantity, entry: Entry) -> Figure:
    found = entry.distribution[quantity.key]
    count, measured = sum(found["all"]), sum(found["measured"])
    words = [_plain(found[part]) for part in ("lowest", "highest", "median")]
    said = f"{count:,} {quantity.whose}, {words[0]} to {words[1]}, median {words[2]}"
    below = f"{measured:,} of them measured, {_ends(found)}"
    data = [_bars(found, "all", quantity, 5, "y"), _bars(found, "measured", quantity, 1, "y2")]
    frame = layout(BOTH, showlegend=False, bargap=0.06, xaxis=axis(quantity.unit, rangemode="normal", anchor="y2"))
    frame["yaxis"] = axis("all", domain=[0.42, 1], tickformat="~s", nticks=4)
    frame["yaxis2"] = axis("measured", domain=[0, 0.28], tickformat="d", nticks=3, rangemode="tozero")
    if max(found["measured"]) < 3:
        frame["yaxis2"]["dtick"] = 1
    key = f"shape-{quantity.key.partition('_')[0].lower()}"
    summary = f"{quantity.title}, {quantity.unit}: {said}; {below}"
    return Figure(
        key, quantity.title, f"Above: {said}. Below: {below}.", summary, data, frame, _bins(entry), BOTH, True
    )


def _bars(found: Dict[str, Any], part: str, quantity: Quantity, place: int, up: str) -> Trace:
    begin, width = found["begin"], found["width"]
    ends = [(begin + at * width, begin + (at + 1) * width) for at in range(len(found[part]))]
    return {
        "type": "bar",
        "x": [(low + high) / 2 for low, high in ends],
        "y": found[part],
        "yaxis": up,
        "width": width * 0.94,
        "customdata": [f"{_plain(low)} to {_plain(high)}" for low, high in ends],
        "marker": {"color": color(place), "line": {"width": 0.5, "color": INK}},
        "hovertemplate": f"%{{y}} {quantity.whose} with %{{customdata}}<extra>{part}</extra>",
    }


def _ends(found: Dict[str, Any]) -> str:
    """From where the first bin with something measured begins to where the last one ends."""
    places = [at for at, count in enumerate(found["measured"]) if count]
    low, high = (found["begin"] + at * found["width"] for at in (places[0], places[-1] + 1))
    return f"within {_plain(low)} to {_plain(high)}"


def _plain(value: float) -> str:
    return f"{round(value, 1):,g}"


def _bins(entry: Entry) -> Table:
    rows = []
    for quantity in QUANTITIES:
        found = entry.distribution[quantity.key]
        for at, counts in enumerate(zip(found["all"], found["measured"])):
            low, high = (found["begin"] + edge * found["width"] for edge in (at, at + 1))
            cells = [Cell(_plain(value), round(value, 6), entry.results) for value in (low, high)]
            cells += [Cell(str(value), value, entry.results) for value in counts]
            rows.append([Cell(f"{quantity.title}, {quantity.unit}"), *cells, Cell(quantity.whose)])
    columns = [Column("of", False), *(Column(title) for title in ("from", "to below", "all", "measured"))]
    return Table("shapes", "T, U and padding", [*columns, Column("counted", False)], rows)


def of_batches(entry: Entry) -> List[Figure]:
    """How long the longest utterances of the measured batches are, and how much of them is padding."""
    table = _batch_table(entry)
    columns = {column.title: [row[at].value for row in table.rows] for at, column in enumerate(table.columns)}
    return [
        _histogram("shape-t", "Longest T", "frames", columns["longest T"], table),
        _histogram("shape-u", "Longest U", "tokens", columns["longest U"], table),
        _histogram("shape-padding", "Padding", "% of the cells of the batch", columns["padding %"], table),
    ]


def _sentence(entry: Entry) -> str:
    """Few batches in words."""
    batches = entry.batches
    size = " and ".join(dict.fromkeys(str(batch["N"]) for batch in batches))
    longest = [f"{batch['T_max']} x {_tokens(batch)} ({_padding(batch):.0f}% padding)" for batch in batches]
    many = f"{len(batches)} batch{'es' * (len(batches) != 1)} of {size} utterances"
    return (
        f"<p>{text(many)}; longest T x U of each: {text(', '.join(longest))}. How all utterances of the shape file are "
        "distributed was not recorded with this run.</p>\n"
    )


def _batch_table(entry: Entry) -> Table:
    columns = [Column(title) for title in ("batch", "N", "longest T", "longest U", "padding %", "padded cells")]
    rows = []
    for batch in entry.batches:
        values = (batch.get("index"), batch["N"], batch["T_max"], _tokens(batch), _padding(batch))
        shown = [*values, batch["padded_cells"]]
        rows.append([Cell(_words(value), value, entry.results) for value in shown])
    return Table("batches", "The measured batches", columns, rows)


def _words(value: Any) -> str:
    return number(value, 3) if isinstance(value, float) else str(value)


def _padding(batch: Dict[str, Any]) -> float:
    """Percent."""
    return 100 * (1 - batch["useful_cells"] / batch["padded_cells"])


def _tokens(batch: Dict[str, Any]) -> int:
    value: Optional[Any] = batch.get("U_max")
    return value if type(value) is int else 0


def _histogram(key: str, title: str, unit: str, values: Sequence[float], table: Table) -> Figure:
    described = f"median {number(statistics.median(values), 3)}, {number(min(values), 3)} to {number(max(values), 3)}"
    trace = {
        "type": "histogram",
        "x": list(values),
        "nbinsx": 20,
        "marker": {"color": color(5), "line": {"width": 1, "color": INK}},
        "hovertemplate": "%{y} batches with %{x}<extra></extra>",
    }
    frame = layout(ALONE, showlegend=False, bargap=0.06, xaxis=axis(unit, rangemode="normal"))
    frame["yaxis"] = axis("batches", tickformat="d")
    summary = f"{title} of {len(values)} batches, {unit}: {described}"
    return Figure(key, title, described + ".", summary, [trace], frame, table, ALONE, small=True)
