"""Show the records of `check`: how each loss answers each case (the matrix), and what to beware of
in a loss (its corners).

The matrix becomes tables and findings for the screen, Markdown and the page.  The corners are kept
in docs/ too, and the verdict quotes them: first wrong answers without an error, then crashes, then
errors for inputs that one could expect to work.  Does not import torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from rnnt_bench.conformance.outcomes import (
    CRASHES,
    DIFFERS,
    ERROR,
    IMPRECISE,
    JUDGED,
    NAN_GRADIENT,
    NOT_ASKED,
    PASS,
    REFUSES,
    TIMEOUT,
    Outcome,
    Row,
)
from rnnt_bench.core import text
from rnnt_bench.core.errors import UserError
from rnnt_bench.core.files import ROOT
from rnnt_bench.core.implementations import KINDS, LATTICES, with_variants
from rnnt_bench.core.questions import BY_NAME, TABLE, WRONG, Question
from rnnt_bench.present.parts import Cell, Column, Judged, Table
from rnnt_bench.present.text import block, listed
from rnnt_bench.records import schema
from rnnt_bench.tools import kept

# isort: split
from msgspec import Struct, structs

TOOL, TITLE = "check", "Conformance: which loss is right in which corner"
#: Files that `check --output` writes: the page of docs/, and the corners that the verdict reads.
PAGE, CORNERS = "conformance.md", "corners.json"


class Style(NamedTuple):
    """Hold how a result is shown.

    Attributes:
        symbol: in the matrix.
        mark: its class in page.css; in Markdown the symbol is bold if present.text.BOLD has it.
        meaning: what the legend says.
    """

    symbol: str
    mark: str
    meaning: str


LOST = "its process died, or its CUDA context, which only a new process gets back"
STYLES: Mapping[str, Style] = {
    PASS: Style("\u2713", "good", "as asked"),  # a check mark
    DIFFERS: Style("\u2717", "wrong", "a wrong answer without an error"),  # a cross
    REFUSES: Style("!", "refused", "an error instead of an answer"),
    CRASHES: Style("\u2020", "dead", LOST),  # a dagger
    TIMEOUT: Style("\u2026", "dead", "no answer in time"),  # an ellipsis
    NOT_ASKED: Style("\u2013", "quiet", "the case does not concern it, or was not asked"),  # a dash
    ERROR: Style("?", "dead", "this suite failed"),
}
#: Results that a user must beware of, the worst first, with the headings of their findings.
FINDINGS = {
    DIFFERS: "Wrong without an error",
    CRASHES: "Ends the process",
    TIMEOUT: "Hangs",
    REFUSES: "Refuses what one could expect to work",
}
#: Titles of the kinds of loss that are not named for their lattice.
OTHER_KINDS = {
    "exact": "the transducer of Graves 2012",
    "pruned": "pruned, with all of U in its ranges",
}
SIMULATED = " (simulated)"
#: A finding quotes at most so many characters of an answer.
LONGEST = 72
#: Short heads of columns, by implementation.  One that is not here has its own name.
SHORT = {
    "torchaudio": "ta",
    "optimized_transducer": "ot",
    "fast_rnnt": "fr",
    "fast_rnnt-pruned": "fr-p",
    "k2-pruned": "k2-p",
    "warprnnt_numba": "wn",
    "nemo": "ne",
    "nemo-triton": "nt",
    "nemo-tdt": "nd",
    "nemo-multi-blank": "nm",
    "warp-rnnt": "wr",
    "warp-transducer": "wt",
    "speechbrain": "sb",
    "reference": "ref",
    "apex": "ap",
    "fused": "fu",
    "transformers": "tf",
}


class Config(Struct, kw_only=True):
    """Hold what a run was asked: names of cases, the device, and why losses are missing here."""

    cases: list[str]
    device: str
    missing: dict[str, str] = {}


@dataclass
class Matrix:
    """Hold the outcomes of a run.

    Attributes:
        heading: device, day and revision.
        rows: one for each loss.
        cases: those that the losses were asked.
        started: when the run began, ISO 8601; "" if it is not known.
    """

    heading: str
    rows: Sequence[Row]
    cases: Sequence[Question] = TABLE
    started: str = ""

    @property
    def judged(self) -> list[Row]:
        """Return the rows that have outcomes."""
        return [row for row in self.rows if row.cells]


def outcome_of(row: Row, case: Question) -> Outcome:
    """Return the outcome of a loss in a case; NOT_ASKED if the row has none."""
    return row.cells.get(case.name, Outcome(NOT_ASKED, "not asked"))


def leaves_nan(outcome: Outcome) -> bool:
    """Return whether the outcome passes although the gradient is NaN: users must keep this gradient
    from their optimizer."""
    return outcome.result == PASS and outcome.message.endswith(NAN_GRADIENT)


def called(name: str, row: Row) -> str:
    """Return a name, with SIMULATED behind it if the kernels of the row ran in a simulator."""
    return name + (SIMULATED if row.simulator else "")


def short(name: str) -> str:
    """Return the head of a loss's column: "ot" for "optimized_transducer", "ot:m" for
    "optimized_transducer:modified"."""
    base, _, variant = name.partition(":")
    head = SHORT.get(base, base)
    if not variant:
        return head
    return f"{head}:" + "".join(word[0] for word in variant.split("-") if word)


def tables(matrix: Matrix) -> list[Table]:
    """Return a table for each kind of loss, without kinds whose losses have no odd case, see
    `_odd_cases`."""
    by_kind = text.gathered((row.kind, row) for row in matrix.judged)
    ordered = dict.fromkeys([*KINDS, *by_kind])
    every = [_table(kind, by_kind[kind], matrix.cases) for kind in ordered if kind in by_kind]
    return [table for table in every if table.rows]


def _table(kind: str, rows: Sequence[Row], cases: Sequence[Question]) -> Table:
    """Return the table of a kind of loss, with the cases in which a loss is odd (`_odd_cases`).

    Its columns are the losses that are odd in at least one case; the title names the other losses
    of the kind.  It has no lines if no loss is odd.

    rows: the losses of the kind
    """
    columns = [row for row in rows if _odd_cases(row, cases)]
    heads = [Column(short(row.name), False, centered=True) for row in columns]
    lines = [
        [Cell(case.title), *(_cell(outcome_of(row, case)) for row in columns)]
        for case in cases
        if any(_odd_cases(row, [case]) for row in columns)
    ]
    title = f"{kind}: {LATTICES[kind]}" if kind in LATTICES else OTHER_KINDS.get(kind, kind)
    clean = [row.name for row in rows if row not in columns]
    if clean:
        title += f"; as asked in every case: {', '.join(clean)}"
    return Table(f"conformance-{kind}", title, [Column("case", False), *heads], lines)


def _cell(outcome: Outcome) -> Cell:
    """Return an outcome as a symbol, with a star if it leaves NaN in the gradient."""
    style = STYLES[outcome.result]
    star = "*" if leaves_nan(outcome) else ""
    return Cell(style.symbol + star, mark=style.mark)


def _odd_cases(row: Row, cases: Sequence[Question]) -> list[Question]:
    """Return the cases that a loss does not pass, or passes with NaN in the gradient. Cases that
    are not asked of the loss are left out."""
    odd = []
    for case in cases:
        outcome = outcome_of(row, case)
        if outcome.result not in (PASS, NOT_ASKED) or leaves_nan(outcome):
            odd.append(case)
    return odd


def meaning(case: Question, result: str) -> str:
    """Return what a result of a case means to a user; "" where it is no reason to beware."""
    if result in (CRASHES, TIMEOUT):
        return f"ends or hangs the process: {case.title}"
    return {DIFFERS: case.wrong, REFUSES: case.refusal}.get(result, "")


def findings(matrix: Matrix, brief: bool = False) -> dict[str, list[str]]:
    """Return heading -> the lines of its findings, wrong answers first.

    A line has the case, what its result means, the losses with this result, and the answer of the
    first of them unless it refused.  With `brief` a line has only the meaning and the losses.  If
    the meaning says only that the process ends or hangs, or that the answer is not the loss, a
    brief line has the case, too.
    """
    lines: dict[str, list[str]] = {}
    for result, heading in FINDINGS.items():
        for case in matrix.cases:
            what = _finding(case, result, brief)
            rows = [row for row in matrix.rows if outcome_of(row, case).result == result]
            if not what or not rows:
                continue
            line = f"{what}: {_packages(row.name for row in rows)}"
            answer = outcome_of(rows[0], case).message
            if answer and result != REFUSES and not brief:
                line += f" ({text.short(answer, LONGEST)})"
            lines.setdefault(heading, []).append(line)
    return lines


def _finding(case: Question, result: str, brief: bool) -> str:
    """Return what a line of `findings` says of a case; "" where the result is no finding.

    brief: as in `findings`."""
    words = meaning(case, result)
    # A meaning of the case's own tells the case.  WRONG does not: many cases have it.
    if not words or (brief and words != WRONG):
        return words
    if result in (CRASHES, TIMEOUT):
        return case.title  # the heading says the rest
    return f"{case.title}: {words}"


def _packages(names: Iterable[str]) -> str:
    """Return names without their variants, each once, since the tables have the variants."""
    return ", ".join(dict.fromkeys(name.partition(":")[0] for name in names))


def remarks(matrix: Matrix) -> list[str]:
    """Return the lines below the tables.

    They tell what the symbols and the heads of columns mean, the versions, what the reduction
    "mean" of each package is, and which losses are imprecise in which cases."""
    # The first row of each package, by the package.
    packages: dict[str, Row] = {}
    for row in matrix.judged:
        packages.setdefault(row.name.partition(":")[0], row)
    heads = []
    for name, row in packages.items():
        words = called(name, row)
        if short(name) != words:
            heads.append(f"{short(name)} {words}")
    lines = [_legend(matrix)]
    if heads:
        lines.append(f"columns, where a variant adds its first letters: {', '.join(heads)}")
    versions = text.gathered((row.torch, f"{name} {row.version}") for name, row in packages.items())
    lines += [f"torch {torch}: {', '.join(names)}" for torch, names in versions.items()]
    means = text.gathered(
        (outcome.message, row.name)
        for row in matrix.judged
        if (outcome := outcome_of(row, BY_NAME["reduction-mean"])).result == PASS
    )
    lines += [
        f'reduction "mean" is the {mean}: {_packages(names)}' for mean, names in means.items()
    ]
    for row in matrix.judged:
        titles = [
            case.title
            for case in matrix.cases
            if outcome_of(row, case).message.startswith(IMPRECISE)
        ]
        if titles:
            lines.append(f"imprecise, right in float64 alone: {row.name} ({', '.join(titles)})")
    return lines


def _legend(matrix: Matrix) -> str:
    """Return the symbols that the tables may show, with what they mean."""
    outcomes = [outcome for row in matrix.judged for outcome in row.cells.values()]
    used = {outcome.result for outcome in outcomes}
    legend = [
        f"{style.symbol} {style.meaning}" for result, style in STYLES.items() if result in used
    ]
    if any(map(leaves_nan, outcomes)):
        legend.append("* the loss is infinite as asked, the gradient nan")
    return "; ".join(legend)


def answer_of(matrix: Matrix, of_user: Sequence[str] = ()) -> kept.Answer:
    """Return a matrix as all formats show it.

    of_user: losses of the user's own, which fail the command where they are wrong or not judged.
    """
    clean = [called(row.name, row) for row in matrix.judged if not _odd_cases(row, matrix.cases)]
    asked = f"{matrix.heading}; {text.count(len(matrix.cases), 'case')}"
    lines = [
        f"{heading}: {line}"
        for heading, finding_lines in findings(matrix).items()
        for line in finding_lines
    ]
    rows = [
        {"loss": row.name, "case": case.name, **structs.asdict(outcome_of(row, case))}
        for row in matrix.judged
        for case in matrix.cases
    ]
    unjudged = [row for row in matrix.rows if not row.cells]
    rows += [
        {"loss": row.name, "case": "", "result": row.status, "message": row.reason}
        for row in unjudged
    ]
    return kept.Answer(
        TITLE,
        total=[asked, f"as asked in all: {', '.join(clean) or 'none'}"],
        tables=tables(matrix),
        lines=[*lines, *remarks(matrix)],
        failures=[f"not judged: {row.name}: {row.status}: {row.reason}" for row in unjudged],
        folded=True,
        rows=rows,
        statuses=[_status(row, row.name in of_user) for row in matrix.rows],
    )


def _status(row: Row, is_of_user: bool) -> str:
    """Return the status of a loss for the exit code: ERROR, which fails the command, "ok", or why
    the loss was not judged.

    It is ERROR if this suite failed in a case.  For a loss of the user's own it is also ERROR if a
    case is wrong, crashes or hangs, or if no case passed.  So it is if the case "ragged" was asked
    and did not pass."""
    results = {outcome.result for outcome in row.cells.values()}
    ragged = row.cells.get("ragged")
    is_wrong = results & {DIFFERS, CRASHES, TIMEOUT} or (ragged and ragged.result != PASS)
    if ERROR in results or (is_of_user and (is_wrong or PASS not in results)):
        return ERROR
    return "ok" if row.status == JUDGED else row.status


def page(matrix: Matrix, earlier: Mapping[str, Corners]) -> str:
    """Return docs/conformance.md: the matrix, its findings, and which losses were not judged.

    earlier: the corners of losses that this run did not judge, by name.
    """
    lines = [
        "# Conformance of the transducer losses",
        f"{text.escaped(matrix.heading)}. `./rnnt-bench check --output docs` makes this page, "
        "`--list` says what each case asks, `--only NAME` judges one loss, your own too; "
        "[corners.md](corners.md) says more. Loss and gradient are compared with the float64 oracle "
        "of the lattice. Programs of 12 lines show defects to maintainers: see "
        "[family.md](family.md).",
        "## Matrix",
        *(block(table, "markdown") for table in tables(matrix)),
        listed(remarks(matrix), "markdown"),
        "## Findings",
    ]
    for heading, finding_lines in findings(matrix, brief=True).items():
        lines += [f"### {heading}", listed(finding_lines, "markdown")]
    if earlier:
        lines += ["## Judged earlier", "This run did not judge these; an earlier one did:"]
        lines.append(listed(_of_earlier(earlier), "markdown"))
    # A reason may begin with the name of its loss.  Without that name, losses with equal reasons
    # share a line.
    reasons = text.gathered(
        (re.sub(f"^{re.escape(row.name)} ", "it ", row.reason), row.name)
        for row in matrix.rows
        if not row.cells
    )
    absent = [f"{', '.join(names)}: {reason}" for reason, names in reasons.items()]
    if absent:
        lines += ["## Not judged", listed(absent, "markdown")]
    return "\n\n".join(lines) + "\n"


def _of_earlier(earlier: Mapping[str, Corners]) -> list[str]:
    """Return a line for each loss: its version, the day, and the titles of its cases behind the
    symbol of each result of FINDINGS, or "none".

    earlier: name of a loss -> its corners."""
    lines = []
    for name, entry in earlier.items():
        results = []
        for result in FINDINGS:
            titles = [case.title for case in entry.cases(result)]
            if titles:
                results.append(f"{STYLES[result].symbol} {', '.join(titles)}")
        lines.append(f"{name} {entry.version}, {entry.day}: {'; '.join(results) or 'none'}")
    return lines


def matrix_of(run: kept.Kept) -> Matrix:
    """Return the matrix of a run.  It has a row also for each loss that was not judged.

    Its rows have the order of the implementations; losses that are none of these come last."""
    head, config = run.header, schema.typed(run.header.config, Config)
    kinds = {implementation.name: implementation.kind for implementation in with_variants()}

    def unjudged(name: str, status: str, reason: str) -> Row:
        return Row(name, kinds.get(name, "exact"), status, reason)

    rows = [unjudged(name, "missing", reason) for name, reason in config.missing.items()]
    for name, job in run.jobs.items():
        rows += job.of(Row) or [unjudged(name, job.status, job.reason)]
    order = list(kinds)
    rows.sort(key=lambda row: order.index(row.name) if row.name in kinds else len(order))
    devices = dict.fromkeys(row.device_name for row in rows if row.device_name)
    revision = (head.git_revision or "unknown")[:12]
    if head.git_dirty:
        revision += " with uncommitted changes"
    hardware = " and ".join(devices) or head.machine.cpu
    heading = f"{config.device}: {hardware}; {head.started[:10]}; suite {revision}"
    cases = [BY_NAME[name] for name in config.cases if name in BY_NAME]
    return Matrix(heading, rows, cases, head.started)


class Corners(Struct):
    """Hold what a user of a loss must beware of.

    Attributes:
        version: of the package that was judged.
        day: when it was judged, ISO 8601.
        results: names of cases, each with a result of FINDINGS.
    """

    version: str
    day: str
    results: Mapping[str, str]

    def cases(self, result: str) -> list[Question]:
        """Return the cases with a result, in the order of the table."""
        return [case for case in TABLE if self.results.get(case.name) == result]


def corners(matrix: Matrix) -> dict[str, Corners]:
    """Return the corners of each loss that was judged, by name."""
    result = {}
    for row in matrix.judged:
        results = {
            case: outcome.result
            for case, outcome in row.cells.items()
            if outcome.result in FINDINGS
        }
        version = (row.version or "").partition("+")[0]  # "1.24" of "1.24+cu130"
        result[row.name] = Corners(version, matrix.started[:10], results)
    return result


def read_corners(folder: Path) -> dict[str, Corners]:
    """Return the corners in the file CORNERS of a folder, by name of the loss; {} if there is no
    such file.  Raises UserError if it cannot be read."""
    path = folder / CORNERS
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        result: dict[str, Corners] = schema.typed(content, dict[str, Corners])
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: {error}; remove it, or make it by check --output") from error
    return result


def judged(name: str, folders: Sequence[Path]) -> Judged | None:
    """Return what to beware of in a loss, the worst first; None if it was never judged.

    The answer is that of the newest run in `folders` that judged it.  If none did, it is that of the
    corners in docs/.
    """
    answers = kept.answers(folders, TOOL, matrix_of)
    matrices = [answer for answer in answers if isinstance(answer, Matrix)]
    newest_first = sorted(matrices, key=lambda matrix: matrix.started, reverse=True)
    for corners_by_name in (*map(corners, newest_first), read_corners(ROOT / "docs")):
        if name in corners_by_name:
            entry = corners_by_name[name]
            meanings = [
                meaning(case, result) for result in FINDINGS for case in entry.cases(result)
            ]
            caveats = list(dict.fromkeys(filter(None, meanings)))
            return Judged(caveats, entry.version, entry.day)
    return None


SLICE = replace(kept.slice_of(TOOL, TITLE, lambda run: answer_of(matrix_of(run))), judged=judged)
