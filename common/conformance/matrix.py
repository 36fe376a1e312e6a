"""Render a conformance matrix: as a table, and with its findings as text for the terminal and as Markdown."""

from __future__ import annotations

from collections import Counter
from typing import Dict, List, Mapping, Optional, Sequence

from msgspec import structs

from common.conformance import findings as judging
from common.conformance.documents import Matrix, MatrixRow
from common.conformance.records import CRASHES, DIFFERS, NOT_APPLICABLE, PASS, REFUSES, RESULTS, TIMEOUT
from common.core.implementations import KINDS, LATTICES
from common.core.text import count, escaped, gathered, plain
from common.present.table import Cell, Column, Table, tabulated
from common.present.text import aligned, spaced
from common.present.text import markdown as markdown_table
from common.setup import obtaining
from common.tables import answer

#: Mark of each result (a class of page.css; bold in Markdown if something is wrong), and symbol of each result.
MARKS = dict(zip(RESULTS, ("good", "wrong", "refused", "dead", "dead", "quiet", "dead")))
SYMBOLS = dict(zip(RESULTS, "\u2713\u2717!\u2020\u2026\u2013?"))
NOTED = "*"  # after the symbol of a loss that passes although its gradient is NaN
COLORS = {"good": "32", "wrong": "1;31", "refused": "33", "dead": "1;35", "quiet": "2"}  # ANSI codes by mark
LONGEST_TITLE = 80  # characters of the title of a case
WRONG = (DIFFERS, CRASHES, TIMEOUT)
#: Headings of the kinds of loss that are no lattice.
OTHER_KINDS = {
    "exact": "the transducer of Graves 2012",
    "pruned": "pruned, with all of U in its ranges",
}
MOST_FINDINGS = 8  # wrong answers shown without --details
HOW_TO_RUN = (
    f"Each block of code is a whole program: save it as `{obtaining.SHOWN}` in the folder of this suite, and run the "
    "command above it there. The comment at its end says what it prints."
)


def versions(row: MatrixRow, document: Matrix) -> str:
    """Return the versions of a row ("1.4, torch 2.11.0"), its simulator, and when an earlier run judged it."""
    version, torch = ((text or "-").partition("+")[0] for text in (row.version, row.torch))
    simulator = f", simulated: {row.simulator}" if row.simulator else ""
    when = judging.judged_elsewhere(row, document)
    return f"{version}, torch {torch}{simulator}" + (f"; judged {when}" if when else "")


def by_kind(document: Matrix) -> Dict[str, Matrix]:
    """Return a document for each kind of loss, in the order of the tables: its rows, and the cases that concern one."""
    kinds = gathered((row.kind, row) for row in document.judged)
    order = {kind: number for number, kind in enumerate(KINDS)}
    parts = {}
    for kind in sorted(kinds, key=lambda kind: order.get(kind, len(order))):
        rows = kinds[kind]
        asked = {name for row in rows for name, outcome in row.cells.items() if outcome.result != NOT_APPLICABLE}
        cases = [case for case in document.cases if case.name in asked]
        parts[kind] = structs.replace(document, implementations=rows, cases=cases)
    return parts


def titled(kind: str) -> str:
    """Return the heading of a kind of loss: "tdt: tokens and durations"."""
    words = LATTICES.get(kind)
    return f"{kind}: {words}" if words else OTHER_KINDS.get(kind, kind)


def matrix(document: Matrix, heads: Optional[Sequence[str]] = None, symbols: bool = False) -> Table:
    """Return a table with a row for each case and a column for each implementation that was judged.

    `heads` are those of the columns, by default the names; with `symbols` each cell is one character.
    """
    judged = document.judged
    heads = list(map(judging.called, judged)) if heads is None else heads
    columns = [Column("case", False), *(Column(head, False, centered=symbols) for head in heads)]
    rows = []
    for case in document.cases:
        outcomes = [row.cells[case.name] for row in judged]
        if symbols:
            cells = [Cell(SYMBOLS[each.result] + (NOTED if judging.leaves_nan(each) else "")) for each in outcomes]
        else:
            cells = [Cell(judging.cell(each), mark=MARKS[each.result]) for each in outcomes]
        rows.append([Cell(case.title), *cells])
    return Table("conformance", "Conformance matrix", columns, rows)


def legend(document: Matrix) -> Dict[str, str]:
    """Return the meaning of each result that occurs in the matrix."""
    used = {outcome.result for row in document.judged for outcome in row.cells.values()}
    return {result: words for result, words in judging.LEGEND.items() if result in used}


def findings_by_kind(document: Matrix) -> Dict[str, List[judging.Finding]]:
    """Return the findings of a matrix by their kind."""
    return gathered((finding.kind, finding) for finding in judging.findings(document))


# -- terminal --------------------------------------------------------------------------------------------------------


def table(document: Matrix, color: bool) -> str:
    """Return the text of --details: a matrix for each kind of loss, with numbered columns, and the findings.

    With `color` it has ANSI codes.
    """
    lines = [judging.heading(document), ""]
    lines += [f"  -  {row.name}: {row.status}: {plain(row.reason)}" for row in document.not_judged]
    for kind, part in by_kind(document).items():
        columns = list(enumerate(part.judged, start=1))
        lines += ["", titled(kind), ""]
        lines += [f"{number:3d}  {row.name} ({versions(row, document)})" for number, row in columns]
        numbered = matrix(part, [str(number) for number, _ in columns])
        lines += ["", aligned(numbered, LONGEST_TITLE, COLORS if color else None)]
    lines.append("")
    lines += [*(f"{result}: {words}" for result, words in legend(document).items()), judging.NUMBER]
    for kind, of_kind in findings_by_kind(document).items():
        lines += ["", f"\x1b[1m{kind}\x1b[0m" if color else kind]
        for finding in of_kind:
            lines.append(f"  {finding.case.title}: {finding.sentence}")
            lines += [f"    {', '.join(who)}: {plain(words) or 'no message'}" for words, who in finding.who.items()]
    return "\n".join(lines) + "\n"


def screen(document: Matrix, width: int = answer.WIDTH, colors: Mapping[str, str] = answer.NO_COLORS) -> str:
    """Return the summary for the terminal: counts of results by implementation, wrong answers, and the verdict.

    Lines have at most `width` characters; the text ends with a newline.
    """
    used = [result for result in RESULTS if result in legend(document)]
    rows, clean = [], []
    for row in document.judged:
        counts = Counter(outcome.result for outcome in row.cells.values())
        rows.append([Cell(judging.called(row)), *(Cell(str(counts[result]), counts[result]) for result in used)])
        if not any(counts[result] for result in (*WRONG, REFUSES)):
            clean.append(judging.called(row))
    columns = [Column("implementation", False), *(Column(result) for result in used)]
    table = Table("conformance", "Conformance", columns, rows)
    by_kind = findings_by_kind(document)
    silent = gathered((finding.case.wrong, who) for finding in by_kind.get(judging.WRONG, ()) for who in _who(finding))
    often = sorted(silent.items(), key=lambda each: -len(each[1]))[:MOST_FINDINGS]
    lines = {kind.lower(): count(sum(len(_who(each)) for each in of), "answer") for kind, of in by_kind.items()}
    lines = {"right in every case": ", ".join(clean) or "none", **lines}
    others = [row.name for row in document.not_judged]
    blocks = [
        answer.wrapped(f"{judging.heading(document)}; {count(len(document.cases), 'case')}", width),
        aligned(table, answer.LONGEST_NAME, colors).splitlines() if rows else [],
        [line for words, who in often for line in answer.wrapped(f"{', '.join(who)}: {words}", width, "  ", 2)],
        answer.wrapped(f"not judged: {', '.join(others)}", width, "  ", 2) if others else [],
        answer.verdict_lines(lines, width, colors),
    ]
    return spaced(blocks)


def _who(finding: judging.Finding) -> List[str]:
    """Return the names of all implementations that a finding concerns."""
    return [name for names in finding.who.values() for name in names]


# -- Markdown --------------------------------------------------------------------------------------------------------


def _code(words: str) -> str:
    """Return a text as inline code of Markdown."""
    return f"`{plain(words).replace('`', chr(39))}`"


def markdown(document: Matrix) -> str:
    """Return a page: the matrix, the findings, versions, and the answers to each case."""
    columns, absent = document.judged, document.not_judged
    lines = ["# Conformance of the transducer losses", "", f"On {escaped(judging.heading(document))}.", ""]
    lines += [
        f"Made by `{' '.join(document.command)}`. Loss and gradient are compared with the float64 oracle of "
        "`common/losses/oracle.py`, with the lattice that the implementation documents; a pruned loss has all of "
        "U in its ranges. Inputs are float32 unless the case says otherwise.",
        "",
    ]
    lines += ["## Matrix", "", "One for each lattice, with the cases that concern a loss of it.", ""]
    for kind, part in by_kind(document).items():
        lines += [f"### {titled(kind)}", "", *_compact(part), ""]
    lines += [f"{_legend(document)}.", "", "## Reductions", "", *_reductions(document), ""]
    lines += ["## Findings", "", *_findings(findings_by_kind(document))]
    lines += ["## Versions", "", markdown_table(_versions(document))]
    if any(judging.judged_elsewhere(row, document) for row in columns):
        lines += ["", "Each row is judged as a whole. A row that an earlier run judged keeps its revision."]
    simulated = [f"{row.name} ({row.simulator})" for row in columns if row.simulator]
    if simulated:
        lines += ["", f"Kernels for CUDA, run in a simulator on the CPU: {escaped(', '.join(simulated))}."]
    others = [f"- {escaped(row.name)}: {row.status}: {escaped(row.reason)}" for row in absent]
    lines += ["", "Not judged:", "", *others] if others else []
    lines += ["", "## The cases and the answers", ""]
    for case in document.cases:
        lines += [f"**{escaped(case.title)}** (`{case.name}`): {escaped(case.asks)}.", ""]
        for (result, words), names in judging.messages(document, case.name).items():
            lines.append(f"- {result}: {_code(words)}: {escaped(', '.join(names))}")
        lines += [""] if lines[-1] else []
    return "\n".join(lines)


def _versions(document: Matrix) -> Table:
    """Return the table of versions, a row for each implementation that was judged."""
    rows = []
    for row in document.judged:
        cells = {"implementation": row.name, "kind": row.kind, "version": row.version, "torch": row.torch}
        when = judging.judged_elsewhere(row, document) or judging.judged_when(document)
        cells.update({"Python": row.python, "judged": when})
        rows.append({title: Cell(str(value)) for title, value in cells.items()})
    return tabulated("versions", "Versions", rows)


def _findings(by_kind: Mapping[str, Sequence[judging.Finding]]) -> List[str]:
    """Return the Markdown lines of all findings."""
    lines = []
    if any(finding.shown for of_kind in by_kind.values() for finding in of_kind):
        lines += [HOW_TO_RUN, ""]
    for kind, of_kind in by_kind.items():
        lines += [f"### {kind}", "", *(line for finding in of_kind for line in _finding(finding))]
    return lines if by_kind else ["None.", ""]


def _finding(finding: judging.Finding) -> List[str]:
    """Return the Markdown lines of a finding, the first of its reproductions unfolded."""
    lines = [f"**{escaped(finding.case.title)}**: {escaped(finding.sentence)}.", ""]
    for words, names in finding.who.items():
        lines.append(f"- {escaped(', '.join(names))}" + (f": {_code(words)}" if words else ""))
    lines.append("")
    for number, (name, code) in enumerate(finding.shown.items()):
        command, source, title = obtaining.command(name), obtaining.source(name), f"Shown with {escaped(name)}"
        to_run = f"{_code(command)} ({source})" if command else source
        block = ["", "```python", code, "```", ""]
        if number == 0:
            lines += [f"{title}: {to_run}", *block]
        else:
            lines += [f"<details><summary>{title}</summary>", "", to_run, *block, "</details>", ""]
    return lines


#: Short heads of columns by name of the implementation; one that is not here has its own name.
SHORT = dict(
    pair.split("=")
    for pair in (
        "torchaudio=ta optimized_transducer=ot fast_rnnt=fr fast_rnnt-pruned=fr-p k2-pruned=k2-p "
        "warprnnt_numba=wn nemo=ne nemo-triton=nt warp-rnnt=wr warp-transducer=wt speechbrain=sb "
        "reference=ref apex=ap fused=fu transformers=tf nemo-tdt=nd nemo-multi-blank=nm"
    ).split()
)


def short(name: str) -> str:
    """Return the head of the column of an implementation; a variant adds its first letter ("ot:m")."""
    base, _, variant = name.partition(":")
    initials = "".join(word[0] for word in variant.split("-") if word)
    return SHORT.get(base, base) + (f":{initials}" if variant else "")


def _compact(document: Matrix) -> List[str]:
    """Return the Markdown lines of the matrix with a symbol in each cell, and the legend of symbols and heads."""
    columns = [(short(row.name), judging.called(row)) for row in document.judged]
    names = [f"{head} {name}" for head, name in columns if head != name]
    table_lines = markdown_table(matrix(document, [head for head, _ in columns], symbols=True))
    return [table_lines, "", f"{escaped(', '.join(names))}."]


def _legend(document: Matrix) -> str:
    """Return the meaning of the symbols in one line."""
    results = [f"{SYMBOLS[result]} {result}: {words}" for result, words in legend(document).items()]
    return "; ".join([*results, f"\\{NOTED} the loss is infinite as asked, the gradient nan"])


#: Formula of each reduction, its name in torch and torchaudio, and in NeMo and transformers; "": it has none.
REDUCTIONS = (
    ("the (N,) losses", "none", "none"),
    ("the sum of the losses", "sum", "sum"),
    ("the mean of the losses", "mean", "mean_batch"),
    ("the mean of each loss divided by its U", "", "mean"),
    ("the sum of the losses divided by the sum of U", "", "mean_volume"),
)
#: Its formula as the answers to case reduction-mean name it.
MEANS = dict(
    zip(
        ("mean over utterances", "mean over utterances of the loss per target", "sum over all targets of the batch"),
        (formula for formula, *_ in REDUCTIONS[2:]),
    )
)


def _reductions(document: Matrix) -> List[str]:
    """Return the Markdown lines of the names that reductions have, and of the package whose "mean" is which."""
    answered = gathered(
        (MEANS.get(outcome.message), name)
        for name, outcome in judging.outcomes_of(document, "reduction-mean")
        if outcome.result == PASS
    )
    rows = []
    for formula, name, other in REDUCTIONS:
        who = [] if formula is None else answered.get(formula, [])
        cells = {"formula": formula, "torchaudio": name, "NeMo, transformers": other, "mean of": ", ".join(who)}
        rows.append({title: Cell(words) for title, words in cells.items()})
    table_lines = markdown_table(tabulated("reductions", "Reductions", rows))
    return [table_lines, "", "The last column has the rows whose mean it is, as case `reduction-mean` saw it."]
