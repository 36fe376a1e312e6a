"""What a counter counted, as tables of modules, classes, operators and length buckets, and the counter's rules."""

from __future__ import annotations

from dataclasses import dataclass
from operator import itemgetter
from typing import Dict, List, Sequence

from common.analysis import metrics
from common.analysis.metrics import Metric, metric
from common.core.text import plain
from common.core.units import quantity
from common.present.export import csv_text, json_text
from common.present.table import Cell, Column, Table, Values, tabulated
from common.present.text import aligned, listed, markdown
from common.tools.flops import rows as flops
from common.tools.flops.documents import Counted
from common.tools.flops.rows import Breakdown, amount

#: Characters of a cell in the terminal: a module's path is cut rather late.
LONGEST = 60
PARAMETERS = ("trainable", "frozen")
#: Numbers that have a column only where the total has some.
OPTIONAL = ("frozen", "backward_macs", "backward_flops", "ns", "ns_share")


def parts(breakdown: Breakdown, by: str) -> Table:
    """Return a row for each part, and the total; a column for what is there: the backward, time, frozen parameters."""
    total = breakdown.row(breakdown.total)
    absent = {key for key in OPTIONAL if not total[key]} | (set(PARAMETERS) if by == "operator" else set())
    shown = [number for number in flops.NUMBERS if number.title and number.key not in absent]
    names = {by: "name", **({"class": "kind"} if by == "module" else {})}
    rows = []
    for row in [*breakdown.rows(), total]:
        texts = [Cell(row[key] or ("(model)" if key == "name" else ""), row[key]) for key in names.values()]
        rows.append([*texts, *(number.cell(row) for number in shown)])
    title = f"by {by}" + (", each with all below it" if by == "module" else "")
    columns = [*(Column(name, False) for name in names), *(Column(number.title) for number in shown)]
    return Table(by, title, columns, rows)


# -- utterances ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bucket:
    """Utterances of similar length: `samples` and `macs` of each."""

    name: str
    samples: Sequence[int]
    macs: Sequence[int]
    flops: int
    sample_rate: int

    def row(self) -> Values:
        """Return the bucket as CSV and JSON have it; rates in MACs per second of audio."""
        seconds = [samples / self.sample_rate for samples in self.samples]
        rates = [macs / length for macs, length in zip(self.macs, seconds)]
        return {
            "bucket": self.name,
            "utterances": len(seconds),
            "shortest_s": min(seconds),
            "longest_s": max(seconds),
            "macs": sum(self.macs),
            "flops": self.flops,
            "macs_per_s": sum(self.macs) / sum(seconds),
            "macs_per_s_min": min(rates),
            "macs_per_s_max": max(rates),
        }


def _seconds(key: str, title: str) -> Metric:
    return metric(key, title, "{:.2f}".format, value=itemgetter(key), unit="s")


#: Of a bucket, as NUMBERS of analysis/flops.
BUCKETS = (
    metric("utterances", "utterances", value=itemgetter("utterances")),
    _seconds("shortest_s", "shortest s"),
    _seconds("longest_s", "longest s"),
    amount("macs", "MACs", "MACs"),
    amount("flops", "FLOPs", "FLOPs"),
    amount("macs_per_s", "MACs per s of audio", "MACs"),
    amount("macs_per_s_min", "least", "MACs"),
    amount("macs_per_s_max", "most", "MACs"),
)


def spoken(content: Counted) -> List[Bucket]:
    """Return the utterances of a count by length; [] where its input was no audio."""
    return [Bucket(each.name, each.samples, each.macs, each.flops, each.sample_rate) for each in content.buckets]


def buckets(utterances: Sequence[Bucket]) -> Table:
    values = [bucket.row() for bucket in utterances]
    rows = [{"bucket": Cell(row["bucket"]), **metrics.cells(BUCKETS, row)} for row in values]
    return tabulated("buckets", "utterances by length", rows)


# -- text ------------------------------------------------------------------------------------------------------------


def render(breakdown: Breakdown, by: str, format: str, spoken: Sequence[Bucket] = ()) -> str:
    """Return everything as text.  format: "table", "markdown", "json", or "csv" (of the buckets, without any of the
    parts)."""
    if format == "json":
        document = {
            "convention": breakdown.convention,
            "total": vars(breakdown.total),
            "rows": breakdown.rows(),
            "not_counted": [{"operator": name, "reason": reason} for name, reason in breakdown.not_counted],
            **({"buckets": [bucket.row() for bucket in spoken]} if spoken else {}),
        }
        return json_text([document])
    if format == "csv":
        return csv_text([bucket.row() for bucket in spoken] if spoken else breakdown.rows())
    tables = [*([buckets(spoken)] if spoken else []), parts(breakdown, by)]
    blocks = [_block(table, format) for table in tables]
    below = remarks(breakdown)
    return "\n\n".join([listed(totals(breakdown), format), *blocks, *([listed(below, format)] if below else [])]) + "\n"


def _block(table: Table, format: str) -> str:
    return markdown(table) if format == "markdown" else f"{table.title}\n{aligned(table, LONGEST)}"


def totals(breakdown: Breakdown) -> List[str]:
    """Return the lines above the tables."""
    total = breakdown.total
    parameters = f"parameters: {quantity(total.trainable + total.frozen)} ({total.trainable + total.frozen}"
    return [
        f"total: {quantity(total.macs, 'MACs')} ({total.macs}), {quantity(total.flops, 'FLOPs')} ({total.flops})",
        f"{parameters}; trainable {total.trainable}, frozen {total.frozen})",
    ]


def remarks(breakdown: Breakdown) -> List[str]:
    """Return the lines below the tables."""
    lines = list(breakdown.remarks)
    if breakdown.convention != "exact":
        lines.append(f"convention: {breakdown.convention}, see docs/flops.md")
    if breakdown.total.ns is not None:
        lines.append("ms: in torch's operators alone, one by one: no measure of the model's speed")
    return lines + [f"not counted: {name} ({reason})" for name, reason in breakdown.not_counted]


# -- rules -----------------------------------------------------------------------------------------------------------


def rules(rows: Sequence[Dict[str, str]], format: str) -> str:
    """Return the counter's rules as text.  rows: mappings of operators, macs, flops, reason."""
    if format in ("csv", "json"):
        return (csv_text if format == "csv" else json_text)(rows)
    if format == "markdown":
        titles = {"operators": "operators", "macs": "MACs", "flops": "FLOPs", "reason": "why"}
        cells = [{title: Cell(row[key] or "-") for key, title in titles.items()} for row in rows]
        return markdown(tabulated("rules", "what counts how much", cells)) + "\n"
    return "".join(
        f"{plain(row['operators'])}\n  MACs: {row['macs'] or 'none'}; FLOPs: {row['flops']}\n  {row['reason']}\n"
        for row in rows
    )
