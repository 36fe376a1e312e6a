"""Sleep as a job: what benchmarks/cluster_speed.py and the tests of --executor ray spread over nodes."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterator, Mapping, Optional

from common.core.emitted import Emitted


@dataclass(frozen=True)
class Environment(Emitted):
    record = "environment"

    device: str = "cpu"


@dataclass(frozen=True)
class Sample(Emitted):
    record = "sample"

    round: Optional[int]
    total_wall_ns: int
    scope: str = "step"
    batch: int = 0


def run(job: Mapping[str, Any]) -> Iterator[Emitted]:
    """The settings `seconds`: how long; `pids`: a folder for the number of its process, "" for none.  A timing job
    tells how long it slept."""
    if job["settings"]["pids"]:
        (Path(job["settings"]["pids"]) / str(os.getpid())).touch()
    yield Environment()
    began = time.perf_counter_ns()
    time.sleep(job["settings"]["seconds"])
    slept = time.perf_counter_ns() - began
    if job["pass"] == "timing":
        yield Sample(job["round"], slept)
