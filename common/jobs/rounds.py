"""The jobs of a run of losses in their order: correctness of all comes first, then every loss gets
the same rounds."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from rnnt_bench.core import text
from rnnt_bench.core.errors import NotRunnable
from rnnt_bench.core.implementations import FAST_MKL, find
from rnnt_bench.core.settings import FEWEST_IN_BUDGET, Settings
from rnnt_bench.jobs.job import WRONG_RESULT, Job, Like
from rnnt_bench.jobs.session import Executor, Session
from rnnt_bench.records import schema, store
from rnnt_bench.setup import interpreters, libraries

#: The device's limits are measured in the first of so many rounds: the best of all repeats counts.
LIMITS_EVERY = 3
LIMITS = Like("limits", "limits")
#: Seconds to look before a machine is called quiet.
LOOK_SECONDS = 2.0


def measure(
    session: Session, jobs: Sequence[Job], *, limits: bool = False, wait: float = 0.0
) -> None:
    """Run those of `jobs` that are not done yet.  After a job that is not ok the later ones of its
    loss are skipped.

    With --budget the first FEWEST_IN_BUDGET rounds and the other passes come in any case; then as
    many rounds, and repeats of rounds, as begin in time.  limits: measure the device's too; wait:
    seconds, in all, to wait for a quiet machine before rounds that ran beside other load are
    repeated.  Raises Interrupted, and UserError."""
    progress = session.progress
    budget = session.settings.budget or math.inf
    pending = [job for job in jobs if session.run_of[job.implementation].needs(job.name)]
    rounds = _by_round(pending)
    with_limits = list(rounds)[::LIMITS_EVERY] if limits else []
    in_time = [number for number in rounds if number > FEWEST_IN_BUDGET and budget < math.inf]
    coming = [(number, LIMITS) for number in with_limits] + [
        (job.round, job.like) for job in pending
    ]
    progress.deadline = time.monotonic() + budget
    progress.expect(
        [like for number, like in coming if number not in in_time],
        [like for number, like in coming if number in in_time],
    )
    timed = Rounds(session)
    # No loss is timed without it.
    session.carry_out_all([job for job in pending if job.pass_name == "correctness"])
    for number in [number for number in rounds if number not in in_time]:
        timed.run(number, rounds[number], number in with_limits)
    session.carry_out_all(
        [job for job in pending if job.pass_name not in ("correctness", "timing")]
    )
    for number in in_time:
        timed.run(number, rounds[number], number in with_limits)
    if wait:
        timed.repeat(list(_by_round(jobs).values()), wait)


def _by_round(jobs: Sequence[Job]) -> dict[int, list[Job]]:
    return text.gathered((job.round or 0, job) for job in jobs if job.pass_name == "timing")


class Rounds:
    """The timing rounds of a run.

    Attributes:
        ms: how fast each loss is so far, by loss, then by round and batch
        loaded: whether a loss ran beside other load, by loss and round
        no_limits: whether the device's limits could not be measured
    """

    def __init__(self, session: Session):
        self.session = session
        self.no_limits = False
        self.ms: dict[str, dict[tuple[int, Any], float]] = {}
        self.loaded: dict[tuple[str, int], bool] = {}
        for name, run in session.run_of.items():  # of a run that goes on
            for lines in store.latest_jobs(store.read(run.path)).values():
                end = store.status_of(lines)
                if end and (end.pass_name, end.status) == ("timing", "ok"):
                    self.note(name, end.round or 0, lines)

    def run(self, number: int, jobs: Sequence[Job], with_limits: bool) -> None:
        """Run the jobs of a round, and say who is ahead."""
        session, progress = self.session, self.session.progress
        in_time = number <= FEWEST_IN_BUDGET or time.monotonic() < progress.deadline
        timed = [job for job in jobs if in_time and not session.run_of[job.implementation].failed]
        for job in [job for job in jobs if job not in timed]:
            progress.skip(job.like)
        if timed:
            session.executor.get_ready(timed, session.python_of, session.settings)
        if with_limits:
            self.measure_limits(number, timed)
        for job in timed:
            if session.run_of[job.implementation].failed:
                progress.skip(job.like)
            else:
                self.carry_out(job)
        if timed:
            self.say(f"round {number}/{session.settings.rounds}")

    def say(self, title: str) -> None:
        """Say who is ahead, and how long it will take."""
        if self.ms:
            progress = self.session.progress
            progress.say("; ".join(filter(None, [f"{title}: {self.words()}", progress.left()])))

    def carry_out(self, job: Job) -> None:
        end, lines = self.session.carry_out(job)
        reason = end.reason or ""
        if end.status == "ok":
            self.note(job.implementation, job.round or 0, lines)
        elif reason.startswith(WRONG_RESULT):
            self.end_same_as(job, reason.removeprefix(f"{WRONG_RESULT}: "))

    def end_same_as(self, wrong: Job, words: str) -> None:
        """End the rows of the same code as a loss that was found wrong; they may not have been
        asked that question."""
        for name, run in self.session.run_of.items():
            if find(name).same_as == wrong.implementation and not run.failed:
                reason = f"{WRONG_RESULT}: of {wrong.implementation}, the same code, {words}"
                # It is not of this round: one that was right hides a later end.
                job = replace(wrong, implementation=name, pass_name="same-code")
                run.add([job.status("error", reason)])

    def note(self, name: str, number: int, lines: Sequence[schema.Line]) -> None:
        """Take in the samples of a loss in a round."""
        samples = [line for line in lines if isinstance(line, schema.Sample) and not line.warmup]
        by_scope = text.gathered((sample.scope, sample) for sample in samples)
        timed = by_scope.get("step", by_scope.get("loss", []))
        by_batch = text.gathered((sample.batch, sample.total_wall_ns / 1e6) for sample in timed)
        medians = {(number, batch): median(ms) for batch, ms in by_batch.items()}
        self.ms.setdefault(name, {}).update(medians)
        self.loaded[name, number] = any(map(store.is_loaded, by_scope.values()))

    def words(self) -> str:
        """Return "exact: a 577.8, b 969.9 ms; pruned: c 59.2 ms": means over the batches that were
        timed, of the losses that have all of them."""
        kinds = text.gathered(
            (self.session.run_of[name].header.kind or "exact", name) for name in self.ms
        )
        parts = []
        for kind, names in kinds.items():
            most = max(len(self.ms[name]) for name in names)
            means = {
                name: fmean(self.ms[name].values())
                for name in names
                if len(self.ms[name]) == most > 0
            }
            if means:
                losses = ", ".join(
                    f"{name} {text.number(means[name])}"
                    for name in sorted(means, key=means.__getitem__)
                )
                parts.append(f"{kind}: {losses} ms")
        return "; ".join(parts)

    def measure_limits(self, number: int, jobs: Sequence[Job]) -> None:
        """Measure what the device does at best, in the newest torch of the run and as torch is, and
        add the ``limits`` record to every run that goes on.  A failure is not fatal: it is not
        tried again.  Raises Interrupted."""
        session, progress = self.session, self.session.progress
        pythons = {
            name: choice.python for name, choice in session.python_of.items() if choice.python
        }
        pythons = {
            name: python for name, python in pythons.items() if not session.run_of[name].failed
        }
        wanted = pythons if jobs and not self.no_limits else {}
        usual = [name for name in wanted if find(name).condition != FAST_MKL]
        name = max(usual, key=lambda name: interpreters.torch_version(wanted[name]), default=None)
        if name is None:
            progress.skip(LIMITS)
            return
        job = Job(name, "limits", number, subject="device", request=_library(session.settings))
        progress.start(job.name)
        lines = session.execute(job)
        end = lines[-1]
        assert isinstance(end, schema.Status)
        limits = [line for line in lines if isinstance(line, schema.Limits)]
        if not limits:
            limits = [schema.Limits(reason=f"{end.status}: {end.reason}")]
            self.no_limits = True
        for line in limits:
            line.round = number
        for name in pythons:
            # the next job writes it, if there is room then
            with suppress(store.NotWritten):
                session.run_of[name].add(limits)
        progress.done(job.name, end.status, end.reason, LIMITS)

    def repeat(self, rounds: Sequence[Sequence[Job]], wait: float) -> None:
        """Repeat each round in which a loss ran beside other load, as a whole, when the machine is
        quiet; it replaces what its losses measured before, whatever the times are.  At most
        len(rounds) repetitions are made in all, and none begins after the budget."""
        session, progress = self.session, self.session.progress
        left = len(rounds)
        patience = wait
        while left:
            crowded = [
                jobs
                for jobs in rounds
                if any(self.loaded.get((job.like.row, job.round or 0)) for job in jobs)
            ]
            again = [[job for job in jobs if self._can_repeat(job)] for jobs in crowded[:left]]
            again = [jobs for jobs in again if jobs]
            if not again:
                return
            numbers = ", ".join(str(jobs[0].round) for jobs in again)
            beside_load = (
                f"{'round' if len(again) == 1 else 'rounds'} {numbers} ran beside other load"
            )
            if time.monotonic() >= progress.deadline:
                progress.say(
                    f"{beside_load}: --resume measures them again, since the time of --budget is over"
                )
                return
            progress.say(f"{beside_load}: measured again when the machine is quiet")
            progress.expect([], [job.like for jobs in again for job in jobs])
            for jobs in again:
                began = time.monotonic()
                while session.executor.disturbance(session.settings, LOOK_SECONDS):
                    if time.monotonic() - began > patience:
                        words = f"the machine was not quiet within {wait:g} s (--wait): what is left is not repeated"
                        progress.say(words)
                        return
                patience -= time.monotonic() - began
                if time.monotonic() >= progress.deadline:
                    break
                for job in filter(self._can_repeat, jobs):
                    self.carry_out(job)
                self.say(f"round {jobs[0].round}/{session.settings.rounds}, measured again")
            left -= len(again)

    def _can_repeat(self, job: Job) -> bool:
        return (job.implementation, job.round) in self.loaded and not self.session.run_of[
            job.implementation
        ].failed


def products(
    executor: Executor, name: str, python: Path, settings: Settings, folder: Path, timeout: float
) -> list[schema.Limits]:
    """Return ``limits`` records of matrix products alone, on one thread: as torch has them, beside
    the suite's own, then by torch under FAST_MKL.  Fewer where there is no C compiler, or a process
    fails.  Raises Interrupted.

    name: an implementation that `python` has; folder: --log-dir."""
    library = _library(settings)
    if "library" not in library:
        return []
    limits: list[schema.Limits] = []
    for row, options in ((name, library), (find(name).under(FAST_MKL).name, {})):
        request = {**options, "products_alone": True}
        job = Job(row, "limits", subject="device", overrides=(("threads", 1),), request=request)
        lines = executor.execute(job, python, folder, settings, timeout, lambda text: None)
        limits += [line for line in lines if isinstance(line, schema.Limits)]
    return limits


def _library(settings: Settings) -> dict[str, str]:
    """Return the library by which the limits pass multiplies beside torch, or why there is none, as
    Job.request."""
    if settings.device != "cpu" or settings.dtype not in libraries.NUMBERS:
        return {}
    try:
        return {"library": str(libraries.multiplication(settings.dtype))}
    except NotRunnable as error:
        return {"no_library": f"the suite's own products: {error}"}
