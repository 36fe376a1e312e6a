#!/usr/bin/env python3
"""Measure how much sooner a run ends on two and four devices, with sleeping jobs on Ray nodes of this machine.

The jobs are those of a run of 4 losses and 16 rounds; the jobs of one round stay on one device, and each sleeps.
Sleeping jobs take nothing from each other, so the result is what spreading costs.  It needs the ray environment
(`make setup ENVIRONMENTS=ray`), or RAY_PYTHON.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import List, Tuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import local_cluster  # noqa: E402
from common.core import settings  # noqa: E402
from common.core.text import count  # noqa: E402
from common.jobs import cluster  # noqa: E402
from common.jobs.plan import plan  # noqa: E402
from common.jobs.progress import Progress  # noqa: E402
from common.jobs.session import Session  # noqa: E402
from common.jobs.spec import Job  # noqa: E402
from common.records.run import open_runs  # noqa: E402
from common.setup import environments  # noqa: E402

NAMES = ("torchaudio", "fast_rnnt", "optimized_transducer", "reference")


def sleeping(rounds: int, seconds: float, names: Tuple[str, ...] = NAMES, pids: str = "") -> List[Job]:
    """The jobs of a run, each of which sleeps.  pids: see sleeping.py."""
    chosen = settings.resolve({"preset": "quick", "rounds": rounds, "passes": ("correctness", "timing")}, "cpu")
    overrides = (("seconds", seconds), ("pids", pids))
    return [replace(job, subject="sleep", overrides=overrides) for job in plan(names, chosen)]


def spent(address: str, jobs: List[Job], log_dir: Path, quiet: bool = True, resume: bool = False) -> float:
    """Return the seconds from the first job to the last, on all devices of a cluster."""
    names = list(dict.fromkeys(job.implementation for job in jobs))
    resolved = settings.resolve({"preset": "quick"}, "cpu")
    with cluster.kinds(address, "cpu", names, False) as (kind, *_):
        fields = {"machine": kind.machine}
        with open_runs(names, resolved, log_dir, resume, fields) as run_of, Progress(quiet) as progress:
            session = Session(run_of, kind.choose(names, False, ()), resolved, 60.0, progress, kind)
            began = time.monotonic()
            session.run(jobs, with_limits=False)
            return time.monotonic() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=3.0, help="Seconds of each job. Default: 3")
    parser.add_argument("--rounds", type=int, default=16, help="Number of rounds. Default: 16")
    arguments = parser.parse_args()
    python = os.environ.get(cluster.PYTHON) or environments.interpreter("ray")
    if python is None:
        sys.exit(environments.reason("ray"))
    jobs = sleeping(arguments.rounds, arguments.seconds)
    print(f"{count(len(jobs), 'job')} of {arguments.seconds:g} s\n")
    print("| nodes | seconds | times as fast as one | no job sleeps |\n| ---: | ---: | ---: | ---: |")
    alone = 0.0
    for nodes in (1, 2, 4):
        with local_cluster.started(Path(python), nodes) as nodes_of_ray, tempfile.TemporaryDirectory() as folder:
            seconds = spent(nodes_of_ray.address, jobs, Path(folder))
        alone = alone or seconds
        idle = 1 - len(jobs) * arguments.seconds / nodes / seconds
        print(f"| {nodes} | {seconds:.1f} | {alone / seconds:.2f} | {idle:.1%} |", flush=True)


if __name__ == "__main__":
    main()
