"""Show a comparison of two measurements (see analysis/comparison.py): on one screen, as a whole
table, as Markdown for a pull request, as JSON, or as a page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from rnnt_bench.analysis import comparison, control, doubts, machines, metrics, ratios, standing
from rnnt_bench.analysis.row import SCOPES, Row
from rnnt_bench.analysis.standing import BESIDE_LOAD, percent
from rnnt_bench.core import errors, statistics
from rnnt_bench.core.text import error, escaped, gathered, number
from rnnt_bench.present import parts, style
from rnnt_bench.present.text import aligned, json_text, listed, markdown, spaced
from rnnt_bench.show import page, plots, tables

Changes = Sequence[comparison.Change]
FORMATS = ("table", "markdown", "json")
VERDICT = parts.Column("verdict", numeric=False)
#: A column of comparisons between separate runs, whose unchanged rows are the control.
OVER_CONTROL = parts.Column("over control")
#: The columns, in the order of the fields of Line.
COLUMNS = (
    parts.Column("implementation", numeric=False),
    parts.Column("what", numeric=False),
    VERDICT,
    parts.Column("ratio"),
    OVER_CONTROL,
    *(parts.Column(title) for title in ("interval", "baseline", "new", "rounds", "batches")),
)
#: The columns that a screen has room for: all but rounds and batches.
NARROW = COLUMNS[:8]
#: Verdict -> mark of its cell (a class of page.css).
MARKS = {
    **dict.fromkeys(("faster", "less", "better"), "good"),
    **dict.fromkeys(("slower", "more", "worse", "wrong"), "bad"),
}


class Line(NamedTuple):
    """Hold one line of the table in words, "-" where there is no value.

    Attributes:
        what: what was compared, such as "step time" or "errors"
        baseline, new: the two sides, with their unit
        reason: why the verdict is so, which stands below the table
    """

    name: str
    what: str
    verdict: str
    ratio: str = "-"
    over_control: str = "-"
    interval: str = "-"
    baseline: str = "-"
    new: str = "-"
    rounds: str = "-"
    batches: str = "-"
    reason: str = ""

    @property
    def is_explained(self) -> bool:
        """Tell whether the reason stands below the table, and the line on the screen.

        They do for each time, and for everything else whose verdict is not "same"."""
        return self.what.endswith(" time") or self.verdict != "same"


def render(changes: Changes, remarks: Sequence[str], format: str = "table") -> str:
    """Return all changes as a text: JSON, or a table with the reasons of the verdicts below it.

    The table leaves out changes without a side that measured something, unless all are such.

    remarks: further lines below the table, which JSON leaves out; format: one of FORMATS
    """
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
    """Return the outcome in lines that fit the terminal: all times, the other numbers that changed
    or may have changed, and the verdict.

    remarks: further lines below the table.
    """
    shown = _measured(changes)
    lines = [line for line in lines_of(shown) if line.is_explained]
    below = [*_controls(shown), *_failed_sides(shown), *remarks]
    *sides, _ = origins(shown)  # how the times are compared is not on the screen
    return spaced(
        [
            [part for line in sides for part in terminal.wrapped(line, most=None)],
            aligned(table(lines, NARROW), tables.LONGEST_NAME, terminal.colors).splitlines(),
            [part for line in below for part in terminal.wrapped(line)],
            tables.verdict_lines(_answers(shown, lines), terminal),
        ]
    )


def _failed_sides(changes: Changes) -> list[str]:
    """Return a line for each side of a pair that did not end well."""
    return [
        f"{change.pair.name}: {doubt.words}"
        for change in changes
        for doubt in doubts.about_sides(change.pair.baseline, change.pair.new)
        if doubt.kind == "status"
    ]


def _answers(changes: Changes, lines: Sequence[Line]) -> dict[str, str]:
    """Return {question: answer} of the verdict on a screen, for `tables.verdict_lines`.

    The answers say how many of the times have each verdict, what became better or worse, and what
    cannot be told.

    lines: the lines of the table on that screen."""
    answers = {"times": _counts(changes)}
    names = gathered(
        (line.verdict, f"{line.name} {line.what.removesuffix(' time')}") for line in lines
    )
    # MARKS has the verdicts that tell a change. The others, below, are shown with their reason.
    answers.update({verdict: ", ".join(names[verdict]) for verdict in MARKS if verdict in names})
    loaded = gathered((line.reason, line.name) for line in lines if line.verdict == BESIDE_LOAD)
    if loaded:
        answers[BESIDE_LOAD] = "; ".join(
            f"{', '.join(dict.fromkeys(loaded_names))}: {reason}"
            for reason, loaded_names in loaded.items()
        )
    uncontrolled = [
        f"{change.pair.name} {scope}"
        for change in changes
        for scope, time in change.time.items()
        if "uncontrolled" in time.kinds
    ]
    if uncontrolled:
        answers["unclear"] = (
            f"separate runs, which {ratios.FEWEST_CONTROLS} rows that did not change would make "
            f"comparable: {', '.join(uncontrolled)}; measure both in one run"
        )
    return answers


def table(lines: Sequence[Line], columns: Sequence[parts.Column] = COLUMNS) -> parts.Table:
    """Return the lines as a table, without the column "over control" where it is empty."""
    controlled = any(line.over_control != "-" for line in lines)
    kept = [column for column in columns if controlled or column != OVER_CONTROL]
    rows = []
    for line in lines:
        cells = dict(zip(COLUMNS, map(_cell, line)))
        cells[VERDICT] = parts.Cell(line.verdict, mark=MARKS.get(line.verdict, ""))
        rows.append([cells[column] for column in kept])
    return parts.Table("comparison", "Comparison", kept, rows)


def _cell(words: str) -> parts.Cell:
    """Return a cell with these words; "-" has no value."""
    return parts.Cell(words, None if words == "-" else words)


def _measured(changes: Changes) -> Changes:
    """Return the changes with a side that measured something; all of them if none did."""
    return [change for change in changes if _is_measured(change)] or changes


def _is_measured(change: comparison.Change) -> bool:
    """Return whether a side of the change has times, peaks or errors."""
    runs = (change.pair.baseline, change.pair.new)
    return any(run.timed or run.peaks_mb or run.checked.loss_error is not None for run in runs)


def _below(changes: Changes, remarks: Sequence[str]) -> list[str]:
    """Return the lines below the whole table: each verdict with its reason, each note once."""
    shown = _measured(changes)
    lines = lines_of(shown)
    explained = [line for line in lines if line.is_explained]
    # What is the same in each implementation, and the implementations that each note is about.
    same = gathered((line.name, line.what) for line in lines if not line.is_explained)
    notes = gathered((note, change.pair.name) for change in shown for note in _notes(change))
    below = [
        *(f"{line.name}, {line.what}: {line.verdict}: {line.reason}" for line in explained),
        *(f"{name}: {', '.join(whats)}: same" for name, whats in same.items()),
        f"times: {_counts(shown)}",
        *_controls(shown),
        *(f"{', '.join(names)}: {note}" for note, names in notes.items()),
        *remarks,
    ]
    others = dict.fromkeys(change.pair.name for change in changes if change not in shown)
    if others:
        below.append(f"measured on neither side: {', '.join(others)}")
    return below


def on_one_side(sides: comparison.Sides) -> list[str]:
    """Return lines on runs that only one side has, and on later runs that measured nothing."""
    lines = []
    for side, runs in (("in the baseline", sides.gone), ("on the new side", sides.added)):
        if runs:
            lines.append(f"{', '.join(dict.fromkeys(map(sides.label, runs)))}: {side} only")
    stopped = tables.stopped([run for pair in sides.pairs for run in (pair.baseline, pair.new)])
    if stopped:
        lines.append(stopped)
    return lines


def origins(changes: Changes) -> list[str]:
    """Return three lines: where each side is from, and how their times are compared."""
    return [
        _origin("baseline", [change.pair.baseline for change in changes]),
        _origin("new", [change.pair.new for change in changes]),
        _method(changes),
    ]


def _origin(side: str, runs: Sequence[Row]) -> str:
    """Return the file of a side's only run, or the folder of its runs, and when the first began."""
    folders = dict.fromkeys(run.folder for run in runs)
    where = str(runs[0].results)
    if len(folders) > 1:
        parents = ", ".join(dict.fromkeys(str(folder.parent) for folder in folders))
        where = f"{parents} ({len(folders)} runs)"
    return f"{side}: {where}, started {min(run.header.started for run in runs)}"


def _method(changes: Changes) -> str:
    """Return how the times are compared: between two runs or within one, what is averaged, the
    confidence of the intervals, and the tolerance."""
    times = [time for change in changes for time in change.time.values() if time.ratio]
    ways = []
    if not all(time.paired for time in times):
        ways.append(
            "two separate runs, over the rows that did not change (the control), a batch paired with itself where both "
            "drew it"
        )
    if any(time.paired for time in times):
        ways.append("rounds paired: both sides were measured beside each other")
    margins = changes[0].margins  # the same in all changes
    return (
        "time: new / baseline, geometric mean over batches and rounds; "
        f"{'; '.join(ways) or 'no times to compare'}. "
        f"Intervals over rounds: {percent(margins.confidence)} each, which makes 95% for all of them together. "
        f"Tolerance: {percent(margins.tolerance)}."
    )


def lines_of(changes: Changes) -> list[Line]:
    """Return the lines of all changes: time and memory by scope, where a side has them, and
    errors."""
    lines = []
    for change in changes:
        name = change.pair.name
        lines += [
            _time_line(name, scope, time) for scope, time in change.time.items() if any(time.rounds)
        ]
        for scope, memory in change.memory.items():
            if memory.baseline_mb is not None or memory.new_mb is not None:
                lines.append(
                    Line(
                        name,
                        f"{scope} memory",
                        memory.verdict,
                        ratio=_ratio(memory.ratio),
                        baseline=_with_unit(memory.baseline_mb, "peak_memory_mb"),
                        new=_with_unit(memory.new_mb, "peak_memory_mb"),
                        batches=str(memory.batches),
                        reason=memory.reason,
                    )
                )
        lines.append(
            Line(
                name,
                "errors",
                change.errors.verdict,
                baseline=_errors(change.errors.baseline),
                new=_errors(change.errors.new),
                reason=change.errors.reason,
            )
        )
    return lines


def _time_line(name: str, scope: str, time: standing.Standing) -> Line:
    """Return the line of a time.  Its `rounds` are "3" if they are paired; else those of the
    baseline and the new ones, "3 + 5"."""
    baseline_ms, new_ms = time.both_ms
    baseline_rounds, new_rounds = time.rounds
    return Line(
        name,
        f"{scope} time",
        time.verdict,
        ratio=_ratio(time.factor),
        over_control=_ratio(time.over_control),
        interval="-" if time.low is None else f"{time.low:.3f}-{time.high:.3f}",
        baseline=_with_unit(baseline_ms, f"{scope}_ms"),
        new=_with_unit(new_ms, f"{scope}_ms"),
        rounds=str(baseline_rounds) if time.paired else f"{baseline_rounds} + {new_rounds}",
        batches=str(time.ratio.batches if time.ratio else 0),
        reason=time.reason,
    )


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _errors(errors: Mapping[str, float | None]) -> str:
    """Return the relative errors of the loss and the gradient: "1.2e-07, 3.4e-07"."""
    return f"{error(errors['loss_error'])}, {error(errors['grad_error'])}"


def _with_unit(value: float | None, key: str) -> str:
    """Return a value of the metric `key` with its unit."""
    return "-" if value is None else f"{number(value)} {metrics.METRICS[key].unit}"


def _counts(changes: Changes) -> str:
    """Return how many of the compared times became faster or slower: "1 faster, 0 slower, 4
    unclear".  Times that were measured beside other load are left out."""
    verdicts = _verdicts(changes)
    del verdicts[BESIDE_LOAD]  # no error where it is missing, unlike that of a dict
    if not verdicts:
        return "none to compare"
    words = ("faster", "slower", *(["same"] if verdicts["same"] else []), "unclear")
    return ", ".join(f"{verdicts[word]} {word}" for word in words)


def _verdicts(changes: Changes) -> Counter[str]:
    """Return how many of the compared times have each verdict."""
    return Counter(
        time.verdict
        for change in changes
        for time in change.time.values()
        if time.ratio is not None
    )


def _controls(changes: Changes) -> list[str]:
    """Return a line for each scope and pair of runs: how the times of the unchanged rows moved from
    one run to the other."""
    lines = []
    for scope in SCOPES:
        times = [change.time[scope] for change in changes if scope in change.time]
        for unchanged in control.unchanged_by_runs(times).values():
            moved = control.control_of(unchanged)
            if moved:
                lines.append(f"control, {scope}: {_moved(moved, first=unchanged[0])}")
    return lines


def _moved(moved: ratios.Control, first: standing.Standing) -> str:
    """Return in words how many times as long the unchanged rows took in the new run, and whether
    the machine was slower or faster by that.  If both runs have the machine's rates, add these.

    moved: the control, with the number of unchanged rows as its `rows`; first: the standing of one
    of these rows, for the rates and the tolerance."""
    ratio, low, high = moved.slowdown()
    # First the interval of their mean ratio, then the range of the ratios of the single rows.
    spread = f"{low:.2f} to {high:.2f}; each {moved.least:.2f} to {moved.most:.2f}"
    words = f"{moved.rows} rows that did not change took {ratio:.2f} times the time ({spread})"
    verdict = statistics.verdict(low, high, first.margins.tolerance)
    if verdict in ("slower", "faster"):
        words += f", so the machine was {verdict}"
    before, after = machines.rates(first.baseline), machines.rates(first.row)
    return f"{words}; {before}, then {after}" if before and after else words


def _notes(change: comparison.Change) -> Iterator[str]:
    """Yield notes on a change: what differs in the code, and the doubts about its two sides."""
    if change.changed:
        yield f"changed: {', '.join(change.changed)}"
    elif change.pair.is_one_loss:
        yield "nothing that is recorded of the code changed: a difference would be of the machine, or of chance"
    for doubt in doubts.about_sides(change.pair.baseline, change.pair.new):
        yield doubt.words


# The page.


def write(changes: Changes, remarks: Sequence[str], output: Path) -> Path:
    """Write the page of a comparison, whole or not at all; return its path. Raises UserError where
    nothing was compared, or the page cannot be written.

    remarks: further notes below the table.
    """
    if not changes:
        raise errors.UserError("no page: nothing was compared")
    shown = _measured(changes)
    baseline, new, method = origins(changes)
    section = parts.Section(
        "comparison",
        "What changed",
        method,
        lead=_figure(shown),
        tables=[table(lines_of(shown))],
        notes=[("", [f"{line}."]) for line in _below(changes, remarks)],
    )
    lead = f"{baseline}. {new}."
    text = page.assembled(
        [section], output.parent, title(shown), lead, overline="Two measurements, compared"
    )
    return page.saved(text, output)


def title(changes: Changes) -> str:
    """Return the title of the page: how many times have each verdict, "Times: 2 slower, 3 unclear",
    or "Times: none to compare"."""
    counts = ", ".join(f"{number} {verdict}" for verdict, number in _verdicts(changes).items())
    return f"Times: {counts or 'none to compare'}"


def _figure(changes: Changes) -> parts.Figure | None:
    """Return a figure with the ratio of each time that is compared; None if there is no ratio."""
    look_of = style.looks_of({change.pair.new.name: change.pair.new.kind for change in changes})
    dots = [
        plots.Dot(
            f"{change.pair.name}, {scope}",
            look_of[time.row.name],
            time.factor,
            low=time.low,
            high=time.high,
            verdict=time.verdict,
            hollow=time.verdict == BESIDE_LOAD,
            source=time.row.results,
        )
        for change in changes
        for scope, time in change.time.items()
        if time.factor is not None
    ]
    caption = (
        "Dot: the time of the new side over that of the baseline; line: its interval over rounds."
    )
    name = "Time, new over baseline"
    return plots.ratios("changes", name, caption, dots, "times the baseline") if dots else None
