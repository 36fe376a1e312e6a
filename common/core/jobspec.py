"""Say what the process of a job measures: rnnt_bench.jobs.job writes it, and hands it to the
subject there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rnnt_bench.core.settings import Settings


@dataclass(frozen=True)
class JobSpec:
    """Hold what a process is asked to measure.

    Attributes:
        job: its name, as records have it
        subject: a key of jobs.job.SUBJECTS
        folder: of the run, for traces; "" for none
        settings: of this job
        request: what else its subject reads
        pass_name, round: of a loss; rounds begin at 1
        script, variant: of the implementation
        same_as: the row of the same code that is asked the questions that this one is not
        shared: a folder where the jobs of a run leave right answers
        takes, leaves: as a Task has them
        output: the file for its records
    """

    settings: Settings
    job: str = ""
    subject: str = "loss"
    folder: str = ""
    request: Mapping[str, Any] = field(default_factory=dict)
    pass_name: str = ""
    round: int | None = None
    script: str = ""
    variant: str = ""
    same_as: str = ""
    shared: str = ""
    takes: str | None = None
    leaves: str | None = None
    output: str = ""
