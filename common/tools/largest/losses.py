"""The largest batch of each loss: which job comes next, and the table."""

from __future__ import annotations

from msgspec import Struct, structs

from rnnt_bench.analysis.groups import TITLES
from rnnt_bench.analysis.metrics import amount
from rnnt_bench.core import implementations, text
from rnnt_bench.core.errors import NOT_RUNNABLE
from rnnt_bench.present.parts import Cell, measured, tabulated
from rnnt_bench.records import schema
from rnnt_bench.tools.kept import NOT_RUN, Answer, Kept, slice_of
from rnnt_bench.tools.largest import buckets
from rnnt_bench.tools.largest.search import TOLERANCE, Outcome, Search

TOOL, TITLE = "largest", "Largest batch that fits"


class Losses(Struct, tag="losses", kw_only=True):
    """The search of several losses.

    Attributes:
        losses: the searches, by the names of rows
        kinds: of each
        missing: of those without a Python, why
        capped: whether --largest-cap was given
        unit: of the sizes, in words: "utterances"
        limit: what a step may take, in words
        words: what is the same for all: sizes, dtype, shape file
    """

    losses: list[Search]
    kinds: dict[str, str]
    missing: dict[str, str]
    capped: bool
    unit: str
    limit: str
    words: list[str]


def state(config: Losses, search: Search, kept: Kept) -> tuple[Outcome, tuple[str, int] | None]:
    """Return how far the search of a loss is, with its correctness before and the judgement of the
    size found after it, and (pass, size) of the job that comes next; None where none does."""
    if search.name in config.missing:
        return Outcome(None, "missing", config.missing[search.name]), None
    correct = kept.job(f"{search.name} correctness")
    if correct.status == NOT_RUN:
        return Outcome(None, "interrupted", "stopped before it was judged; --resume goes on"), None
    if correct.status != "ok":
        return Outcome(None, correct.status, correct.reason), None
    end = search.outcome(kept)
    size = search.next(kept)
    if size is not None:
        return end, ("probe", size)
    largest = end.size
    judged = kept.job(f"{search.name} judge-{largest}")
    if largest is None or end.status != "ok" or judged.status == "ok":
        return end, None
    if judged.status in ("interrupted", NOT_RUN):
        reason = "stopped before the size found was judged; --resume goes on"
        end = structs.replace(end, status="interrupted", reason=reason)
    else:
        end = structs.replace(end, status="wrong", reason=judged.reason)
    return end, ("judge", largest)


def coming(config: Losses, kept: Kept) -> list[tuple[str, str, int]]:
    """Return (loss, pass, size) of the next job of each right loss: the sizes, then a step of the
    size found."""
    jobs = {search.name: state(config, search, kept)[1] for search in config.losses}
    return [(name, *job) for name, job in jobs.items() if job]


def answer(kept: Kept) -> Answer:
    """Return the table of a run, the largest first."""
    if kept.header.config["type"] == "training":
        return buckets.answer(kept)
    config = schema.typed(kept.header.config, Losses)
    ends = {search.name: state(config, search, kept)[0] for search in config.losses}
    kinds = config.kinds
    rank = {kind: number for number, kind in enumerate(implementations.KINDS)}
    names = sorted(ends, key=lambda name: (rank.get(kinds[name], 0), -(ends[name].size or 0), name))
    rows = []
    values = []
    caps = {"cap": "--largest-cap" if config.capped else "all there are"}
    for name in names:
        end = ends[name]
        step = end.heaviest
        where = kept.job(f"{name} correctness").environment or schema.Environment()
        peak = step.peak_bytes / text.MB if step and step.peak_bytes else None
        if end.status not in NOT_RUNNABLE:  # a line below the table says why
            rows.append(
                {
                    "implementation": Cell(name),
                    "kind": Cell(TITLES.get(kinds[name], "")),
                    "status": Cell(end.status),
                    "within": Cell(amount(step.limit_bytes) if step else "-"),
                    "largest that fits": Cell(end.shown, end.size),
                    "limited by": Cell(caps.get(end.limited_by, end.limited_by or "-")),
                    "heaviest batch N x T x U+1": Cell(
                        f"{step.N} x {step.T} x {step.U + 1}" if step else "-"
                    ),
                    "peak MB": measured(peak),
                    "torch": Cell((where.torch or "-").partition("+")[0]),
                    "version": Cell(where.implementation_version or "-"),
                }
            )
        values.append(
            {
                "implementation": name,
                "kind": kinds[name],
                "status": end.status,
                "reason": end.reason,
                "largest": end.size,
                "unit": config.unit,
                "limited_by": end.limited_by,
                "limit_bytes": step.limit_bytes if step else None,
                "peak_mb": peak,
            }
        )
    title = f"The largest batch, in {config.unit}, within {config.limit}"
    exact = {
        name: end
        for name, end in ends.items()
        if kinds[name] in ("exact", implementations.BY_UTTERANCE)
    }
    approximate = {name: end for name, end in ends.items() if kinds[name] == "pruned"}
    total = [
        _verdict("exact", exact, config.unit),
        _verdict("approximate", approximate, config.unit),
    ]
    return Answer(
        kept.header.name,
        list(filter(None, total)),
        [tabulated("largest", title, rows)],
        [*kept.machine, ", ".join(config.words)],
        [f"{name}: {end.status}: {end.reason}" for name, end in ends.items() if end.reason],
        values,
        ["error" if end.status == "wrong" else end.status for end in ends.values()],
    )


def _verdict(title: str, ends: dict[str, Outcome], unit: str) -> str:
    """Return "largest batch, exact: fused, 48 utterances; next is k2 at 6"; withheld where a search
    did not end."""
    sizes = {name: end.size for name, end in ends.items() if end.size and end.status != "wrong"}
    if not sizes:
        return ""
    open_ = [name for name in sizes if ends[name].status != "ok"]
    if open_:
        return f"largest batch, {title}: withheld: the search of {', '.join(open_)} did not end; --resume goes on"
    (best, size), *others = sorted(sizes.items(), key=lambda item: -item[1])
    rivals = [name for name, other in others if size <= (1 + TOLERANCE) * other]
    names = " or ".join([best, *rivals])
    behind = f"; next is {others[0][0]} at {others[0][1]}" if others and not rivals else ""
    return f"largest batch, {title}: {names}, {size} {unit}{behind}"


SLICE = slice_of(TOOL, TITLE, answer)
