"""Show rows as text: on a screen the answer first, a table by kind, what did not run, correctness, the verdict; with
--details a whole table for each configuration or sweep, with remarks below.  CSV and JSON: see present/text.py.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path
from textwrap import wrap
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple, Union

from rnnt_bench.analysis import doubts, logs, metrics, standing, verdict
from rnnt_bench.analysis.groups import Group, is_numeric, kind_title
from rnnt_bench.analysis.row import SCOPES, Row
from rnnt_bench.core import settings
from rnnt_bench.core.called import command
from rnnt_bench.core.errors import NOT_RUNNABLE
from rnnt_bench.core.text import count, error, gathered, number, plain, short
from rnnt_bench.present.parts import Cell, Column, Table, Values
from rnnt_bench.present.parts import words as in_words
from rnnt_bench.present.text import aligned, block, csv_text, json_text, listed, painted, spaced, stopped_later

Lines = List[str]
FORMATS = ("table", "markdown", "csv", "json")
STATUS_MARKS = {"ok": "good", **dict.fromkeys(NOT_RUNNABLE, "quiet")}


def whole(log: logs.Log, format: str = "table") -> str:
    sweeps, every = log.sweeps, log.groups  # which ranks them
    parts: List[List[Union[Table, str]]] = []
    parts.append([*(table("results", group.heading, group.rows) for group in every), *remarks(log.rows, format)])
    for sweep in sweeps:
        parts.append([table("sweep", sweep.heading, sweep.rows, "sweep"), *remarks(sweep.rows, format)])
    shown = [[each if isinstance(each, str) else block(each, format) for each in blocks] for blocks in parts if blocks]
    return "\n".join("\n\n".join(blocks) + "\n" for blocks in shown)


def exported(log: logs.Log, others: Sequence[Values], format: str) -> str:
    """Return all rows as "csv" or "json", those of the losses first.  others: rows of tools, which name their tool."""
    _, sweeps = log.groups, log.sweeps  # the groups rank the rows
    rows = [*log.rows, *(row for sweep in sweeps for row in sweep.rows)]
    further = metrics.differing(rows)
    if format == "csv":
        return csv_text([*(metrics.plain(row, further) for row in rows), *others])
    return json_text([*(metrics.exported(row, further) for row in rows), *others])


def table(of: str, title: str, rows: Sequence[Row], name: str = "results") -> Table:
    shown = metrics.columns(of, rows)
    keys = rows[0].header.values if rows else ()
    lead = [Column(settings.flag(key), is_numeric([row.header.values[key] for row in rows])) for key in keys]
    swept = [[Cell(settings.worded(value), value) for value in row.header.values.values()] for row in rows]
    body = [[*first, *cells(row, shown)] for first, row in zip(swept, rows)]
    return Table(name, title, [*lead, *(Column(each.title, each.numeric) for each in shown)], body)


def cells(row: Row, shown: Sequence[metrics.Metric]) -> List[Cell]:
    result = []
    for metric in shown:
        words, value = plain(metric.shown(row)), metric.value(row)
        if metric.numeric:  # an interval, say, has its words in the CSV too
            value = words if value is None and words != "-" else value
            result.append(Cell(words, value, row.trace if metric.profiled else row.results))
        else:
            status = "bad" if words == "busy" else STATUS_MARKS.get(row.status, "bad")
            result.append(Cell(words, mark={"label": "name", "status": status}.get(metric.key, "")))
    return result


# The lines below tables: reasons and load, ratios, noise, the other clock, stages, notes.


def remarks(rows: Sequence[Row], format: str) -> List[str]:
    reasons = [f"{row.name}: {row.status}: {row.reason}" for row in rows if row.reason]
    parts = [[*reasons, *filter(None, [doubts.beside_load(rows)])], _ratios(rows), _stages(rows), notes(rows)]
    return [listed(lines, format) for lines in parts if lines]


def measured_again(rows: Sequence[Row]) -> str:
    """Return a line, "8 of 18 rounds ran beside other load and were measured again (1, 3, ...)", or an empty one."""
    again = {number: max(row.repeated.get(number, 0) for row in rows) for row in rows for number in row.repeated}
    if not again:
        return ""
    every = sum(again.values()) + max(row.rounds for row in rows)
    numbers = ", ".join(map(str, sorted(again)))
    return f"{sum(again.values())} of {every} rounds ran beside other load and were measured again ({numbers})"


def _ratios(rows: Sequence[Row]) -> Lines:
    pairs = [(row.against_fastest, row.loss_against_fastest) for row in rows]
    compared = [step for step, _ in pairs if step] + [loss for step, loss in pairs if loss and loss is not step]
    return [*(verdict.over_fastest(each) for each in compared if not each.is_fastest), *drifts(rows)]


def drifts(rows: Sequence[Row]) -> Lines:
    return [verdict.drifting(*each) for each in standing.drifts(rows)]


def _stages(rows: Sequence[Row]) -> Lines:
    lines = []
    for row in rows:
        stages = [(scope, row.times_of(scope).stages, "ms") for scope in SCOPES if row.times_of(scope).stages]
        if not stages and row.profile.label_us:
            stages = [("profiled", row.profile.label_us, "us")]
        for scope, parts, unit in stages:
            split = ", ".join(f"{short(plain(name))} {number(value, 3)} {unit}" for name, value in parts.items())
            lines.append(f"{row.name} {scope}: {split}")
    return lines


def notes(rows: Sequence[Row]) -> Lines:
    """Return which rounds were measured again, and each note once, with the rows that have it."""
    names_by_words = gathered((doubt.words, row.name) for row in rows for doubt in doubts.doubts(row))
    lines = [f"{', '.join(dict.fromkeys(names))}: {words}" for words, names in names_by_words.items()]
    lines = [*filter(None, [measured_again(rows)]), *lines, *filter(None, [stopped(rows)])]
    earlier = sum(len(row.earlier) for row in rows)
    hidden = f"{count(earlier, 'earlier run')} of the same configuration not shown (--all-runs)"
    return [*lines, hidden] if earlier else lines


def stopped(rows: Sequence[Row]) -> str:
    """Return a line on later runs that are empty, or an empty one."""
    return stopped_later([row.folder.name for newest in rows for row in newest.stopped])


# The screen.

#: Characters of a line where the width is not known.
WIDTH = 100
NARROWEST = 60
#: Marks of cells, and words, as ANSI codes.
COLORS = {"good": "32", "bad": "1;31", "title": "1"}
NO_COLORS: Mapping[str, str] = {}
LONGEST_NAME = 40
MOST_LINES = 3  # of one remark
MOST_FAILURES = 5


def how() -> Dict[str, Any]:
    """Return `width` and `colors` as the terminal has them; NO_COLOR (no-color.org) and a dumb terminal have no
    colors."""
    if not sys.stdout.isatty():
        return {"width": WIDTH, "colors": NO_COLORS}
    in_color = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    width = max(NARROWEST, shutil.get_terminal_size((WIDTH, 40)).columns)
    return {"width": width, "colors": COLORS if in_color else NO_COLORS}


def screen(
    log: logs.Log, width: int = WIDTH, colors: Mapping[str, str] = NO_COLORS, folders: Sequence[Path] = ()
) -> str:
    """Return what log folders have in lines of at most `width`: runs and sweeps. folders: where a conformance
    matrix may be, besides docs/."""
    parts = []
    blocks = [
        _blocks("answer", group.heading, group.rows, width, colors, *_answers(group, folders)) for group in log.groups
    ]
    parts.append([block for of_group in blocks for block in of_group])
    for sweep in log.sweeps:
        picks = ((settings.words(values), verdict.fastest(rows)) for values, rows in sweep.cells())
        answers = {cell: verdict.answer(pick, verdict.time_of(pick.scope)) for cell, pick in picks if pick}
        first = "The fastest exact loss" if answers else ""
        parts.append(_blocks("answer-sweep", sweep.heading, sweep.rows, width, colors, first, answers))
    return "\n".join(spaced(blocks) for blocks in parts if blocks)


def _blocks(
    of: str,
    head: str,
    rows: Sequence[Row],
    width: int,
    colors: Mapping[str, str],
    first: str,
    answers: Mapping[str, verdict.Words],
) -> List[List[str]]:
    return [
        wrapped(head, width),
        fitting(of, [row for row in rows if row.is_measured], width, colors),
        [*failures(rows, width, colors), *absent(rows, width), *correctness(rows, width)],
        load(rows, width, colors),
        verdict_lines({name: in_words(words) for name, words in answers.items()}, width, colors, first),
    ]


# The table.


def fitting(name: str, rows: Sequence[Row], width: int, colors: Mapping[str, str]) -> List[str]:
    """Return the lines of a table, grouped by cell and kind, with as many columns as there is room for."""
    every = metrics.columns(name, rows)
    titles = [", ".join(filter(None, [settings.words(row.header.values), kind_title(row)])) for row in rows]
    shown: List[metrics.Metric] = []
    lines: List[str] = []
    for metric in sorted(every, key=lambda metric: metric.room):
        tried = [each for each in every if each in shown or each is metric]
        body = [[_marked(row, *pair) for pair in zip(tried, cells(row, tried))] for row in rows]
        made = Table(name, "", [Column(each.title, each.numeric) for each in tried], body)
        if not shown or max(map(len, aligned(made, LONGEST_NAME).splitlines())) <= width:
            shown, lines = tried, aligned(made._replace(groups=titles), LONGEST_NAME, colors).splitlines()
    return lines


def _marked(row: Row, metric: metrics.Metric, cell: Cell) -> Cell:
    return cell._replace(mark={"status": cell.mark, "verdict": "good" if row.is_fastest else ""}.get(metric.key, ""))


# Below it.


def wrapped(text: str, width: int, indent: str = "", most: Optional[int] = None) -> List[str]:
    """Return lines of at most `width` characters, all but the first indented; "..." ends the last of `most`."""
    lines = wrap(plain(text), width, subsequent_indent=indent, break_on_hyphens=False) or [""]
    if most is not None and len(lines) > most:
        lines = [*lines[: most - 1], f"{lines[most - 1][: width - 4].rstrip()} ..."]
    return lines


def failures(rows: Sequence[Row], width: int, colors: Mapping[str, str]) -> List[str]:
    failed = [row for row in rows if row.status not in ("ok", *NOT_RUNNABLE)]
    lines: List[str] = []
    for row in failed[:MOST_FAILURES]:
        reason = f"{row.name}: {row.status}: {row.reason or 'no reason known'}"
        first, *further = wrapped(reason, width, "  ", MOST_LINES + 1)
        lines += [painted(first, "bad", colors), *further]
    others = len(failed) - MOST_FAILURES
    return lines + ([f"and {others} more (--details)"] if others > 0 else [])


def absent(rows: Sequence[Row], width: int) -> List[str]:
    names_by_way = gathered((_obtained(row), row.name) for row in rows if row.status in NOT_RUNNABLE)
    if not names_by_way:
        return []
    ways = "; ".join(f"{', '.join(names)} ({how})" for how, names in names_by_way.items())
    return wrapped(f"did not run: {ways}", width, "  ", MOST_LINES)


def _obtained(row: Row) -> str:
    """Return in a few words what a row that cannot run needs."""
    reason = re.sub(r"^[a-z]+(-[\w-]+)?: ", "", row.reason)
    needs, set_up = re.search(r"; it runs on ([a-z ]+)", reason), re.search(r"`(make setup[^`]*)`", reason)
    if python := re.match(r"needs Python [0-9.]+( or [0-9.]+)*", reason):
        return python[0]  # which no set-up brings
    if row.status == "unsupported" or "@" in row.name:
        return f"needs {needs[1].strip().upper()}" if needs else reason
    return set_up[1] if set_up else f"manual install, see {command('list')}" if "install" in reason else reason


def correctness(rows: Sequence[Row], width: int) -> List[str]:
    """Return lines on the rows that agree with the oracle; the other judged rows are failures."""
    right = [row for row in rows if None not in row.errors and row.status == "ok"]
    if not right:
        return []
    loss, gradients = (error(max(row.errors[index] or 0 for row in right)) for index in (0, 1))
    where = "at the measured size" if all(row.checked.at_size for row in right) else "at the size that was judged"
    by_name = {row.name: [each.errors[1] or 0 for each in right if each.name == row.name] for row in right}
    above = ", ".join(f"{name} {error(max(of))}" for name, of in by_name.items() if max(of) > metrics.MARKED_ERROR)
    unsure = ", ".join(dict.fromkeys(row.name for row in right if "imprecise" in doubts.kinds(row)))
    parts = [
        f"correct: {count(len(right), 'row')}, loss within {loss} and gradients within {gradients} of the float64 "
        f"oracle's {where}",
        above and f"gradients above {metrics.MARKED_ERROR:.0e}: {above}",
        unsure and f"imprecise: {unsure}",
    ]
    return wrapped("; ".join(filter(None, parts)), width, "  ")


def load(rows: Sequence[Row], width: int, colors: Mapping[str, str]) -> List[str]:
    lines = filter(None, [doubts.beside_load(rows), *drifts(rows)])
    bad = [painted(part, "bad", colors) for line in lines for part in wrapped(line, width, "  ", MOST_LINES + 1)]
    others = filter(None, [measured_again(rows), stopped(rows)])
    return [*bad, *(part for line in others for part in wrapped(line, width, "  ", MOST_LINES))]


# The verdict.


def verdict_lines(answers: Mapping[str, str], width: int, colors: Mapping[str, str], first: str = "") -> List[str]:
    """Return VERDICT, the line `first`, and a line for each question with aligned answers."""
    room = max(map(len, answers), default=0) + 4
    lines = [painted(line, "title", colors) for line in wrapped(first, width, "  ")] if first else []
    for question, answer in answers.items():
        first, *others = wrapped(answer, width - room, most=2 * MOST_LINES)
        lines += [f"  {question}:".ljust(room) + first, *(" " * room + line for line in others)]
    return [painted("VERDICT", "title", colors), *lines] if lines else []


def _answers(group: Group, folders: Sequence[Path]) -> Tuple[str, Dict[str, verdict.Words]]:
    rows, answers = group.rows, {}
    quick, logits, small, approximate = verdict.picks(rows, folders)
    if quick:
        answers["fastest exact"] = verdict.answer(quick, verdict.time_of(quick.scope))
        products = verdict.of_products(quick, rows)
        if products:
            answers["torch's products"] = [products]
        changed = verdict.since(quick.row, rows, quick.scope)
        if changed and not quick.withheld:
            answers[changed[0]] = [changed[1]]
    if logits and logits.step:
        answers["given logits"] = verdict.logits_words(logits)
    if small:
        answers["smallest exact"] = verdict.answer(small, verdict.PEAK)
    if approximate:
        answers["approximate"] = verdict.approximate(approximate)
    if quick and not quick.withheld:
        question, words = verdict.cautions(quick)
        answers[question] = [words]
    return verdict.headline(quick, small) if quick else "", answers
