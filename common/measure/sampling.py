"""Which samples are taken and when to stop: rules that depend only on what was measured so far.  Times in nanoseconds.

No clock is read here: the caller's function takes the samples, and tests pass made-up ones.
"""

from __future__ import annotations

import math
from statistics import stdev
from typing import Any, Callable, Dict, Generator, Iterator, List, Optional, Sequence

from common.core import statistics
from common.system import stops
from common.system.load import ForeignLoad, busy_flags

#: Warm-up is over when two successive samples agree within this.
WARM_UP_TOLERANCE = 0.10
WARM_UP_MAX_SAMPLES = 10
#: Warm-up may take this share of a scope's time cap.
WARM_UP_SHARE = 0.25


def warmed_up(durations: Sequence[int], max_seconds: float) -> bool:
    """Whether these samples of one batch are stable, or a cap is reached."""
    if len(durations) >= 2:
        last, before = durations[-1], durations[-2]
        if abs(last - before) <= WARM_UP_TOLERANCE * min(last, before):
            return True
    return len(durations) >= WARM_UP_MAX_SAMPLES or sum(durations) >= WARM_UP_SHARE * max_seconds * 1e9


def relative_half_width(samples: Dict[int, List[int]]) -> float:
    """Half-width of the 95% interval of the median, as a fraction, over samples grouped by batch.

    Each sample is divided by the median of its batch, so that different sizes of batches are not spread.  The standard
    error of a median of normal samples is 1.253 sigma / sqrt(n).  sigma is the standard deviation, which outliers
    raise: noisy samples lead to more samples, up to the caps.  Infinite while no batch was measured twice.
    """
    relative = []
    for durations in samples.values():
        if len(durations) >= 2:
            middle = statistics.median(durations)
            relative += [duration / middle for duration in durations]
    if not relative:
        return math.inf
    return 1.96 * 1.253 * stdev(relative) / math.sqrt(len(relative))


#: So many sweeps over all batches before the spread may end sampling: fewer samples can agree by chance.
MIN_SWEEPS_FOR_SPREAD = 5


def enough(samples: Dict[int, List[int]], batches: int, spread: float, max_samples: int, max_seconds: float) -> str:
    """Why sampling stops, "" where it goes on, before each sample: the wanted spread or a cap is reached.

    Only at the end of a sweep over all batches, so that each has as many samples.
    """
    count = sum(len(durations) for durations in samples.values())
    if count == 0 or count % batches:
        return ""
    if count >= max_samples:
        return "sample cap"
    if sum(sum(durations) for durations in samples.values()) >= max_seconds * 1e9:
        return "time cap"
    return "spread" if count >= MIN_SWEEPS_FOR_SPREAD * batches and relative_half_width(samples) <= spread else ""


#: A sample during which the process was stopped (Ctrl-Z) is taken again so often: a tool that stops it all the time, to
#: limit its share of the CPU, must not keep a round from its end.
MOST_RETRIES = 3

#: Takes a sample: its batch, its repeat, and whether it is one of the warm-up.
Sampler = Callable[[int, int, bool], Dict[str, Any]]


def uninterrupted(sample: Sampler, batch: int, repeat: int, warmup: bool) -> Dict[str, Any]:
    """Return a sample during which the process was not stopped: it is taken again, MOST_RETRIES times at most."""
    for _ in range(MOST_RETRIES):
        before = stops.count()
        taken = sample(batch, repeat, warmup)
        if stops.count() == before:
            return taken
    return sample(batch, repeat, warmup)


class WithLoad:
    """Keeps samples until the load beside them is known: the system counts it too coarsely for one short sample.

    threads: CPU threads that a sample keeps busy; None: as many as there are cores.
    """

    def __init__(self, threads: Optional[int] = None) -> None:
        self.threads, self.load = threads, ForeignLoad()
        self.waiting: List[Dict[str, Any]] = []

    def add(self, sample: Dict[str, Any]) -> Iterator[Dict[str, Any]]:
        self.waiting.append(sample)
        if self.load.ready():
            yield from self.flush()

    def flush(self) -> Iterator[Dict[str, Any]]:
        share = self.load.share()
        for sample in self.waiting:
            yield {**sample, "foreign_cpu": share, "flags": busy_flags(share, self.threads)}
        self.waiting = []


def warm_up(
    sample: Sampler,
    batches: Sequence[int],
    max_seconds: float,
    threads: Optional[int] = None,
) -> Iterator[Dict[str, Any]]:
    """Samples, marked as warm-up, of the first of `batches` until it is warmed up, and one of each other batch.
    threads: as of WithLoad."""
    samples = WithLoad(threads)
    durations: List[int] = []
    while batches and not warmed_up(durations, max_seconds):
        warm = uninterrupted(sample, batches[0], len(durations), True)
        durations.append(warm["total_wall_ns"])
        yield from samples.add(warm)
    for batch in batches[1:]:
        yield from samples.add(uninterrupted(sample, batch, 0, True))
    yield from samples.flush()


def sweep(
    sample: Sampler,
    batches: Sequence[int],
    *,
    spread: float,
    max_samples: int,
    max_seconds: float,
    threads: Optional[int] = None,
) -> Generator[Dict[str, Any], None, str]:
    """Samples with the load beside them, of all `batches` in turn until `enough`.  Returns why they ended.

    sample(batch, repeat, warmup): takes one; of what it returns only "total_wall_ns" is read here.  threads: as of
    WithLoad.
    """
    samples = WithLoad(threads)
    measured: Dict[int, List[int]] = {batch: [] for batch in batches}
    repeat = 0
    while True:
        for batch in batches:
            why = enough(measured, len(batches), spread, max_samples, max_seconds)
            if why:
                yield from samples.flush()
                return why
            taken = uninterrupted(sample, batch, repeat, False)
            measured[batch].append(taken["total_wall_ns"])
            yield from samples.add(taken)
        repeat += 1
