"""Define what the process of a job is asked to measure.

rnnt_bench.jobs.job writes a JobSpec to a file for that process, and reads it there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rnnt_bench.core.settings import Settings


@dataclass(frozen=True)
class JobSpec:
    """Hold what one process is asked to measure.

    Attributes:
        settings: of this job
        job: its name in records
        subject: what it measures, a key of jobs.job.SUBJECTS: "loss", or one of a tool
        folder: the log folder of the run, for traces; "" for none
        request: values that only this subject reads
        pass_name: correctness, timing, memory, trace or limits; "" for a task of a tool
        round: of a timing or limits pass, from 1; None for other passes
        script, variant: of the implementation of a loss (core.implementations)
        same_as: name of the row with the same code.  Most questions are asked of that row alone.
            "" for none
        shared: folder where a job keeps the oracle's answers for other jobs of the run; "" for none
        takes: name of a file in `folder` that the task before this one wrote; None for none
        leaves: name of a file that this one writes there for the next; None for none
        output: path of the file for its records
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
