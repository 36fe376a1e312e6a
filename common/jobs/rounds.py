"""The jobs of a run of losses: correctness, then timing rounds, then the other passes.

Every loss gets the same rounds; with --budget, three at least, and none begins when the time is over.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from contextlib import suppress
from typing import Any, Dict, List, Optional, Sequence, Tuple

from common.core.settings import FEWEST_ROUNDS
from common.core.statistics import mean, median
from common.core.text import number as worded
from common.jobs.session import Session
from common.jobs.spec import Job
from common.records import schema, store
from common.records.schema import Sample
from common.setup import interpreters

#: The device's limits are measured in the first of so many rounds: the best of all repeats counts.
LIMITS_EVERY = 3
LIMITS = "limits", "limits"
#: Seconds to look before a machine is called quiet.
LOOK_SECONDS = 2.0


def measure(
    session: Session, jobs: Sequence[Job], *, limits: bool = False, wait: float = 0.0, budget: Optional[float] = None
) -> None:
    """Run those of `jobs` that are not done yet.  After a job that is not ok the later ones of its loss are skipped.

    Args:
        limits: measure the device's limits too, at the begin of every third timing round.
        wait: seconds to wait, in all, for a quiet machine before rounds that ran beside other load are repeated.
        budget: seconds after which no round begins.

    Raises Interrupted, and UserError for a mistake of the user's (a broken shape file, say).
    """
    pending = [job for job in jobs if session.run_of[job.implementation].needs(job.name)]
    rounds = _by_round(pending)
    with_limits = list(rounds)[::LIMITS_EVERY] if limits else []
    session.progress.expect([LIMITS] * len(with_limits) + [job.like for job in pending])
    timed = Rounds(session, budget)
    session.carry_out_all([job for job in pending if job.pass_name == "correctness"])  # no time without it
    for number, of_round in rounds.items():
        timed.run(number, of_round, number in with_limits)
    session.carry_out_all([job for job in pending if job.pass_name not in ("correctness", "timing")])
    if wait:
        timed.repeat(list(_by_round(jobs).values()), wait)


def _by_round(jobs: Sequence[Job]) -> Dict[int, List[Job]]:
    rounds: Dict[int, List[Job]] = {}
    for job in jobs:
        if job.pass_name == "timing" and job.round is not None:
            rounds.setdefault(job.round, []).append(job)
    return rounds


class Rounds:
    """The timing rounds of a run: how fast each loss is so far, and which rounds ran beside other load.

    Attributes:
        ms: by loss, then by round and batch; in a round all measure the same batches.
        loaded: whether a loss ran beside other load, by loss and round.
    """

    def __init__(self, session: Session, budget: Optional[float] = None):
        self.session, self.ends = session, time.monotonic() + (budget or math.inf)
        self.kinds = {name: run.header.kind or "exact" for name, run in session.run_of.items()}
        self.ms: Dict[str, Dict[Tuple[int, Any], float]] = {}
        self.loaded: Dict[Tuple[str, int], bool] = {}
        self.no_limits = False
        for name, run in session.run_of.items():
            for number, samples in run.timed_rounds().items():
                self.note(name, number, samples)

    def run(self, number: int, jobs: Sequence[Job], with_limits: bool) -> None:
        """Run the jobs of a round, and say who is ahead."""
        session, progress = self.session, self.session.progress
        in_time = number <= FEWEST_ROUNDS or time.monotonic() < self.ends
        timed = [job for job in jobs if in_time and not session.run_of[job.implementation].failed]
        for job in [job for job in jobs if job not in timed]:
            progress.skip(job.like)
        if timed:
            pythons = [session.python_of[job.implementation].python for job in timed]
            distinct = list(dict.fromkeys(python for python in pythons if python))
            session.executor.get_ready(timed, distinct, session.settings)
        if with_limits:
            self.measure_limits(number, timed)
        for job in timed:
            self.carry_out(job)
        if timed and self.ms:
            words = [f"round {number}/{session.settings.rounds}: {self.words()}", progress.left()]
            progress.say("; ".join(filter(None, words)))

    def carry_out(self, job: Job) -> None:
        end, records = self.session.carry_out(job)
        if end.status == "ok":
            lines = [schema.typed(record) for record in records]
            self.note(job.implementation, job.round or 0, [line for line in lines if isinstance(line, Sample)])

    def note(self, name: str, number: int, samples: Sequence[Sample]) -> None:
        """Take in the samples of a loss in a round."""
        times_of: Dict[Tuple[str, Any], List[float]] = defaultdict(list)
        for sample in samples:
            if not sample.warmup:
                times_of[sample.scope, (number, sample.batch)].append(sample.total_wall_ns / 1e6)
        scope = "step" if any(scope == "step" for scope, _ in times_of) else "loss"
        times = {batch: median(ms) for (of_scope, batch), ms in times_of.items() if of_scope == scope}
        self.ms.setdefault(name, {}).update(times)
        self.loaded[name, number] = bool(store.loaded_scopes(samples))

    def words(self) -> str:
        """Return "exact: a 577.8, b 969.9 ms; pruned: c 59.2 ms": means over the batches that were timed."""
        kinds: Dict[str, List[Tuple[float, str]]] = {}
        for name, ms in self.ms.items():
            most = max(len(of) for other, of in self.ms.items() if self.kinds[other] == self.kinds[name])
            if ms and len(ms) == most:
                kinds.setdefault(self.kinds[name], []).append((mean(list(ms.values())), name))
        lines = {kind: ", ".join(f"{name} {worded(ms)}" for ms, name in sorted(of)) for kind, of in kinds.items()}
        return "; ".join(f"{kind}: {line} ms" for kind, line in lines.items())

    def measure_limits(self, number: int, jobs: Sequence[Job]) -> None:
        """Measure what the device does at best, in the newest torch of the run, and add the ``limits`` record to every
        run that goes on.  A failure is not fatal: it is not tried again.  Raises Interrupted."""
        session, progress = self.session, self.session.progress
        pythons = {name: choice.python for name, choice in session.python_of.items() if choice.python}
        pythons = {name: python for name, python in pythons.items() if not session.run_of[name].failed}
        name = interpreters.with_newest_torch(pythons) if jobs and not self.no_limits else None
        if name is None:
            progress.skip(LIMITS)
            return
        job = Job(name, "limits", number, subject="device")
        progress.start(job.name)
        *records, status = session.execute(job)
        if not records:
            records = [{"record": "limits", "reason": f"{status['status']}: {status['reason']}"}]
            self.no_limits = True
        of_all = [{key: record[key] for key in record if key != "job"} | {"round": number} for record in records]
        for name in pythons:
            with suppress(store.NotWritten):  # goes to disk with the next job, if there is room then
                session.run_of[name].add(of_all)
        progress.done(job.name, status["status"], status["reason"], LIMITS)

    def repeat(self, rounds: Sequence[Sequence[Job]], wait: float) -> None:
        """Repeat each round in which a loss ran beside other load, as a whole.

        Each begins when the machine is quiet, and replaces what its losses measured before, whatever the times are.  At
        most len(rounds) repetitions are made in all; one round may be repeated twice.  Raises Interrupted and
        UserError.
        """
        session, left, patience = self.session, len(rounds), wait
        while left:
            crowded = [
                jobs for jobs in rounds if any(self.loaded.get((job.implementation, job.round or 0)) for job in jobs)
            ]
            again = [[job for job in jobs if self._can_repeat(job)] for jobs in crowded[:left]]
            again = [jobs for jobs in again if jobs]
            if not again:
                return
            noun, numbers = "round" if len(again) == 1 else "rounds", ", ".join(str(jobs[0].round) for jobs in again)
            session.progress.say(f"{noun} {numbers} ran beside other load: measured again when the machine is quiet")
            session.progress.expect([job.like for jobs in again for job in jobs])
            for jobs in again:
                began = time.monotonic()
                while session.executor.disturbance(session.settings, LOOK_SECONDS):
                    if time.monotonic() - began > patience:
                        words = f"the machine was not quiet within {wait:g} s (--wait): what is left is not repeated"
                        session.progress.say(words)
                        return
                patience -= time.monotonic() - began
                for job in filter(self._can_repeat, jobs):
                    self.carry_out(job)
            left -= len(again)

    def _can_repeat(self, job: Job) -> bool:
        timed = (job.implementation, job.round) in self.loaded
        return timed and not self.session.run_of[job.implementation].failed
