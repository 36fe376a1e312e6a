"""Show a comparison (see analysis/comparison.py) as text: a table for the terminal, Markdown for a pull request, or
JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from common.analysis import metrics
from common.analysis.comparison import Change, Sides
from common.analysis.metrics import METRICS, Metric
from common.analysis.standing import BESIDE_LOAD, percent
from common.core.implementations import LATTICES
from common.core.text import error, escaped, gathered, number
from common.present.export import json_text
from common.present.table import Cell, Column, Table
from common.present.text import aligned, listed, markdown, spaced
from common.tables import answer

FORMATS = ("table", "markdown", "json")
COLUMNS = (
    *(Column(title, False) for title in ("implementation", "what", "verdict")),
    *(Column(title) for title in ("ratio", "interval", "baseline", "new", "rounds", "batches")),
)


class Line(NamedTuple):
    """Hold one line of the table.  what, verdict, reason: of the sentence below the table."""

    what: str
    verdict: str
    reason: str
    cells: Sequence[str]


def render(rows: Sequence[Change], remarks: Sequence[str], format: str = "table") -> str:
    """Return the comparison as text that ends with a newline.  remarks: lines below it, which JSON leaves out."""
    if format == "json":
        return json_text([row.as_json() for row in rows])
    if format not in FORMATS:
        raise ValueError(f"not a format: {format}")
    shown = [row for row in rows if is_measured(row)] or rows
    if len(shown) < len(rows):
        others = dict.fromkeys(row.name for row in rows if not is_measured(row))
        remarks = [*remarks, f"measured on neither side: {', '.join(others)}"]
    below = [sentence for row in shown for sentence in explained(row.name, lines_of(row))]
    below += [*_power(shown), *all_notes(shown), *remarks]
    if format == "markdown":
        blocks = [*map(escaped, origins(rows)), markdown(table(shown))]
    else:
        blocks = [listed(origins(rows), format), aligned(table(shown))]
    return "\n\n".join([*blocks, listed(below, format)]) + "\n"


def screen(
    rows: Sequence[Change],
    remarks: Sequence[str],
    width: int = answer.WIDTH,
    colors: Mapping[str, str] = answer.NO_COLORS,
) -> str:
    """Return the outcome as lines of at most `width` characters, the last with a newline: all times, whatever else
    changed, and the verdict."""
    shown = [row for row in rows if is_measured(row)] or rows
    lines = [(row.name, line) for row in shown for line in lines_of(row)]
    lines = [(name, line) for name, line in lines if line.what.endswith(" time") or line.verdict != "same"]
    cells = [[Cell(name), Cell(of.what), Cell(of.verdict, mark=MARKS.get(of.verdict, ""))] for name, of in lines]
    body = [[*first, *map(Cell, line.cells[:4])] for first, (_, line) in zip(cells, lines)]
    failed = [note for row in shown for note in _notes_of(row) if " run is " in note]
    below = [*(f"{row.name}: {note}" for row in shown for note in _notes_of(row) if note in failed), *remarks]
    table = Table("comparison", "Comparison", COLUMNS[:7], body)
    blocks = [
        [line for text in origins(rows)[:2] for line in answer.wrapped(text, width, "  ")],
        aligned(table, answer.LONGEST_NAME, colors).splitlines(),
        [line for text in below for line in answer.wrapped(text, width, "  ", answer.MOST_LINES)],
        answer.verdict_lines(answers_of(shown, lines), width, colors),
    ]
    return spaced(blocks)


#: The change that a comparison should be able to show.
NOISY = 0.1
#: Of verdicts, as of cells.
MARKS = {
    **dict.fromkeys(("faster", "less", "better"), "good"),
    **dict.fromkeys(("slower", "more", "worse", "wrong"), "bad"),
}


def answers_of(rows: Sequence[Change], lines: Sequence[Tuple[str, Line]]) -> Dict[str, str]:
    """Return question -> answer: how many times changed, the rows of each verdict, and why some rows have none.

    lines: (name of the row, line) to count.
    """
    answers = {"times": next(_power(rows), "none to compare").partition("times: ")[2] or "none to compare"}
    names_by_verdict = gathered((line.verdict, f"{name} {line.what.replace(' time', '')}") for name, line in lines)
    for verdict in MARKS:
        if verdict in names_by_verdict:
            answers[verdict] = ", ".join(names_by_verdict[verdict])
    reasons = gathered((line.reason, name) for name, line in lines if line.verdict == BESIDE_LOAD)
    if reasons:
        answers[BESIDE_LOAD] = "; ".join(f"{', '.join(dict.fromkeys(names))}: {why}" for why, names in reasons.items())
    return answers


def table(rows: Sequence[Change]) -> Table:
    """Return the table of all lines."""
    lines = [[row.name, line.what, line.verdict, *line.cells] for row in rows for line in lines_of(row)]
    cells = [[Cell(words, None if words == "-" else words) for words in line] for line in lines]
    return Table("comparison", "Comparison", COLUMNS, cells)


def is_measured(row: Change) -> bool:
    """Return whether a side of the row has something to compare."""
    return row.baseline.measured or row.new.measured


def on_one_side(sides: Sides) -> List[str]:
    """Return remarks on the runs that the other side lacks."""
    return [
        f"{', '.join(dict.fromkeys(map(sides.label, runs)))}: {side} only"
        for side, runs in (("in the baseline", sides.gone), ("on the new side", sides.added))
        if runs
    ]


def origins(rows: Sequence[Change]) -> List[str]:
    """Say where both sides come from, and how the intervals were made."""
    lines = []
    for side in ("baseline", "new"):
        runs = [getattr(row, side) for row in rows]
        files = list(dict.fromkeys(run.file for run in runs))
        folders = dict.fromkeys(str(Path(file).parent.parent) for file in files)
        where = files[0] if len(files) == 1 else f"{', '.join(folders)} ({len(files)} runs)"
        lines.append(f"{side}: {where}, started {min(run.started or '' for run in runs)}")
    paired = {time.standing.paired for row in rows for time in row.time.values() if time.ratio is not None}
    ways = {
        True: "rounds paired: both sides were measured beside each other",
        False: "two independent groups of rounds (Welch): the sides were measured at different times",
    }
    how = "; ".join(ways[way] for way in sorted(paired)) or "no times to compare"
    lines.append(
        f"time: new / baseline, geometric mean over batches and rounds; {how}. "
        f"Intervals over rounds: {percent(rows[0].margins.confidence)} each, which makes 95% for all of them together. "
        f"Tolerance: {percent(rows[0].margins.tolerance)}; same: within {percent(rows[0].margins.same)}."
    )
    return lines


def lines_of(row: Change) -> List[Line]:
    """Return the lines of a row, without what neither side measured, such as scope `loss` of a loss that has none."""
    lines = []
    for scope, time in row.time.items():
        standing, rounds = time.standing, time.standing.rounds
        if not any(rounds):
            continue
        interval = "-" if time.low is None else f"{time.low:.3f}-{time.high:.3f}"
        shown = str(rounds[0]) if standing.paired else f"{rounds[0]} + {rounds[1]}"
        batches = standing.ratio.batches if standing.ratio else 0
        sides = _sides(time, METRICS[f"{scope}_median"])
        lines.append(_line(f"{scope} time", time, time.ratio, [interval, *sides, shown, str(batches)]))
    for scope, memory in row.memory.items():
        if memory.baseline_mb is None and memory.new_mb is None:
            continue
        cells = ["-", *_sides(memory, METRICS["peak_mb"]), "-", str(memory.batches)]
        lines.append(_line(f"{scope} memory", memory, memory.ratio, cells))
    keys = [key for key in metrics.COLUMNS["comparison"] if key.endswith("_error")]
    errors = [", ".join(error(side[key]) for key in keys) for side in (row.errors.baseline, row.errors.new)]
    return [*lines, _line("errors", row.errors, None, ["-", *errors, "-", "-"])]


def _line(what: str, change: Any, ratio: Optional[float], cells: Sequence[str]) -> Line:
    return Line(what, change.verdict, change.reason, ["-" if ratio is None else f"{ratio:.3f}", *cells])


def explained(name: str, lines: Sequence[Line]) -> Iterator[str]:
    """Return a sentence for each line of the table; lines that need no explanation share one."""
    plainly_same = []
    for line in lines:
        if line.verdict == "same" and not line.what.endswith("time"):
            plainly_same.append(line.what)
        else:
            yield f"{name}, {line.what}: {line.verdict}: {line.reason}"
    if plainly_same:
        yield f"{name}: {', '.join(plainly_same)}: same"


def _power(rows: Sequence[Change]) -> Iterator[str]:
    """Yield how many times changed, and which slowdown was detectable; the latter first where nothing is sure and a
    change of NOISY would have gone undetected."""
    times = [time for row in rows for time in row.time.values() if time.ratio is not None]
    times = [time for time in times if time.verdict != BESIDE_LOAD]
    if not times:
        return
    verdicts = [time.verdict for time in times]
    words = ("faster", "slower", *(["same"] if "same" in verdicts else []), "unclear")
    counts = ", ".join(f"{verdicts.count(word)} {word}" for word in words)
    changes = sorted(known for time in times if (known := time.standing.detectable) is not None)
    if not changes:
        yield f"times: {counts}; no change is detectable with so few rounds"
        return
    least, most = percent(changes[0], 2), percent(changes[-1], 2)
    detectable = f"detectable at 80% power: {least}"
    if len(changes) > 1:
        detectable += f" (best row) to {most} (worst)"
    if len(changes) < len(times):
        detectable += f", in {len(changes)} of {len(times)} rows"
    if verdicts.count("unclear") == len(verdicts) and changes[-1] > NOISY:
        yield f"times: too noisy; {detectable}; {counts}"
    else:
        yield f"times: {counts}; {detectable}"


def _sides(change: Any, metric: Metric) -> List[str]:
    values = [getattr(change, f"{side}_{metric.unit.lower()}") for side in ("baseline", "new")]
    return ["-" if value is None else f"{number(value)} {metric.unit}" for value in values]


def all_notes(rows: Sequence[Change]) -> List[str]:
    """Return each note once, with the rows that have it."""
    names_by_note = gathered((note, row.name) for row in rows for note in _notes_of(row))
    return [f"{', '.join(names)}: {note}" for note, names in names_by_note.items()]


#: What a side that is no exact loss is, for a comparison of two implementations.
OTHER_KINDS = {
    **dict.fromkeys(LATTICES, "computes the loss on another lattice"),
    "pruned": "is approximate by design",
}


def _notes_of(row: Change) -> Iterator[str]:
    """Yield what changed in the code and around it; failures; approximations."""
    sides = {side: getattr(row, side) for side in ("baseline", "new")}
    one_loss = sides["baseline"].name == sides["new"].name
    if row.changed:
        yield f"changed: {', '.join(row.changed)}"
    elif one_loss:
        yield "nothing that is recorded of the code changed: a difference would be of the machine, or of chance"
    for word, side in sides.items():
        if side.status != "ok":
            yield f"the {word} run is {side.status}: {side.reason}"
        if side.kind in OTHER_KINDS and not one_loss:
            yield f"{side.name} {OTHER_KINDS[side.kind]}"
