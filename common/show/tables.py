"""Show rows as text: on a screen the answer first, a table by kind, what did not run, correctness,
the verdict; with --details a whole table for each configuration or sweep, with remarks below.  CSV
and JSON: see present/text.py.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import wrap
from typing import NamedTuple

from rnnt_bench.analysis import doubts, logs, metrics, standing, verdict
from rnnt_bench.analysis.groups import Group, Sweep, is_numeric, kind_title
from rnnt_bench.analysis.row import SCOPES, Row, Rows
from rnnt_bench.core import settings
from rnnt_bench.core.called import command
from rnnt_bench.core.errors import NOT_RUNNABLE
from rnnt_bench.core.text import count, error, gathered, number, plain, short
from rnnt_bench.present.parts import Cell, Column, Table, Values
from rnnt_bench.present.parts import words as in_words
from rnnt_bench.present.text import (
    aligned,
    block,
    csv_text,
    json_text,
    listed,
    painted,
    spaced,
    stopped_later,
)

Lines = list[str]
FORMATS = ("table", "markdown", "csv", "json")
STATUS_MARKS = {"ok": "good", **dict.fromkeys(NOT_RUNNABLE, "quiet")}


def whole(log: logs.Log, format: str = "table", folders: Sequence[Path] = ()) -> str:
    """Return the tables of all configurations with their remarks, then those of each sweep; each
    table has its verdict below it, but in Markdown.  folders: as of `screen`."""
    parts: list[list[str]] = [[]]
    for group in log.groups:
        parts[0].append(block(table("results", group.heading, group.rows), format))
        if format == "table":
            parts[0].append("\n".join(_of_group(group, UNKNOWN, folders)))
    parts[0] += remarks(log.rows, format)
    for sweep in log.sweeps:
        swept = block(table("sweep", sweep.heading, sweep.rows, "sweep"), format)
        answer = "\n".join(_of_sweep(sweep, UNKNOWN)) if format == "table" else ""
        parts.append([swept, answer])
        for values, rows in sweep.cells():
            parts[-1] += [f"{settings.words(values)}:", *remarks(rows, format)]
    return "\n".join("\n\n".join(filter(None, blocks)) + "\n" for blocks in parts if blocks)


def exported(log: logs.Log, tool_rows: Sequence[Values], format: str) -> str:
    """Return all rows as "csv" or "json", those of the losses first."""
    _, sweeps = log.groups, log.sweeps  # the groups rank the rows
    rows = [*log.rows, *(row for sweep in sweeps for row in sweep.rows)]
    further = metrics.differing(rows)
    if format == "csv":
        return csv_text([*(metrics.plain(row, further) for row in rows), *tool_rows])
    return json_text([*(metrics.exported(row, further) for row in rows), *tool_rows])


def table(columns: str, title: str, rows: Rows, name: str = "results") -> Table:
    """Return the table of these rows.  columns: the table of analysis/metrics.py whose columns it
    has, behind those of the settings that are swept."""
    shown = metrics.columns(columns, rows)
    keys = rows[0].header.values if rows else ()
    lead = [
        Column(settings.flag(key), is_numeric([row.header.values[key] for row in rows]))
        for key in keys
    ]
    body = []
    for row in rows:
        swept = [Cell(settings.worded(value), value) for value in row.header.values.values()]
        body.append([*swept, *cells(row, shown)])
    return Table(name, title, [*lead, *map(_column, shown)], body)


def _column(metric: metrics.Metric) -> Column:
    return Column(metric.title, metric.numeric)


def cells(row: Row, shown: Sequence[metrics.Metric]) -> list[Cell]:
    result = []
    for metric in shown:
        words = plain(metric.shown(row))
        value = metric.value(row)
        if metric.numeric:  # an interval, say, has its words in the CSV too
            value = words if value is None and words != "-" else value
            result.append(Cell(words, value, row.trace if metric.profiled else row.results))
        else:
            status = "bad" if words == "busy" else STATUS_MARKS.get(row.status, "bad")
            result.append(Cell(words, mark={"label": "name", "status": status}.get(metric.key, "")))
    return result


# The lines below tables: reasons and load, ratios, noise, the other clock, stages, notes.


def remarks(rows: Rows, format: str) -> list[str]:
    reasons = [f"{row.name}: {row.status}: {row.reason}" for row in rows if row.reason]
    parts = [
        [*reasons, *filter(None, [doubts.beside_load(rows)])],
        _ratios(rows),
        _stages(rows),
        notes(rows),
    ]
    return [listed(lines, format) for lines in parts if lines]


def measured_again(rows: Rows) -> str:
    """Return a line, "8 of 18 rounds ran beside other load and were measured again (1, 3, ...)", or
    an empty one."""
    again = {
        number: max(row.repeated.get(number, 0) for row in rows)
        for row in rows
        for number in row.repeated
    }
    if not again:
        return ""
    repetitions = sum(again.values())
    every = repetitions + max(row.rounds for row in rows)
    numbers = ", ".join(map(str, sorted(again)))
    return (
        f"{repetitions} of {every} rounds ran beside other load and were measured again ({numbers})"
    )


def _ratios(rows: Rows) -> Lines:
    steps = [row.against_fastest for row in rows]
    losses = [row.loss_against_fastest for row in rows]  # the same object for a row without a step
    ranked = dict.fromkeys([*steps, *losses])
    lines = [verdict.over_fastest(ratio) for ratio in ranked if ratio and not ratio.is_fastest]
    return [*lines, *drifts(rows)]


def drifts(rows: Rows) -> Lines:
    return [verdict.drifting(ratio, drift) for ratio, drift in standing.drifts(rows)]


def _stages(rows: Rows) -> Lines:
    lines = []
    for row in rows:
        stages = [
            (scope, row.times_of(scope).stages, "ms")
            for scope in SCOPES
            if row.times_of(scope).stages
        ]
        if not stages and row.profile.label_us:
            stages = [("profiled", row.profile.label_us, "us")]
        for scope, parts, unit in stages:
            split = ", ".join(
                f"{short(plain(name))} {number(value, 3)} {unit}" for name, value in parts.items()
            )
            lines.append(f"{row.name} {scope}: {split}")
    return lines


def notes(rows: Rows) -> Lines:
    """Return which rounds were measured again, and each note once, with the rows that have it."""
    names_by_words = gathered(
        (doubt.words, row.name) for row in rows for doubt in doubts.doubts(row)
    )
    lines = [
        f"{', '.join(dict.fromkeys(names))}: {words}" for words, names in names_by_words.items()
    ]
    earlier = sum(len(row.earlier) for row in rows)
    hidden = (
        f"{count(earlier, 'earlier run')} of the same configuration not shown (--all-runs)"
        if earlier
        else ""
    )
    return list(filter(None, [measured_again(rows), *lines, stopped(rows), hidden]))


def stopped(rows: Rows) -> str:
    """Return a line on later runs that are empty, or an empty one."""
    return stopped_later([row.folder.name for newest in rows for row in newest.stopped])


# The screen.

#: Characters of a line where the width is not known.
WIDTH = 100
NARROWEST = 60
#: Marks of cells, and words, as ANSI codes.
COLORS = {"good": "32", "bad": "1;31", "title": "1"}
LONGEST_NAME = 40
MOST_LINES = 3  # of one remark
MOST_FAILURES = 5


class Terminal(NamedTuple):
    """Hold the characters of a line, and the ANSI codes of marks: none where nothing is
    coloured."""

    width: int = WIDTH
    colors: Mapping[str, str] = {}

    def painted(self, words: str, mark: str) -> str:
        return painted(words, mark, self.colors)

    def wrapped(self, text: str, most: int | None = MOST_LINES) -> Lines:
        """Return the lines of a remark, all but the first indented; "..." ends the last of
        `most`."""
        return wrapped(text, self.width, "  ", most)


#: The terminal where nothing is known of it, or there is none.
UNKNOWN = Terminal()


def this_terminal() -> Terminal:
    """Return the terminal as it is; NO_COLOR (no-color.org) and a dumb one have no colors."""
    if not sys.stdout.isatty():
        return UNKNOWN
    in_color = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    width = max(NARROWEST, shutil.get_terminal_size((WIDTH, 40)).columns)
    return Terminal(width, COLORS if in_color else {})


def screen(log: logs.Log, terminal: Terminal = UNKNOWN, folders: Sequence[Path] = ()) -> str:
    """Return what log folders have in lines that fit: runs and sweeps. folders: where a conformance
    matrix may be, besides docs/."""
    parts: list[Lines] = []
    for group in log.groups:
        parts += _blocks("answer", group.heading, group.rows, terminal)
        parts.append(_of_group(group, terminal, folders))
    sections = [parts]
    for sweep in log.sweeps:
        blocks = _blocks("answer-sweep", sweep.heading, sweep.rows, terminal)
        sections.append([*blocks, _of_sweep(sweep, terminal)])
    return "\n".join(spaced(blocks) for blocks in sections if blocks)


def _blocks(columns: str, heading: str, rows: Rows, terminal: Terminal) -> list[Lines]:
    measured = [row for row in rows if row.is_measured]
    return [
        wrapped(heading, terminal.width),
        fitting(columns, measured, terminal),
        [*failures(rows, terminal), *absent(rows, terminal), *correctness(rows, terminal)],
        load(rows, terminal),
    ]


# The table.


def fitting(name: str, rows: Rows, terminal: Terminal) -> Lines:
    """Return the lines of a table, grouped by cell and kind, with as many columns as there is room
    for."""
    every = metrics.columns(name, rows)
    titles = [
        ", ".join(filter(None, [settings.words(row.header.values), kind_title(row)]))
        for row in rows
    ]
    shown: list[metrics.Metric] = []
    lines: Lines = []
    for metric in sorted(every, key=lambda metric: metric.room):
        tried = [column for column in every if column in shown or column is metric]
        body = [[_marked(row, *pair) for pair in zip(tried, cells(row, tried))] for row in rows]
        fits = Table(name, "", list(map(_column, tried)), body)
        if not shown or max(map(len, aligned(fits, LONGEST_NAME).splitlines())) <= terminal.width:
            shown = tried
            lines = aligned(
                fits._replace(groups=titles), LONGEST_NAME, terminal.colors
            ).splitlines()
    return lines


def _marked(row: Row, metric: metrics.Metric, cell: Cell) -> Cell:
    return cell._replace(
        mark={"status": cell.mark, "verdict": "good" if row.is_fastest else ""}.get(metric.key, "")
    )


# Below it.


def wrapped(text: str, width: int, indent: str = "", most: int | None = None) -> Lines:
    """Return lines of at most `width` characters, all but the first indented; "..." ends the last
    of `most`."""
    lines = wrap(plain(text), width, subsequent_indent=indent, break_on_hyphens=False) or [""]
    if most is not None and len(lines) > most:
        lines = [*lines[: most - 1], f"{lines[most - 1][: width - 4].rstrip()} ..."]
    return lines


def failures(rows: Rows, terminal: Terminal) -> Lines:
    failed = [row for row in rows if row.status not in ("ok", *NOT_RUNNABLE)]
    lines: Lines = []
    for row in failed[:MOST_FAILURES]:
        reason = f"{row.name}: {row.status}: {row.reason or 'no reason known'}"
        first, *further = terminal.wrapped(reason, MOST_LINES + 1)
        lines += [terminal.painted(first, "bad"), *further]
    others = len(failed) - MOST_FAILURES
    return lines + ([f"and {others} more (--details)"] if others > 0 else [])


def absent(rows: Rows, terminal: Terminal) -> Lines:
    names_by_way = gathered(
        (_obtained(row), row.name) for row in rows if row.status in NOT_RUNNABLE
    )
    ways = "; ".join(f"{', '.join(names)} ({way})" for way, names in names_by_way.items())
    return terminal.wrapped(f"did not run: {ways}") if ways else []


def _obtained(row: Row) -> str:
    """Return in a few words what a row that cannot run needs."""
    reason = re.sub(r"^[a-z]+(-[\w-]+)?: ", "", row.reason)
    if python := re.match(r"needs Python [0-9.]+( or [0-9.]+)*", reason):
        return python[0]  # no set-up brings another Python
    if row.status == "unsupported" or "@" in row.name:
        device = re.search(r"; it runs on ([a-z ]+)", reason)
        return (
            f"needs {device[1].strip().upper()}" if device else reason.removeprefix(f"{row.name} ")
        )
    if set_up := re.search(r"`(make setup[^`]*)`", reason):
        return set_up[1]
    return f"manual install, see {command('list')}" if "install" in reason else reason


def correctness(rows: Rows, terminal: Terminal) -> Lines:
    """Return lines on the rows that agree with the oracle; the other judged rows are failures."""
    right = [row for row in rows if None not in row.errors and row.status == "ok"]
    if not right:
        return []
    loss = error(max(row.errors.loss or 0 for row in right))
    gradients = error(max(row.errors.gradient or 0 for row in right))
    where = (
        "at the measured size"
        if all(row.checked.at_size for row in right)
        else "at the size that was judged"
    )
    words = f"correct: {count(len(right), 'row')}, loss within {loss} and gradients within {gradients} of the float64 "
    words += f"oracle's {where}"
    errors_by_name = gathered((row.name, row.errors.gradient or 0) for row in right)
    limit = doubts.MARKED_ERROR
    above = [
        f"{name} {error(max(errors))}"
        for name, errors in errors_by_name.items()
        if max(errors) > limit
    ]
    if above:
        words += f"; gradients above {limit:.0e}: {', '.join(above)}"
    imprecise = dict.fromkeys(row.name for row in right if "imprecise" in doubts.kinds(row))
    if imprecise:
        words += f"; imprecise: {', '.join(imprecise)}"
    return terminal.wrapped(words, None)


def load(rows: Rows, terminal: Terminal) -> Lines:
    lines: Lines = []
    for line in filter(None, [doubts.beside_load(rows), *drifts(rows)]):
        lines += [terminal.painted(part, "bad") for part in terminal.wrapped(line, MOST_LINES + 1)]
    for line in filter(None, [measured_again(rows), stopped(rows)]):
        lines += terminal.wrapped(line)
    return lines


# The verdict.


def verdict_lines(answers: Mapping[str, str], terminal: Terminal, title: str = "") -> Lines:
    """Return VERDICT, the line `title`, and a line for each question with aligned answers."""
    room = max(map(len, answers), default=0) + 4
    lines = (
        [terminal.painted(line, "title") for line in terminal.wrapped(title, None)] if title else []
    )
    for question, answer in answers.items():
        first, *others = wrapped(answer, terminal.width - room, most=2 * MOST_LINES)
        lines += [f"  {question}:".ljust(room) + first, *(" " * room + line for line in others)]
    return [terminal.painted("VERDICT", "title"), *lines] if lines else []


def _of_sweep(sweep: Sweep, terminal: Terminal) -> Lines:
    """Return the lines of the verdict on a sweep: the fastest exact loss of each combination."""
    answers = {
        settings.words(values): in_words(verdict.answer(pick, verdict.time_of(pick.scope)))
        for values, rows in sweep.cells()
        if (pick := verdict.fastest(rows))
    }
    return verdict_lines(answers, terminal, "The fastest exact loss") if answers else []


def _of_group(group: Group, terminal: Terminal, folders: Sequence[Path]) -> Lines:
    """Return the lines of the verdict on a group."""
    answers: dict[str, verdict.Words] = {}
    fastest, logits, smallest, approximate = verdict.picks(group.rows, folders)
    if fastest:
        answers["fastest exact"] = verdict.answer(fastest, verdict.time_of(fastest.scope))
        products = verdict.of_products(fastest, group.rows)
        if products:
            answers["torch's products"] = [products]
        since = verdict.since(fastest.row, group.rows, fastest.scope)
        if since and not fastest.withheld:
            question, words = since
            answers[question] = [words]
    if logits and logits.step:
        answers["given logits"] = verdict.logits_words(logits)
    if smallest:
        answers["smallest exact"] = verdict.answer(smallest, verdict.PEAK)
    if approximate:
        answers["approximate"] = verdict.approximate(approximate)
    if fastest and not fastest.withheld:
        question, words = verdict.cautions(fastest)
        answers[question] = [words]
    title = verdict.headline(fastest, smallest) if fastest else ""
    return verdict_lines({key: in_words(words) for key, words in answers.items()}, terminal, title)
