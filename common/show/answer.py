"""Show rows on a screen, the answer first: a table by kind, what did not run, correctness, the verdict.

Stages, options, limits, errors at size and notes are in results.py's tables (--details).
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path
from textwrap import wrap
from typing import Any, Dict, List, Mapping, Optional, Sequence

from common.analysis import metrics, verdict
from common.analysis.groups import Sweep, groups, heading, kind_title
from common.analysis.logs import Log
from common.analysis.metrics import MARKED_ERROR, Metric
from common.analysis.row import Row
from common.analysis.verdict import Words
from common.core import grid
from common.core.errors import NOT_RUNNABLE
from common.core.text import count, error, gathered, plain
from common.present.parts import Cell, Table
from common.present.parts import words as in_words
from common.present.text import aligned, painted, spaced
from common.show import results

#: Characters of a line where the width is not known.
WIDTH = 100
NARROWEST = 60
#: Marks of cells, and words, as ANSI codes.
COLORS = {"good": "32", "bad": "1;31", "title": "1"}
NO_COLORS: Mapping[str, str] = {}
#: The columns in the order in which they get room.
FIRST = (
    *(
        "name",
        "status",
        "step_median",
        "ratio",
        "verdict",
        "peak_mb",
        "loss_median",
        "interval",
        "half",
        "loss_ratio",
    ),
    "gap",
    *("largest", "limited_by", "utterances_per_second", "largest_mb", "within"),
    *("torch", "frames_per_second", "profiled_us", "profiled_mb", "measured_error", "limits", "heaviest"),
)
LONGEST_NAME = 40
EMPTY = {"status": {"ok"}}  # by metric: words that tell nothing
MOST_LINES = 3  # of one remark
MOST_FAILURES = 5


def how() -> Dict[str, Any]:
    """Return `width` and `colors` as the terminal has them; WIDTH, and no colors, where stdout is none.

    NO_COLOR (no-color.org) and a dumb terminal have no colors."""
    if not sys.stdout.isatty():
        return {"width": WIDTH, "colors": NO_COLORS}
    in_color = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    width = max(NARROWEST, shutil.get_terminal_size((WIDTH, 40)).columns)
    return {"width": width, "colors": COLORS if in_color else NO_COLORS}


def of_log(log: Log, width: int = WIDTH, colors: Mapping[str, str] = NO_COLORS, folders: Sequence[Path] = ()) -> str:
    """Return what log folders have as lines of at most `width` characters, the last with a newline: runs, searches,
    sweeps.

    colors: COLORS for a terminal that shows them; folders: where a conformance matrix may be, besides docs/.
    """
    parts = [render(rows, width, colors, folders) for rows in (log.rows, log.searches) if rows]
    return "\n".join([*parts, *(render_sweep(sweep, width, colors) for sweep in log.sweeps)])


def render(
    rows: Sequence[Row], width: int = WIDTH, colors: Mapping[str, str] = NO_COLORS, folders: Sequence[Path] = ()
) -> str:
    """Return rows as lines, see `of_log`."""
    return spaced(block for group in groups(rows) for block in _of_group(group, width, colors, folders))


def _of_group(rows: Sequence[Row], width: int, colors: Mapping[str, str], folders: Sequence[Path]) -> List[List[str]]:
    of = "answer search" if rows[0].largest else "answer"
    answers = (_of_search if rows[0].largest else _of_times)(rows, width, colors, folders)
    return _blocks(of, heading(rows), rows, width, colors, answers)


def _blocks(
    of: str, head: str, rows: Sequence[Row], width: int, colors: Mapping[str, str], answers: List[str]
) -> List[List[str]]:
    return [
        wrapped(head, width),
        table(of, [row for row in rows if row.is_measured], width, colors),
        [*failures(rows, width, colors), *absent(rows, width), *correctness(rows, width)],
        load(rows, width, colors),
        answers,
    ]


def render_sweep(sweep: Sweep, width: int = WIDTH, colors: Mapping[str, str] = NO_COLORS) -> str:
    """Return a sweep as lines of at most `width` characters: a table grouped by cell, and the fastest of each."""
    answers: Dict[str, str] = {}
    for values, rows in sweep.cells():
        pick = verdict.fastest(rows)
        if pick:
            answers[grid.words(values)] = in_words(verdict.answer(pick, verdict.time_of(pick.scope)))
    lines = verdict_lines(answers, width, colors, "The fastest exact loss" if answers else "")
    return spaced(_blocks("answer sweep", sweep.heading, sweep.rows, width, colors, lines))


# The table.


def table(of: str, rows: Sequence[Row], width: int, colors: Mapping[str, str]) -> List[str]:
    """Return the lines of the table `of` metrics.COLUMNS, grouped by cell and kind, with as many columns as there is
    room for, the most important first, without empty columns."""
    columns = [metric for metric in metrics.columns(of, rows) if rows]
    every = [metric for metric in columns if {metric.shown(row) for row in rows} - EMPTY.get(metric.key, {"-", ""})]
    order = sorted(every, key=lambda metric: FIRST.index(metric.key) if metric.key in FIRST else len(FIRST))
    titles = [", ".join(filter(None, [grid.words(row.header.values), kind_title(row)])) for row in rows]
    shown: List[Metric] = []
    lines: List[str] = []
    for metric in order:
        tried = [each for each in every if each in shown or each is metric]
        made = Table(of, "", results.columns(tried, of), [_cells(row, tried) for row in rows])
        if shown and max(map(len, aligned(made, LONGEST_NAME).splitlines())) > width:
            continue
        shown, lines = tried, aligned(made._replace(groups=titles), LONGEST_NAME, colors).splitlines()
    return lines


def _cells(row: Row, shown: Sequence[Metric]) -> List[Cell]:
    """Return the cells of a row, marked where the status is bad and where the row is the fastest."""
    verdict_mark = "good" if row.is_fastest else ""
    pairs = zip(shown, results.cells(row, shown))
    return [
        cell._replace(mark={"status": cell.mark, "verdict": verdict_mark}.get(metric.key, "")) for metric, cell in pairs
    ]


# Below it.


def wrapped(text: str, width: int, indent: str = "", most: Optional[int] = None) -> List[str]:
    """Return lines of at most `width` characters, all but the first indented; "..." ends the last of `most`."""
    lines = wrap(plain(text), width, subsequent_indent=indent, break_on_hyphens=False) or [""]
    if most is not None and len(lines) > most:
        lines = [*lines[: most - 1], f"{lines[most - 1][: width - 4].rstrip()} ..."]
    return lines


def failures(rows: Sequence[Row], width: int, colors: Mapping[str, str]) -> List[str]:
    """Return lines on the rows that could run here and failed, with the reasons."""
    failed = [row for row in rows if row.status not in ("ok", *NOT_RUNNABLE)]
    lines: List[str] = []
    for row in failed[:MOST_FAILURES]:
        reason = f"{row.name}: {row.status}: {row.reason or 'no reason known'}"
        first, *further = wrapped(reason, width, "  ", MOST_LINES + 1)
        lines += [painted(first, "bad", colors), *further]
    others = len(failed) - MOST_FAILURES
    return lines + ([f"and {others} more (--details)"] if others > 0 else [])


def absent(rows: Sequence[Row], width: int) -> List[str]:
    """Return lines on the rows that cannot run here, and how to get them."""
    names_by_way = gathered((_obtained(row), row.name) for row in rows if row.status in NOT_RUNNABLE)
    if not names_by_way:
        return []
    ways = "; ".join(f"{', '.join(names)} ({how})" for how, names in names_by_way.items())
    return wrapped(f"did not run: {ways}", width, "  ", MOST_LINES)


def _obtained(row: Row) -> str:
    """Return in a few words what a row that cannot run needs."""
    reason = re.sub(r"^[a-z]+(-[\w-]+)?: ", "", row.reason)
    if row.status == "unsupported":
        needs = re.search(r"; it runs on ([a-z ]+)", reason)
        return f"needs {needs[1].strip().upper()}" if needs else reason
    if row.name.partition("@")[2]:
        return reason
    set_up = re.search(r"`(make setup[^`]*)`", reason)
    return set_up[1] if set_up else "manual install, see --list"


def correctness(rows: Sequence[Row], width: int) -> List[str]:
    """Return lines on the rows that agree with the oracle; the other judged rows are failures."""
    right = [row for row in rows if None not in row.measured_errors and row.status == "ok"]
    if not right:
        return []
    worst = [error(max(row.measured_errors[index] or 0 for row in right)) for index in (0, 1)]
    where = "at the measured size" if all(row.checked.at_size for row in right) else "at the size that was judged"
    line = f"correct: {count(len(right), 'row')}, loss within {worst[0]} and gradients within {worst[1]} of the float64"
    line += f" oracle's {where}"
    errors = [(row.name, row.measured_errors[1] or 0) for row in right]
    above = [f"{name} {error(value)}" for name, value in errors if value > MARKED_ERROR]
    if above:
        line += f"; gradients above {MARKED_ERROR:.0e}: {', '.join(above)}"
    unsure = [row.name for row in right if row.imprecise]
    if unsure:
        line += f"; imprecise: {', '.join(unsure)}"
    return wrapped(line, width, "  ")


def load(rows: Sequence[Row], width: int, colors: Mapping[str, str]) -> List[str]:
    """Return lines on samples beside other load and on ratios that drift; empty where there are none."""
    lines = filter(None, [results.beside_load(rows), *results.drifts(rows)])
    return [painted(part, "bad", colors) for line in lines for part in wrapped(line, width, "  ", MOST_LINES + 1)]


# The verdict.


def verdict_lines(answers: Mapping[str, str], width: int, colors: Mapping[str, str], first: str = "") -> List[str]:
    """Return VERDICT, the line `first`, and a line for each question with aligned answers; empty without answers."""
    room = max(map(len, answers), default=0) + 4
    lines = [painted(line, "title", colors) for line in wrapped(first, width, "  ")] if first else []
    for question, answer in answers.items():
        head = f"  {question}:"
        for line in wrapped(answer, width - room, most=2 * MOST_LINES):
            lines.append(head.ljust(room) + line)
            head = ""
    return [painted("VERDICT", "title", colors), *lines] if lines else []


def _of_times(rows: Sequence[Row], width: int, colors: Mapping[str, str], folders: Sequence[Path]) -> List[str]:
    picks = verdict.of(rows, folders)
    answers: Dict[str, Words] = {}
    if picks.fastest:
        answers["fastest exact"] = verdict.answer(picks.fastest, verdict.time_of(picks.fastest.scope))
    if picks.logits and picks.logits.step:
        answers["given logits"] = verdict.logits_words(picks.logits)
    if picks.smallest:
        answers["smallest exact"] = verdict.answer(picks.smallest, verdict.PEAK)
    if picks.approximate:
        answers["approximate"] = verdict.approximate(picks.approximate)
    if picks.fastest and not picks.fastest.withheld:
        question, words = verdict.corners(picks.fastest)
        answers[question] = [words]
    first = verdict.headline(picks.fastest) if picks.fastest else ""
    return verdict_lines({question: in_words(sentence) for question, sentence in answers.items()}, width, colors, first)


def _of_search(rows: Sequence[Row], width: int, colors: Mapping[str, str], folders: Sequence[Path]) -> List[str]:
    picks = {"exact": verdict.largest(rows), "approximate": verdict.largest(rows, ("pruned",))}
    answers = {name: in_words(verdict.answer(pick, verdict.SIZE)) for name, pick in picks.items() if pick}
    return verdict_lines({f"largest batch, {name}": answer for name, answer in answers.items()}, width, colors)
