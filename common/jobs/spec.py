"""One job: a process that measures one thing; the file that describes it to that process, and its status record."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Dict, List, Mapping, Optional, Sequence, Tuple, Union

from common.core.implementations import find
from common.core.settings import MEMORY_VARIABLES, PROBE_VARIABLES, REUSE_VARIABLES, Settings
from common.core.text import clipped

if TYPE_CHECKING:
    from common.records.schema import Record

#: Name of a subject -> the module whose ``run(job)`` yields its records; `job` is as Job.to_json makes it.
SUBJECTS = {
    "loss": "common.losses.subject",
    "device": "common.measure.peaks",
    "flops": "common.tools.flops.measure",
    "inference": "common.tools.inference.measure",
    "pipeline": "common.tools.pipelines.measure",
    "profile": "common.tools.profile.measure",
    "conformance": "common.conformance.judge",
}

#: Environment variables of the processes of a pass; those of the others are as --allocator says.
VARIABLES = {"memory": MEMORY_VARIABLES, "probe": PROBE_VARIABLES}
#: An implementation and a pass: jobs that are alike take as long.
Like = Tuple[str, str]


@dataclass(frozen=True)
class Job:
    """One process to start for an implementation, in its Python.

    Args:
        round: number from 1, in the timing and limits passes.
        size: with --find-largest, the batch size that is tried.
        overrides: settings of this job alone.
        limit_bytes: limit on its memory.
        subject: a key of SUBJECTS.
    """

    implementation: str
    pass_name: str
    round: Optional[int] = None
    size: Optional[int] = None
    overrides: Tuple[Tuple[str, Any], ...] = ()
    limit_bytes: Optional[int] = None
    subject: str = "loss"

    @property
    def name(self) -> str:
        """Return the name that records have: "correctness", "timing-1", "probe-64", "limits-1"."""
        return "-".join(str(part) for part in (self.pass_name, self.size, self.round) if part is not None)

    @property
    def like(self) -> Like:
        return self.implementation, self.pass_name

    @property
    def title(self) -> str:
        return f"{self.implementation} {self.name}"

    def variables(self, settings: Settings) -> Mapping[str, str]:
        """Return the environment variables that its process needs."""
        return VARIABLES.get(self.pass_name, REUSE_VARIABLES if settings.allocator == "reuse" else {})

    def status(self, status: str, reason: str, wall_ns: int = 0) -> Record:
        """Return the ``status`` record."""
        names = {"record": "status", "job": self.name, "pass": self.pass_name, "round": self.round}
        size = {"size": self.size} if self.size else {}
        return {**names, **size, "status": status, "reason": clipped(reason), "wall_ns": wall_ns}

    def to_json(self, settings: Settings, folder: Path) -> Dict[str, Any]:
        """Return the job as its process reads it.  folder: the folder of the run, for traces."""
        of = find(self.implementation)
        return {
            "job": self.name,
            "subject": self.subject,
            "pass": self.pass_name,
            "round": self.round,
            "implementation": self.implementation,
            "limit_bytes": self.limit_bytes,
            "script": of.script,
            "variant": of.variant,
            "folder": str(folder.resolve()),
            "settings": {**settings.to_json(), **dict(self.overrides)},
        }


@dataclass(frozen=True)
class Task:
    """One process to start for a tool that measures no loss.

    Args:
        given: what its subject reads beside the settings.
        overrides: settings of this task alone.
        python: interpreter of its process, where it is not the run's.
        environment: variables of its process.
    """

    name: str
    subject: str
    given: Mapping[str, Any]
    overrides: Tuple[Tuple[str, Any], ...] = ()
    python: Optional[Path] = None
    environment: Mapping[str, str] = field(default_factory=dict)
    round: None = None

    @property
    def like(self) -> Like:
        return self.name, self.subject

    @property
    def title(self) -> str:
        return self.name

    def variables(self, settings: Settings) -> Mapping[str, str]:
        """Return its own alone: with glibc's defaults times are as a user has them, and the heap hides no peak."""
        return self.environment

    def status(self, status: str, reason: str, wall_ns: int = 0) -> Record:
        """Return the ``status`` record."""
        names = {"record": "status", "job": self.name, "pass": self.subject}
        return {**names, "status": status, "reason": clipped(reason), "wall_ns": wall_ns}

    def to_json(self, settings: Settings, folder: Path) -> Dict[str, Any]:
        """Return the task as its process reads it.  folder: the folder of the run."""
        names = {"job": self.name, "subject": self.subject, "folder": str(folder.resolve())}
        return {**names, "given": dict(self.given), "settings": {**settings.to_json(), **dict(self.overrides)}}


#: A job that an executor takes.
Runnable = Union[Job, Task]


def plan(names: Sequence[str], settings: Settings) -> List[Job]:
    """Return the jobs of a run in their order: correctness of all, the timing rounds, memory, traces.

    The seed shuffles the implementations of each round.
    """
    jobs = [Job(name, "correctness") for name in names if "correctness" in settings.passes]
    if "timing" in settings.passes:
        shuffle = random.Random(settings.seed)
        for number in range(1, settings.rounds + 1):
            order = list(names)
            shuffle.shuffle(order)
            jobs += [Job(name, "timing", number) for name in order]
    for name_of_pass in ("memory", "trace"):
        if name_of_pass in settings.passes:
            jobs += [Job(name, name_of_pass) for name in names]
    return jobs
