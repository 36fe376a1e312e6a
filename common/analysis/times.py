"""Summarize the samples of one run: times, stages, rates, medians of rounds, other load, and how
near a limit they are.

The limit is the time that the device needs at least for a batch (docs/method.md): the bytes that
the layout of a loss moves over the rate of memory, or the products of a step over the best rate of
products.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, geometric_mean, median
from typing import NamedTuple

from rnnt_bench.core import implementations, statistics, text
from rnnt_bench.records import schema, store

ITEMSIZE = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


class Times(NamedTuple):
    """Hold the times of one scope in ms; empty where it was not timed.

    Attributes:
        ms: what rows are ranked by
        interval: 95%, of their median over rounds
        event, wall: by the two clocks of CUDA
        stages: means over batches of medians
        medians: round -> batch -> median, with text as keys
        loaded: rounds beside other load for more than half of their time
    """

    ms: statistics.Summary | None = None
    interval: list[float] | None = None
    event: statistics.Summary | None = None
    wall: statistics.Summary | None = None
    forward: statistics.Summary | None = None
    stages: Mapping[str, float] = {}
    medians: Mapping[str, Mapping[str, float]] = {}
    loaded: Sequence[str] = ()


def summarize(samples: Sequence[schema.Sample], scope: str) -> Times:
    """Return the times of a scope.  samples: of all scopes, without warm-up."""
    timed = [sample for sample in samples if sample.scope == scope]
    rounds = text.gathered((str(sample.round), sample) for sample in timed)
    medians = {name: _medians(lines, 1e6) for name, lines in rounds.items()}
    # The interval is over rounds: samples of one process are not independent.
    interval = statistics.interval([fmean(batches.values()) for batches in medians.values()])

    def described(key: str) -> statistics.Summary | None:
        durations = ((sample.batch, getattr(sample, key)) for sample in timed)
        return statistics.describe(
            text.gathered((batch, ns / 1e6) for batch, ns in durations if ns is not None)
        )

    stages = text.gathered_twice(
        (stage, sample.batch, ns / 1e6)
        for sample in timed
        for stage, ns in (sample.stages or {}).items()
    )
    events = described("total_event_ns")
    return Times(
        ms=described("ranked_ns"),
        interval=list(interval) if interval else None,
        event=events,
        wall=described("total_wall_ns") if events else None,
        # On CUDA the host runs ahead of forward, so only the events know when it ended.
        forward=described("forward_wall_ns") or described("forward_event_ns"),
        stages={name: fmean(map(median, batches.values())) for name, batches in stages.items()},
        medians=medians,
        loaded=[name for name, lines in rounds.items() if store.is_loaded(lines)],
    )


def _medians(samples: Sequence[schema.Sample], unit_ns: float) -> dict[str, float]:
    """Return the median time by batch, in a unit of so many nanoseconds."""
    by_batch = text.gathered((str(sample.batch), sample.ranked_ns / unit_ns) for sample in samples)
    return {batch: median(durations) for batch, durations in by_batch.items()}


def rates(
    samples: Sequence[schema.Sample], batches: Sequence[schema.Batch]
) -> tuple[float | None, float | None]:
    """Return (utterances, frames) per second of the measured batches, over the sum of the medians
    of their samples."""
    medians = _medians(samples, 1e9)
    timed = [batch for batch in batches if str(batch.index) in medians]
    if not timed:
        return None, None
    seconds = sum(medians[str(batch.index)] for batch in timed)
    utterances_per_second = sum(batch.N for batch in timed) / seconds
    frames = [batch.frames for batch in timed if batch.frames is not None]
    if len(frames) < len(timed):
        return utterances_per_second, None
    return utterances_per_second, sum(frames) / seconds


def others_cpu(samples: Sequence[schema.Sample]) -> float | None:
    """Return the share of the CPUs that other processes took, averaged over the time of samples."""
    shares = [
        (sample.total_wall_ns, sample.foreign_cpu)
        for sample in samples
        if sample.foreign_cpu is not None
    ]
    total = sum(ns for ns, _ in shares)
    return sum(ns * share for ns, share in shares) / total if total else None


# Limits.


class DeviceRates(NamedTuple):
    """Hold how fast the device is at best; None where that was not measured.

    Attributes:
        memory: bytes per second of the largest buffer, the median of the processes that measured
            it, since their pages differ
        memory_low, memory_high: range over the processes
        torch, loop: operations per second of matrix products by torch.mm and by the suite's own
            loop, the best of all processes; the library that makes MKL take its path for Intel's
            processors changes torch's rate alone
    """

    memory: float | None = None
    memory_low: float | None = None
    memory_high: float | None = None
    torch: float | None = None
    loop: float | None = None

    @property
    def products(self) -> float | None:
        """Return the larger rate of matrix products."""
        return max(filter(None, (self.torch, self.loop)), default=None)


def device_rates(limits: Sequence[schema.Limits], mkl_as_intel: bool | None = None) -> DeviceRates:
    """Return the rates of a run. mkl_as_intel: torch's rate is that of processes in which MKL took
    its path for Intel's processors (True) or its own (False); None: of all processes."""
    moved = [_bytes_per_second(line.streams) for line in limits if line.streams]
    best: dict[str, float] = {}
    for line in limits:
        is_other_path = (
            None not in (mkl_as_intel, line.mkl_as_intel) and line.mkl_as_intel != mkl_as_intel
        )
        for product in line.products:
            if product.by == "torch" and is_other_path:
                continue
            rate = 2e9 * product.n**3 / min(product.ns)
            best[product.by] = max(best.get(product.by, 0.0), rate)
    result = DeviceRates(torch=best.get("torch"), loop=best.get("loop"))
    if not moved:
        return result
    return result._replace(memory=median(moved), memory_low=min(moved), memory_high=max(moved))


#: torch's matrix products are slow if their rate is below SLOW of the processor's, and MKL's path for
#: Intel's processors makes them FASTER times as fast.
SLOW, FASTER = 0.8, 1.2


def slow_products(limits: Sequence[schema.Limits]) -> float | None:
    """Return the share of the processor's rate at which torch multiplies matrices, where that is slow
    (see SLOW) because of MKL; None where it is not slow, or not known.

    The processor's rate is that of the suite's own loop. On processors that are not Intel's, MKL may
    not use the widest vectors; a preloaded library makes it take its path for Intel's."""
    # The records with streams are of all threads, which wait for each other beside other load: torch
    # would look slow for that reason too.
    one_thread = [line for line in limits if not line.streams]
    usual = device_rates(one_thread, mkl_as_intel=False)
    as_intel = device_rates(one_thread, mkl_as_intel=True)
    if not (usual.torch and usual.loop and as_intel.torch):
        return None
    is_slow = usual.torch < SLOW * usual.loop and as_intel.torch > FASTER * usual.torch
    return usual.torch / usual.loop if is_slow else None


def _bytes_per_second(streams: Sequence[schema.Stream]) -> float:
    """Return the best rate of the largest buffer in one process, since other load only slows."""
    largest = max(stream.buffer_bytes for stream in streams)
    return max(
        1e9 * stream.moved_bytes / min(stream.ns)
        for stream in streams
        if stream.buffer_bytes == largest
    )


def least_work(
    scope: str, kind: str, batch: schema.Batch, settings: schema.RecordedSettings, share: float
) -> tuple[float, float]:
    """Return (bytes to move, operations of matrix products) of a batch without its padding, at
    least. Only needed cells count, those whose posterior the gradient's dtype can tell from zero;
    an exact loss may leave out the others. The loss alone reads their logits for the normalisers
    and again for the gradient, and writes gradients of all cells. A step stores no logits: inputs,
    weights and their gradients move, and each needed cell takes three products of 2 H V. Pruned
    losses have S symbols a frame, two projections, and normalisers of am + lm. share: the needed
    cells over all."""
    itemsize, H = ITEMSIZE[settings.dtype], settings.encoder_dim
    V = settings.vocab_size + len(implementations.durations_of(kind, settings.durations))
    visited = batch.useful_cells  # the cells that this kind can need
    if kind in implementations.ONE_SYMBOL:
        visited = batch.one_symbol_cells or visited
    elif kind == "pruned":
        visited = batch.pruned_cells or visited
    needed = min(share * batch.useful_cells, visited)
    if scope == "loss":
        written = batch.useful_cells
        if kind == "pruned" and batch.pruned_cells:
            written = batch.pruned_cells
        return itemsize * V * (2 * needed + written), 0.0
    rows = (batch.frames or 0) + (batch.tokens or 0) + batch.N
    layers = 1
    flops = 6 * H * V * needed
    if kind == "pruned":
        layers = 3
        flops += 2 * batch.useful_cells * V + 6 * H * V * rows
    return 2 * itemsize * (rows * H + layers * H * V), flops


def limit_percent(
    rates: DeviceRates,
    kind: str,
    batches: Sequence[schema.Batch],
    settings: schema.RecordedSettings,
    samples: Sequence[schema.Sample],
    at_size: schema.AtSize | None,
) -> dict[str, float]:
    """Return by scope how many percent of the time the limit is, the geometric mean over batches;
    empty where the records hold too little. at_size: of the correctness pass, which counted the
    needed cells."""
    is_known = (
        settings.dtype in ITEMSIZE
        and settings.vocab_size
        and settings.encoder_dim
        and settings.mode != "forward"
    )
    if not (
        rates.memory and is_known and at_size and at_size.needed_cells and at_size.useful_cells
    ):
        return {}
    share = at_size.needed_cells / at_size.useful_cells
    percent = {}
    for scope, timed in text.gathered((sample.scope, sample) for sample in samples).items():
        if not rates.products and scope != "loss":
            continue
        limits = {}  # batch -> seconds
        for batch in batches:
            if batch.tokens is not None:
                moved_bytes, operations = least_work(scope, kind, batch, settings, share)
                seconds = max(moved_bytes / rates.memory, operations / (rates.products or 1.0))
                limits[str(batch.index)] = seconds
        medians = _medians(timed, 1e9)
        if medians.keys() <= limits.keys():
            percent[scope] = 100 * geometric_mean(
                [limits[batch] / seconds for batch, seconds in medians.items()]
            )
    return percent
