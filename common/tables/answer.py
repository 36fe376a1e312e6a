"""Rows of runs -> what one came for, on a screen: a table by kind, what did not run, correctness, the verdict.

Stages, options, limits, errors at size and notes are in results.py's tables (--details).
"""

from __future__ import annotations

import re
from pathlib import Path
from textwrap import wrap
from typing import Callable, Dict, List, Mapping, Optional, Sequence

from common.analysis import metrics, verdict
from common.analysis.groups import groups, heading, kind_rank
from common.analysis.metrics import MARKED_ERROR, Metric
from common.analysis.row import Row
from common.analysis.verdict import LogitsPick, Pick
from common.core.errors import NOT_RUNNABLE
from common.core.implementations import LATTICES
from common.core.text import count, error, gathered, number, plain
from common.present.table import Cell, Table
from common.present.text import aligned, painted, spaced
from common.setup import environments, obtaining
from common.tables import remarks, results, search

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
    """The rows as lines of at most `width` characters, the last with a newline.  colors: COLORS for a terminal that
    shows them; folders: where a conformance matrix may be, besides docs/."""
    return spaced(block for group in groups(rows) for block in _of_group(group, width, colors, folders))


def _of_group(rows: Sequence[Row], width: int, colors: Mapping[str, str], folders: Sequence[Path]) -> List[List[str]]:
    of = "answer search" if rows[0].largest else "answer"
    return [
        wrapped(heading(rows), width),
        by_kind(of, [row for row in rows if row.is_measured], width, colors),
        [*failures(rows, width, colors), *absent(rows, width), *correctness(rows, width)],
        load(rows, width, colors),
        (_of_search if rows[0].largest else _of_times)(rows, width, colors, folders),
    ]


# The table.


def by_kind(of: str, rows: Sequence[Row], width: int, colors: Mapping[str, str]) -> List[str]:
    """The lines of the table `of` metrics.COLUMNS; empty without rows."""
    rows = sorted(rows, key=kind_rank)
    return titled(fitted(of, rows, width, colors), rows) if rows else []


def titled(table: str, rows: Sequence[Row]) -> List[str]:
    """The lines of a table of these rows, those of each kind below its title."""
    lines, body = table.splitlines()[: -len(rows)], table.splitlines()[-len(rows) :]
    for kind, of_kind in gathered(zip((KINDS.get(row.kind or "") for row in rows), body)).items():
        lines += [*([f"{kind}:"] if kind else []), *of_kind]
    return lines


def fitted(of: str, rows: Sequence[Row], width: int, colors: Mapping[str, str]) -> str:
    """The table with as many columns as there is room for, the most important first; those in which no row has
    anything are left out."""
    every = [metric for metric in metrics.columns(of, rows) if _tells(metric, rows)]
    order = sorted(every, key=lambda metric: FIRST.index(metric.key) if metric.key in FIRST else len(FIRST))
    shown: List[Metric] = []
    text = ""
    for metric in order:
        tried = [one for one in every if one in shown or one is metric]
        table = Table(of, "", results.columns(tried, of), [_cells(row, tried) for row in rows])
        if shown and max(map(len, aligned(table, LONGEST_NAME).splitlines())) > width:
            continue
        shown, text = tried, aligned(table, LONGEST_NAME, colors)
    return text


def _tells(metric: Metric, rows: Sequence[Row]) -> bool:
    said = {metric.shown(row) for row in rows}
    return bool(said - ({"ok"} if metric.key == "status" else {"-", ""}))


def _cells(row: Row, shown: Sequence[Metric]) -> List[Cell]:
    """Return the cells of a row, marked where the status is bad and where the row is the fastest."""

    def mark(metric: Metric, cell: Cell) -> str:
        if metric.key == "status":
            return cell.mark
        return "good" if metric.key == "verdict" and row.is_fastest else ""

    return [cell._replace(mark=mark(metric, cell)) for metric, cell in zip(shown, results.cells(row, shown))]


# Below it.


def wrapped(text: str, width: int, indent: str = "", most: Optional[int] = None) -> List[str]:
    """Lines of at most `width` characters, from the second on indented; "..." where there would be more than `most`."""
    lines = wrap(plain(text), width, subsequent_indent=indent, break_on_hyphens=False) or [""]
    if most is not None and len(lines) > most:
        lines = [*lines[: most - 1], f"{lines[most - 1][: width - 4].rstrip()} ..."]
    return lines


def failures(rows: Sequence[Row], width: int, colors: Mapping[str, str]) -> List[str]:
    """What could have run and did not come to its end, and why."""
    failed = [row for row in rows if row.status not in ("ok", *NOT_RUNNABLE)]
    lines: List[str] = []
    for row in failed[:MOST_FAILURES]:
        reason = f"{row.name}: {row.status}: {row.reason or 'no reason known'}"
        first, *more = wrapped(reason, width, "  ", MOST_LINES + 1)
        lines += [painted(first, "bad", colors), *more]
    others = len(failed) - MOST_FAILURES
    return lines + ([f"and {others} more (--details)"] if others > 0 else [])


def absent(rows: Sequence[Row], width: int) -> List[str]:
    """What cannot run here, and how to get it."""
    found = gathered((_obtained(row), row.name) for row in rows if row.status in NOT_RUNNABLE)
    if not found:
        return []
    said = "; ".join(f"{', '.join(names)} ({how})" for how, names in found.items())
    return wrapped(f"did not run: {said}", width, "  ", MOST_LINES)


def _obtained(row: Row) -> str:
    """What a row that cannot run wants, in a few words."""
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
    """Of the rows that were compared with the oracle and are right; those that are not are failures."""
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
    """Return the lines on samples that ran beside other load and on ratios that drift; empty where there are none."""
    lines = filter(None, [remarks.beside_load(rows), *remarks.drifts(rows)])
    return [painted(part, "bad", colors) for line in lines for part in wrapped(line, width, "  ", MOST_LINES + 1)]


# The verdict.

#: In the place of a winner, where other load may have made it one.
WITHHELD = "withheld: samples ran beside other load; measure again when the machine is quiet"


def said(lines: Mapping[str, str], width: int, colors: Mapping[str, str]) -> List[str]:
    """VERDICT: a line for each question, its answers under each other; empty without answers."""
    room = max(map(len, lines), default=0) + 4
    found = []
    for question, answer in lines.items():
        head = f"  {question}:"
        for line in wrapped(answer, width - room, most=MOST_LINES + 1):
            found.append(head.ljust(room) + line)
            head = ""
    return [painted("VERDICT", "title", colors), *found] if found else []


def _of_times(rows: Sequence[Row], width: int, colors: Mapping[str, str], folders: Sequence[Path]) -> List[str]:
    found = verdict.of(rows, folders)
    lines: Dict[str, str] = {}
    if found.fastest:
        lines["fastest exact"] = _timed(found.fastest)
    if found.logits and found.logits.step:
        lines["given logits"] = _given_logits(found.logits)
    if found.smallest:
        lines["smallest exact"] = _picked(found.smallest, lambda row: f"{number(row.peak_mb)} MB", "times its peak")
    if found.approximate:
        lines["approximate"] = _approximate(found.approximate)
    if found.fastest and not found.fastest.withheld:
        name, caveats = found.fastest.row.name, found.fastest.caveats
        if caveats:
            lines["beware"] = f"{name}: {'; '.join(caveats)}"
        elif caveats is None:
            lines["corners"] = f"{name} was not judged yet: ./conformance.py --only {name}"
        else:
            lines["corners"] = f"conformance.py found nothing wrong with {name}"
    return said(lines, width, colors)


def _picked(pick: Pick, size: Callable[[Row], str], times: str) -> str:
    """ "a, 577.8 ms; next is b, 1.67 times its time", or which differ from it by no sure amount."""
    if pick.withheld:
        return WITHHELD
    best = f"{pick.row.name}, {size(pick.row)}"
    if pick.next is None:
        return f"{best} (the only one)"
    ratio = f"{number(pick.times, 3)} {times}"
    if pick.sure:
        return f"{best}; next is {pick.next.name}, {ratio}"
    others = f" (and {len(pick.rivals) - 1} more)" if len(pick.rivals) > 1 else ""
    return f"unclear: {best}, or {pick.next.name}, {ratio}{others}"


def _timed(pick: Pick) -> str:
    """Return the pick with its time in its scope, and the next one's ratio with its interval."""
    ms = metrics.METRICS[f"{pick.scope}_median"].shown
    described = _picked(pick, lambda row: f"{ms(row)} ms a {pick.scope}", "times its time")
    if pick.next is None or pick.withheld:
        return described
    low, high = (pick.next_ratio.low, pick.next_ratio.high) if pick.next_ratio else (None, None)
    if low is None or high is None:
        return f"{described}; one round gives no interval: --rounds 3 or more"
    return f"{described} ({number(low, 3)}-{number(high, 3)})"


def _given_logits(pick: LogitsPick) -> str:
    """Return the loss to use, what the choice rests on, and what the other scope says."""
    if pick.loss.withheld or (pick.step and pick.step.withheld):
        return WITHHELD
    by_loss, by_step = (_timed(each) if each else "" for each in (pick.loss, pick.step))
    if pick.basis == "both":
        return f"{by_loss}; its step is the fastest too"
    if pick.basis == "loss":
        return f"{by_loss}. It rests on the loss alone; by the step {by_step}"
    if pick.basis == "step":
        return f"{by_step}. It rests on the step; by the loss alone {by_loss}"
    return f"unclear: by the loss alone {by_loss.removeprefix('unclear: ')}; by the step {by_step}"


def _approximate(pick: Pick) -> str:
    """Return the pick with its time and peak over those of the fastest exact loss, and how far its loss is off."""
    if pick.withheld:
        return WITHHELD
    parts = []
    if pick.over:
        memory = f" and {number(pick.memory, 2)}x the peak" if pick.memory else ""
        parts.append(f"{number(pick.over.ratio, 2)}x the time{memory} of the fastest exact loss")
    gaps = pick.row.approximation_gaps
    if gaps:
        names = {"peaky": "peaky logits (made, sharper than a trained model's)"}
        off = [f"{100 * abs(gap):.2g}% on {names.get(kind, f'{kind} logits')}" for kind, gap in gaps.items()]
        parts.append(f"its loss is off by {' and '.join(off)}, which does not bound it in training")
    elif pick.row.approximation_gap is not None:
        parts.append(f"its loss is off by {100 * abs(pick.row.approximation_gap):.2g}%")
    return f"{pick.row.name}, {'; '.join(parts)}" if parts else pick.row.name


def _of_search(rows: Sequence[Row], width: int, colors: Mapping[str, str], folders: Sequence[Path]) -> List[str]:
    lines: Dict[str, str] = {}
    for kinds, name in ((verdict.EXACT, "exact"), (("pruned",), "approximate")):
        size, pace = verdict.largest(rows, kinds), verdict.trains_fastest(rows, kinds)
        if size:
            lines[f"largest batch, {name}"] = _picked(size, search.said, "times its size")
        if pace:
            lines[f"trains fastest, {name}"] = _picked(pace, _pace, "times the time of an utterance")
    return said(lines, width, colors)


def _pace(row: Row) -> str:
    return f"{number(row.utterances_per_second)} utterances/s"
