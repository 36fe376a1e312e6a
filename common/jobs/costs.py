"""Tells what the jobs of a run cost, from a run that comes with the suite: results/costs.json.

docs/_figures.py writes the file; it holds the seconds of a job by implementation and pass, of preset cpu on two cores.
Other machines differ by a factor, which the first jobs tell (see progress).
"""

from __future__ import annotations

import json
from contextlib import suppress
from functools import cache
from typing import Dict, Mapping, Sequence

from common.core import presets
from common.core.paths import ROOT
from common.core.settings import Settings
from common.core.statistics import median
from common.jobs.progress import Like
from common.jobs.session import rounds_with_limits
from common.jobs.spec import Job, like

FILE = ROOT / "results" / "costs.json"
#: Seconds of the device's limits, once.
LIMITS = 6.0
#: MB that a run keeps of each implementation: its records, and with the trace pass its traces.
RECORDS_MB, TRACES_MB = 0.5, 20.0


@cache
def known() -> Mapping[str, Mapping[str, float]]:
    """Return {implementation: {pass: seconds}}; {} where the file cannot be read."""
    with suppress(OSError, ValueError):
        return dict(json.loads(FILE.read_text(encoding="utf-8")))
    return {}


def of(jobs: Sequence[Like], settings: Settings) -> Dict[Like, float]:
    """Return the seconds of one job of each sort, for runs of the size that they are known of; {} for others."""
    size, _ = presets.parts(settings.preset)
    if size != "cpu" or settings.device != "cpu" or not known():
        return {}
    costs: Dict[Like, float] = {("limits", "limits"): LIMITS}
    for name, pass_name in dict.fromkeys(jobs):
        others = [seconds[pass_name] for seconds in known().values() if pass_name in seconds]
        cost = known().get(name, known().get(name.partition(":")[0], {})).get(pass_name)
        if cost or others:
            costs[name, pass_name] = cost or median(others)
    return costs


def seconds(jobs: Sequence[Job], settings: Settings, with_limits: bool) -> float:
    """Return how long these jobs take on such a machine; 0.0 where that is not known."""
    costs = of([like(job) for job in jobs], settings)
    limits = LIMITS * len(rounds_with_limits(jobs)) if with_limits and costs else 0.0
    return limits + sum(costs.get(like(job), 0.0) for job in jobs)


def megabytes(names: Sequence[str], settings: Settings) -> float:
    """Return about how much disk the run of these implementations takes, in MB."""
    return len(names) * (RECORDS_MB + (TRACES_MB if "trace" in settings.passes else 0.0))
