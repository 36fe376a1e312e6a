"""Show a comparison (see analysis/comparison.py): one screen, Markdown for a pull request, JSON, or a page."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, Iterator, List, Mapping, NamedTuple, Optional, Sequence

from rnnt_bench.analysis import comparison, control, doubts, machines, metrics, ratios, standing
from rnnt_bench.analysis.row import SCOPES
from rnnt_bench.analysis.standing import BESIDE_LOAD, percent
from rnnt_bench.core import errors, statistics
from rnnt_bench.core.text import error, escaped, gathered, number
from rnnt_bench.present import parts, style
from rnnt_bench.present.text import aligned, json_text, listed, markdown, spaced
from rnnt_bench.show import page, plots, tables

FORMATS = ("table", "markdown", "json")
#: Of two separate runs alone.
OVER_CONTROL = parts.Column("over control")
COLUMNS = (
    *(parts.Column(title, False) for title in ("implementation", "what", "verdict")),
    *(parts.Column("ratio"), OVER_CONTROL),
    *(parts.Column(title) for title in ("interval", "baseline", "new", "rounds", "batches")),
)
#: Marks of verdicts, like those of cells.
MARKS = {
    **dict.fromkeys(("faster", "less", "better"), "good"),
    **dict.fromkeys(("slower", "more", "worse", "wrong"), "bad"),
}


class Line(NamedTuple):
    """Hold one line of the table.  what, verdict, reason: of the sentence below the table."""

    name: str
    what: str
    verdict: str
    reason: str
    cells: Sequence[str]


def render(rows: Sequence[comparison.Change], remarks: Sequence[str], format: str = "table") -> str:
    """Return every number with its reason as text. remarks: lines below it, which JSON leaves out."""
    if format == "json":
        return json_text([row.as_json() for row in rows])
    shown = _measured(rows)
    below = listed(_below(rows, remarks), format)
    if format == "markdown":
        blocks = [*map(escaped, origins(shown)), markdown(table(lines_of(shown)))]
    else:
        blocks = [listed(origins(shown), format), aligned(table(lines_of(shown)))]
    return "\n\n".join([*blocks, below]) + "\n"


def screen(
    rows: Sequence[comparison.Change],
    remarks: Sequence[str],
    width: int = tables.WIDTH,
    colors: Mapping[str, str] = tables.NO_COLORS,
) -> str:
    """Return the outcome in lines of at most `width`: all times, whatever else changed, and the verdict."""
    shown = _measured(rows)
    lines = [line for line in lines_of(shown) if line.what.endswith(" time") or line.verdict != "same"]
    ended = [(row, doubts.about_sides(row.pair.baseline, row.pair.new)) for row in shown]
    below = [
        *_controls(shown),
        *(f"{row.pair.name}: {each.words}" for row, sides in ended for each in sides if each.kind == "status"),
    ]
    names = gathered((line.verdict, f"{line.name} {line.what.replace(' time', '')}") for line in lines)
    answers = {"times": _counts(shown), **{verdict: ", ".join(names[verdict]) for verdict in MARKS if verdict in names}}
    reasons = gathered((line.reason, line.name) for line in lines if line.verdict == BESIDE_LOAD)
    beside = "; ".join(f"{', '.join(dict.fromkeys(of))}: {why}" for why, of in reasons.items())
    answers.update({BESIDE_LOAD: beside} if beside else {})
    alone = [
        f"{row.pair.name} {scope}" for row in shown for scope, time in row.time.items() if "uncontrolled" in time.kinds
    ]
    if alone:
        answers["unclear"] = f"separate runs, which {ratios.FEWEST_CONTROLS} rows that did not change would make "
        answers["unclear"] += f"comparable: {', '.join(alone)}; measure both in one run"
    return spaced(
        [
            [line for text in origins(shown)[:2] for line in tables.wrapped(text, width, "  ")],
            aligned(table(lines, COLUMNS[:8]), tables.LONGEST_NAME, colors).splitlines(),
            [line for text in [*below, *remarks] for line in tables.wrapped(text, width, "  ", tables.MOST_LINES)],
            tables.verdict_lines(answers, width, colors),
        ]
    )


def table(lines: Sequence[Line], columns: Sequence[parts.Column] = COLUMNS) -> parts.Table:
    cells = [
        [
            *map(parts.Cell, (line.name, line.what)),
            parts.Cell(line.verdict, mark=MARKS.get(line.verdict, "")),
            *(parts.Cell(words, None if words == "-" else words) for words in line.cells),
        ]
        for line in lines
    ]
    compared = any(row[columns.index(OVER_CONTROL)].shown != "-" for row in cells)
    kept = [at for at, column in enumerate(columns) if compared or column != OVER_CONTROL]
    shown = [[row[at] for at in kept] for row in cells]
    return parts.Table("comparison", "Comparison", [columns[at] for at in kept], shown)


def _measured(rows: Sequence[comparison.Change]) -> Sequence[comparison.Change]:
    """Return the rows of which a side has something to compare; all where none has."""
    runs = ((row, run) for row in rows for run in (row.pair.baseline, row.pair.new))
    known = [id(row) for row, run in runs if run.timed or run.peaks_mb or run.checked.loss_error is not None]
    return [row for row in rows if id(row) in known] or rows


def _below(rows: Sequence[comparison.Change], remarks: Sequence[str]) -> List[str]:
    """Return the lines below the whole table: each verdict with its reason, each note once."""
    shown = _measured(rows)
    lines = lines_of(shown)
    told = [line for line in lines if line.verdict != "same" or line.what.endswith("time")]
    same = gathered((line.name, line.what) for line in lines if line not in told)
    notes = gathered((note, row.pair.name) for row in shown for note in _notes_of(row))
    others = dict.fromkeys(row.pair.name for row in rows if row not in shown)
    return [
        *(f"{line.name}, {line.what}: {line.verdict}: {line.reason}" for line in told),
        *(f"{name}: {', '.join(whats)}: same" for name, whats in same.items()),
        f"times: {_counts(shown)}",
        *_controls(shown),
        *(f"{', '.join(names)}: {note}" for note, names in notes.items()),
        *remarks,
        *([f"measured on neither side: {', '.join(others)}"] if others else []),
    ]


def on_one_side(sides: comparison.Sides) -> List[str]:
    """Return lines on runs that are on one side alone, and on later ones that measured nothing."""
    stopped = tables.stopped([run for pair in sides.pairs for run in (pair.baseline, pair.new)])
    lines = [
        f"{', '.join(dict.fromkeys(map(sides.label, runs)))}: {side} only"
        for side, runs in (("in the baseline", sides.gone), ("on the new side", sides.added))
        if runs
    ]
    return [*lines, *filter(None, [stopped])]


def origins(rows: Sequence[comparison.Change]) -> List[str]:
    lines = []
    for side in ("baseline", "new"):
        runs = [getattr(row.pair, side) for row in rows]
        folders = list(dict.fromkeys(run.folder for run in runs))
        above = ", ".join(dict.fromkeys(str(folder.parent) for folder in folders))
        where = str(runs[0].results) if len(folders) == 1 else f"{above} ({len(folders)} runs)"
        lines.append(f"{side}: {where}, started {min(run.header.started for run in runs)}")
    paired = {time.paired for row in rows for time in row.time.values() if time.ratio is not None}
    ways = {
        True: "rounds paired: both sides were measured beside each other",
        False: "two separate runs, over the rows that did not change (the control), a batch paired with itself where "
        "both drew it",
    }
    how, margins = "; ".join(ways[way] for way in sorted(paired)) or "no times to compare", rows[0].margins
    lines.append(
        f"time: new / baseline, geometric mean over batches and rounds; {how}. "
        f"Intervals over rounds: {percent(margins.confidence)} each, which makes 95% for all of them together. "
        f"Tolerance: {percent(margins.tolerance)}."
    )
    return lines


def lines_of(rows: Sequence[comparison.Change]) -> List[Line]:
    """Return the lines of rows, without what neither side measured, such as scope `loss` of a loss that has none."""
    lines = []

    def add(row: comparison.Change, what: str, change: Any, ratio: Optional[float], *cells: str) -> None:
        both = ratio, getattr(change, "over_control", None)
        words = ["-" if value is None else f"{value:.3f}" for value in both]
        lines.append(Line(row.pair.name, what, change.verdict, change.reason, [*words, *cells]))

    def with_unit(values: Sequence[Optional[float]], key: str) -> List[str]:
        return ["-" if value is None else f"{number(value)} {metrics.METRICS[key].unit}" for value in values]

    for row in rows:
        for scope, time in row.time.items():
            if any(time.rounds):
                interval = "-" if time.low is None else f"{time.low:.3f}-{time.high:.3f}"
                shown = str(time.rounds[0]) if time.paired else "{} + {}".format(*time.rounds)
                batches = str(time.ratio.batches if time.ratio else 0)
                sides = with_unit(time.both_ms, f"{scope}_ms")
                add(row, f"{scope} time", time, time.factor, interval, *sides, shown, batches)
        for scope, memory in row.memory.items():
            if memory.baseline is not None or memory.new is not None:
                sides = with_unit((memory.baseline, memory.new), "peak_memory_mb")
                add(row, f"{scope} memory", memory, memory.ratio, "-", *sides, "-", str(memory.batches))
        both = (row.errors.baseline, row.errors.new)
        errors = [f"{error(side['loss_error'])}, {error(side['grad_error'])}" for side in both]
        add(row, "errors", row.errors, None, "-", *errors, "-", "-")
    return lines


def _counts(rows: Sequence[comparison.Change]) -> str:
    """Return how many times changed: "1 faster, 0 slower, 4 unclear"."""
    times = [time for row in rows for time in row.time.values() if time.ratio is not None]
    verdicts = Counter(time.verdict for time in times if time.verdict != BESIDE_LOAD)
    if not verdicts:
        return "none to compare"
    words = ("faster", "slower", *(["same"] if verdicts["same"] else []), "unclear")
    return ", ".join(f"{verdicts[word]} {word}" for word in words)


def _controls(rows: Sequence[comparison.Change]) -> List[str]:
    """Return a line for each control: by what the rows moved that did not change, and the machine's rates."""
    lines = []
    for scope in SCOPES:
        times = [row.time[scope] for row in rows if scope in row.time]
        for unchanged in control.by_runs(times).values():
            moved = control.moved(unchanged)
            lines += [f"control, {scope}: {_moved(moved, unchanged[0])}"] if moved else []
    return lines


def _moved(moved: ratios.Control, first: standing.Standing) -> str:
    """Return how much slower unchanged rows were, whether that is sure, and the rates of both runs of the first."""
    ratio, low, high = moved.together()
    spread = f"{low:.2f} to {high:.2f}; each {moved.least:.2f} to {moved.most:.2f}"
    words = f"{moved.rows} rows that did not change took {ratio:.2f} times the time ({spread})"
    verdict = statistics.verdict(low, high, first.margins.tolerance)
    if verdict in ("slower", "faster"):
        words += f", so the machine was {verdict}"
    rates = [machines.rates(row) for row in (first.baseline, first.row)]
    return f"{words}; {', then '.join(rates)}" if all(rates) else words


def _notes_of(row: comparison.Change) -> Iterator[str]:
    """Yield what changed in the code and around it; failures; approximations."""
    if row.changed:
        yield f"changed: {', '.join(row.changed)}"
    elif row.pair.one_loss:
        yield "nothing that is recorded of the code changed: a difference would be of the machine, or of chance"
    for doubt in doubts.about_sides(row.pair.baseline, row.pair.new):
        yield doubt.words


# The page.


def write(rows: Sequence[comparison.Change], remarks: Sequence[str], output: Path) -> Path:
    """Write the page, whole or not at all; return its path. Raises UserError."""
    if not rows:
        raise errors.UserError("no page: nothing was compared")
    shown, first = _measured(rows), origins(rows)
    figure = _figure(shown)
    section = parts.Section(
        *("comparison", "What changed", first[2]),
        lead=figure,
        tables=[table(lines_of(shown))],
        notes=[("", [f"{line}."]) for line in _below(rows, remarks)],
    )
    lead = " ".join(f"{line}." for line in first[:2])
    text = page.assembled([section], output.parent, title(shown), lead, overline="Two measurements, compared")
    return page.saved(text, output)


def title(rows: Sequence[comparison.Change]) -> str:
    """Return "Times: 2 slower, 3 unclear"."""
    counts = Counter(time.verdict for row in rows for time in row.time.values() if time.ratio is not None)
    return f"Times: {', '.join(f'{number} {verdict}' for verdict, number in counts.items()) or 'none to compare'}"


def _figure(rows: Sequence[comparison.Change]) -> Optional[parts.Figure]:
    look_of = style.look_of_each({row.pair.new.name: row.pair.new.kind for row in rows})
    dots = []
    for row in rows:
        for scope, time in row.time.items():
            if time.factor is not None:
                numbers = time.factor, time.low, time.high, time.verdict, time.verdict == BESIDE_LOAD
                dots.append(plots.Dot(f"{row.pair.name}, {scope}", look_of[time.row.name], *numbers, time.row.results))
    if not dots:
        return None
    caption = "Dot: the time of the new side over that of the baseline; line: its interval over rounds."
    if any(dot.hollow for dot in dots):
        caption += " Hollow: beside other load, so the ratio decides nothing."
    return plots.ratios("changes", "Time, new over baseline", caption, dots, "times the baseline")
