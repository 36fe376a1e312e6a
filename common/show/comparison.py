"""Show a comparison (see analysis/comparison.py): one screen, Markdown for a pull request, JSON, or a page."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, Iterator, List, Mapping, NamedTuple, Optional, Sequence

from common.analysis import comparison, metrics
from common.analysis.comparison import Change, Sides
from common.analysis.metrics import METRICS, Metric
from common.analysis.standing import BESIDE_LOAD, percent
from common.core.errors import UserError
from common.core.files import another, make_folder, write_whole
from common.core.implementations import LATTICES
from common.core.text import error, escaped, gathered, number
from common.present.parts import Card, Cell, Column, Figure, Section, Table
from common.present.parts import Line as Fact
from common.present.style import looks
from common.present.text import aligned, json_text, listed, markdown, spaced
from common.show import answer, plots
from common.show.page import assembled

FORMATS = ("table", "markdown", "json")
COLUMNS = (
    *(Column(title, False) for title in ("implementation", "what", "verdict")),
    *(Column(title) for title in ("ratio", "interval", "baseline", "new", "rounds", "batches")),
)
#: The change that a comparison should be able to show.
NOISY = 0.1
#: Marks of verdicts, like those of cells.
MARKS = {
    **dict.fromkeys(("faster", "less", "better"), "good"),
    **dict.fromkeys(("slower", "more", "worse", "wrong"), "bad"),
}
#: Words for a side that is no exact loss, in a comparison of two implementations.
OTHER_KINDS = {
    **dict.fromkeys(LATTICES, "computes the loss on another lattice"),
    "pruned": "is approximate by design",
}

TITLE = "What changed"
#: The verdicts with a card, in their order, and the words above it.
CARDS = {
    **{"slower": "Slower", "faster": "Faster", "wrong": "Wrong", "worse": "Less accurate", "better": "More accurate"},
    **{"more": "More memory", "less": "Less memory", "unclear": "Unclear"},
    BESIDE_LOAD: BESIDE_LOAD.capitalize(),
}
MOST_NAMED = 6  # in the answer of a card


class Line(NamedTuple):
    """Hold one line of the table.  what, verdict, reason: of the sentence below the table."""

    name: str
    what: str
    verdict: str
    reason: str
    cells: Sequence[str]


def render(rows: Sequence[Change], remarks: Sequence[str], format: str = "table") -> str:
    """Return every number with its reason, as text that ends with a newline.  remarks: lines below it, which JSON
    leaves out."""
    if format == "json":
        return json_text([row.as_json() for row in rows])
    shown, remarks = _measured(rows), [*remarks, *_unmeasured(rows)]
    lines = [line for row in shown for line in lines_of(row)]
    told = [line for line in lines if line.verdict != "same" or line.what.endswith("time")]
    same = gathered((line.name, line.what) for line in lines if line not in told)
    below = [f"{line.name}, {line.what}: {line.verdict}: {line.reason}" for line in told]
    below += [f"{name}: {', '.join(whats)}: same" for name, whats in same.items()]
    below += [f"times: {_power(shown)}", *all_notes(shown), *remarks]
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
    shown = _measured(rows)
    lines = [line for row in shown for line in lines_of(row)]
    lines = [line for line in lines if line.what.endswith(" time") or line.verdict != "same"]
    below = [f"{row.name}: {note}" for row in shown for note in _notes_of(row) if " run is " in note]
    names = gathered((line.verdict, f"{line.name} {line.what.replace(' time', '')}") for line in lines)
    answers = {"times": _power(shown), **{verdict: ", ".join(names[verdict]) for verdict in MARKS if verdict in names}}
    reasons = gathered((line.reason, line.name) for line in lines if line.verdict == BESIDE_LOAD)
    if reasons:
        answers[BESIDE_LOAD] = "; ".join(f"{', '.join(dict.fromkeys(names))}: {why}" for why, names in reasons.items())
    blocks = [
        [line for text in origins(rows)[:2] for line in answer.wrapped(text, width, "  ")],
        aligned(_table(lines, COLUMNS[:7]), answer.LONGEST_NAME, colors).splitlines(),
        [line for text in [*below, *remarks] for line in answer.wrapped(text, width, "  ", answer.MOST_LINES)],
        answer.verdict_lines(answers, width, colors),
    ]
    return spaced(blocks)


def table(rows: Sequence[Change]) -> Table:
    """Return the table of all lines."""
    return _table([line for row in rows for line in lines_of(row)], COLUMNS)


def _table(lines: Sequence[Line], columns: Sequence[Column]) -> Table:
    cells = [
        [
            *map(Cell, (line.name, line.what)),
            Cell(line.verdict, mark=MARKS.get(line.verdict, "")),
            *(Cell(words, None if words == "-" else words) for words in line.cells),
        ]
        for line in lines
    ]
    return Table("comparison", "Comparison", columns, [row[: len(columns)] for row in cells])


def _measured(rows: Sequence[Change]) -> Sequence[Change]:
    """Return the rows of which a side has something to compare; all where none has."""
    return [row for row in rows if is_measured(row)] or rows


def is_measured(row: Change) -> bool:
    """Return whether a side of the row has something to compare."""
    return comparison.is_measured(row.pair.baseline) or comparison.is_measured(row.pair.new)


def _unmeasured(rows: Sequence[Change]) -> List[str]:
    others = dict.fromkeys(row.name for row in rows if row not in _measured(rows))
    return [f"measured on neither side: {', '.join(others)}"] if others else []


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
        runs = [getattr(row.pair, side) for row in rows]
        folders = list(dict.fromkeys(run.folder for run in runs))
        above = ", ".join(dict.fromkeys(str(folder.parent) for folder in folders))
        where = str(runs[0].results) if len(folders) == 1 else f"{above} ({len(folders)} runs)"
        lines.append(f"{side}: {where}, started {min(run.started or '' for run in runs)}")
    paired = {time.paired for row in rows for time in row.time.values() if time.ratio is not None}
    ways = {
        True: "rounds paired: both sides were measured beside each other",
        False: "two independent groups of rounds (Welch): the sides were measured at different times",
    }
    how, margins = "; ".join(ways[way] for way in sorted(paired)) or "no times to compare", rows[0].margins
    lines.append(
        f"time: new / baseline, geometric mean over batches and rounds; {how}. "
        f"Intervals over rounds: {percent(margins.confidence)} each, which makes 95% for all of them together. "
        f"Tolerance: {percent(margins.tolerance)}; same: within {percent(margins.same)}."
    )
    return lines


def lines_of(row: Change) -> List[Line]:
    """Return the lines of a row, without what neither side measured, such as scope `loss` of a loss that has none."""

    def line(what: str, change: Any, ratio: Optional[float], *cells: str) -> Line:
        words = "-" if ratio is None else f"{ratio:.3f}"
        return Line(row.name, what, change.verdict, change.reason, [words, *cells])

    lines = []
    for scope, time in row.time.items():
        rounds, ratio = time.rounds, time.ratio
        if any(rounds):
            interval = "-" if time.low is None else f"{time.low:.3f}-{time.high:.3f}"
            shown = str(rounds[0]) if time.paired else f"{rounds[0]} + {rounds[1]}"
            sides, batches = _sides(time.both_ms, METRICS[f"{scope}_median"]), str(ratio.batches if ratio else 0)
            lines.append(line(f"{scope} time", time, time.times, interval, *sides, shown, batches))
    for scope, memory in row.memory.items():
        both = (memory.baseline_mb, memory.new_mb)
        if any(of is not None for of in both):
            sides = _sides(both, METRICS["peak_mb"])
            lines.append(line(f"{scope} memory", memory, memory.ratio, "-", *sides, "-", str(memory.batches)))
    keys = [key for key in metrics.COLUMNS["comparison"] if key.endswith("_error")]
    errors = [", ".join(error(side[key]) for key in keys) for side in (row.errors.baseline, row.errors.new)]
    return [*lines, line("errors", row.errors, None, "-", *errors, "-", "-")]


def _sides(values: Sequence[Optional[float]], metric: Metric) -> List[str]:
    return ["-" if value is None else f"{number(value)} {metric.unit}" for value in values]


def _power(rows: Sequence[Change]) -> str:
    """Return how many times changed, and which slowdown was detectable; the latter first where nothing is sure and a
    change of NOISY would have gone undetected."""
    times = [time for row in rows for time in row.time.values() if time.ratio is not None]
    times = [time for time in times if time.verdict != BESIDE_LOAD]
    if not times:
        return "none to compare"
    verdicts = [time.verdict for time in times]
    words = ("faster", "slower", *(["same"] if "same" in verdicts else []), "unclear")
    counts = ", ".join(f"{verdicts.count(word)} {word}" for word in words)
    changes = sorted(known for time in times if (known := time.detectable) is not None)
    if not changes:
        return f"{counts}; no change is detectable with so few rounds"
    least, most = percent(changes[0], 2), percent(changes[-1], 2)
    detectable = f"detectable at 80% power: {least}"
    detectable += f" (best row) to {most} (worst)" if len(changes) > 1 else ""
    detectable += f", in {len(changes)} of {len(times)} rows" if len(changes) < len(times) else ""
    if verdicts.count("unclear") == len(verdicts) and changes[-1] > NOISY:
        return f"too noisy; {detectable}; {counts}"
    return f"{counts}; {detectable}"


def all_notes(rows: Sequence[Change]) -> List[str]:
    """Return each note once, with the rows that have it."""
    names_by_note = gathered((note, row.name) for row in rows for note in _notes_of(row))
    return [f"{', '.join(names)}: {note}" for note, names in names_by_note.items()]


def _notes_of(row: Change) -> Iterator[str]:
    """Yield what changed in the code and around it; failures; approximations."""
    if row.changed:
        yield f"changed: {', '.join(row.changed)}"
    elif row.pair.one_loss:
        yield "nothing that is recorded of the code changed: a difference would be of the machine, or of chance"
    for word, run in {"baseline": row.pair.baseline, "new": row.pair.new}.items():
        if run.failure:
            yield f"the {word} run is {': '.join(run.failure)}"
        if run.kind in OTHER_KINDS and not row.pair.one_loss:
            yield f"{run.name} {OTHER_KINDS[run.kind]}"


# The page.


def write(rows: Sequence[Change], remarks: Sequence[str], output: Path) -> Path:
    """Write the page, whole or not at all; return its path.  remarks: as below the table.  Raises UserError."""
    if not rows:
        raise UserError("no page: nothing was compared")
    advice = another("--output")
    make_folder(output.parent, advice)
    write_whole(advice, (output, page(rows, remarks, output.parent)))
    return output


def page(rows: Sequence[Change], remarks: Sequence[str], base: Path, library: Optional[str] = None) -> str:
    """Return the page as text.  base: the folder that it will be in; library: JavaScript in place of plotly.js."""
    shown = _measured(rows)
    cards = _cards(shown)
    section = Section(
        "comparison",
        TITLE,
        "" if cards else "Nothing changed by more than the tolerance.",
        cards=cards,
        lead=_figure(shown),
        tables=[table(shown)],
        notes=_notes(shown, remarks),
    )
    lead = " ".join(f"{line}." for line in origins(shown)[:2])
    return assembled([section], base, title(shown), lead, library, overline="Two measurements, compared")


def title(rows: Sequence[Change]) -> str:
    """Return "a: 20% more time (12% to 28%)" of one time that surely changed, else "2 faster, 1 slower, 3 unclear"."""
    times = [(row.name, time) for row in rows for time in row.time.values() if time.ratio is not None]
    counts = Counter(time.verdict for _, time in times)
    if len(times) == counts["faster"] + counts["slower"] == 1:
        ((name, time),) = times
        low, high = sorted(abs((end or 1) - 1) for end in (time.low, time.high))
        words = f"{percent(abs((time.times or 1) - 1), 2)} {'more' if time.verdict == 'slower' else 'less'} time"
        return f"{name}: {words} ({percent(low, 2)} to {percent(high, 2)})"
    words_of_all = ", ".join(f"{number} {verdict}" for verdict, number in counts.items())
    return f"Times: {words_of_all}" if times else "No times to compare"


def _cards(rows: Sequence[Change]) -> List[Card]:
    """Return a card for each verdict except "same", with the reason for each of its lines."""
    of_verdict = gathered((line.verdict, line) for row in rows for line in lines_of(row))
    cards = []
    for verdict, question in CARDS.items():
        lines = of_verdict.get(verdict, [])
        names = [f"{line.name}, {line.what}" for line in lines]
        others = [f"{len(names) - MOST_NAMED} more"] if len(names) > MOST_NAMED else []
        reasons: List[Fact] = [(name, [f"{line.reason}."]) for name, line in zip(names, lines)]
        answer_words = "; ".join([*names[:MOST_NAMED], *others])
        is_sure, is_bad = verdict not in ("unclear", BESIDE_LOAD), MARKS.get(verdict) == "bad"
        cards += [Card(question, answer_words, is_sure, reasons, bad=is_bad)] if lines else []
    return cards


def _figure(rows: Sequence[Change]) -> Optional[Figure]:
    """Return the plot of the ratios of all times; None where there are none."""
    look_of = looks({row.pair.new.name: row.pair.new.kind for row in rows})
    dots = []
    for row in rows:
        new = row.pair.new
        for scope, time in row.time.items():
            if time.times is not None:
                numbers = time.times, time.low, time.high, time.verdict, time.verdict == BESIDE_LOAD
                dots.append(plots.Dot(f"{row.name}, {scope}", look_of[new.name], *numbers, new.results))
    if not dots:
        return None
    caption = "Dot: the time of the new side over that of the baseline; line: its interval over rounds."
    if any(dot.hollow for dot in dots):
        caption += " Hollow: beside other load, so the ratio decides nothing."
    return plots.ratios("changes", "Time, new over baseline", caption, dots, "times the baseline")


def _notes(rows: Sequence[Change], remarks: Sequence[str]) -> List[Fact]:
    """Return how it was compared, what changed in the code, and the remarks."""
    lines = [*origins(rows)[2:], *all_notes(rows), *remarks]
    return [("", [line if line.endswith(".") else f"{line}."]) for line in lines]
