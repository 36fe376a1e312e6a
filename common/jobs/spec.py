"""One job: a process that measures one thing; the file that describes it to that process, and its status record."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Dict, Mapping, Optional, Tuple, Union

from common.core.implementations import find
from common.core.settings import MEMORY_VARIABLES, PROBE_VARIABLES, REUSE_VARIABLES, Settings
from common.core.text import clipped

if TYPE_CHECKING:
    from common.records.schema import Record

#: What a job can measure, and the module whose ``run(job)`` yields its records; `job` is as Job.to_json makes it.
SUBJECTS = {
    "loss": "common.losses.subject",
    "device": "common.measure.peaks",
    "flops": "common.tools.flops.measure",
    "inference": "common.tools.inference.measure",
    "pipeline": "common.tools.inference.pipeline_measure",
    "cascade": "common.jobs.cascade",
    "profile": "common.tools.profile.measure",
    "conformance": "common.conformance.isolated",
}
#: Those that start processes of their own, and so are run where the job is: ``run(job, python, timeout, note)``.
#: A status record at the end is the job's; without one it ended well.
STARTING = ("conformance", "cascade")

#: What the processes of a pass have in their environment; those of the others as --allocator says.
VARIABLES = {"memory": MEMORY_VARIABLES, "probe": PROBE_VARIABLES}


@dataclass(frozen=True)
class Job:
    """One process to start for an implementation, in its Python.

    Args:
        round: number from 1, in the timing, limits and throughput passes.
        size: with --find-largest, the batch size that is tried or timed.
        pool: the size of the batches whose utterances are timed in batches of `size`.
        overrides: settings of this job alone.
        limit_bytes: limit on its memory.
        subject: a key of SUBJECTS.
    """

    implementation: str
    pass_name: str
    round: Optional[int] = None
    size: Optional[int] = None
    pool: Optional[int] = None
    overrides: Tuple[Tuple[str, Any], ...] = ()
    limit_bytes: Optional[int] = None
    subject: str = "loss"

    @property
    def name(self) -> str:
        """Return the name that records have: "correctness", "timing-1", "probe-64", "throughput-64-of-96-1",
        "limits-1"."""
        pool = None if self.pool is None else f"of-{self.pool}"
        return "-".join(str(part) for part in (self.pass_name, self.size, pool, self.round) if part is not None)

    def variables(self, settings: Settings) -> Mapping[str, str]:
        """Return the environment variables that its process needs."""
        return VARIABLES.get(self.pass_name, REUSE_VARIABLES if settings.allocator == "reuse" else {})

    def status(self, status: str, reason: str, wall_ns: int = 0) -> Record:
        """Return the ``status`` record."""
        sizes = {key: value for key, value in (("size", self.size), ("pool", self.pool)) if value}
        names = {"record": "status", "job": self.name, "pass": self.pass_name, "round": self.round}
        return {**names, **sizes, "status": status, "reason": clipped(reason), "wall_ns": wall_ns}

    def to_json(self, settings: Settings, folder: Path) -> Dict[str, Any]:
        """Return the job as its process reads it.  folder: the folder of the run, for traces."""
        of = find(self.implementation)
        names = {"job": self.name, "subject": self.subject, "pass": self.pass_name, "round": self.round}
        names["implementation"] = self.implementation
        sizes = {"pool": self.pool, "limit_bytes": self.limit_bytes}
        values = {**settings.to_json(), **dict(self.overrides)}
        where = {"script": of.script, "variant": of.variant, "folder": str(folder.resolve())}
        return {**names, **sizes, **where, "settings": values}


@dataclass(frozen=True)
class Task:
    """One process to start for a tool that measures no loss.

    Args:
        given: what its subject reads beside the settings.
        overrides: settings of this task alone.
    """

    name: str
    subject: str
    given: Mapping[str, Any]
    overrides: Tuple[Tuple[str, Any], ...] = ()
    round: None = None

    def variables(self, settings: Settings) -> Mapping[str, str]:
        """Return no variables.

        glibc keeps its defaults, so times are as a user has them and the heap hides no part of the peak.
        """
        return {}

    def status(self, status: str, reason: str, wall_ns: int = 0) -> Record:
        """Return the ``status`` record."""
        names = {"record": "status", "job": self.name, "pass": self.subject}
        return {**names, "status": status, "reason": reason, "wall_ns": wall_ns}

    def to_json(self, settings: Settings, folder: Path) -> Dict[str, Any]:
        """Return the job as its process reads it.  folder: the folder of the run, for traces."""
        names = {"job": self.name, "subject": self.subject, "folder": str(folder.resolve())}
        return {**names, "given": dict(self.given), "settings": {**settings.to_json(), **dict(self.overrides)}}


#: What an executor takes.
Runnable = Union[Job, Task]


def like(job: Runnable) -> Tuple[str, str]:
    """Return what a job measures, an implementation or the task itself, and its pass: jobs that are alike take as
    long."""
    return (job.implementation, job.pass_name) if isinstance(job, Job) else (job.name, job.subject)
