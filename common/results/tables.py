"""Rows (see summary.py) -> text: a table for the terminal or Markdown; CSV and JSON are in exports.py."""

from __future__ import annotations

import math
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

from common import workloads
from common.implementations import KINDS
from common.results import ranking, remarks
from common.results.exports import csv_text, json_text, plain
from common.results.summary import Row, same_configuration
from common.results.wording import error, escaped, number, short

FORMATS = ("table", "markdown", "csv", "json")
OWN = ("pruned_recipe", "prune_range", "scopes")  # settings that part no groups

Cells = List[str]


def render(rows: Sequence[Row], format: str = "table") -> str:
    """The rows as text that ends with a newline.  ValueError for a format not in FORMATS."""
    if format not in FORMATS:
        raise ValueError(f"not a format: {format}")
    grouped = [(heading(group), group) for group in groups(rows)]
    if format == "json":
        return json_text(rows)
    if format == "csv":
        return csv_text(rows)
    blocks = [block(title, group, format) for title, group in grouped]
    return "\n\n".join(blocks + remarks.remarks(rows, format)) + "\n"


def _spread(described: Optional[Dict[str, float]]) -> str:
    if described is None:
        return "-"
    return (
        f"{number(described['median'])} [{number(described['p20'], 3)}-{number(described['p80'], 3)}] {described['n']}"
    )


def _peak(row: Row) -> Optional[float]:
    """MB of the memory pass: the device's where there is one, else torch's own, else the process's."""
    peaks = row["memory"].get("step") or row["memory"].get("loss") or {}
    for key in ("device_allocated_mb", "torch_allocated_mb", "process_mb"):
        if peaks.get(key) is not None:
            return peaks[key]
    return None


def over_fastest(row: Row) -> str:
    """ "1.98x slower" than the fastest of its kind, which itself has "1.00"."""
    found = row["against_fastest"]
    if not found or found["ratio"] is None:
        return "-"
    return "1.00" if found["is_fastest"] else f"{found['ratio']:.2f}x {found['verdict']}"


def limit_percent(row: Row, scope: str) -> Optional[float]:
    """Of the packed floor: what no layout can do without."""
    return row["limit_percent"].get(scope, {}).get("packed")


def _limits(row: Row) -> str:
    both = [number(limit_percent(row, scope), 2) for scope in ("step", "loss")]
    return "-" if both == ["-", "-"] else " / ".join(both)


def marked(name: str, kind: Optional[str]) -> str:
    """A name with what sets its kind apart from an exact loss."""
    mark = {"topology": " (topology)", "pruned": " (approx.)", "additive": " (additive)"}.get(kind or "", "")
    return name + mark


def _name(row: Row) -> str:
    return marked(row["name"], row["kind"])


class Column(NamedTuple):
    """title: words may be put under each other; text: the cell of a row; numeric: aligned to the right."""

    title: str
    text: Any
    numeric: bool = True


COLUMNS = (
    Column("implementation", _name, False),
    Column("version", lambda row: (row["implementation_version"] or "-").split("+")[0], False),
    Column("torch", lambda row: (row["torch_version"] or "-").split("+")[0], False),
    Column("status", lambda row: row["status"], False),
    Column("step ms median [p20-p80] n", lambda row: _spread(row["step_ms"])),
    Column("loss ms median [p20-p80] n", lambda row: _spread(row["loss_ms"])),
    Column("over the fastest", over_fastest),
    Column("% of limit step / loss", _limits),
    Column("peak memory MB", lambda row: number(_peak(row))),
    Column("profiled step us", lambda row: number(row["average_step_time_us"])),
    Column("profiled peak MB", lambda row: number(row["peak_memory_mb"])),
    Column("loss error", lambda row: error(row["loss_error"])),
    Column("grad error", lambda row: error(row["grad_error"])),
)


def groups(rows: Sequence[Row]) -> List[List[Row]]:
    """Rows of one configuration together, the fastest step first, each compared with the fastest of its kind (see
    ranking.py), but for those of --find-largest, which were timed on batches of their own.  What only concerns one
    implementation, or which scopes were timed, does not part them."""
    ordered = sorted(rows, key=lambda row: sum(value is None for value in row["configuration"].values()))
    result: List[List[Row]] = []
    for row in ordered:
        fitting = (
            group
            for group in result
            if group[0]["unreadable"] == row["unreadable"]
            and bool(group[0]["configuration"]) == bool(row["configuration"])
            and bool(group[0]["largest"]) == bool(row["largest"])
            and same_configuration(_shared(group[0]), _shared(row))
        )
        group = next(fitting, None)
        if group is None:
            result.append([row])
        else:
            group.append(row)
    for group in result:
        if not group[0]["largest"]:
            ranking.fill(group)
        group.sort(key=rank)
    return sorted(result, key=lambda group: not group[0]["configuration"])


def _shared(row: Row) -> Row:
    return {"configuration": {key: value for key, value in row["configuration"].items() if key not in OWN}}


def kind_rank(row: Row) -> int:
    return KINDS.index(row["kind"]) if row["kind"] in KINDS else 0


def rank(row: Row) -> Tuple[int, float, float, float, str]:
    """By kind first: an approximation that is faster is not the faster loss."""
    medians = [row[key]["median"] if row[key] else math.inf for key in ("step_ms", "loss_ms")]
    profiled = row["average_step_time_us"]
    found = row["against_fastest"]
    ratio = found.get("ratio")
    profiled = math.inf if profiled is None else profiled
    ratio = math.inf if ratio is None else ratio
    return kind_rank(row), found.get("scope") != "step", ratio, *medians, profiled, row["name"]


def known_configuration(group: Sequence[Row]) -> Dict[str, Any]:
    """What is known of the configuration of rows that agree in it."""
    known: Dict[str, Any] = {}
    for row in group:
        known.update({key: value for key, value in row["configuration"].items() if value is not None})
    return known


def heading(group: Sequence[Row]) -> str:
    """One line that says what the rows of a group have in common."""
    known = known_configuration(group)
    if group[0]["unreadable"]:
        return "unreadable"
    if not known:
        return "traces without records of this suite"
    measured = {row["measured_batches"] for row in group} - {None}
    if len(measured) == 1 and not known.get("find_largest"):
        known["num_batches"] = measured.pop()
    batches = "batch" if known.get("num_batches") == 1 else "batches"
    size = "max frames {max_frames}, sorted" if known.get("sort_utterance") else "batch size {batch_size}"
    if known.get("find_largest"):
        size = f"largest {known['find_largest']} that fits"
    parts = [
        " ".join(filter(None, (_known(size, known), _known(f"({{batches}} {{num_batches}} {batches})", known)))),
        *workloads.described(known),
        _known("V {vocab_size}", known),
        _known("joiner {encoder_dim}", known),
        _known("{dtype}", known),
        " ".join(str(known[key]) for key in ("device", "device_name") if key in known),
    ]
    if known.get("device") == "cpu":
        spare = known.get("cores") not in (None, known.get("threads"))
        threads = _known("{threads} threads" + " of {cores} cores" * spare, known)
        parts += [threads, _known("denormals: {denormals}", known)]
    most = max(row["rounds"] for row in group)
    parts.append(f"{most} round{'' if most == 1 else 's'}")
    useful = {row["useful_fraction"] for row in group} - {None}
    if len(useful) == 1:
        parts.append(f"{100 * useful.pop():.0f}% of the padded cells useful")
    return plain(", ".join(filter(None, parts)))


def _known(text: str, known: Dict[str, Any]) -> str:
    """The text with what is known of the rows; nothing where that does not fill it."""
    try:
        return text.format_map(known)
    except KeyError:
        return ""


def block(title: str, group: Sequence[Row], format: str, columns: Sequence[Column] = COLUMNS) -> str:
    """The rows of one table below its title, as text of the "table" or "markdown" format."""
    return (_markdown if format == "markdown" else _table)(title, group, columns)


def _table(title: str, group: Sequence[Row], columns: Sequence[Column]) -> str:
    body = [[short(plain(column.text(row))) for column in columns] for row in group]
    widths = [
        max(max(map(len, column.title.split())), *(len(cells[place]) for cells in body))
        for place, column in enumerate(columns)
    ]
    titles = [_wrapped(column.title, width) for column, width in zip(columns, widths)]
    height = max(map(len, titles))
    head = [[([""] * (height - len(lines)) + lines)[level] for lines in titles] for level in range(height)]
    lines = [title, *(_aligned(cells, widths, columns) for cells in head), "  ".join("-" * width for width in widths)]
    return "\n".join(lines + [_aligned(cells, widths, columns) for cells in body])


def _wrapped(title: str, width: int) -> Cells:
    lines = [""]
    for word in title.split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


def _aligned(cells: Cells, widths: Sequence[int], columns: Sequence[Column]) -> str:
    placed = (
        cell.rjust(width) if column.numeric else cell.ljust(width)
        for cell, width, column in zip(cells, widths, columns)
    )
    return "  ".join(placed).rstrip()


def _markdown(title: str, group: Sequence[Row], columns: Sequence[Column]) -> str:
    lines = [
        f"**{escaped(title)}**",
        "",
        "| " + " | ".join(column.title for column in columns) + " |",
        "| " + " | ".join("---:" if column.numeric else "---" for column in columns) + " |",
    ]
    for row in group:
        lines.append("| " + " | ".join(escaped(plain(column.text(row))) for column in columns) + " |")
    return "\n".join(lines)
