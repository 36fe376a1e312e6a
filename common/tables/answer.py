"""Show rows on a screen, the answer first: a table by kind, what did not run, correctness, the verdict.

Stages, options, limits, errors at size and notes are in results.py's tables (--details).
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from textwrap import wrap
from typing import Dict, List, Mapping, Optional, Sequence

from common.analysis import metrics, verdict, wording
from common.analysis.groups import groups, heading, kind_rank
from common.analysis.metrics import MARKED_ERROR, Metric
from common.analysis.row import Row
from common.analysis.wording import Words
from common.core.errors import NOT_RUNNABLE
from common.core.implementations import LATTICES
from common.core.text import count, error, gathered, plain
from common.present.table import Cell, Table
from common.present.table import words as in_words
from common.present.text import aligned, painted, spaced
from common.setup import environments, obtaining
from common.tables import remarks, results

#: Characters of a line where the width is not known.
WIDTH = 100
#: Marks of cells, and words, as ANSI codes.
COLORS = {"good": "32", "bad": "1;31", "title": "1"}
NO_COLORS: Mapping[str, str] = {}
#: Above the rows of each kind.
KINDS = {
    "exact": "exact",
    **{name: f"exact, on another lattice ({words})" for name, words in LATTICES.items()},
    "pruned": "approximate",
    "additive": "additive joiner (a different model, not comparable)",
}
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
        "same_torch",
        "half",
        "loss_ratio",
    ),
    "gap",
    *("largest", "limited_by", "utterances_per_second", "largest_mb", "within"),
    *("torch", "frames_per_second", "profiled_us", "profiled_mb", "measured_error", "limits", "heaviest"),
)
LONGEST_NAME = 40
MOST_LINES = 3  # of one remark
MOST_FAILURES = 5


def render(
    rows: Sequence[Row], width: int = WIDTH, colors: Mapping[str, str] = NO_COLORS, folders: Sequence[Path] = ()
) -> str:
    """Return the rows as lines of at most `width` characters, the last with a newline.

    colors: COLORS for a terminal that shows them; folders: where a conformance matrix may be, besides docs/.
    """
    return spaced(block for group in groups(rows) for block in _of_group(group, width, colors, folders))


def verdict_alone(
    rows: Sequence[Row], width: int = WIDTH, colors: Mapping[str, str] = NO_COLORS, folders: Sequence[Path] = ()
) -> str:
    """Return the verdict that `render` ends in, without the table."""
    return spaced(_of_times(group, width, colors, folders) for group in groups(rows))


def so_far(
    rows: Sequence[Row], width: int = WIDTH, colors: Mapping[str, str] = NO_COLORS, folders: Sequence[Path] = ()
) -> str:
    """Return the table and the verdict of an unfinished run, as lines of at most `width` characters.

    A row that has measured something counts as one that ended well.
    """
    rows = [replace(row, status="ok", reason="") if row.is_comparable else row for row in rows]
    return spaced(
        block
        for group in groups(rows)
        for block in (
            by_kind("answer", [row for row in group if row.is_measured], width, colors),
            load(group, width, colors),
            _of_times(group, width, colors, folders),
        )
    )


def _of_group(rows: Sequence[Row], width: int, colors: Mapping[str, str], folders: Sequence[Path]) -> List[List[str]]:
    of = "answer search" if rows[0].largest else "answer"
    return [
        wrapped(heading(rows), width),
        by_kind(of, [row for row in rows if row.is_measured], width, colors),
        [*torches(rows, width), *failures(rows, width, colors), *absent(rows, width), *correctness(rows, width)],
        load(rows, width, colors),
        (_of_search if rows[0].largest else _of_times)(rows, width, colors, folders),
    ]


# The table.


def by_kind(of: str, rows: Sequence[Row], width: int, colors: Mapping[str, str]) -> List[str]:
    """Return the lines of the table `of` metrics.COLUMNS; empty without rows."""
    rows = sorted(rows, key=kind_rank)
    return titled(fitted(of, rows, width, colors), rows) if rows else []


def titled(table: str, rows: Sequence[Row]) -> List[str]:
    """Return the lines of a table of these rows, with the title of each kind above its rows."""
    lines, body = table.splitlines()[: -len(rows)], table.splitlines()[-len(rows) :]
    for kind, of_kind in gathered(zip((KINDS.get(row.kind or "") for row in rows), body)).items():
        lines += [*([f"{kind}:"] if kind else []), *of_kind]
    return lines


def fitted(of: str, rows: Sequence[Row], width: int, colors: Mapping[str, str]) -> str:
    """Return the table with as many columns as there is room for, the most important first, without empty columns."""
    every = [metric for metric in metrics.columns(of, rows) if _tells(metric, rows)]
    order = sorted(every, key=lambda metric: FIRST.index(metric.key) if metric.key in FIRST else len(FIRST))
    shown: List[Metric] = []
    text = ""
    for metric in order:
        tried = [each for each in every if each in shown or each is metric]
        table = Table(of, "", results.columns(tried, of), [_cells(row, tried) for row in rows])
        if shown and max(map(len, aligned(table, LONGEST_NAME).splitlines())) > width:
            continue
        shown, text = tried, aligned(table, LONGEST_NAME, colors)
    return text


def _tells(metric: Metric, rows: Sequence[Row]) -> bool:
    words = {metric.shown(row) for row in rows}
    return bool(words - ({"ok"} if metric.key == "status" else {"-", ""}))


def _cells(row: Row, shown: Sequence[Metric]) -> List[Cell]:
    """Return the cells of a row, marked where the status is bad and where the row is the fastest."""

    def mark(metric: Metric, cell: Cell) -> str:
        if metric.key == "status":
            return cell.mark
        return "good" if metric.key == "verdict" and row.is_fastest else ""

    return [cell._replace(mark=mark(metric, cell)) for metric, cell in zip(shown, results.cells(row, shown))]


# Below it.


def wrapped(text: str, width: int, indent: str = "", most: Optional[int] = None) -> List[str]:
    """Return lines of at most `width` characters, all but the first indented; "..." ends the last of `most`."""
    lines = wrap(plain(text), width, subsequent_indent=indent, break_on_hyphens=False) or [""]
    if most is not None and len(lines) > most:
        lines = [*lines[: most - 1], f"{lines[most - 1][: width - 4].rstrip()} ..."]
    return lines


def torches(rows: Sequence[Row], width: int) -> List[str]:
    """Return lines on the verdict "other torch", with the ratios under one torch; empty without such rows."""
    apart = [row for row in rows if row.against_fastest and row.against_fastest.other_torch]
    if not apart:
        return []
    theirs = ", ".join(dict.fromkeys(row.torch for row in apart))
    homes = ", ".join(dict.fromkeys(row.against_fastest.fastest.torch for row in apart if row.against_fastest))
    line = f"other torch: ran under {theirs}, the fastest under {homes}, so these ratios compare the torches too"
    known = [f"{row.name} {metrics.METRICS['same_torch'].shown(row)}" for row in apart if row.same_torch]
    if known:
        line += f"; under one torch they would be {', '.join(known)}"
    return wrapped(line, width, "  ", MOST_LINES)


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
    implementation = obtaining.implementation_of(row.name)
    if row.status == "unsupported":
        needs = re.search(r"; it runs on ([a-z ]+)", reason)
        return f"needs {needs[1].strip().upper()}" if needs else reason
    if implementation is None or implementation.template or row.name.partition("@")[2]:
        return reason
    if obtaining.effort(row.name) < 2:
        return environments.ENVIRONMENTS[implementation.environment].command
    return "manual install, see --list"


def correctness(rows: Sequence[Row], width: int) -> List[str]:
    """Return lines on the rows that agree with the oracle; the other judged rows are failures."""
    right = [row for row in rows if row.loss_error is not None and row.grad_error is not None and row.status == "ok"]
    if not right:
        return []
    worst = [error(max(row.measured_errors[index] or 0 for row in right)) for index in (0, 1)]
    where = "at the measured size" if all(row.at_size for row in right) else "at the size that was judged"
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
    lines = filter(None, [remarks.beside_load(rows), *remarks.drifts(rows)])
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
        answers["fastest exact"] = wording.answer(picks.fastest, wording.time_of(picks.fastest.scope))
    if picks.logits and picks.logits.step:
        answers["given logits"] = wording.given_logits(picks.logits)
    if picks.smallest:
        answers["smallest exact"] = wording.answer(picks.smallest, wording.PEAK)
    if picks.approximate:
        answers["approximate"] = wording.approximate(picks.approximate)
    if picks.fastest and not picks.fastest.withheld:
        question, words = wording.corners(picks.fastest)
        answers[question] = [words]
    first = wording.headline(picks.fastest) if picks.fastest else ""
    return verdict_lines({question: in_words(sentence) for question, sentence in answers.items()}, width, colors, first)


def _of_search(rows: Sequence[Row], width: int, colors: Mapping[str, str], folders: Sequence[Path]) -> List[str]:
    answers: Dict[str, str] = {}
    for kinds, name in ((verdict.ranked_kinds(rows), "exact"), (("pruned",), "approximate")):
        size, pace = verdict.largest(rows, kinds), verdict.trains_fastest(rows, kinds)
        if size:
            answers[f"largest batch, {name}"] = in_words(wording.answer(size, wording.SIZE))
        if pace:
            answers[f"trains fastest, {name}"] = in_words(wording.answer(pace, wording.PACE))
    return verdict_lines(answers, width, colors)
