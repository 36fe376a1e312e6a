"""Carries out the jobs of a run, and keeps what they measure.

A job that crashes, hangs, is killed or runs out of memory costs only its own row.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from typing import Callable, Deque, Dict, Iterable, List, Mapping, Optional, Sequence, Set, Tuple

from common.core.settings import SLOW_ROUNDS, Settings
from common.jobs.budget import Budget, has_enough
from common.jobs.executor import Executor, Interrupted
from common.jobs.patience import Patience
from common.jobs.progress import Progress, Standing
from common.jobs.spec import Job, Runnable, like
from common.records import schema, store
from common.records.run import Run
from common.records.schema import Record, Status
from common.setup import interpreters
from common.traces import files

#: The device's limits are measured in the first of so many rounds: the best of all repeats counts.
LIMITS_EVERY = 3
#: Rounds that must be left for a row that joins, so that it measures these alone.
FEWEST_JOINED = 5
Chain = Deque[Job]


@dataclass
class Session:
    """The jobs of a run, carried out by an executor.

    Args:
        run_of, python_of: the run and the Python of each implementation, or task.
        timeout: seconds for one job.
        wait: seconds to wait, in all, for a quiet machine before rounds that ran beside other load are repeated; 0
            repeats none.
        budget: the time that the run may take.
        resumed: whether timing rounds may be on disk already.
        after_round: called with the number of each timing round that has ended.

    The other fields change during the run:
        timed, loaded: (implementation, round) of timing jobs that have samples, and that ran beside other load.
        limited: whether the device's limits are known, or could not be measured.
        standing: which implementation is ahead.
    """

    run_of: Mapping[str, Run]
    python_of: Mapping[str, interpreters.Choice]
    settings: Settings
    timeout: float
    progress: Progress
    executor: Executor
    wait: float = 0.0
    budget: Optional[Budget] = None
    resumed: bool = False
    after_round: Callable[[int], None] = lambda number: None
    timed: Set[Tuple[str, Optional[int]]] = field(default_factory=set)
    loaded: Set[Tuple[str, Optional[int]]] = field(default_factory=set)
    warned: Set[str] = field(default_factory=set)
    limited: bool = False
    standing: Standing = field(default_factory=lambda: Standing({}))

    def run(self, jobs: Sequence[Job], with_limits: bool) -> None:
        """Run those of `jobs` that are not done yet.  After a job that is not ok the later ones of its implementation
        are skipped.  with_limits: measure the device's limits too, at the begin of every third timing round.

        Raises Interrupted, and UserError for a mistake of the user's (a broken shape file, say).
        """
        self.standing.kind_of = {name: run.header.kind for name, run in self.run_of.items()}
        for name, run in self.run_of.items() if self.resumed else ():
            for number, samples in run.timed_rounds().items():
                self._note(name, number, samples)
        pending = self.pending(jobs)
        rounds = rounds_with_limits(pending) if with_limits else []
        limits = [("limits", "limits")] * len(rounds)
        self.progress.expect([*limits, *map(like, pending)])

        def serve(chain: Chain) -> None:
            pass_name, number = chain[0].pass_name, chain[0].round
            if pass_name == "timing" and not self._has_room(chain):
                for job in chain:
                    self.progress.skip(like(job))
                chain.clear()
                return
            timed = [job for job in chain if self._will_run(job)] if pass_name == "timing" else []
            if timed:
                self._get_ready(timed)
            if number in rounds:
                if timed:
                    self.limits(number)
                else:
                    self.progress.skip(("limits", "limits"))
            while chain:
                if self.run_of[chain[0].implementation].failed:
                    self.progress.skip(like(chain[0]))
                elif self._has_enough(chain[0]):
                    self._keep(chain[0], [{**chain[0].status("ok", ""), "left_out": True}])
                    self.progress.skip(like(chain[0]))
                else:
                    self.carry_out(chain[0])
                chain.popleft()
            if timed and self.standing.ms:
                words = f"round {number}/{self.settings.rounds}: {self.standing.words()}"
                self.progress.say_round("; ".join(filter(None, [words, self.progress.left()])))
                self.after_round(number or 0)

        for correctness in (True, False):  # no time without it
            for chain in _chains(job for job in pending if (job.pass_name == "correctness") is correctness):
                serve(chain)
        if self.wait:
            self.measure_again(_chains(job for job in jobs if job.pass_name == "timing"))

    def _will_run(self, job: Job) -> bool:
        """Tell whether a timing job is carried out when its turn comes."""
        return not self.run_of[job.implementation].failed and not self._has_enough(job)

    def _get_ready(self, jobs: Sequence[Job]) -> None:
        """Start what the jobs of a timing round need."""
        pythons = [self.python_of[job.implementation].python for job in jobs]
        self.executor.get_ready(jobs, list(dict.fromkeys(filter(None, pythons))), self.settings)

    def _has_room(self, chain: Chain) -> bool:
        """Tell whether a timing round is to begin: with --budget, where it and the passes after it still fit."""
        if self.budget is None:
            return True
        later = [coming for coming in self.progress.coming if coming[1] not in ("timing", "limits")]
        seconds = self.progress.seconds_of([*map(like, chain), *later])
        return self.budget.has_room(chain[0].round or 0, seconds)

    def _has_enough(self, job: Job) -> bool:
        """Tell whether the loss of a timing job is so slow that it needs no further round."""
        rounds = self.settings.slow_rounds or (SLOW_ROUNDS if self.budget else None)
        return job.pass_name == "timing" and bool(rounds) and has_enough(job.implementation, rounds or 0, self.standing)

    def measure_again(self, rounds: Sequence[Chain]) -> None:
        """Repeat each timing round in which a row ran beside other load, as a whole.

        Each begins when the machine is quiet, and replaces what its rows measured before, whatever the times are.  At
        most len(rounds) repetitions are made in all; one round may be repeated twice.

        Raises Interrupted and UserError.
        """
        left, patience = len(rounds), Patience(self.wait)

        def serve(chain: Chain) -> None:
            if not patience.until_quiet(self.executor, self.settings):
                return
            while chain:
                if not self.run_of[chain[0].implementation].failed:
                    self.carry_out(chain[0])
                chain.popleft()

        def key(job: Job) -> Tuple[str, Optional[int]]:
            return job.implementation, job.round

        while left > 0 and not patience.is_over:
            crowded = [chain for chain in rounds if any(key(job) in self.loaded for job in chain)][:left]
            again = [
                deque(job for job in chain if key(job) in self.timed and not self.run_of[job.implementation].failed)
                for chain in crowded
            ]
            again = [chain for chain in again if chain]
            if not again:
                return
            numbers = ", ".join(str(chain[0].round) for chain in again)
            noun = "round" if len(again) == 1 else "rounds"
            self.progress.say(f"{noun} {numbers} ran beside other load: measured again when the machine is quiet")
            self.progress.expect_more([like(job) for chain in again for job in chain])
            for chain in again:
                serve(chain)
            left -= len(again)
        if patience.is_over:
            self.progress.say(
                f"the machine was not quiet within {self.wait:g} s (--wait): what is left is not repeated"
            )

    def pending(self, jobs: Sequence[Job]) -> List[Job]:
        """Return the jobs that are not done yet, of implementations that can run."""
        first = self._first_rounds([job for job in jobs if job.pass_name == "timing"])
        result = []
        for job in jobs:
            run = self.run_of[job.implementation]
            is_behind = job.pass_name == "timing" and (job.round or 0) < first[job.implementation]
            if run.needs(job.name) and not is_behind:
                result.append(job)
        return result

    def _first_rounds(self, jobs: Sequence[Job]) -> Dict[str, int]:
        """Return the round that each implementation begins with, from its timing jobs.

        A row that joins a run when that is resumed begins with the others' next round, since a round holds what ran
        beside each other; with the first where too few are left.
        """
        done: Dict[str, List[int]] = {name: [] for name in self.run_of}
        for job in jobs:
            if self.run_of[job.implementation].is_done(job.name):
                done[job.implementation].append(job.round or 0)
        others = [number for name, rounds in done.items() if not self.run_of[name].joined for number in rounds]
        following = max(others, default=0) + 1
        left = len({job.round for job in jobs if (job.round or 0) >= following})
        joins = following if left >= FEWEST_JOINED else 1
        return {name: joins if self.run_of[name].joined else min(rounds, default=1) for name, rounds in done.items()}

    def carry_out(self, job: Runnable) -> Status:
        """Run one job and keep its records; returns its status.  Raises Interrupted and UserError."""
        name, pass_name = like(job)
        title = f"{name} {job.name}" if isinstance(job, Job) else name
        run, choice = self.run_of[name], self.python_of[name]
        self.progress.start(title)
        if choice.python is None:
            records = [job.status("missing", choice.reason)]
        else:
            try:
                records = self._execute(job)
            except Interrupted as interruption:
                self._keep(job, interruption.records)
                raise
        self._keep(job, records)
        self._warn(records)
        if isinstance(job, Job) and job.pass_name == "timing" and records[-1]["status"] == "ok":
            lines = [schema.typed(record) for record in records]
            self._note(name, job.round, [line for line in lines if isinstance(line, schema.Sample)])
        end = run.last_status
        self.progress.done(title, end.status, end.reason, like(job))
        return end

    def limits(self, number: Optional[int]) -> None:
        """Measure what a device does at best, in the newest torch of the run, and add the ``limits`` record to every
        run that goes on.  A failure is not fatal: it is not tried again, and of that device there is no "% of limit",
        or that of earlier rounds.  number: of the round.  Raises Interrupted."""
        pythons = {name: choice.python for name, choice in self.python_of.items() if choice.python}
        pythons = {name: python for name, python in pythons.items() if not self.run_of[name].failed}
        name = None if self.limited else interpreters.with_newest_torch(pythons)
        if name is None:
            self.progress.skip(("limits", "limits"))
            return
        job = Job(name, "limits", number, subject="device")
        self.progress.start(job.name)
        *records, status = self._execute(job)
        if not records:
            reason = f"{status['status']}: {status['reason']}"
            records = [{"record": "limits", "reason": reason}]
            self.limited = True
        of_all = [{**{key: record[key] for key in record if key != "job"}, "round": number} for record in records]
        for name in pythons:
            with suppress(store.NotWritten):  # goes to disk with the next job, if there is room then
                self.run_of[name].add(of_all)
        self.progress.done(job.name, status["status"], status["reason"], ("limits", "limits"))

    def _execute(self, job: Runnable) -> List[Record]:
        name, _ = like(job)
        python, how = self.python_of[name].python, (self.settings, self.timeout, self.progress.note)
        assert python is not None
        return self.executor.execute(job, python, self.run_of[name].folder, *how)

    def _keep(self, job: Runnable, records: Sequence[Record]) -> None:
        """Add the records of a job to its run.  Traces that failed are removed first: they may have filled the disk."""
        name, pass_name = like(job)
        if pass_name == "trace" and records[-1]["status"] != "ok":
            files.remove(self.run_of[name].folder)
        self.run_of[name].add(records)

    def _note(self, name: str, number: Optional[int], samples: Sequence[schema.Sample]) -> None:
        """Take in the samples of a timing round, and whether it ran beside other load."""
        self.standing.add(name, samples)
        self.timed.add((name, number))
        (self.loaded.add if store.loaded_scopes(samples) else self.loaded.discard)((name, number))

    def _warn(self, records: Sequence[Record]) -> None:
        """Print each warning of the workers once, whatever --quiet says: it is about the results."""
        for record in records:
            for warning in record.get("warnings", []):
                if warning not in self.warned:
                    self.warned.add(warning)
                    self.progress.warn(warning)


def rounds_with_limits(jobs: Sequence[Job]) -> List[int]:
    """Return the timing rounds that measure the limits of the device."""
    rounds = sorted({job.round for job in jobs if job.pass_name == "timing" and job.round is not None})
    return rounds[::LIMITS_EVERY]


def _chains(jobs: Iterable[Job]) -> List[Chain]:
    """Return the jobs in chains: a round of the timing pass, whose times are paired, is one; any other job is one of
    its own."""
    chains: List[Chain] = []
    for (pass_name, _), alike in groupby(jobs, key=lambda job: (job.pass_name, job.round)):
        chain = deque(alike)
        chains += [chain] if pass_name == "timing" else [deque([job]) for job in chain]
    return chains
