"""Run the jobs of a run of losses in their order: correctness of all comes first, then every loss
gets the same timing rounds, then the other passes.

The limits of the device, how fast it reads, writes and multiplies at best, are measured between the
rounds.  A row under FAST_MKL runs with MKL on its fast path, by a preloaded library
(core/implementations.py).
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median

from rnnt_bench.core import text
from rnnt_bench.core.errors import NotRunnable
from rnnt_bench.core.implementations import FAST_MKL, find
from rnnt_bench.core.settings import FEWEST_IN_BUDGET, Settings
from rnnt_bench.jobs.job import WRONG_RESULT, Job, RowPass
from rnnt_bench.jobs.session import Executor, Session
from rnnt_bench.records import schema, store
from rnnt_bench.setup import interpreters, libraries

#: The device's limits are measured in the first of every three rounds.  Only the best of all
#: repeats counts.
LIMITS_EVERY = 3
LIMITS = RowPass("limits", "limits")
#: Seconds to look before a machine is called quiet.
LOOK_SECONDS = 2.0


def measure(
    session: Session, jobs: Sequence[Job], *, limits: bool = False, wait: float = 0.0
) -> None:
    """Run the jobs that are not done yet.  After a job that is not ok the later jobs of its loss are
    skipped.

    With --budget the first FEWEST_IN_BUDGET rounds and the other passes come in any case.  Further
    rounds, and repeats of rounds, only begin before the budget is spent.  Raises Interrupted on
    Ctrl-C, and UserError for a mistake in the user's input that a job finds.

    Args:
        session: the runs to measure
        jobs: those that `jobs.job.plan` returned
        limits: whether the limits of the device are measured, too
        wait: seconds, in all, to wait for a quiet machine before rounds that ran beside other load
          are repeated
    """
    progress = session.progress
    budget = session.settings.budget or math.inf
    pending = [job for job in jobs if session.run_of[job.implementation].needs(job.name)]
    rounds = _by_round(pending)
    with_limits = list(rounds)[::LIMITS_EVERY] if limits else []
    optional = [number for number in rounds if number > FEWEST_IN_BUDGET and budget < math.inf]
    certain = [number for number in rounds if number not in optional]
    # All that will run, with the number of its round: it tells whether the budget may leave it out.
    # A job of another pass has the number 0, and is certain.
    expected = [(number, LIMITS) for number in with_limits]
    expected += [(job.round or 0, job.row_pass) for job in pending]
    progress.deadline = time.monotonic() + budget
    progress.expect(
        [row_pass for number, row_pass in expected if number not in optional],
        [row_pass for number, row_pass in expected if number in optional],
    )
    timing = Rounds(session)
    # The correctness jobs come first, since a loss that is wrong is not timed.
    session.carry_out_all([job for job in pending if job.pass_name == "correctness"])
    for number in certain:
        timing.run(number, rounds[number], number in with_limits)
    session.carry_out_all(
        [job for job in pending if job.pass_name not in ("correctness", "timing")]
    )
    for number in optional:
        timing.run(number, rounds[number], number in with_limits)
    if wait:  # of all rounds, also those that an earlier command measured
        timing.repeat(list(_by_round(jobs).values()), wait)


def _by_round(jobs: Sequence[Job]) -> dict[int, list[Job]]:
    """Return {number of the round: its jobs} of the timing pass."""
    return text.gathered((job.round or 0, job) for job in jobs if job.pass_name == "timing")


class Rounds:
    """The timing rounds of a run.

    Attributes:
        ms: median time of each loss so far: ms[loss][round, batch]
        loaded: whether a loss ran beside other load: loaded[loss, round]; only rounds in which the
            loss ended well have an entry
        no_limits: whether measuring the device's limits has failed
    """

    def __init__(self, session: Session):
        """Take in the timing rounds that resumed runs already have on disk."""
        self.session = session
        self.no_limits = False
        self.ms: dict[str, dict[tuple[int, int], float]] = {}
        self.loaded: dict[tuple[str, int], bool] = {}
        for name, run in session.run_of.items():
            for lines in store.latest_jobs(store.read(run.path)).values():
                end = store.status_of(lines)
                if end and end.pass_name == "timing" and end.status == "ok":
                    self.take_in(name, end.round or 0, lines)

    def run(self, number: int, jobs: Sequence[Job], with_limits: bool) -> None:
        """Run the jobs of a round whose losses have not failed, and show the mean times.

        A round after the first FEWEST_IN_BUDGET is skipped if the deadline has passed.

        number: of the round, from 1; with_limits: whether to measure the limits of the device
        before the jobs."""
        session, progress = self.session, self.session.progress
        is_too_late = number > FEWEST_IN_BUDGET and time.monotonic() >= progress.deadline
        timed: list[Job] = []
        for job in jobs:
            if is_too_late or session.run_of[job.implementation].failed:
                progress.skip(job.row_pass)
            else:
                timed.append(job)
        if timed:
            session.executor.get_ready(timed, session.python_of, session.settings)
        if with_limits:
            self.measure_limits(number, timed)
        for job in timed:
            # Another row of the same code may have been found wrong in this round.
            if session.run_of[job.implementation].failed:
                progress.skip(job.row_pass)
            else:
                self.carry_out(job)
        if timed:
            self.say(f"round {number}/{session.settings.rounds}")

    def say(self, title: str) -> None:
        """Show the mean times of the losses so far, and how long the run will take.  Show nothing
        before any loss has times.

        title: what the line begins with, such as "round 2/5"."""
        if self.ms:
            progress = self.session.progress
            progress.say("; ".join(filter(None, [f"{title}: {self.standing()}", progress.left()])))

    def carry_out(self, job: Job) -> None:
        """Run a job, and take in its times.  If it finds its loss wrong, end the other rows that
        run the same code."""
        end, lines = self.session.carry_out(job)
        reason = end.reason or ""
        if end.status == "ok":
            self.take_in(job.implementation, job.round or 0, lines)
        elif reason.startswith(WRONG_RESULT):
            self.end_same_code(job, reason.removeprefix(f"{WRONG_RESULT}: "))

    def end_same_code(self, wrong: Job, reason: str) -> None:
        """End the rows that run the same code as a loss that was found wrong.  Their own jobs ask
        fewer questions, and may not find the mistake.

        wrong: the job that found the loss wrong; reason: what is wrong with the loss."""
        for name, run in self.session.run_of.items():
            if find(name).same_as == wrong.implementation and not run.failed:
                # `pass_name` gives the job a name of its own.  Under the name of a timing job that
                # has ended well, readers would leave this status out (see store.latest_jobs).
                job = replace(wrong, implementation=name, pass_name="same-code")
                status = job.status(
                    "error", f"{WRONG_RESULT}: of {wrong.implementation}, the same code, {reason}"
                )
                run.add([status])

    def take_in(self, name: str, number: int, lines: Sequence[schema.Line]) -> None:
        """Keep the times of a loss in a round, and whether the loss ran beside other load.

        The times are those of the scope "step", or of the scope "loss" where no step was timed.

        name: of the loss; number: of the round; lines: the records of the job."""
        samples = [line for line in lines if isinstance(line, schema.Sample) and not line.warmup]
        by_scope = text.gathered((sample.scope, sample) for sample in samples)
        timed = by_scope.get("step", by_scope.get("loss", []))
        by_batch = text.gathered((sample.batch, sample.total_wall_ns / 1e6) for sample in timed)
        medians = {(number, batch): median(ms) for batch, ms in by_batch.items()}
        self.ms.setdefault(name, {}).update(medians)
        self.loaded[name, number] = any(map(store.is_loaded, by_scope.values()))

    def standing(self) -> str:
        """Return the mean times of losses by kind: "exact: a 577.8, b 969.9 ms; pruned: c 59.2 ms".

        A time is of one batch in one round.  Of each kind only the losses that have the most times
        are named: those that lag behind are left out."""
        kinds = text.gathered(
            (self.session.run_of[name].header.kind or "exact", name) for name in self.ms
        )
        parts = []
        for kind, names in kinds.items():
            most_times = max(len(self.ms[name]) for name in names)
            if not most_times:
                continue
            complete = [name for name in names if len(self.ms[name]) == most_times]
            means = sorted((fmean(self.ms[name].values()), name) for name in complete)
            losses = ", ".join(f"{name} {text.number(mean)}" for mean, name in means)
            parts.append(f"{kind}: {losses} ms")
        return "; ".join(parts)

    def measure_limits(self, number: int, jobs: Sequence[Job]) -> None:
        """Measure the limits of the device, and add the ``limits`` record to every run that has not
        failed.  The newest torch of the run measures them, without FAST_MKL.

        After a failure they are not measured again.  Raises Interrupted.

        number: number of the round; jobs: the jobs of the round, [] if the round is skipped."""
        session, progress = self.session, self.session.progress
        pythons = {
            name: choice.python
            for name, choice in session.python_of.items()
            if choice.python and not session.run_of[name].failed
        }
        usual = [name for name in pythons if find(name).condition != FAST_MKL]
        if not (jobs and usual) or self.no_limits:
            progress.skip(LIMITS)
            return
        name = max(usual, key=lambda name: interpreters.torch_version(pythons[name]))
        job = Job(
            name, "limits", number, subject="device", request=_product_request(session.settings)
        )
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
            # If the disk has no room now, the run keeps the records and writes them with the next.
            with suppress(store.NotWritten):
                session.run_of[name].add(limits)
        progress.done(job.name, end.status, end.reason, LIMITS)

    def repeat(self, rounds: Sequence[Sequence[Job]], wait: float) -> None:
        """Repeat the rounds in which a loss ran beside other load, until no such round is left.

        At most len(rounds) repetitions are made in all, and none begins after the deadline of
        --budget.

        A round is repeated as a whole, when the machine is quiet.  The new times replace the old
        ones, even if they are longer.  If the machine is not quiet in time, the repetitions end.

        rounds: the jobs of each round; wait: seconds to wait for a quiet machine, in all."""
        session, progress = self.session, self.session.progress
        wait_left = wait
        repetitions_left = len(rounds)
        while again := self._loaded_rounds(rounds)[:repetitions_left]:
            repetitions_left -= len(again)
            numbers = ", ".join(str(jobs[0].round) for jobs in again)
            noun = "round" if len(again) == 1 else "rounds"
            beside_load = f"{noun} {numbers} ran beside other load"
            if time.monotonic() >= progress.deadline:
                progress.say(
                    f"{beside_load}: --resume measures them again, since the time of --budget is over"
                )
                return
            progress.say(f"{beside_load}: measured again when the machine is quiet")
            progress.expect([], [job.row_pass for jobs in again for job in jobs])
            for jobs in again:
                began = time.monotonic()
                # A look takes LOOK_SECONDS, so this loop needs no sleep.
                while session.executor.disturbance(session.settings, LOOK_SECONDS):
                    if time.monotonic() - began > wait_left:
                        progress.say(
                            f"the machine was not quiet within {wait:g} s (--wait): what is left is not repeated"
                        )
                        return
                wait_left -= time.monotonic() - began
                if time.monotonic() >= progress.deadline:
                    break  # if repetitions are left, the outer loop tells which rounds need one
                for job in filter(self._can_repeat, jobs):
                    self.carry_out(job)
                self.say(f"round {jobs[0].round}/{session.settings.rounds}, measured again")

    def _loaded_rounds(self, rounds: Sequence[Sequence[Job]]) -> list[list[Job]]:
        """Return the jobs to repeat of each round in which a loss ran beside other load."""
        result = []
        for jobs in rounds:
            is_loaded = any(self.loaded.get((job.implementation, job.round or 0)) for job in jobs)
            to_repeat = list(filter(self._can_repeat, jobs))
            if is_loaded and to_repeat:
                result.append(to_repeat)
        return result

    def _can_repeat(self, job: Job) -> bool:
        """Return whether a timing job ended well, and no later job of its loss failed."""
        # It is in `loaded` only if it ended well, whether beside load (True) or not (False).
        ended_well = (job.implementation, job.round) in self.loaded
        return ended_well and not self.session.run_of[job.implementation].failed


def products(
    executor: Executor, name: str, python: Path, settings: Settings, folder: Path, timeout: float
) -> list[schema.Limits]:
    """Measure how fast torch multiplies matrices on one thread: first without FAST_MKL, then with
    it.  Return a ``limits`` record of each; the first also has the suite's own matrix product.

    A process that fails leaves no record.  If the suite's own product is missing (see
    `_product_request`), nothing is measured, and [] is returned.  Raises Interrupted.

    Args:
        name, python: an implementation, and a Python that has it
        folder: --log-dir
        timeout: seconds for each process
    """
    own_product = _product_request(settings)
    if "library" not in own_product:
        return []
    with_fast_mkl = find(name).under(FAST_MKL).name
    limits: list[schema.Limits] = []
    for row, library in ((name, own_product), (with_fast_mkl, {})):
        request = {**library, "products_alone": True}
        job = Job(row, "limits", subject="device", overrides=(("threads", 1),), request=request)
        # No progress bar is told that the job still runs.
        lines = executor.execute(job, python, folder, settings, timeout, lambda text: None)
        limits += [line for line in lines if isinstance(line, schema.Limits)]
    return limits


def _product_request(settings: Settings) -> dict[str, str]:
    """Return the part of a limits job's request about the suite's own matrix product.

    The job times this product beside torch's.  The part is {"library": path}, or {"no_library":
    reason} if the product cannot be compiled, or {} if the suite has none for this device and
    dtype."""
    if settings.device != "cpu" or settings.dtype not in libraries.NUMBERS:
        return {}
    try:
        return {"library": str(libraries.multiplication(settings.dtype))}
    except NotRunnable as error:
        return {"no_library": f"the suite's own products: {error}"}
