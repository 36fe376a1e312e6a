"""Sleep as a job: what benchmarks/cluster_speed.py and the tests of --executor ray spread over nodes."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, Dict, Iterator, Mapping


def run(job: Mapping[str, Any]) -> Iterator[Dict[str, Any]]:
    """The settings `seconds`: how long; `pids`: a folder for the number of its process, "" for none.  A timing job
    tells how long it slept."""
    if job["settings"]["pids"]:
        (Path(job["settings"]["pids"]) / str(os.getpid())).touch()
    yield {"record": "environment", "device": "cpu"}
    began = time.perf_counter_ns()
    time.sleep(job["settings"]["seconds"])
    slept = time.perf_counter_ns() - began
    if job["pass"] == "timing":
        yield {"record": "sample", "scope": "step", "round": job["round"], "batch": 0, "total_wall_ns": slept}
