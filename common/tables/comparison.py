"""Rows of a comparison (see comparison.py) -> text: a table for the terminal, Markdown for a pull request, or JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence

from common.results.change_verdicts import percent
from common.results.comparison import Row
from common.results.exports import json_text, plain
from common.results.run_pairs import Sides
from common.results.wording import escaped

FORMATS = ("table", "markdown", "json")
TITLES = ("implementation", "what", "verdict", "ratio", "interval", "baseline", "new", "rounds", "batches")
_TEXT_COLUMNS = 3  # the others are numbers, aligned to the right


class Line(NamedTuple):
    """One line of the table and why its verdict is what it is."""

    cells: List[str]
    reason: str


def render(rows: Sequence[Row], remarks: Sequence[str], format: str = "table") -> str:
    """The comparison as text that ends with a newline.  remarks: lines to stand below it; not in the JSON."""
    if format == "json":
        return json_text(rows)
    if format not in FORMATS:
        raise ValueError(f"not a format: {format}")
    shown = [row for row in rows if _measured(row)] or rows
    if len(shown) < len(rows):
        others = dict.fromkeys(row["name"] for row in rows if not _measured(row))
        remarks = [*remarks, f"measured on neither side: {', '.join(others)}"]
    lines = [line for row in shown for line in _lines(row)]
    sentences = [sentence for row in shown for sentence in _sentences(row["name"], _lines(row))]
    head = [plain(text) for text in _head(rows)]
    below = [plain(text) for text in [*sentences, *_notes(shown), *remarks]]
    if format == "markdown":
        table = [TITLES, ["---"] * _TEXT_COLUMNS + ["---:"] * (len(TITLES) - _TEXT_COLUMNS)]
        table += [[escaped(plain(cell)) for cell in line.cells] for line in lines]
        blocks = [
            "\n\n".join(escaped(text) for text in head),
            "\n".join(f"| {' | '.join(cells)} |" for cells in table),
            "\n".join(f"- {escaped(text)}" for text in below),
        ]
    else:
        blocks = ["\n".join(head), _aligned([[plain(cell) for cell in line.cells] for line in lines]), "\n".join(below)]
    return "\n\n".join(blocks) + "\n"


def _measured(row: Row) -> bool:
    return row["baseline"]["measured"] or row["new"]["measured"]


def on_one_side(sides: Sides) -> List[str]:
    """Remarks on the runs that were compared with nothing."""
    return [
        f"{', '.join(dict.fromkeys(map(sides.label, runs)))}: {side} only"
        for side, runs in (("in the baseline", sides.gone), ("on the new side", sides.added))
        if runs
    ]


def _head(rows: Sequence[Row]) -> List[str]:
    """Where both sides come from, and how the intervals were made."""
    lines = []
    for side in ("baseline", "new"):
        runs = [row[side] for row in rows]
        files = list(dict.fromkeys(run["file"] for run in runs))
        folders = dict.fromkeys(str(Path(file).parent.parent) for file in files)
        where = files[0] if len(files) == 1 else f"{', '.join(folders)} ({len(files)} runs)"
        lines.append(f"{side}: {where}, started {min(run['started'] or '' for run in runs)}")
    paired = {time["paired"] for row in rows for time in row["time"].values() if time["ratio"] is not None}
    ways = {
        True: "rounds paired: both sides were measured beside each other",
        False: "two independent groups of rounds (Welch): the sides were measured at different times",
    }
    how = "; ".join(ways[way] for way in sorted(paired)) or "no times to compare"
    lines.append(
        f"time: new / baseline, geometric mean over batches and rounds; {how}. "
        f"Intervals over rounds: {percent(rows[0]['confidence'])} each, which makes 95% for all of them together. "
        f"Tolerance: {percent(rows[0]['tolerance'])}."
    )
    return lines


def _lines(row: Row) -> List[Line]:
    lines = []
    for scope, time in row["time"].items():
        interval = "-" if time["low"] is None else f"{time['low']:.3f}-{time['high']:.3f}"
        rounds = time["baseline_rounds"], time["new_rounds"]
        shown = str(rounds[0]) if time["paired"] else f"{rounds[0]} + {rounds[1]}"
        cells = [interval, *_sides(time, "ms"), shown, str(time["batches"])]
        lines.append(_line(row, f"{scope} time", time, cells))
    for scope, memory in row["memory"].items():
        lines.append(
            _line(row, f"{scope} memory", memory, ["-", *_sides(memory, "mb", "MB"), "-", str(memory["batches"])])
        )
    errors = [
        ", ".join(_error(row["errors"][f"{side}_{key}"]) for key in ("loss_error", "grad_error"))
        for side in ("baseline", "new")
    ]
    return [*lines, _line(row, "errors", {**row["errors"], "ratio": None}, ["-", *errors, "-", "-"])]


def _error(value: Optional[float]) -> str:
    return "-" if value is None else f"{value:.1e}"


def _line(row: Row, what: str, change: Dict[str, Any], cells: List[str]) -> Line:
    ratio = "-" if change["ratio"] is None else f"{change['ratio']:.3f}"
    return Line([row["name"], what, change["verdict"], ratio, *cells], change["reason"])


def _sentences(name: str, lines: Sequence[Line]) -> Iterator[str]:
    """One for each line of the table, but those that need no explanation are one together."""
    plainly_same = []
    for line in lines:
        _, what, verdict = line.cells[:_TEXT_COLUMNS]
        if verdict == "same" and not what.endswith("time"):
            plainly_same.append(what)
        else:
            yield f"{name}, {what}: {verdict}: {line.reason}"
    if plainly_same:
        yield f"{name}: {', '.join(plainly_same)}: same"


def _sides(change: Dict[str, Any], unit: str, shown: Optional[str] = None) -> List[str]:
    values = [change[f"{side}_{unit}"] for side in ("baseline", "new")]
    return ["-" if value is None else f"{value:.4g} {shown or unit}" for value in values]


def _notes(rows: Sequence[Row]) -> List[str]:
    """Each note once, with the rows it is about."""
    about: Dict[str, List[str]] = {}
    for row in rows:
        for note in _notes_of(row):
            about.setdefault(note, []).append(row["name"])
    return [f"{', '.join(names)}: {note}" for note, names in about.items()]


#: What a side that is no exact loss is, for a comparison of two implementations.
OTHER_KINDS = {
    "topology": "computes the loss on another lattice",
    "pruned": "is approximate by design",
    "additive": "has logits without a joiner",
}


def _notes_of(row: Row) -> Iterator[str]:
    """What changed in the code and around it; failures; approximations."""
    sides = {side: row[side] for side in ("baseline", "new")}
    one_loss = sides["baseline"]["name"] == sides["new"]["name"]
    if row["changed"]:
        yield f"changed: {', '.join(row['changed'])}"
    elif one_loss:
        yield "nothing that is recorded of the code changed: a difference would be of the machine, or of chance"
    for word, side in sides.items():
        if side["status"] != "ok":
            yield f"the {word} run is {side['status']}: {side['reason']}"
        if side["kind"] in OTHER_KINDS and not one_loss:
            yield f"{side['name']} {OTHER_KINDS[side['kind']]}"


def _aligned(body: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(TITLES, *body)]
    table = [TITLES, ["-" * width for width in widths], *body]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if place < _TEXT_COLUMNS else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(cells, widths))
        ).rstrip()
        for cells in table
    )
