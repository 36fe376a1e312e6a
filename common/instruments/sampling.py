"""Decide which samples are taken and when to stop, from what was measured so far; times are in
nanoseconds.

It reads no clock: the caller passes a function that takes a sample, and tests pass one that makes
samples up.
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

#: The factor of sigma / sqrt(n) in the standard error of the median of n normal numbers.
OF_MEDIAN = 1.253
#: Half of the 95% interval of a normal number, in standard errors.
NORMAL_95 = 1.96

#: Takes a sample.  Arguments: number of the batch, of the repeat, and whether it is a warm-up.  The
#: sample has `total_wall_ns`.  Its `foreign_cpu` and `flags`, the load beside it, are filled in
#: here.
Sampler = Callable[[int, int, bool], Any]


def warmed_up(durations: Sequence[int], max_seconds: float) -> bool:
    """Return whether the warm-up of a batch is over.

    It is over if the last two samples agree, if there are WARM_UP_MAX_SAMPLES samples, or if they
    took WARM_UP_SHARE of `max_seconds`.

    durations: of the warm-up samples of the batch, in nanoseconds; max_seconds: cap on the time of
    all samples of the scope"""
    if len(durations) >= 2:
        before, last = durations[-2:]
        if abs(last - before) <= WARM_UP_TOLERANCE * min(last, before):
            return True
    if len(durations) >= WARM_UP_MAX_SAMPLES:
        return True
    return sum(durations) >= WARM_UP_SHARE * max_seconds * 1e9


def relative_half_width(samples: dict[int, list[int]]) -> float:
    """Return the half-width of the 95% interval of the median of samples, as a fraction of the
    median; infinite while no batch was measured twice.

    Each sample is divided by the median of its batch, so that sizes of batches do not count as
    spread.  Outliers widen the interval, since they raise the standard deviation: if samples are
    noisy, more are taken.

    samples: durations by batch.
    """
    repeated = [durations for durations in samples.values() if len(durations) >= 2]
    relative = [duration / median(durations) for durations in repeated for duration in durations]
    if not relative:
        return math.inf
    return NORMAL_95 * OF_MEDIAN * stdev(relative) / math.sqrt(len(relative))


def enough(
    samples: dict[int, list[int]],
    batches: int,
    spread: float,
    max_samples: int,
    max_seconds: float,
    least: int = 1,
) -> str:
    """Return why sampling stops before a further sample: "spread", "sample cap" or "time cap"; "" if
    it continues.

    It stops only at the end of a sweep over all batches, so that each has as many samples.

    Args:
        samples: durations by batch.
        batches: number of batches.
        spread: relative half-width that suffices.
        max_samples: cap on the number of all samples.
        max_seconds: cap on the time of all samples.
        least: sweeps that are completed in spite of the time cap.
    """
    count = sum(map(len, samples.values()))
    if count == 0 or count % batches:
        return ""
    if count >= max_samples:
        return "sample cap"
    sweeps = count // batches
    if sweeps >= least and sum(map(sum, samples.values())) >= max_seconds * 1e9:
        return "time cap"
    if sweeps >= MIN_SWEEPS_FOR_SPREAD and relative_half_width(samples) <= spread:
        return "spread"
    return ""


def with_load(samples: Generator[Any, None, str], threads: int | None) -> Generator[Any, None, str]:
    """Yield samples with the load beside them filled in; return what `samples` returns.

    Samples wait until the load is known, since the system counts it too coarsely for a short
    sample.

    Args:
        samples: returns why it ended.
        threads: number of CPU threads that a sample keeps busy; None: as many as there are cores.
    """
    load = ForeignLoad()
    waiting = []
    why = None  # while `samples` goes on
    while why is None:
        try:
            waiting.append(next(samples))
        except StopIteration as end:  # a `for` loop would lose what `samples` returns
            why = end.value
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

    The load beside them is filled in, as in `with_load`.  Return "".

    Args:
        sample: takes a sample.
        batches: numbers of the batches.
        max_seconds: time cap of the scope, of which the first batch takes about WARM_UP_SHARE at
            most.
        threads: number of CPU threads that a sample keeps busy.
    """

    def samples() -> Generator[Any, None, str]:
        durations: list[int] = []
        while batches and not warmed_up(durations, max_seconds):
            repeat = len(durations)
            taken = sample(batches[0], repeat, True)  # a warm-up
            durations.append(taken.total_wall_ns)
            yield taken
        for batch in batches[1:]:
            yield sample(batch, 0, True)  # its first repeat, a warm-up
        return ""  # None would tell `with_load` to go on

    return with_load(samples(), threads)


def sweep(
    sample: Sampler, batches: Sequence[int], *, threads: int | None = None, **caps: Any
) -> Generator[Any, None, str]:
    """Yield samples of all batches in turn; return why they ended, as `enough` says it.

    The load beside them is filled in, as in `with_load`.

    Args:
        sample: takes a sample.
        batches: numbers of the batches.
        threads: number of CPU threads that a sample keeps busy.
        caps: `spread`, `max_samples`, `max_seconds` and `least` of `enough`.
    """

    def samples() -> Generator[Any, None, str]:
        measured: dict[int, list[int]] = {batch: [] for batch in batches}
        while True:
            for batch in batches:
                why = enough(measured, len(batches), **caps)
                if why:
                    return why
                repeat = len(measured[batch])
                taken = sample(batch, repeat, False)  # no warm-up
                measured[batch].append(taken.total_wall_ns)
                yield taken

    return with_load(samples(), threads)
