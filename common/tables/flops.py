"""What a counter counted, as tables of modules, classes, operators and length buckets, and the counter's rules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

from common.analysis.flops import Breakdown, Part
from common.core.table import Cell, Column, Table, measured, tabulated
from common.core.text import plain
from common.core.units import quantity
from common.tables.export import csv_text, json_text
from common.tables.text import aligned, listed, markdown

#: Characters of a cell in the terminal: a module's path is cut rather late.
LONGEST = 60


def parts(found: Breakdown, by: str) -> Table:
    """One row for each part, and the total; a column for what is there: the backward, time, frozen parameters."""
    columns = _columns(found, by)
    rows = [[cell(part) for _, cell in columns] for part in [*found.parts, found.total]]
    title = f"by {by}" + (", each with all below it" if by == "module" else "")
    return Table(by, title, [column for column, _ in columns], rows)


def _columns(found: Breakdown, by: str) -> List[Tuple[Column, Callable[[Part], Cell]]]:
    """Each column with the cell of a part."""

    def amount(title: str, key: str, unit: str = "") -> Tuple[Column, Callable[[Part], Cell]]:
        return Column(title), lambda part: _amount(getattr(part, key), unit)

    def share(key: str) -> Tuple[Column, Callable[[Part], Cell]]:
        return Column("share"), lambda part: _percent(found.shares(part)[f"{key}_share"])

    total = found.total
    columns = [(Column(by, False), lambda part: Cell(part.name or "(model)", part.name))]
    if by == "module":
        columns.append((Column("class", False), lambda part: Cell(str(part.kind), part.kind)))
    columns.append(amount("calls", "calls"))
    if by != "operator":
        columns += [amount("trainable", "trainable"), *([amount("frozen", "frozen")] if total.frozen else [])]
    columns += [amount("MACs", "macs", "MACs"), share("macs"), amount("FLOPs", "flops", "FLOPs"), share("flops")]
    columns += [amount("backward MACs", "backward_macs", "MACs")] if total.backward_macs else []
    columns += [amount("backward FLOPs", "backward_flops", "FLOPs")] if total.backward_flops else []
    if total.ns:
        columns += [(Column("ms"), lambda part: measured(None if part.ns is None else part.ns / 1e6)), share("ns")]
    return columns


def _amount(value: int, unit: str = "") -> Cell:
    return Cell(quantity(value, unit), value)


def _percent(share: Optional[float]) -> Cell:
    return Cell("-" if share is None else f"{100 * share:.1f}%", share)


# -- utterances ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bucket:
    """Utterances of similar length: `samples` and `macs` of each."""

    name: str
    samples: Sequence[int]
    macs: Sequence[int]
    flops: int
    sample_rate: int

    def row(self) -> Dict[str, Any]:
        """As CSV and JSON have it; rates in MACs per second of audio."""
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


def buckets(found: Sequence[Bucket]) -> Table:
    rows = []
    for row in (bucket.row() for bucket in found):
        cells = {
            "bucket": Cell(row["bucket"]),
            "utterances": measured(row["utterances"]),
            "shortest s": Cell(f"{row['shortest_s']:.2f}", row["shortest_s"]),
            "longest s": Cell(f"{row['longest_s']:.2f}", row["longest_s"]),
            "MACs": _amount(row["macs"], "MACs"),
            "FLOPs": _amount(row["flops"], "FLOPs"),
        }
        rates = {"MACs per s of audio": "macs_per_s", "least": "macs_per_s_min", "most": "macs_per_s_max"}
        cells.update({title: Cell(quantity(round(row[key]), "MACs"), row[key]) for title, key in rates.items()})
        rows.append(cells)
    return tabulated("buckets", "utterances by length", rows)


# -- text ------------------------------------------------------------------------------------------------------------


def render(found: Breakdown, by: str, format: str, spoken: Sequence[Bucket] = ()) -> str:
    """Everything as "table", "markdown", "csv" (of the buckets, where there are any, else of the parts) or "json"."""
    if format == "json":
        document = {
            "convention": found.convention,
            "total": vars(found.total),
            "rows": found.rows(),
            "not_counted": [{"operator": name, "reason": reason} for name, reason in found.not_counted],
            **({"buckets": [bucket.row() for bucket in spoken]} if spoken else {}),
        }
        return json_text([document])
    if format == "csv":
        return csv_text([bucket.row() for bucket in spoken] if spoken else found.rows())
    tables = [*([buckets(spoken)] if spoken else []), parts(found, by)]
    blocks = [_block(table, format) for table in tables]
    return "\n\n".join([*blocks, listed(totals(found), format)]) + "\n"


def _block(table: Table, format: str) -> str:
    return markdown(table) if format == "markdown" else f"{table.title}\n{aligned(table, LONGEST)}"


def totals(found: Breakdown) -> List[str]:
    """The lines below a table."""
    total = found.total
    parameters = f"parameters: {quantity(total.trainable + total.frozen)} ({total.trainable + total.frozen}"
    lines = [
        f"total: {quantity(total.macs, 'MACs')} ({total.macs}), {quantity(total.flops, 'FLOPs')} ({total.flops})",
        f"{parameters}; trainable {total.trainable}, frozen {total.frozen})",
    ]
    if found.convention != "exact":
        lines.append(f"convention: {found.convention}, see docs/flops.md")
    if total.ns is not None:
        lines.append("ms: in torch's operators alone, one by one: no measure of the model's speed")
    return lines + [f"not counted: {name} ({reason})" for name, reason in found.not_counted]


# -- rules -----------------------------------------------------------------------------------------------------------


def rules(rows: Sequence[Dict[str, str]], format: str) -> str:
    """The counter's rules: mappings of operators, macs, flops, reason."""
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
