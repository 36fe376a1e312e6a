"""Carries out jobs, one after the other, by an executor, and keeps what they measure.

A job that crashes, hangs, is killed or runs out of memory costs only its own row.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, List, Mapping, Sequence, Tuple

from common.core.settings import Settings
from common.jobs.progress import Progress
from common.jobs.spec import Job, Runnable
from common.records.run import Run
from common.records.schema import Record, Status
from common.setup.interpreters import Choice
from common.system import machine
from common.traces import files


class Interrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM came while a job ran; `records` are those of that job."""

    def __init__(self, records: List[Record]):
        super().__init__("interrupted")
        self.records = records


class Executor(ABC):
    """Runs jobs, one after the other."""

    @abstractmethod
    def execute(
        self, job: Runnable, python: Path, folder: Path, settings: Settings, timeout: float, note: Callable[[str], None]
    ) -> List[Record]:
        """Run a job to its end and return its records, the last of which is its status.

        Args:
            python: the interpreter of its process.
            folder: the folder of the run, where traces go.
            timeout: seconds.
            note: called now and then with how far the job is.

        Whatever ends the process becomes a status.  Raises UserError for a mistake in the user's input that the process
        found, and Interrupted.
        """

    def get_ready(self, jobs: Sequence[Job], pythons: Sequence[Path], settings: Settings) -> None:
        """Start what these jobs of one round need before the first of them is timed, in as little time as it takes."""
        return

    def disturbance(self, settings: Settings, seconds: float = 0.0) -> str:
        """Return how busy others keep this machine, as machine.disturbance does.  seconds: how long to look."""
        on_cpu, others = settings.device.partition(":")[0] == "cpu", machine.ForeignLoad()
        time.sleep(seconds)
        return machine.disturbance(others, settings.threads if on_cpu else 1)


@dataclass
class Session:
    """The runs that a command measures.

    Args:
        run_of, python_of: the run and the Python of each implementation, or task.
        timeout: seconds for one job.
    """

    run_of: Mapping[str, Run]
    python_of: Mapping[str, Choice]
    settings: Settings
    timeout: float
    progress: Progress
    executor: Executor

    def execute(self, job: Runnable) -> List[Record]:
        """Run one job and return its records.  Raises Interrupted and UserError."""
        run, choice = self.run_of[job.like[0]], self.python_of[job.like[0]]
        if choice.python is None:
            return [job.status("missing", choice.reason)]
        return self.executor.execute(job, choice.python, run.folder, self.settings, self.timeout, self.progress.note)

    def carry_out(self, job: Runnable) -> Tuple[Status, List[Record]]:
        """Run one job and keep its records; return its status, and them.  Raises Interrupted and UserError."""
        self.progress.start(job.title)
        try:
            records = self.execute(job)
        except Interrupted as interruption:
            self.keep(job, interruption.records)
            raise
        end = self.keep(job, records)
        for record in records:
            for warning in record.get("warnings", []):
                self.progress.warn(warning)
        self.progress.done(job.title, end.status, end.reason, job.like)
        return end, records

    def keep(self, job: Runnable, records: List[Record]) -> Status:
        """Add the records of a job to its run.  Traces that failed are removed first: they may have filled the disk."""
        run = self.run_of[job.like[0]]
        if job.like[1] == "trace" and records[-1]["status"] != "ok":
            files.remove(run.folder)
        run.add(records)
        return run.last_status

    def carry_out_all(self, jobs: List[Job]) -> None:
        """Run jobs, but skip the later ones of an implementation after one that is not ok."""
        for job in jobs:
            if self.run_of[job.implementation].failed:
                self.progress.skip(job.like)
            else:
                self.carry_out(job)
