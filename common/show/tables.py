"""Show rows as text.

`screen` answers first: a short table by kind, what did not run, correctness, the verdict. `whole`
(--details) has all columns of each configuration or sweep, with remarks below. `exported` is for
CSV and JSON, which present/text.py writes.
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
#: Status, as tables show it -> mark of its cell (a class of page.css).
STATUS_MARKS = {"ok": "good", "imprecise": "good", **dict.fromkeys(NOT_RUNNABLE, "quiet")}


def whole(log: logs.Log, format: str = "table", folders: Sequence[Path] = ()) -> str:
    """Return the whole tables of all configurations, then of each sweep, with remarks below.

    format: "table", with verdicts below the tables, or "markdown", without verdicts
    folders: where a conformance matrix may be, besides docs/
    """
    with_verdict = format == "table"
    blocks = []
    for group in log.groups:
        blocks.append(block(table("results", group.heading, group.rows), format))
        if with_verdict:
            blocks.append("\n".join(_group_verdict(group, terminal=UNKNOWN, folders=folders)))
    sections = [[*blocks, *remarks(log.rows, format)]]
    for sweep in log.sweeps:
        blocks = [block(table("sweep", sweep.heading, sweep.rows, "sweep"), format)]
        if with_verdict:
            blocks.append("\n".join(_sweep_verdict(sweep, terminal=UNKNOWN)))
        for values, rows in sweep.cells():
            blocks += [f"{settings.words(values)}:", *remarks(rows, format)]
        sections.append(blocks)
    return "\n".join("\n\n".join(filter(None, section)) + "\n" for section in sections if section)


def exported(log: logs.Log, tool_rows: Sequence[Values], format: str) -> str:
    """Return all rows as "csv" or "json": those of the losses, then `tool_rows`."""
    _ = log.groups  # reading it sets the ratio of each row over the fastest of its group
    rows = [*log.rows, *(row for sweep in log.sweeps for row in sweep.rows)]
    differing = metrics.differing(rows)
    if format == "csv":
        return csv_text([*(metrics.plain(row, differing) for row in rows), *tool_rows])
    return json_text([*(metrics.exported(row, differing) for row in rows), *tool_rows])


def table(columns: str, title: str, rows: Rows, name: str = "results") -> Table:
    """Return a table of rows: the settings that were swept, then metrics.

    columns: the name of a table in analysis/metrics.py, which has the metrics; name, title: of the
    new table."""
    shown = metrics.columns(columns, rows)
    keys = rows[0].header.values if rows else ()
    heads = [
        Column(settings.flag(key), is_numeric([row.header.values[key] for row in rows]))
        for key in keys
    ]
    body = []
    for row in rows:
        swept = [Cell(settings.worded(value), value) for value in row.header.values.values()]
        body.append([*swept, *(_cell(row, metric) for metric in shown)])
    return Table(name, title, [*heads, *map(_column, shown)], body)


def _column(metric: metrics.Metric) -> Column:
    return Column(metric.title, metric.numeric)


def _cell(row: Row, metric: metrics.Metric) -> Cell:
    """Return what a metric shows of a row; a number links to the file that it is from."""
    words = plain(metric.shown(row))
    if metric.numeric:
        value = metric.value(row)
        # Words without a number, such as an interval, are their own value; "-" has none.
        if value is None and words != "-":
            value = words
        return Cell(words, value, row.trace if metric.profiled else row.results)
    if metric.key == "label":
        return Cell(words, mark="name")
    if metric.key == "status":
        return Cell(words, mark=STATUS_MARKS.get(words, "bad"))
    return Cell(words)


# The lines below tables: reasons and load, ratios, noise, the other clock, stages, notes.


def remarks(rows: Rows, format: str) -> list[str]:
    """Return the paragraphs below a whole table: failures and load, ratios, stages, notes.

    A paragraph without lines is left out.  format: "markdown", or "table" for the terminal."""
    failed = [f"{row.name}: {row.status}: {row.reason}" for row in rows if row.reason]
    loaded = doubts.beside_load(rows)
    paragraphs = [
        [*failed, loaded] if loaded else failed,
        _ratios(rows),
        _stages(rows),
        notes(rows),
    ]
    return [listed(lines, format) for lines in paragraphs if lines]


def _ratios(rows: Rows) -> Lines:
    """Return a line for each ratio over the fastest row, then one for each ratio that drifts over
    the rounds."""
    steps = [row.against_fastest for row in rows]
    losses = [row.loss_against_fastest for row in rows]
    distinct = dict.fromkeys([*steps, *losses])  # a row without a step has one ratio in both lists
    lines = [verdict.ratio_remark(ratio) for ratio in distinct if ratio and not ratio.is_fastest]
    return [*lines, *drifts(rows)]


def drifts(rows: Rows) -> Lines:
    """Return a line for each ratio that drifts over the rounds."""
    return [verdict.drift_remark(ratio, drift) for ratio, drift in standing.drifts(rows)]


def _stages(rows: Rows) -> Lines:
    """Return a line for each row and scope that was timed in stages, such as
    "fused step: joiner 1.2 ms, loss 3.4 ms".

    A row that was timed in none gets a line from its trace, such as "fused profiled: ... us"."""
    lines = []
    for row in rows:
        timed = {scope: row.times_of(scope).stages for scope in SCOPES}
        for scope, stages in timed.items():
            if stages:
                lines.append(f"{row.name} {scope}: {_split(stages, 'ms')}")
        if row.profile.label_us and not any(timed.values()):
            lines.append(f"{row.name} profiled: {_split(row.profile.label_us, 'us')}")
    return lines


def _split(stages: Mapping[str, float], unit: str) -> str:
    """Return "joiner 1.2 ms, loss 3.4 ms"."""
    return ", ".join(
        f"{short(plain(name))} {number(value, 3)} {unit}" for name, value in stages.items()
    )


def notes(rows: Rows) -> Lines:
    """Return the notes on a table: rounds measured again, each doubt with the rows that have it,
    later runs that measured nothing, and the number of earlier runs that are not shown."""
    names_by_doubt = gathered(
        (doubt.words, row.name) for row in rows for doubt in doubts.doubts(row)
    )
    lines = [
        f"{', '.join(dict.fromkeys(names))}: {words}" for words, names in names_by_doubt.items()
    ]
    lines = [measured_again(rows), *lines, stopped(rows)]
    earlier = sum(len(row.earlier) for row in rows)
    if earlier:
        runs = count(earlier, "earlier run")
        lines.append(f"{runs} of the same configuration not shown (--all-runs)")
    return list(filter(None, lines))


def measured_again(rows: Rows) -> str:
    """Return "8 of 18 rounds ran beside other load and were measured again (1, 3, ...)"; "" if none
    was.

    The 8 are the repetitions of all rounds: those of a round are the most that a row has.  The 18
    are these and the rounds that count.  In brackets are the numbers of the repeated rounds."""
    repetitions: dict[int, int] = {}
    for row in rows:
        for round_number, times in row.repeated.items():
            repetitions[round_number] = max(times, repetitions.get(round_number, 0))
    if not repetitions:
        return ""
    again = sum(repetitions.values())
    total = again + max(row.rounds for row in rows)
    numbers = ", ".join(map(str, sorted(repetitions)))
    return f"{again} of {total} rounds ran beside other load and were measured again ({numbers})"


def stopped(rows: Rows) -> str:
    """Return a line on later runs that measured nothing; "" if there are none."""
    return stopped_later([row.folder.name for newest in rows for row in newest.stopped])


# The screen.

#: Characters of a line: where the terminal's width is not known, and at least.
WIDTH = 100
NARROWEST = 60
#: Mark -> ANSI code: green, bold red, bold.
COLORS = {"good": "32", "bad": "1;31", "title": "1"}
LONGEST_NAME = 40  # characters of a cell
MOST_LINES = 3  # of one remark
MOST_FAILURES = 5  # that are named


class Terminal(NamedTuple):
    """Hold the width of a line in characters, and the ANSI code of each mark, {} for no colours."""

    width: int = WIDTH
    colors: Mapping[str, str] = {}

    def painted(self, words: str, mark: str) -> str:
        """Return words in the colour of a mark; as they are on a terminal without colours."""
        return painted(words, mark, self.colors)

    def wrapped(self, text: str, most: int | None = MOST_LINES) -> Lines:
        """Return a remark as lines that fit, at most `most` of them; see the function `wrapped`."""
        return wrapped(text, self.width, "  ", most)


#: Stands for a file, or a terminal of which nothing is known.
UNKNOWN = Terminal()


def this_terminal() -> Terminal:
    """Return the terminal of stdout; UNKNOWN if stdout is no terminal.

    It has no colours if NO_COLOR (no-color.org) is set, or TERM is "dumb"."""
    if not sys.stdout.isatty():
        return UNKNOWN
    in_color = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    width = max(NARROWEST, shutil.get_terminal_size(fallback=(WIDTH, 40)).columns)
    return Terminal(width, COLORS if in_color else {})


def screen(log: logs.Log, terminal: Terminal = UNKNOWN, folders: Sequence[Path] = ()) -> str:
    """Return the losses and sweeps of a log, each with its verdict, in lines that fit.

    folders: where a conformance matrix may be, besides docs/.
    """
    blocks: list[Lines] = []
    for group in log.groups:
        blocks += _blocks("answer", group.heading, group.rows, terminal)
        blocks.append(_group_verdict(group, terminal, folders))
    sections = [blocks]
    for sweep in log.sweeps:
        blocks = _blocks("answer-sweep", sweep.heading, sweep.rows, terminal)
        sections.append([*blocks, _sweep_verdict(sweep, terminal)])
    return "\n".join(spaced(blocks) for blocks in sections if blocks)


def _blocks(columns: str, heading: str, rows: Rows, terminal: Terminal) -> list[Lines]:
    """Return the blocks above a verdict: the heading, the table, then failures, absent losses and
    correctness of its rows, and the load beside them.

    columns: the name of the table, see `fitting`"""
    measured = [row for row in rows if row.is_measured]
    return [
        wrapped(heading, terminal.width),
        fitting(columns, measured, terminal),
        [*failures(rows, terminal), *absent(rows, terminal), *correctness(rows, terminal)],
        load(rows, terminal),
    ]


# The table.


def fitting(name: str, rows: Rows, terminal: Terminal) -> Lines:
    """Return the lines of the table `name` of analysis/metrics.py, grouped by swept settings and
    kind, with as many columns as the terminal has room for.

    Columns are tried in the order of their metric's `room`.  The first is always shown, and a
    column that does not fit is left out."""
    columns = metrics.columns(name, rows)
    titles = [
        ", ".join(filter(None, [settings.words(row.header.values), kind_title(row)]))
        for row in rows
    ]
    shown: list[metrics.Metric] = []
    lines: Lines = []
    for metric in sorted(columns, key=lambda metric: metric.room):
        tried = [column for column in columns if column in shown or column is metric]
        body = [[_screen_cell(row, column) for column in tried] for row in rows]
        tried_table = Table(name, "", list(map(_column, tried)), body)
        # The width is measured without colours and without the titles of groups.
        plain_lines = aligned(tried_table, LONGEST_NAME).splitlines()
        if not shown or max(map(len, plain_lines)) <= terminal.width:
            shown = tried
            grouped = tried_table._replace(groups=titles)
            lines = aligned(grouped, LONGEST_NAME, terminal.colors).splitlines()
    return lines


def _screen_cell(row: Row, metric: metrics.Metric) -> Cell:
    """Return what a screen shows of a row's metric.  Only a status, and the verdict of the fastest
    row, have a colour."""
    cell = _cell(row, metric)
    if metric.key == "verdict":
        return cell._replace(mark="good" if row.is_fastest else "")
    return cell if metric.key == "status" else cell._replace(mark="")


# Below the table.


def wrapped(text: str, width: int, indent: str = "", most: int | None = None) -> Lines:
    """Return lines of at most `width` characters, with `indent` before all but the first.

    most: largest number of lines; if the text needs more, the last of these is cut and ends in
        " ...". None is no limit.
    """
    lines = wrap(plain(text), width, subsequent_indent=indent, break_on_hyphens=False) or [""]
    if most is not None and len(lines) > most:
        lines = [*lines[: most - 1], f"{lines[most - 1][: width - 4].rstrip()} ..."]
    return lines


def failures(rows: Rows, terminal: Terminal) -> Lines:
    """Return lines on the first rows that failed, each with its reason, and the number of
    others."""
    failed = [row for row in rows if row.status not in ("ok", *NOT_RUNNABLE)]
    lines: Lines = []
    for row in failed[:MOST_FAILURES]:
        reason = f"{row.name}: {row.status}: {row.reason or 'no reason known'}"
        first, *further = terminal.wrapped(reason, MOST_LINES + 1)
        lines += [terminal.painted(first, "bad"), *further]
    others = len(failed) - MOST_FAILURES
    if others > 0:
        lines.append(f"and {others} more (--details)")
    return lines


def absent(rows: Rows, terminal: Terminal) -> Lines:
    """Return "did not run: k2, fast_rnnt (make setup-k2); ..." in lines; [] if all could run."""
    names_by_need = gathered((_need(row), row.name) for row in rows if row.status in NOT_RUNNABLE)
    needs = "; ".join(f"{', '.join(names)} ({need})" for need, names in names_by_need.items())
    return terminal.wrapped(f"did not run: {needs}") if needs else []


def _need(row: Row) -> str:
    """Return in a few words what a row that could not run needs: a Python, a device, a command.

    Its reason is a message that was written for a single row, so the words are cut out of it."""
    reason = re.sub(r"^[a-z]+(-[\w-]+)?: ", "", row.reason)  # "k2-pruned: needs Python 3.10"
    python = re.match(r"needs Python [0-9.]+( or [0-9.]+)*", reason)
    if python:
        return python[0]  # no set-up brings another Python
    # A row with an "@" may lack its condition, which no installation of a package brings.
    if row.status == "unsupported" or "@" in row.name:
        # "apex has no cpu version; it runs on cuda"
        device = re.search(r"; it runs on ([a-z ]+)", reason)
        if device:
            return f"needs {device[1].strip().upper()}"
        return reason.removeprefix(f"{row.name} ")
    set_up = re.search(r"`(make setup[^`]*)`", reason)
    if set_up:
        return set_up[1]
    return f"manual install, see {command('list')}" if "install" in reason else reason


def correctness(rows: Rows, terminal: Terminal) -> Lines:
    """Return lines on the rows that agree with the oracle; [] if there are none.

    Rows that do not agree have the status "error", and are among `failures`."""
    right = [row for row in rows if None not in row.errors and row.status == "ok"]
    if not right:
        return []
    losses = [row.errors.loss or 0 for row in right]
    gradients = [row.errors.gradient or 0 for row in right]
    at_size = all(row.checked.at_size for row in right)
    sentence = (
        f"correct: {count(len(right), 'row')}, loss within {error(max(losses))} and gradients "
        f"within {error(max(gradients))} of the float64 oracle's "
        f"{'at the measured size' if at_size else 'at the size that was judged'}"
    )
    gradients_by_name = gathered((row.name, value) for row, value in zip(right, gradients))
    limit = doubts.MARKED_ERROR
    above = [
        f"{name} {error(max(values))}"
        for name, values in gradients_by_name.items()
        if max(values) > limit
    ]
    if above:
        sentence += f"; gradients above {limit:.0e}: {', '.join(above)}"
    imprecise = dict.fromkeys(row.name for row in right if "imprecise" in doubts.kinds(row))
    if imprecise:
        sentence += f"; imprecise: {', '.join(imprecise)}"
    return terminal.wrapped(sentence, most=None)


def load(rows: Rows, terminal: Terminal) -> Lines:
    """Return lines of warnings, in red, and then of remarks.

    The warnings are of other load and of drift, the remarks of rounds that were measured again and
    of stopped runs."""
    lines: Lines = []
    for warning in filter(None, [doubts.beside_load(rows), *drifts(rows)]):
        parts = terminal.wrapped(warning, MOST_LINES + 1)
        lines += [terminal.painted(part, "bad") for part in parts]
    for remark in filter(None, [measured_again(rows), stopped(rows)]):
        lines += terminal.wrapped(remark)
    return lines


# The verdict.


def verdict_lines(answers: Mapping[str, str], terminal: Terminal, title: str = "") -> Lines:
    """Return the line "VERDICT", the title, and the answers, aligned, each behind its question.

    Return [] if there are neither answers nor a title."""
    if not answers and not title:
        return []
    lines = ["VERDICT", *(terminal.wrapped(title, most=None) if title else [])]
    lines = [terminal.painted(line, "title") for line in lines]
    # The column of the questions has an indent of two spaces, a question, a colon and a space.
    column = max(map(len, answers), default=0) + 4
    for question, answer in answers.items():
        first, *others = wrapped(answer, terminal.width - column, most=2 * MOST_LINES)
        lines += [f"  {question}:".ljust(column) + first, *(" " * column + line for line in others)]
    return lines


def _sweep_verdict(sweep: Sweep, terminal: Terminal) -> Lines:
    """Return the verdict on a sweep: the fastest exact loss of each combination of settings that
    has one; [] if none has one."""
    answers = {}
    for values, rows in sweep.cells():
        fastest = verdict.fastest(rows)
        if fastest:
            answer = verdict.answer(fastest, verdict.time_of(fastest.scope))
            answers[settings.words(values)] = in_words(answer)
    return verdict_lines(answers, terminal, "The fastest exact loss") if answers else []


def _group_verdict(group: Group, terminal: Terminal, folders: Sequence[Path]) -> Lines:
    """Return the verdict on a configuration: its fastest exact loss, the fastest loss from given
    logits, the smallest exact loss, an approximation, and what to beware of in the fastest.

    Below the fastest exact loss stand, if they are known, how much of the next loss's time torch's
    slow matrix products take, and the change since an earlier day.

    folders: where a conformance matrix may be, besides docs/"""
    answers: dict[str, verdict.Sentence] = {}  # question, at the begin of a line -> answer
    fastest, logits, smallest, approximate = verdict.picks(group.rows, folders)
    if fastest:
        answers["fastest exact"] = verdict.answer(fastest, verdict.time_of(fastest.scope))
        products = verdict.products_answer(fastest, group.rows)
        if products:
            answers["torch's products"] = [products]
        change = verdict.change_since(fastest.row, group.rows, fastest.scope)
        if change and not fastest.withheld:
            since, words = change
            answers[since] = [words]
    if logits and logits.step:  # without times of steps, the fastest is by the loss alone already
        answers["given logits"] = verdict.logits_answer(logits)
    if smallest:
        answers["smallest exact"] = verdict.answer(smallest, verdict.PEAK)
    if approximate:
        answers["approximate"] = verdict.approximate_answer(approximate)
    if fastest and not fastest.withheld:
        question, cautions = verdict.cautions(fastest)
        answers[question] = [cautions]
    title = verdict.headline(fastest, smallest) if fastest else ""
    texts = {question: in_words(answer) for question, answer in answers.items()}
    return verdict_lines(texts, terminal, title)
