"""Show a conformance matrix, from the records of a run: tables and findings, written once for the
screen, Markdown and the page; and tell the verdict what to beware of in a loss: first wrong answers
without an error, then crashes, then errors for inputs that one could expect to work.  Does not
import torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

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
    RESULTS,
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
#: Files of `check --output`: the page of docs/, and the corners that the verdict reads.
PAGE, CORNERS = "conformance.md", "corners.json"
#: Mark of each result (a class of page.css; bold in Markdown if something is wrong), its symbol and
#: its meaning.
MARKS = dict(zip(RESULTS, ("good", "wrong", "refused", "dead", "dead", "quiet", "dead")))
SYMBOLS = dict(zip(RESULTS, "\u2713\u2717!\u2020\u2026\u2013?"))
LEGEND = {
    PASS: "as asked",
    DIFFERS: "a wrong answer without an error",
    REFUSES: "an error instead of an answer",
    CRASHES: "its process died, or its CUDA context, which only a new process gets back",
    TIMEOUT: "no answer in time",
    NOT_ASKED: "the case does not concern it, or was not asked",
    ERROR: "this suite failed",
}
#: Results that a user must beware of, the worst first.
FINDINGS = {
    DIFFERS: "Wrong without an error",
    CRASHES: "Ends the process",
    TIMEOUT: "Hangs",
    REFUSES: "Refuses what one could expect to work",
}
OTHER_KINDS = {
    "exact": "the transducer of Graves 2012",
    "pruned": "pruned, with all of U in its ranges",
}
SIMULATED = " (simulated)"
#: Characters of an answer that a finding quotes.
LONGEST = 72
#: Short heads of columns by name of the implementation; one that is not here has its own name.
SHORT = dict(
    pair.split("=")
    for pair in (
        "torchaudio=ta optimized_transducer=ot fast_rnnt=fr fast_rnnt-pruned=fr-p k2-pruned=k2-p warprnnt_numba=wn "
        "nemo=ne nemo-triton=nt warp-rnnt=wr warp-transducer=wt speechbrain=sb reference=ref apex=ap fused=fu "
        "transformers=tf nemo-tdt=nd nemo-multi-blank=nm"
    ).split()
)


class Config(Struct, kw_only=True):
    """Hold what a run was asked: cases, the device, and why losses are missing here."""

    cases: list[str]
    device: str
    missing: dict[str, str] = {}


@dataclass
class Matrix:
    """Hold rows, the cases that they were asked, a line on device, day and revision, and when the
    run started."""

    heading: str
    rows: Sequence[Row]
    cases: Sequence[Question] = TABLE
    started: str = ""

    def of_kinds(self) -> Iterator[Matrix]:
        """Yield the matrix of each kind of loss, with the cases in which one of them is not as
        asked."""
        order = {kind: number for number, kind in enumerate(KINDS)}
        kinds = text.gathered((row.kind, row) for row in self.rows if row.cells)
        for kind in sorted(kinds, key=lambda kind: order.get(kind, len(order))):
            odd = [
                case for case in self.cases if any(_odd_cases(row, [case]) for row in kinds[kind])
            ]
            lattice = LATTICES.get(kind)
            yield Matrix(
                f"{kind}: {lattice}" if lattice else OTHER_KINDS.get(kind, kind), kinds[kind], odd
            )


def outcome_of(row: Row, case: Question) -> Outcome:
    return row.cells.get(case.name, Outcome(NOT_ASKED, "not asked"))


def leaves_nan(outcome: Outcome) -> bool:
    """Return whether the outcome passes although the gradient is NaN, which no optimizer may
    see."""
    return outcome.result == PASS and outcome.message.endswith(NAN_GRADIENT)


def called(name: str, row: Row) -> str:
    return name + (SIMULATED if row.simulator else "")


def short(name: str) -> str:
    """Return the head of a column; a variant adds its first letters ("ot:m")."""
    base, _, variant = name.partition(":")
    initials = "".join(word[0] for word in variant.split("-") if word)
    return SHORT.get(base, base) + (f":{initials}" if variant else "")


def tables(matrix: Matrix) -> list[Table]:
    """Return a table for each kind of loss in which one is not as asked: a row for each case in
    which one is not, and a column for each loss that is not as asked in every case; the title names
    the others."""
    result = []
    for part in matrix.of_kinds():
        columns = [row for row in part.rows if _odd_cases(row, part.cases)]
        if not columns:
            continue
        rows = []
        for case in part.cases:
            outcomes = [outcome_of(row, case) for row in columns]
            stars = ["*" if leaves_nan(outcome) else "" for outcome in outcomes]
            cells = (
                Cell(SYMBOLS[outcome.result] + star, mark=MARKS[outcome.result])
                for outcome, star in zip(outcomes, stars)
            )
            rows.append([Cell(case.title), *cells])
        clean = ", ".join(row.name for row in part.rows if row not in columns)
        title = part.heading + (f"; as asked in every case: {clean}" if clean else "")
        heads = [
            Column("case", False),
            *(Column(short(row.name), False, centered=True) for row in columns),
        ]
        result.append(Table(f"conformance-{columns[0].kind}", title, heads, rows))
    return result


def _odd_cases(row: Row, cases: Sequence[Question]) -> list[Question]:
    outcomes = [(case, outcome_of(row, case)) for case in cases]
    return [
        case
        for case, outcome in outcomes
        if outcome.result not in (PASS, NOT_ASKED) or leaves_nan(outcome)
    ]


def meaning(case: Question, result: str) -> str:
    """Return what a result of a case means to a user; "" where nothing is to beware of."""
    fatal = f"ends or hangs the process: {case.title}"
    return {DIFFERS: case.wrong, CRASHES: fatal, TIMEOUT: fatal, REFUSES: case.refusal}.get(
        result, ""
    )


def findings(matrix: Matrix, brief: bool = False) -> dict[str, list[str]]:
    """Return lines by the kind of finding, wrong answers first: the case, what it means, for whom,
    and what the first of them answered; brief: what it means and for whom."""
    lines: dict[str, list[str]] = {}
    for result, heading in FINDINGS.items():
        for case in matrix.cases:
            hits = [(outcome_of(row, case), row.name) for row in matrix.rows]
            who = [(name, outcome.message) for outcome, name in hits if outcome.result == result]
            words = meaning(case, result)
            if who and words:
                if not brief and result in (CRASHES, TIMEOUT):  # which the heading says
                    words = case.title
                elif not brief or words == WRONG:
                    words = f"{case.title}: {words}"
                answer = (
                    ""
                    if brief or result == REFUSES or not who[0][1]
                    else f" ({text.short(who[0][1], LONGEST)})"
                )
                lines.setdefault(heading, []).append(
                    f"{words}: {_packages(name for name, _ in who)}{answer}"
                )
    return lines


def _packages(names: Iterable[str]) -> str:
    """Return names without their variants, each once: the tables have all."""
    return ", ".join(dict.fromkeys(name.partition(":")[0] for name in names))


def remarks(matrix: Matrix) -> list[str]:
    """Return the lines below the tables: symbols, heads of columns, versions, and whose mean is
    which."""
    judged = [row for row in matrix.rows if row.cells]
    used = {outcome.result for row in judged for outcome in row.cells.values()}
    legend = [f"{SYMBOLS[result]} {words}" for result, words in LEGEND.items() if result in used]
    packages: dict[str, Row] = {}
    for row in judged:
        packages.setdefault(row.name.partition(":")[0], row)
    named = {name: called(name, row) for name, row in packages.items()}
    heads = [f"{short(name)} {words}" for name, words in named.items() if short(name) != words]
    if any(leaves_nan(outcome) for row in judged for outcome in row.cells.values()):
        legend.append("* the loss is infinite as asked, the gradient nan")
    lines = ["; ".join(legend)]
    lines += (
        [f"columns, where a variant adds its first letters: {', '.join(heads)}"] if heads else []
    )
    versions = text.gathered((row.torch, f"{name} {row.version}") for name, row in packages.items())
    lines += [f"torch {torch}: {', '.join(names)}" for torch, names in versions.items()]
    means = [(outcome_of(row, BY_NAME["reduction-mean"]), row.name) for row in judged]
    whose = text.gathered(
        (outcome.message, name) for outcome, name in means if outcome.result == PASS
    )
    lines += [
        f'reduction "mean" is the {words}: {_packages(names)}' for words, names in whose.items()
    ]
    imprecise = text.gathered(
        (row.name, case.title)
        for row in judged
        for case in matrix.cases
        if outcome_of(row, case).message.startswith(IMPRECISE)
    )
    return lines + [
        f"imprecise, right in float64 alone: {name} ({', '.join(titles)})"
        for name, titles in imprecise.items()
    ]


def answer_of(matrix: Matrix, of_user: Sequence[str] = ()) -> kept.Answer:
    """Return a matrix as all formats show it; losses `of_user` fail the command where they are
    wrong or not judged."""
    judged = [row for row in matrix.rows if row.cells]
    clean = [called(row.name, row) for row in judged if not _odd_cases(row, matrix.cases)]
    asked = f"{matrix.heading}; {text.count(len(matrix.cases), 'case')}"
    pairs = [
        (row.name, case.name, outcome_of(row, case)) for row in judged for case in matrix.cases
    ]
    rows = [
        {"loss": loss, "case": case, **structs.asdict(outcome)} for loss, case, outcome in pairs
    ]
    unjudged = [(row.name, row.status, row.reason) for row in matrix.rows if not row.cells]
    return kept.Answer(
        TITLE,
        total=[asked, f"as asked in all: {', '.join(clean) or 'none'}"],
        tables=tables(matrix),
        lines=[
            *(f"{kind}: {line}" for kind, lines in findings(matrix).items() for line in lines),
            *remarks(matrix),
        ],
        failures=[f"not judged: {': '.join(words)}" for words in unjudged],
        folded=True,
        rows=[
            *rows,
            *(
                {"loss": loss, "case": "", "result": result, "message": why}
                for loss, result, why in unjudged
            ),
        ],
        statuses=[_status(row, row.name in of_user) for row in matrix.rows],
    )


def _status(row: Row, is_of_user: bool) -> str:
    """Return the status that tells the exit code: packages may be wrong, a loss of the user's own
    may not."""
    results = {outcome.result for outcome in row.cells.values()}
    plain = row.cells.get("ragged", Outcome(PASS)).result == PASS
    right = PASS in results and plain and not {DIFFERS, CRASHES, TIMEOUT} & results
    if ERROR in results or (is_of_user and not right):
        return ERROR
    return "ok" if row.status == JUDGED else row.status


def page(matrix: Matrix, earlier: Mapping[str, Corners]) -> str:
    """Return docs/conformance.md: the matrix, the findings, what an earlier run found of losses
    that this one did not judge, and links."""
    lines = [
        "# Conformance of the transducer losses",
        f"{text.escaped(matrix.heading)}. `./rnnt-bench check --output docs` makes this page, "
        "`--list` says what each case asks, `--only NAME` judges one loss, your own too; [corners.md](corners.md) says "
        "more. Loss and gradient are compared with the float64 oracle of the lattice. "
        "Programs of 12 lines show defects to maintainers: see [family.md](family.md).",
        "## Matrix",
        *(block(table, "markdown") for table in tables(matrix)),
        listed(remarks(matrix), "markdown"),
        "## Findings",
    ]
    for heading, of_kind in findings(matrix, brief=True).items():
        lines += [f"### {heading}", listed(of_kind, "markdown")]
    if earlier:
        lines += ["## Judged earlier", "This run did not judge these; an earlier one did:"]
        lines.append(listed(_of_earlier(earlier), "markdown"))
    missing = [row for row in matrix.rows if not row.cells]
    reasons = text.gathered(
        (re.sub(f"^{re.escape(row.name)} ", "it ", row.reason), row.name) for row in missing
    )
    absent = [f"{', '.join(names)}: {reason}" for reason, names in reasons.items()]
    if absent:
        lines += ["## Not judged", listed(absent, "markdown")]
    return "\n\n".join(lines) + "\n"


def _of_earlier(earlier: Mapping[str, Corners]) -> list[str]:
    """Return a line for each loss: the day, its version, and the cases by their result."""
    lines = []
    for name, entry in earlier.items():
        words = []
        for result in FINDINGS:
            titles = [case.title for case in TABLE if entry.results.get(case.name) == result]
            words += [f"{SYMBOLS[result]} {', '.join(titles)}"] if titles else []
        lines.append(f"{name} {entry.version}, {entry.day}: {'; '.join(words) or 'none'}")
    return lines


def matrix_of(run: kept.Kept) -> Matrix:
    """Return the matrix of a run: its rows in the order of the implementations, and those that are
    missing here."""
    head, config = run.header, schema.typed(run.header.config, Config)
    kinds = {implementation.name: implementation.kind for implementation in with_variants()}
    reasons = {name: ("missing", reason) for name, reason in config.missing.items()}
    reasons.update(
        (name, (job.status, job.reason)) for name, job in run.jobs.items() if not job.values
    )
    rows = [row for job in run.jobs.values() for row in job.of(Row)]
    rows += [
        Row(name, kinds.get(name, "exact"), status, reason)
        for name, (status, reason) in reasons.items()
    ]
    order = {name: number for number, name in enumerate(kinds)}
    rows.sort(key=lambda row: order.get(row.name, len(order)))
    devices = dict.fromkeys(row.device_name for row in rows if row.device_name)
    revision = (head.git_revision or "unknown")[:12] + (
        " with uncommitted changes" if head.git_dirty else ""
    )
    heading = f"{config.device}: {' and '.join(devices) or head.machine.cpu}; {head.started[:10]}; suite {revision}"
    return Matrix(
        heading, rows, [BY_NAME[name] for name in config.cases if name in BY_NAME], head.started
    )


class Corners(Struct):
    """Hold the result of each case that a user of a loss must beware of, the version that was
    judged, and the day."""

    version: str
    day: str
    results: Mapping[str, str]


def corners(matrix: Matrix) -> dict[str, Corners]:
    """Return the corners of each loss that was judged."""
    result = {}
    for row in (row for row in matrix.rows if row.cells):
        results = {
            case: outcome.result
            for case, outcome in row.cells.items()
            if outcome.result in FINDINGS
        }
        version = (row.version or "").partition("+")[0]
        result[row.name] = Corners(version, matrix.started[:10], results)
    return result


def read_corners(folder: Path) -> dict[str, Corners]:
    """Return the corners that a folder has, {} where it has none.  Raises UserError."""
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
    """Return what to beware of in an implementation, the worst first, by the newest matrix in
    `folders` that judged it, else by the corners of docs/; None if none did."""
    answers = kept.answers(folders, TOOL, matrix_of)
    matrices = [answer for answer in answers if isinstance(answer, Matrix)]
    newest_first = sorted(matrices, key=lambda matrix: matrix.started, reverse=True)
    every = [*map(corners, newest_first), read_corners(ROOT / "docs")]
    entry = next((of_run[name] for of_run in every if name in of_run), None)
    if entry is None:
        return None
    results = entry.results
    meanings = [
        meaning(case, result)
        for result in FINDINGS
        for case in TABLE
        if results.get(case.name) == result
    ]
    return Judged(list(dict.fromkeys(filter(None, meanings))), entry.version, entry.day)


SLICE = replace(kept.slice_of(TOOL, TITLE, lambda run: answer_of(matrix_of(run))), judged=judged)
