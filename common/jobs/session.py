"""Carries out the jobs of a run, one after the other, and keeps what they measure.

A job that crashes, hangs, is killed or runs out of memory costs only its own row.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from typing import List, Mapping, Optional, Sequence, Set

from common.core.settings import Settings
from common.core.text import plain
from common.jobs.executor import Executor, Interrupted
from common.jobs.progress import Progress, Standing
from common.jobs.spec import Job
from common.records import store
from common.records.run import Run
from common.records.schema import Record
from common.setup import interpreters
from common.traces import files


@dataclass
class Session:
    """run_of, python_of: the run and the Python of each implementation; timeout: seconds for one job."""

    run_of: Mapping[str, Run]
    python_of: Mapping[str, interpreters.Choice]
    settings: Settings
    timeout: float
    progress: Progress
    executor: Executor
    warned: Set[str] = field(default_factory=set)

    def run(self, jobs: Sequence[Job], with_limits: bool) -> None:
        """Run those of `jobs` that are not done yet.  After a job that is not ok the later ones of its implementation
        are skipped.  with_limits: measure the device's limits before the first timing job.

        Raises Interrupted, and UserError for a mistake of the user's (a broken shape file, say).
        """
        pending = self.pending(jobs)
        with_limits = with_limits and any(job.pass_name == "timing" for job in pending)
        limits = [("limits", "limits")] if with_limits else []
        self.progress.expect([*limits, *((job.implementation, job.pass_name) for job in pending)])
        standing = Standing({name: run.header.kind or "exact" for name, run in self.run_of.items()})
        for (pass_name, number), of_round in groupby(pending, key=lambda job: (job.pass_name, job.round)):
            for job in of_round:
                if self.run_of[job.implementation].failed:
                    self.progress.skip((job.implementation, job.pass_name))
                    continue
                if with_limits and pass_name == "timing":
                    with_limits = False
                    self.limits()
                self.carry_out(job, standing)
            if pass_name == "timing" and len(standing.ms) > 1:
                self.progress.say(f"so far, after round {number}: {standing.words()}")

    def pending(self, jobs: Sequence[Job]) -> List[Job]:
        """Those that are not done yet, of implementations that can run."""
        runs = [self.run_of[job.implementation] for job in jobs]
        return [job for job, run in zip(jobs, runs) if not run.failed and not run.is_done(job.name)]

    def carry_out(self, job: Job, standing: Optional[Standing] = None) -> str:
        """Run one job and keep its records; returns its status.  Raises Interrupted and UserError."""
        title = f"{job.implementation} {job.name}"
        run, choice = self.run_of[job.implementation], self.python_of[job.implementation]
        self.progress.start(title)
        if choice.python is None:
            run.add(job.status("missing", choice.reason))
        else:
            try:
                records = self._execute(job)
            except Interrupted as interruption:
                self._keep(job, interruption.records)
                raise
            self._keep(job, records)
            self._warn(records)
            if standing and job.pass_name == "timing":
                standing.add(job.implementation, records)
        end = run.last_status
        self.progress.done(title, end.status, end.reason, (job.implementation, job.pass_name))
        return end.status

    def limits(self) -> None:
        """Measure what the device does at best, in the newest torch of the run, and add the ``limits`` record to every
        run that goes on.  A failure is not fatal: then there is no "% of limit".  Raises Interrupted."""
        pythons = {name: choice.python for name, choice in self.python_of.items() if choice.python}
        pythons = {name: python for name, python in pythons.items() if not self.run_of[name].failed}
        name = interpreters.with_newest_torch(pythons)
        if name is None:
            self.progress.skip()
            return
        job = Job(name, "limits", subject="device")
        self.progress.start(job.name)
        *records, status = self._execute(job)
        if not records:
            reason = f"{status['status']}: {status['reason']}"
            records = [{"record": "limits", "reason": reason}]
        of_all = [{key: value for key, value in record.items() if key != "job"} for record in records]
        for name in pythons:
            with suppress(store.NotWritten):  # goes to disk with the next job, if there is room then
                self.run_of[name].add(of_all)
        self.progress.done(job.name, status["status"], status["reason"], ("limits", "limits"))

    def _execute(self, job: Job) -> List[Record]:
        python, folder = self.python_of[job.implementation].python, self.run_of[job.implementation].folder
        assert python is not None
        return self.executor.execute(job, python, folder, self.settings, self.timeout, self.progress.note)

    def _keep(self, job: Job, records: Sequence[Record]) -> None:
        """What is left of traces that failed goes first: they may have filled the disk."""
        run = self.run_of[job.implementation]
        if job.pass_name == "trace" and records[-1]["status"] != "ok":
            files.remove(run.folder)
        run.add(records)

    def _warn(self, records: Sequence[Record]) -> None:
        """Print each warning of the workers once, whatever --quiet says: it is about the results."""
        for record in records:
            for warning in record.get("warnings", []):
                if warning not in self.warned:
                    self.warned.add(warning)
                    print(f"warning: {plain(warning)}", file=sys.stderr)
