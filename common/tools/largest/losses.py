"""The largest batch of each loss: which job comes next, and the table.

A loss is judged on few utterances first, since its size is not known yet.  Then its sizes are
searched by probes.  At last a step of the size found is judged."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from rnnt_bench.analysis.groups import TITLES
from rnnt_bench.analysis.metrics import amount
from rnnt_bench.core.errors import NOT_RUNNABLE
from rnnt_bench.core.implementations import BY_UTTERANCE, KINDS
from rnnt_bench.present.parts import Cell, Values, measured, tabulated
from rnnt_bench.records import schema
from rnnt_bench.tools.kept import Answer, Kept, slice_of
from rnnt_bench.tools.largest import buckets
from rnnt_bench.tools.largest.search import TOLERANCE, Outcome, Request, Search

TOOL, TITLE = "largest", "Largest batch that fits"
#: Utterances of the batch on which correctness is judged before the size is known.
JUDGED = 2


class Losses(Struct, tag="losses", kw_only=True):
    """The search of several losses.

    Attributes:
        losses: the searches; their names are those of rows of the benchmarks
        kinds: name of a row -> its kind, a key of KINDS: "exact", "pruned", or another lattice
        missing: name of a row that has no Python to run in -> the reason
        capped: whether --largest-cap was given
        unit: what sizes count, "utterances" or a kind of frames
        words: settings that are the same for all rows: sizes, dtype, shape file
        limit: memory that a step may take, in words
    """

    losses: list[Search]
    kinds: dict[str, str]
    missing: dict[str, str]
    capped: bool
    unit: str
    words: list[str]
    limit: str = ""


class Pass(Request, tag="loss", kw_only=True):
    """Ask a job for a pass of a loss: "correctness", "probe" or "judge", see measure."""

    script: str
    variant: str
    pass_name: str


def outcome(config: Losses, search: Search, kept: Kept) -> Outcome:
    """Return the state of a loss: its result so far, and its next job, if one is to come.

    Its correctness comes first, then its search, then the judgement of the size found."""
    if search.name in config.missing:
        return Outcome(search.name, status="missing", reason=config.missing[search.name])
    correct = kept.job(f"{search.name} correctness")
    if correct.status != "ok":
        return Outcome(
            search.name,
            # Where sizes are frames, `low` is the longest T, below which no batch can be made.
            next_size=max(search.low, JUDGED),
            pass_name="correctness",
            status=correct.status,
            reason=correct.reason,
        )
    result = search.outcome(kept)
    if result.next_size is not None or result.size is None:  # the search goes on, or nothing fits
        return result
    judged = kept.job(f"{search.name} judge-{result.size}")
    if judged.status != "ok":  # not judged yet, or in vain; a wrong answer is an error of the job
        result.next_size = result.size
        result.pass_name = "judge"
        result.status = "wrong" if judged.status == "error" else judged.status
        result.reason = judged.reason
    return result


def unfinished(config: Losses, kept: Kept) -> list[Outcome]:
    """Return the states of the losses for which a job is still to come.

    Losses whose correctness is not known come first."""
    states = [outcome(config, search, kept) for search in config.losses]
    active = [state for state in states if state.next_size is not None]
    return sorted(active, key=lambda state: state.pass_name != "correctness")


def answer(kept: Kept) -> Answer:
    """Return the answer of a run of `largest`: of losses, or of a training (`buckets.answer`).

    The table of losses is ordered by kind, and within a kind the largest batch is first."""
    if kept.header.config["type"] == "training":
        return buckets.answer(kept)
    config = schema.typed(kept.header.config, Losses)
    kinds = config.kinds
    states = [outcome(config, search, kept) for search in config.losses]
    exact = [state for state in states if kinds[state.name] in ("exact", BY_UTTERANCE)]
    approximate = [state for state in states if kinds[state.name] == "pruned"]
    rank = list(KINDS).index
    ranked = sorted(
        states, key=lambda state: (rank(kinds[state.name]), -(state.size or 0), state.name)
    )
    # Why a row cannot run here stands below the table, among the failures.
    table = [_cells(config, state, kept) for state in ranked if state.status not in NOT_RUNNABLE]
    title = f"The largest batch, in {config.unit}, within {config.limit}"
    return Answer(
        kept.header.name,
        total=[
            *_verdict("exact", exact, config.unit),
            *_verdict("approximate", approximate, config.unit),
        ],
        tables=[tabulated("largest", title, table)] if table else [],
        lines=[*kept.machine, ", ".join(config.words)],
        failures=[
            f"{state.name}: {state.status}: {state.reason}" for state in states if state.reason
        ],
        rows=[_values(config, state) for state in ranked],
        # A wrong loss fails the command as an error does.
        statuses=["error" if state.status == "wrong" else state.status for state in states],
    )


def _values(config: Losses, state: Outcome) -> Values:
    """Return the row of a loss for CSV and JSON."""
    return {
        "implementation": state.name,
        "kind": config.kinds[state.name],
        "status": state.status,
        "reason": state.reason,
        "largest": state.size,
        "unit": config.unit,
        "limited_by": state.limited_by,
        # that of the heaviest batch, as in the table
        "limit_bytes": state.tries[0].limit_bytes if state.tries else None,
        "peak_mb": state.peak_mb,
    }


def _cells(config: Losses, state: Outcome, kept: Kept) -> dict[str, Cell]:
    """Return the row of a loss in the table, as {heading: cell}."""
    within = heaviest = "-"
    if state.tries:
        step = state.tries[0]  # that of the heaviest batch
        within = amount(step.limit_bytes)
        heaviest = f"{step.N} x {step.T} x {step.U + 1}"
    limited_by = state.limited_by or "-"
    # Without the flag the cap is what the shape file has: all utterances, or their frames.
    if limited_by == "cap":
        limited_by = "--largest-cap" if config.capped else "all there are"
    environment = kept.job(f"{state.name} correctness").environment or schema.Environment()
    return {
        "implementation": Cell(state.name),
        "kind": Cell(TITLES.get(config.kinds[state.name], "")),
        "status": Cell(state.status),
        "within": Cell(within),
        "largest that fits": Cell(state.shown, state.size),
        "limited by": Cell(limited_by),
        "heaviest batch N x T x U+1": Cell(heaviest),
        "peak MB": measured(state.peak_mb),
        "torch": Cell((environment.torch or "-").partition("+")[0]),
        "version": Cell(environment.implementation_version or "-"),
    }


def _verdict(title: str, states: Sequence[Outcome], unit: str) -> list[str]:
    """Return one line that names the loss with the largest batch; [] if no batch fits any loss.

    An example is "largest batch, exact: fused, 48 utterances; next is k2 at 6".  Losses within
    TOLERANCE of the best are named beside the best; the line then names no next one.  If the search
    of a loss has a size but did not end, the line says that the answer is withheld.

    title: "exact" or "approximate", which all these losses are; unit: what sizes count"""
    sizes = {state.name: state.size for state in states if state.size and state.status != "wrong"}
    if not sizes:
        return []
    unfinished = [state.name for state in states if state.name in sizes and state.status != "ok"]
    if unfinished:
        words = f"the search of {', '.join(unfinished)} did not end; --resume goes on"
        return [f"largest batch, {title}: withheld: {words}"]
    best, *others = sorted(sizes, key=lambda name: -sizes[name])
    rivals = [name for name in others if sizes[best] <= (1 + TOLERANCE) * sizes[name]]
    behind = f"; next is {others[0]} at {sizes[others[0]]}" if others and not rivals else ""
    return [f"largest batch, {title}: {' or '.join([best, *rivals])}, {sizes[best]} {unit}{behind}"]


SLICE = slice_of(TOOL, TITLE, answer)
