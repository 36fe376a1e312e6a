"""--find-largest: for each implementation the largest batch that fits, and how fast it trains there.

Correctness of all comes first.  Then, for one implementation after the other, sizes are tried by doubling and
bisection, each in a process of its own (the probe pass).  Then the throughput at the largest size that fits is
measured, over the same utterances for all, in rounds of fresh processes, the implementations in shuffled order.  A size
at which the throughput pass runs out of memory counts as too large, and its search goes on.  The next size follows from
the records alone, so that --resume tries nothing twice.
"""

from __future__ import annotations

import random
from typing import Dict, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

from common.core import units
from common.core.errors import UserError
from common.core.settings import Settings
from common.jobs.session import Session
from common.jobs.spec import Job
from common.records import store
from common.records.run import Run
from common.records.schema import Environment
from common.records.search import OUTCOMES, TOO_LARGE, answers, bounds

#: The search ends when the largest size that fits and the smallest that does not are this close, as a fraction.
TOLERANCE = 0.05
#: Of the memory available on a CPU, where no limit is given: the rest is for the loaded process and for others.
SHARE_OF_AVAILABLE = 0.9


def next_size(answers: Mapping[int, bool], low: int, cap: int, start: int) -> Optional[int]:
    """Return the size to try next; None once the largest is known to within TOLERANCE, or 1. answers: whether each size
    fits; low, cap: the lowest and highest size worth a try.  From `start` on sizes are doubled until one fails, then
    the gap is halved.  A size that fits does not count where a smaller one did not fit."""
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
    asked for.  total, available: bytes of memory, see common.system.memory.  Raises UserError without /proc.
    """
    source = f"--memory-limit {settings.memory_limit}" if settings.memory_limit else "what is available"
    if settings.device != "cpu":
        return MemoryLimit(None, source)
    if total is None or available is None:
        raise UserError("--find-largest: on a CPU it needs Linux's /proc, which tells how much memory there is")
    most = int(SHARE_OF_AVAILABLE * available)
    if settings.memory_limit is None:
        return MemoryLimit(most, source)
    size = units.bytes_of(settings.memory_limit, total)
    if size > available:
        used = f"the limit is {most / units.GIB:.3g} GiB, {SHARE_OF_AVAILABLE:.0%} of what is available here"
        store.warn(f"{source}: {used}; larger batches may fit where all of it is free")
        return MemoryLimit(most, f"{source}; {used}")
    return MemoryLimit(size, source)


class Search:
    """The search of one implementation.

    failed: whether a probe failed for another reason than its size, which ends the search; untimed: whether the
    throughput pass failed.
    """

    def __init__(self, name: str, run: Run, settings: Settings):
        self.name, self.run, self.settings = name, run, settings
        limit = run.header.memory_limit
        self.limit_bytes = limit.bytes if limit else None
        self.failed = self.untimed = False

    def job(self, pass_name: str, size: int, pool: Optional[int] = None, round_number: Optional[int] = None) -> Job:
        overrides = (((self.settings.find_largest or "").replace("-", "_"), size),)
        return Job(self.name, pass_name, round_number, size, pool, overrides, self.limit_bytes)

    def answers(self) -> Dict[int, bool]:
        return answers(store.latest_jobs(self.run.records))

    def range(self) -> Tuple[int, int, int]:
        """Return (lowest size worth a try, highest, first): sorted batches hold at least the longest utterance."""
        totals = next(
            record.shape_file_totals
            for record in self.run.records
            if isinstance(record, Environment) and record.shape_file_totals
        )
        by_frames = self.settings.sort_utterance
        most = totals.frames if by_frames else totals.utterances
        cap = min(most, self.settings.largest_cap or most)
        start = self.settings.max_frames if by_frames else self.settings.batch_size
        if by_frames and cap < totals.T_max:
            raise UserError(
                f"--largest-cap {cap}: the longest utterance has {totals.T_max} frames and is a batch of its own; "
                "give at least that"
            )
        return totals.T_max if by_frames else 1, cap, start

    def next_probe(self) -> Optional[Job]:
        if self.failed:
            return None
        size = next_size(self.answers(), *self.range())
        return None if size is None else self.job("probe", size)

    @property
    def size(self) -> Optional[int]:
        """Return the largest size that fits, None when none is known to."""
        return bounds(self.answers())[0]

    def throughput_jobs(self, pool: int) -> List[Job]:
        """Return the throughput jobs that are not done yet, at the largest size that fits."""
        if self.size is None or self.untimed:
            return []
        jobs = [self.job("throughput", self.size, pool, number) for number in range(1, self.settings.rounds + 1)]
        return [job for job in jobs if not self.run.is_done(job.name)]


class Searches:
    """All searches of a session."""

    def __init__(self, session: Session):
        self.session = session
        self.order = random.Random(session.settings.seed)

    def run(self) -> None:
        """Run every search that is not finished.  Raises Interrupted and UserError."""
        runs = self.session.run_of
        wrong = [name for name, run in runs.items() if not run.is_done("correctness")]
        for name in wrong:
            self.session.carry_out(Job(name, "correctness"))
        right = {name: run for name, run in runs.items() if run.is_done("correctness")}
        searches = [Search(name, run, self.session.settings) for name, run in right.items()]
        while True:
            for search in searches:
                self._probe(search)
            if self._time(searches):
                return

    def _probe(self, search: Search) -> None:
        while (job := search.next_probe()) is not None:
            search.failed = self.session.carry_out(job).status not in OUTCOMES

    def _time(self, searches: Sequence[Search]) -> bool:
        """Measure the throughput rounds of all searches; return False if a size did not fit after all, so that its
        search goes on."""
        pool = max((search.size or 0 for search in searches), default=0)
        jobs = [(search, job) for search in searches for job in search.throughput_jobs(pool)]
        self.order.shuffle(jobs)
        jobs.sort(key=lambda pair: pair[1].round or 0)  # stable: shuffled within each round
        too_large: Set[str] = set()

        for search, job in jobs:
            if search.name not in too_large and not search.untimed:
                status = self.session.carry_out(job).status
                if status in TOO_LARGE:
                    too_large.add(search.name)
                search.untimed = status not in OUTCOMES
        return not too_large
