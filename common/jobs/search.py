"""--find-largest: for each implementation the largest batch that fits, and how fast it trains there.

Sizes are tried by doubling and bisection, each in a process of its own (the probe pass); then the throughput at the
largest is measured, in fresh processes.  A size at which that runs out of memory counts as too large, and the search
goes on.  The next job follows from the records alone, so that --resume tries nothing twice.
"""

from __future__ import annotations

from typing import Mapping, NamedTuple, Optional, Sequence

from common.core.errors import UserError
from common.core.flag_types import bytes_of
from common.core.settings import Settings
from common.core.text import GIB
from common.jobs.session import Session
from common.jobs.spec import Job
from common.records import store
from common.records.run import Run
from common.records.schema import Environment, Totals
from common.records.store import OUTCOMES, answers, bounds

#: The search ends when the largest size that fits and the smallest that does not are this close, as a fraction.
TOLERANCE = 0.05
#: Share of a CPU's available memory that is the limit by default. The loaded process and others need the rest.
SHARE_OF_AVAILABLE = 0.9


def next_size(answers: Mapping[int, bool], low: int, cap: int, start: int) -> Optional[int]:
    """Return the size to try next; None once the largest is known to within TOLERANCE, or 1.

    Args:
        answers: whether each size fits.  A size that fits does not count where a smaller one did not fit.
        low, cap: the lowest and highest size worth a try.
        start: from here on sizes are doubled until one fails, then the gap is halved.
    """
    fits, fails = bounds(answers)
    if fails is None:
        if fits is None:
            return min(max(start, low), cap)
        return None if fits >= cap else min(2 * fits, cap)
    below = low - 1 if fits is None else fits
    if fails - below > max(1, int(TOLERANCE * below)):
        return (below + fails) // 2
    return low if fits is None and fails > low else None


class MemoryLimit(NamedTuple):
    """The memory that a search may use, as the run's header has it."""

    bytes: Optional[int]  # None on CUDA, where the worker knows the device and the ``probe`` records tell
    source: str  # where the limit is from, in words


def memory_limit(settings: Settings, total: Optional[int], available: Optional[int]) -> MemoryLimit:
    """Return the limit of a search: on a CPU no more than is safe to use, with a warning if that is less than was
    asked for.  total, available: bytes of this machine's memory.  Raises UserError without /proc.
    """
    source = f"--memory-limit {settings.memory_limit}" if settings.memory_limit else "what is available"
    if settings.device != "cpu":
        return MemoryLimit(None, source)
    if total is None or available is None:
        raise UserError("--find-largest: on a CPU it needs Linux's /proc, which tells how much memory there is")
    most = int(SHARE_OF_AVAILABLE * available)
    if settings.memory_limit is None:
        return MemoryLimit(most, source)
    size = bytes_of(settings.memory_limit, total)
    if size > available:
        used = f"the limit is {most / GIB:.3g} GiB, {SHARE_OF_AVAILABLE:.0%} of what is available here"
        store.warn(f"{source}: {used}; larger batches may fit where all of it is free")
        return MemoryLimit(most, f"{source}; {used}")
    return MemoryLimit(size, source)


def run(session: Session, names: Sequence[str]) -> None:
    """Search the largest size of each implementation, correctness of all first.  Raises Interrupted and UserError."""
    session.carry_out_all([Job(name, "correctness") for name in names if session.run_of[name].needs("correctness")])
    for name in names:
        run = session.run_of[name]
        while run.is_done("correctness") and (job := next_job(run, session.settings)) is not None:
            end, _ = session.carry_out(job)
            if end.status not in OUTCOMES:
                break


def next_job(run: Run, settings: Settings) -> Optional[Job]:
    """Return the probe of the next size, or a round of the throughput at the largest; None where all is known."""
    limit = run.header.memory_limit
    environments = (record for record in run.records if isinstance(record, Environment))
    totals = next(record.shape_file_totals for record in environments if record.shape_file_totals)
    known = answers(store.latest_jobs(run.records))
    size, rounds, pass_name = next_size(known, *_range(settings, totals)), [None], "probe"
    if size is None:
        size, rounds, pass_name = bounds(known)[0], [*range(1, settings.rounds + 1)], "throughput"
    overrides = (((settings.find_largest or "").replace("-", "_"), size),)
    of_size = [
        Job(run.header.name, pass_name, at, size, overrides, limit.bytes if limit else None) for at in rounds if size
    ]
    return next((job for job in of_size if not run.is_done(job.name)), None)


def _range(settings: Settings, totals: Totals) -> Sequence[int]:
    """Return (lowest size worth a try, highest, first): sorted batches hold at least the longest utterance."""
    by_frames = settings.sort_utterance
    most = totals.frames if by_frames else totals.utterances
    cap = min(most, settings.largest_cap or most)
    if by_frames and cap < totals.T_max:
        raise UserError(
            f"--largest-cap {cap}: the longest utterance has {totals.T_max} frames and is a batch of its own; "
            "give at least that"
        )
    return totals.T_max if by_frames else 1, cap, settings.max_frames if by_frames else settings.batch_size
