"""The largest batch of each loss: which job comes next, and the table."""

from __future__ import annotations

from msgspec import Struct

from rnnt_bench.analysis.groups import TITLES
from rnnt_bench.analysis.metrics import amount
from rnnt_bench.core.errors import NOT_RUNNABLE
from rnnt_bench.core.implementations import BY_UTTERANCE, KINDS
from rnnt_bench.present.parts import Cell, measured, tabulated
from rnnt_bench.records import schema
from rnnt_bench.tools.kept import Answer, Kept, slice_of
from rnnt_bench.tools.largest import buckets
from rnnt_bench.tools.largest.search import TOLERANCE, Outcome, Request, Search

TOOL, TITLE = "largest", "Largest batch that fits"
#: Utterances of the batch on which correctness is judged, before the size is known.
JUDGED = 2


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
    words: list[str]
    limit: str = ""


class Pass(Request, tag="loss", kw_only=True):
    """Ask for a pass of a loss: "correctness", "probe" or "judge" (measure)."""

    script: str
    variant: str
    pass_name: str


def state(config: Losses, search: Search, kept: Kept) -> Outcome:
    """Return how far the search of a loss is, with its correctness before and the judgement of the
    size found after it."""
    if search.name in config.missing:
        return Outcome(search.name, status="missing", reason=config.missing[search.name])
    correct = kept.job(f"{search.name} correctness")
    if correct.status != "ok":
        return Outcome(
            search.name,
            coming=max(search.low, JUDGED),
            pass_name="correctness",
            status=correct.status,
            reason=correct.reason,
        )
    end = search.outcome(kept)
    judged = kept.job(f"{search.name} judge-{end.size}")
    if end.size and end.coming is None and judged.status != "ok":
        end.coming = end.size
        end.pass_name = "judge"
        end.status = "wrong" if judged.status == "error" else judged.status
        end.reason = judged.reason
    return end


def coming(config: Losses, kept: Kept) -> list[Outcome]:
    """Return the searches that are to go on: first whether each loss is right, then the sizes, then
    a step of the size found."""
    ends = [state(config, search, kept) for search in config.losses]
    wanted = [end for end in ends if end.coming is not None]
    return sorted(wanted, key=lambda end: end.pass_name != "correctness")


def answer(kept: Kept) -> Answer:
    """Return the table of a run, the largest first."""
    if kept.header.config["type"] == "training":
        return buckets.answer(kept)
    config = schema.typed(kept.header.config, Losses)
    kinds = config.kinds
    ends = [state(config, search, kept) for search in config.losses]
    exact = [end for end in ends if kinds[end.name] in ("exact", BY_UTTERANCE)]
    approximate = [end for end in ends if kinds[end.name] == "pruned"]
    caps = {"cap": "--largest-cap" if config.capped else "all there are", "": "-"}
    rank = list(KINDS).index
    rows = []
    cells = []
    for end in sorted(ends, key=lambda end: (rank(kinds[end.name]), -(end.size or 0), end.name)):
        step = end.tries[0] if end.tries else None  # the heaviest
        rows.append(
            {
                "implementation": end.name,
                "kind": kinds[end.name],
                "status": end.status,
                "reason": end.reason,
                "largest": end.size,
                "unit": config.unit,
                "limited_by": end.limited_by,
                "limit_bytes": step.limit_bytes if step else None,
                "peak_mb": end.peak_mb,
            }
        )
        if end.status in NOT_RUNNABLE:  # a line below the table says why
            continue
        where = kept.job(f"{end.name} correctness").environment or schema.Environment()
        heaviest = f"{step.N} x {step.T} x {step.U + 1}" if step else "-"
        cells.append(
            {
                "implementation": Cell(end.name),
                "kind": Cell(TITLES.get(kinds[end.name], "")),
                "status": Cell(end.status),
                "within": Cell(amount(step.limit_bytes) if step else "-"),
                "largest that fits": Cell(end.shown, end.size),
                "limited by": Cell(caps.get(end.limited_by, end.limited_by)),
                "heaviest batch N x T x U+1": Cell(heaviest),
                "peak MB": measured(end.peak_mb),
                "torch": Cell((where.torch or "-").partition("+")[0]),
                "version": Cell(where.implementation_version or "-"),
            }
        )
    title = f"The largest batch, in {config.unit}, within {config.limit}"
    return Answer(
        kept.header.name,
        total=[
            *_verdict("exact", exact, config.unit),
            *_verdict("approximate", approximate, config.unit),
        ],
        tables=[tabulated("largest", title, cells)] if cells else [],
        lines=[*kept.machine, ", ".join(config.words)],
        failures=[f"{end.name}: {end.status}: {end.reason}" for end in ends if end.reason],
        rows=rows,
        statuses=["error" if end.status == "wrong" else end.status for end in ends],
    )


def _verdict(title: str, ends: list[Outcome], unit: str) -> list[str]:
    """Return ["largest batch, exact: fused, 48 utterances; next is k2 at 6"]; withheld where a
    search did not end, [] where nothing fits."""
    sizes = {end.name: end.size for end in ends if end.size and end.status != "wrong"}
    still = [end.name for end in ends if end.name in sizes and end.status != "ok"]
    if still:
        words = f"the search of {', '.join(still)} did not end; --resume goes on"
        return [f"largest batch, {title}: withheld: {words}"]
    names = sorted(sizes, key=lambda name: -sizes[name])
    if not names:
        return []
    best, *others = names
    rivals = [name for name in others if sizes[best] <= (1 + TOLERANCE) * sizes[name]]
    behind = f"; next is {others[0]} at {sizes[others[0]]}" if others and not rivals else ""
    words = " or ".join([best, *rivals])
    return [f"largest batch, {title}: {words}, {sizes[best]} {unit}{behind}"]


SLICE = slice_of(TOOL, TITLE, answer)
