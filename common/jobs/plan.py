"""Which jobs a run has."""

from __future__ import annotations

import random
from typing import List, Sequence

from common.core.settings import Settings
from common.jobs.spec import Job


def plan(names: Sequence[str], settings: Settings) -> List[Job]:
    """Return the jobs in their order: correctness of all, the timing rounds, memory, traces.

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
