"""Show a comparison (see analysis/comparison.py): one screen, Markdown for a pull request, JSON, or
a page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from rnnt_bench.analysis import comparison, control, doubts, machines, metrics, ratios, standing
from rnnt_bench.analysis.row import SCOPES
from rnnt_bench.analysis.standing import BESIDE_LOAD, percent
from rnnt_bench.core import errors, statistics
from rnnt_bench.core.text import error, escaped, gathered, number
from rnnt_bench.present import parts, style
from rnnt_bench.present.text import aligned, json_text, listed, markdown, spaced
from rnnt_bench.show import page, plots, tables

Changes = Sequence[comparison.Change]
FORMATS = ("table", "markdown", "json")
#: Two separate runs alone have this column.
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


def render(changes: Changes, remarks: Sequence[str], format: str = "table") -> str:
    """Return the table of all changes as text, and below it the reason of each verdict.  remarks:
    further lines below, which JSON leaves out."""
    if format == "json":
        return json_text([change.as_json() for change in changes])
    shown = _measured(changes)
    whole = table(lines_of(shown))
    below = listed(_below(changes, remarks), format)
    if format == "markdown":
        blocks = [*map(escaped, origins(shown)), markdown(whole), below]
    else:
        blocks = [listed(origins(shown), format), aligned(whole), below]
    return "\n\n".join(blocks) + "\n"


def screen(
    changes: Changes, remarks: Sequence[str], terminal: tables.Terminal = tables.UNKNOWN
) -> str:
    """Return the outcome in lines that fit: all times, whatever else changed, and the verdict."""
    shown = _measured(changes)
    lines = [
        line for line in lines_of(shown) if line.what.endswith(" time") or line.verdict != "same"
    ]
    below = _controls(shown)
    for change in shown:
        sides = doubts.about_sides(change.pair.baseline, change.pair.new)
        below += [f"{change.pair.name}: {doubt.words}" for doubt in sides if doubt.kind == "status"]
    answers = {"times": _counts(shown)}
    names = gathered(
        (line.verdict, f"{line.name} {line.what.replace(' time', '')}") for line in lines
    )
    answers.update({verdict: ", ".join(names[verdict]) for verdict in MARKS if verdict in names})
    reasons = gathered((line.reason, line.name) for line in lines if line.verdict == BESIDE_LOAD)
    if reasons:
        loaded = (
            f"{', '.join(dict.fromkeys(names))}: {reason}" for reason, names in reasons.items()
        )
        answers[BESIDE_LOAD] = "; ".join(loaded)
    times = [
        (change.pair.name, scope, time) for change in shown for scope, time in change.time.items()
    ]
    alone = [f"{name} {scope}" for name, scope, time in times if "uncontrolled" in time.kinds]
    if alone:
        answers["unclear"] = (
            f"separate runs, which {ratios.FEWEST_CONTROLS} rows that did not change would make "
        )
        answers["unclear"] += f"comparable: {', '.join(alone)}; measure both in one run"
    narrow = table(lines, COLUMNS[:8])
    return spaced(
        [
            [line for text in origins(shown)[:2] for line in terminal.wrapped(text, None)],
            aligned(narrow, tables.LONGEST_NAME, terminal.colors).splitlines(),
            [line for text in [*below, *remarks] for line in terminal.wrapped(text)],
            tables.verdict_lines(answers, terminal),
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
    kept = [index for index, column in enumerate(columns) if compared or column != OVER_CONTROL]
    shown = [[row[index] for index in kept] for row in cells]
    return parts.Table("comparison", "Comparison", [columns[index] for index in kept], shown)


def _measured(changes: Changes) -> Changes:
    """Return the changes of which a side has something to compare; all where none has."""
    return [change for change in changes if _is_measured(change)] or changes


def _is_measured(change: comparison.Change) -> bool:
    runs = (change.pair.baseline, change.pair.new)
    return any(run.timed or run.peaks_mb or run.checked.loss_error is not None for run in runs)


def _below(changes: Changes, remarks: Sequence[str]) -> list[str]:
    """Return the lines below the whole table: each verdict with its reason, each note once."""
    shown = _measured(changes)
    lines = lines_of(shown)
    explained = [line for line in lines if line.verdict != "same" or line.what.endswith("time")]
    same = gathered((line.name, line.what) for line in lines if line not in explained)
    notes = gathered((note, change.pair.name) for change in shown for note in _notes(change))
    others = dict.fromkeys(change.pair.name for change in changes if change not in shown)
    return [
        *(f"{line.name}, {line.what}: {line.verdict}: {line.reason}" for line in explained),
        *(f"{name}: {', '.join(whats)}: same" for name, whats in same.items()),
        f"times: {_counts(shown)}",
        *_controls(shown),
        *(f"{', '.join(names)}: {note}" for note, names in notes.items()),
        *remarks,
        *([f"measured on neither side: {', '.join(others)}"] if others else []),
    ]


def on_one_side(sides: comparison.Sides) -> list[str]:
    """Return lines on runs that are on one side alone, and on later ones that measured nothing."""
    lines = []
    for side, runs in (("in the baseline", sides.gone), ("on the new side", sides.added)):
        if runs:
            lines.append(f"{', '.join(dict.fromkeys(map(sides.label, runs)))}: {side} only")
    stopped = tables.stopped([run for pair in sides.pairs for run in (pair.baseline, pair.new)])
    return [*lines, *filter(None, [stopped])]


def origins(changes: Changes) -> list[str]:
    """Return a line on each side, and one on how their times are compared."""
    lines = []
    for side in ("baseline", "new"):
        runs = [getattr(change.pair, side) for change in changes]
        folders = list(dict.fromkeys(run.folder for run in runs))
        above = ", ".join(dict.fromkeys(str(folder.parent) for folder in folders))
        where = str(runs[0].results) if len(folders) == 1 else f"{above} ({len(folders)} runs)"
        lines.append(f"{side}: {where}, started {min(run.header.started for run in runs)}")
    paired = {
        time.paired for change in changes for time in change.time.values() if time.ratio is not None
    }
    ways = []
    if False in paired:
        ways.append(
            "two separate runs, over the rows that did not change (the control), a batch paired with itself where both "
            "drew it"
        )
    if True in paired:
        ways.append("rounds paired: both sides were measured beside each other")
    margins = changes[0].margins
    lines.append(
        "time: new / baseline, geometric mean over batches and rounds; "
        f"{'; '.join(ways) or 'no times to compare'}. "
        f"Intervals over rounds: {percent(margins.confidence)} each, which makes 95% for all of them together. "
        f"Tolerance: {percent(margins.tolerance)}."
    )
    return lines


def lines_of(changes: Changes) -> list[Line]:
    """Return the lines of changes, without what neither side measured, such as scope `loss` of a
    loss that has none."""
    lines = []
    for change in changes:
        name = change.pair.name
        for scope, time in change.time.items():
            if any(time.rounds):
                interval = "-" if time.low is None else f"{time.low:.3f}-{time.high:.3f}"
                rounds = str(time.rounds[0]) if time.paired else "{} + {}".format(*time.rounds)
                batches = str(time.ratio.batches if time.ratio else 0)
                cells = [interval, *_with_unit(time.both_ms, f"{scope}_ms"), rounds, batches]
                numbers = [_ratio(time.factor), _ratio(time.over_control)]
                lines.append(
                    Line(name, f"{scope} time", time.verdict, time.reason, [*numbers, *cells])
                )
        for scope, memory in change.memory.items():
            if memory.baseline_mb is not None or memory.new_mb is not None:
                sides = _with_unit((memory.baseline_mb, memory.new_mb), "peak_memory_mb")
                cells = [_ratio(memory.ratio), "-", "-", *sides, "-", str(memory.batches)]
                lines.append(Line(name, f"{scope} memory", memory.verdict, memory.reason, cells))
        both = (change.errors.baseline, change.errors.new)
        sides = [f"{error(side['loss_error'])}, {error(side['grad_error'])}" for side in both]
        cells = ["-", "-", "-", *sides, "-", "-"]
        lines.append(Line(name, "errors", change.errors.verdict, change.errors.reason, cells))
    return lines


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _with_unit(values: Sequence[float | None], key: str) -> list[str]:
    """Return values with the unit of the metric `key`."""
    unit = metrics.METRICS[key].unit
    return ["-" if value is None else f"{number(value)} {unit}" for value in values]


def _counts(changes: Changes) -> str:
    """Return how many times changed: "1 faster, 0 slower, 4 unclear"."""
    verdicts = _verdicts(changes)
    del verdicts[BESIDE_LOAD]
    if not verdicts:
        return "none to compare"
    words = ("faster", "slower", *(["same"] if verdicts["same"] else []), "unclear")
    return ", ".join(f"{verdicts[word]} {word}" for word in words)


def _verdicts(changes: Changes) -> Counter[str]:
    """Return how many of the times that are compared have each verdict."""
    return Counter(
        time.verdict
        for change in changes
        for time in change.time.values()
        if time.ratio is not None
    )


def _controls(changes: Changes) -> list[str]:
    """Return a line for each control: by what the rows moved that did not change, and the machine's
    rates."""
    lines = []
    for scope in SCOPES:
        times = [change.time[scope] for change in changes if scope in change.time]
        for unchanged in control.unchanged_by_runs(times).values():
            moved = control.control_of(unchanged)
            lines += [f"control, {scope}: {_moved(moved, unchanged[0])}"] if moved else []
    return lines


def _moved(moved: ratios.Control, first: standing.Standing) -> str:
    """Return how much slower unchanged rows were, whether that is sure, and the rates of both runs
    of the first."""
    ratio, low, high = moved.slowdown()
    spread = f"{low:.2f} to {high:.2f}; each {moved.least:.2f} to {moved.most:.2f}"
    words = f"{moved.rows} rows that did not change took {ratio:.2f} times the time ({spread})"
    verdict = statistics.verdict(low, high, first.margins.tolerance)
    if verdict in ("slower", "faster"):
        words += f", so the machine was {verdict}"
    rates = [machines.rates(row) for row in (first.baseline, first.row)]
    return f"{words}; {', then '.join(rates)}" if all(rates) else words


def _notes(change: comparison.Change) -> Iterator[str]:
    """Yield what changed in the code and around it; failures; approximations."""
    if change.changed:
        yield f"changed: {', '.join(change.changed)}"
    elif change.pair.is_one_loss:
        yield "nothing that is recorded of the code changed: a difference would be of the machine, or of chance"
    for doubt in doubts.about_sides(change.pair.baseline, change.pair.new):
        yield doubt.words


# The page.


def write(changes: Changes, remarks: Sequence[str], output: Path) -> Path:
    """Write the page, whole or not at all; return its path. Raises UserError."""
    if not changes:
        raise errors.UserError("no page: nothing was compared")
    shown = _measured(changes)
    *sides, how = origins(changes)
    section = parts.Section(
        "comparison",
        "What changed",
        how,
        lead=_figure(shown),
        tables=[table(lines_of(shown))],
        notes=[("", [f"{line}."]) for line in _below(changes, remarks)],
    )
    lead = " ".join(f"{line}." for line in sides)
    text = page.assembled(
        [section], output.parent, title(shown), lead, overline="Two measurements, compared"
    )
    return page.saved(text, output)


def title(changes: Changes) -> str:
    """Return "Times: 2 slower, 3 unclear"."""
    counts = ", ".join(f"{number} {verdict}" for verdict, number in _verdicts(changes).items())
    return f"Times: {counts or 'none to compare'}"


def _figure(changes: Changes) -> parts.Figure | None:
    looks = style.looks({change.pair.new.name: change.pair.new.kind for change in changes})
    dots = []
    for change in changes:
        for scope, time in change.time.items():
            if time.factor is not None:
                name = f"{change.pair.name}, {scope}"
                numbers = (
                    time.factor,
                    time.low,
                    time.high,
                    time.verdict,
                    time.verdict == BESIDE_LOAD,
                )
                dots.append(plots.Dot(name, looks[time.row.name], *numbers, time.row.results))
    if not dots:
        return None
    caption = (
        "Dot: the time of the new side over that of the baseline; line: its interval over rounds."
    )
    if any(dot.hollow for dot in dots):
        caption += " Hollow: beside other load, so the ratio decides nothing."
    return plots.ratios("changes", "Time, new over baseline", caption, dots, "times the baseline")
