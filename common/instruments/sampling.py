"""Decide which samples are taken and when to stop, from what was measured so far; times are in
nanoseconds.

Reads no clock: the caller's function takes the samples, and tests pass made-up ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from statistics import median, stdev
from typing import Any

from rnnt_bench.system.machine import ForeignLoad, busy_flags

#: Warm-up is over when two successive samples differ by at most this fraction.
WARM_UP_TOLERANCE = 0.10
WARM_UP_MAX_SAMPLES = 10
#: Warm-up may take this share of a scope's time cap.
WARM_UP_SHARE = 0.25
#: Sweeps over all batches before the spread may end sampling: fewer samples can agree by chance.
MIN_SWEEPS_FOR_SPREAD = 5

#: Takes a sample; arguments: number of the batch, of the repeat, and whether it is a warm-up.  A
#: sample has `total_wall_ns`; its `foreign_cpu` and `flags`, the load beside it, are filled in
#: here.
Sampler = Callable[[int, int, bool], Any]


def warmed_up(durations: Sequence[int], max_seconds: float) -> bool:
    """Return whether the warm-up samples of one batch are stable, or a cap is reached."""
    if len(durations) >= 2:
        last, before = durations[-1], durations[-2]
        if abs(last - before) <= WARM_UP_TOLERANCE * min(last, before):
            return True
    return (
        len(durations) >= WARM_UP_MAX_SAMPLES or sum(durations) >= WARM_UP_SHARE * max_seconds * 1e9
    )


def relative_half_width(samples: dict[int, list[int]]) -> float:
    """Return the half-width of the 95% interval of the median, as a fraction of it, over samples
    grouped by batch.

    Each sample is divided by the median of its batch, so that sizes of batches do not count as
    spread.  The standard error of a median of normal samples is 1.253 sigma / sqrt(n).  sigma is
    the standard deviation, which outliers raise, so noisy samples lead to more samples, up to the
    caps.  Infinite while no batch was measured twice.
    """
    repeated = [durations for durations in samples.values() if len(durations) >= 2]
    relative = [duration / median(durations) for durations in repeated for duration in durations]
    return 1.96 * 1.253 * stdev(relative) / math.sqrt(len(relative)) if relative else math.inf


def enough(
    samples: dict[int, list[int]],
    batches: int,
    spread: float,
    max_samples: int,
    max_seconds: float,
    least: int = 1,
) -> str:
    """Return why sampling stops ("spread", "sample cap", "time cap"), "" if it continues; called
    before each sample.

    It stops only at the end of a sweep over all batches, so that each has as many samples.  spread:
    the relative half-width that suffices; the caps are on the number and the time of all samples;
    least: sweeps before the time cap.
    """
    count = sum(len(durations) for durations in samples.values())
    if count == 0 or count % batches:
        return ""
    if count >= max_samples:
        return "sample cap"
    if count >= least * batches and sum(map(sum, samples.values())) >= max_seconds * 1e9:
        return "time cap"
    return (
        "spread"
        if count >= MIN_SWEEPS_FOR_SPREAD * batches and relative_half_width(samples) <= spread
        else ""
    )


def with_load(samples: Generator[Any, None, str], threads: int | None) -> Generator[Any, None, str]:
    """Yield samples once the load beside them is known, which the system counts too coarsely for a
    short sample.

    threads: number of CPU threads that a sample keeps busy; None: as many as there are cores.
    """
    load = ForeignLoad()
    waiting = []
    why = None
    while why is None:
        try:
            waiting.append(next(samples))
        except StopIteration as end:
            why = end.value or ""
        if why is not None or load.ready():
            share = load.share()
            for sample in waiting:
                sample.foreign_cpu = share
                sample.flags = busy_flags(share, threads)
                yield sample
            waiting = []
    return why


def warm_up(
    sample: Sampler, batches: Sequence[int], max_seconds: float, threads: int | None = None
) -> Generator[Any, None, str]:
    """Yield warm-up samples: of the first batch until it is warmed up, and one of each other batch.

    max_seconds: time cap of the scope, of which warm-up takes WARM_UP_SHARE at most.
    """

    def samples() -> Generator[Any, None, str]:
        durations: list[int] = []
        while batches and not warmed_up(durations, max_seconds):
            taken = sample(batches[0], len(durations), True)
            durations.append(taken.total_wall_ns)
            yield taken
        for batch in batches[1:]:
            yield sample(batch, 0, True)
        return ""

    return with_load(samples(), threads)


def sweep(
    sample: Sampler, batches: Sequence[int], *, threads: int | None = None, **caps: Any
) -> Generator[Any, None, str]:
    """Yield samples of all batches in turn, with the load beside them; return why they ended; caps:
    see `enough`."""

    def samples() -> Generator[Any, None, str]:
        measured: dict[int, list[int]] = {batch: [] for batch in batches}
        while True:
            for batch in batches:
                why = enough(measured, len(batches), **caps)
                if why:
                    return why
                taken = sample(batch, len(measured[batch]), False)
                measured[batch].append(taken.total_wall_ns)
                yield taken

    return with_load(samples(), threads)
