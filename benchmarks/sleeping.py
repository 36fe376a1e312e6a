"""Sleep as a job: what benchmarks/cluster_speed.py and the tests of --executor ray spread over nodes."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, Iterator, Mapping

from common.records.schema import Environment, JobLine, Sample


def run(job: Mapping[str, Any]) -> Iterator[JobLine]:
    """The settings `seconds`: how long; `pids`: a folder for the number of its process, "" for none.  A timing job
    tells how long it slept."""
    if job["settings"]["pids"]:
        (Path(job["settings"]["pids"]) / str(os.getpid())).touch()
    yield Environment(device="cpu")
    began = time.perf_counter_ns()
    time.sleep(job["settings"]["seconds"])
    slept = time.perf_counter_ns() - began
    if job["pass"] == "timing":
        yield Sample(scope="step", round=job["round"], batch=0, total_wall_ns=slept)
