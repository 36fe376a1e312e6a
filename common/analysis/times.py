"""Summarize the samples of one run: times, stages, rates, rounds beside other load, and the percent
of limit.

The limit is the least time that the device needs for a batch (docs/method.md): for a loss, the
bytes that it must move over the rate of memory; for a step, the larger of that and the operations
of its matrix products over the best rate of products.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, geometric_mean, median
from typing import NamedTuple

from rnnt_bench.core import implementations, statistics, text
from rnnt_bench.records import schema, store

ITEMSIZE = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}  # bytes


class Times(NamedTuple):
    """Hold the times of one scope in ms; empty where it was not timed.

    Attributes:
        ms: the times by which rows are ranked, see Sample.ranked_ns
        interval: (low, high), the 95% interval of the mean time over rounds
        event, wall: by CUDA events, by the host's clock; None on a CPU, where `ms` is wall time
        forward: of the forward pass alone
        stages: stage -> mean over batches of the median of its samples
        medians: round -> batch -> median of its samples; the keys are text
        loaded: names of the rounds that ran beside other load for more than half of their time
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
    """Return the times of a scope.

    Args:
        samples: of all scopes of a run, without warm-up
        scope: "step" or "loss"
    """
    timed = [sample for sample in samples if sample.scope == scope]
    rounds = text.gathered((str(sample.round), sample) for sample in timed)
    medians = {name: _medians_ms(of_round) for name, of_round in rounds.items()}
    # The interval is over rounds: samples of one process are not independent.
    interval = statistics.interval([fmean(batches.values()) for batches in medians.values()])

    def described(key: str) -> statistics.Summary | None:
        """Return the summary in ms of a field in ns; None where no sample has the field."""
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
        # Without events `ms` is wall time itself.
        wall=described("total_wall_ns") if events else None,
        # On CUDA the host runs ahead of forward, so only the events know when it ended.
        forward=described("forward_wall_ns") or described("forward_event_ns"),
        stages={name: fmean(map(median, batches.values())) for name, batches in stages.items()},
        medians=medians,
        loaded=[name for name, of_round in rounds.items() if store.is_loaded(of_round)],
    )


def _medians_ms(samples: Sequence[schema.Sample]) -> dict[str, float]:
    """Return batch -> the median time of its samples in ms."""
    by_batch = text.gathered((str(sample.batch), sample.ms) for sample in samples)
    return {batch: median(durations) for batch, durations in by_batch.items()}


def rates(
    samples: Sequence[schema.Sample], batches: Sequence[schema.Batch]
) -> tuple[float | None, float | None]:
    """Return (utterances, frames) per second.

    The time is the sum of the medians of the batches that have samples. None: nothing was timed, or
    records lack the frames of a batch."""
    medians = _medians_ms(samples)
    timed = [batch for batch in batches if str(batch.index) in medians]
    if not timed:
        return None, None
    seconds = sum(medians[str(batch.index)] for batch in timed) / 1e3
    utterances_per_second = sum(batch.N for batch in timed) / seconds
    frames = [batch.frames for batch in timed if batch.frames is not None]
    if len(frames) < len(timed):
        return utterances_per_second, None
    return utterances_per_second, sum(frames) / seconds


def others_cpu(samples: Sequence[schema.Sample]) -> float | None:
    """Return the share (0 to 1) of the CPUs that other processes took, averaged over the time of
    the samples; None if no sample has a share."""
    shares = [
        (sample.total_wall_ns, sample.foreign_cpu)
        for sample in samples
        if sample.foreign_cpu is not None
    ]
    total = sum(ns for ns, _ in shares)
    return sum(ns * share for ns, share in shares) / total if total else None


# The best that the device does.


class DeviceRates(NamedTuple):
    """Hold how fast the device is at best; None where that was not measured.

    Attributes:
        memory: bytes per second of the largest buffer, the median of the processes that measured
            it, since their pages differ
        memory_low, memory_high: its range over these processes
        torch: operations per second of matrix products by torch.mm, the best of all processes
        loop: operations per second of the suite's own loop of matrix products, the best of all
            processes; unlike torch's rate, it does not depend on the path that MKL takes
    """

    memory: float | None = None
    memory_low: float | None = None
    memory_high: float | None = None
    torch: float | None = None
    loop: float | None = None

    @property
    def products(self) -> float | None:
        """Return the larger rate of matrix products, of `torch` and `loop`; None without either."""
        return max(filter(None, (self.torch, self.loop)), default=None)


def device_rates(limits: Sequence[schema.Limits], mkl_as_intel: bool | None = None) -> DeviceRates:
    """Return the rates of a run.

    Args:
        limits: records of the limits pass
        mkl_as_intel: whether torch's rate is that of processes in which MKL took its path for
            Intel's processors (True) or its usual path (False); None: of all processes. The other
            rates are always those of all processes
    """
    memory = [_bytes_per_second(line.streams) for line in limits if line.streams]
    # Records that do not know their path (None) count for both.
    paths = (True, False, None) if mkl_as_intel is None else (mkl_as_intel, None)
    of_path = [line for line in limits if line.mkl_as_intel in paths]
    return DeviceRates(
        memory=median(memory) if memory else None,
        memory_low=min(memory, default=None),
        memory_high=max(memory, default=None),
        torch=_products_per_second(of_path, "torch"),
        loop=_products_per_second(limits, "loop"),
    )


def _products_per_second(limits: Sequence[schema.Limits], by: str) -> float | None:
    """Return the highest rate of matrix products, in operations per second; None without any.

    by: what made the products: "torch", or "loop" for the suite's own loop."""
    rates = [
        # n x n matrices take n^3 multiplications and as many additions
        2e9 * product.n**3 / min(product.ns)
        for line in limits
        for product in line.products
        if product.by == by
    ]
    return max(rates, default=None)


def _bytes_per_second(streams: Sequence[schema.Stream]) -> float:
    """Return the best rate of the largest buffer in one process; other load can only lower a
    rate."""
    largest = max(stream.buffer_bytes for stream in streams)
    return max(
        1e9 * stream.moved_bytes / min(stream.ns)
        for stream in streams
        if stream.buffer_bytes == largest
    )


#: torch's matrix products are slow if their rate is below SLOW of the processor's, and MKL's path
#: for Intel's processors makes them FASTER times as fast.
SLOW, FASTER = 0.8, 1.2


def slow_products(limits: Sequence[schema.Limits]) -> float | None:
    """Return torch's rate of matrix products over the processor's, if torch is slow because of MKL
    (see SLOW); None if torch is not slow, or if a rate is not known.

    On processors that are not Intel's, MKL may not use the widest vectors. So torch is slower than
    the suite's own loop, whose rate is the processor's, and faster under a preloaded library that
    makes MKL take its path for Intel's processors."""
    # Records with streams are of all threads. Beside other load these wait for each other, so torch
    # would look slow for that reason too.
    one_thread = [line for line in limits if not line.streams]
    usual = device_rates(one_thread, mkl_as_intel=False)
    as_intel = device_rates(one_thread, mkl_as_intel=True)
    if not (usual.torch and usual.loop and as_intel.torch):
        return None
    if usual.torch < SLOW * usual.loop and as_intel.torch > FASTER * usual.torch:
        return usual.torch / usual.loop
    return None


# The limit.


def least_work(
    scope: str, kind: str, batch: schema.Batch, settings: schema.RecordedSettings, share: float
) -> tuple[float, float]:
    """Return (bytes to move, operations of matrix products): the least work of a batch, without its
    padding.

    Only needed cells of the lattice count: those whose posterior the gradient's dtype can tell from
    zero. An exact loss may leave out all others.

    Args:
        scope: "step" or "loss"
        kind: of the loss, one of implementations.KINDS
        settings: of the run, with the sizes H of the encoder and V of the vocabulary
        share: needed cells over all cells without padding
    """
    itemsize = ITEMSIZE[settings.dtype]
    H = settings.encoder_dim
    V = settings.vocab_size + len(implementations.durations_of(kind, settings.durations))
    reachable = _reachable_cells(kind, batch)
    needed = min(share * batch.useful_cells, reachable)
    if scope == "loss":
        # It reads the logits of needed cells for the normalisers and again for the gradient, and
        # writes the gradient of every cell that has logits.
        written = reachable if kind == "pruned" else batch.useful_cells
        return itemsize * V * (2 * needed + written), 0.0
    # A step need not store logits. It moves the inputs (T frames and U + 1 decoder outputs of each
    # utterance), the weights, and the gradients of inputs and weights.
    inputs = (batch.frames or 0) + (batch.tokens or 0) + batch.N
    # Three products of 2 H V operations a cell: the logits, and the gradients of inputs and weight.
    product = 6 * H * V
    if kind != "pruned":
        return 2 * itemsize * (inputs * H + H * V), product * needed
    # Pruned losses have two projections more, am of frames and lm of decoder outputs: so there are
    # three weights, and each input is projected once. The normalisers are sums over V of
    # exp(am + lm), a product of the matrices exp(am) and exp(lm).
    operations = product * (needed + inputs) + 2 * batch.useful_cells * V
    return 2 * itemsize * (inputs * H + 3 * H * V), operations


def _reachable_cells(kind: str, batch: schema.Batch) -> int:
    """Return the number of cells, without padding, that paths of this kind of loss can meet; all
    cells without padding if the record does not say."""
    if kind in implementations.ONE_SYMBOL:
        return batch.one_symbol_cells or batch.useful_cells
    if kind == "pruned":
        return batch.pruned_cells or batch.useful_cells
    return batch.useful_cells


def limit_percent(
    rates: DeviceRates,
    kind: str,
    batches: Sequence[schema.Batch],
    settings: schema.RecordedSettings,
    samples: Sequence[schema.Sample],
    at_size: schema.AtSize | None,
) -> dict[str, float]:
    """Return {scope: percent}: the least time that the device needs, in percent of the measured
    time, as the geometric mean over batches.

    The least time of a batch is that of its bytes or that of its operations (`least_work`),
    whichever is longer.  A scope is left out if the records hold too little to compute its percent.

    Args:
        rates: of the device
        kind: of the loss, one of implementations.KINDS
        samples: of all scopes, without warm-up
        at_size: what the correctness pass found on a measured batch, with the number of its needed
            cells
    """
    # `least_work` needs these sizes.  It counts gradients too, which the mode "forward" lacks.
    if not (
        settings.dtype in ITEMSIZE
        and settings.vocab_size
        and settings.encoder_dim
        and settings.mode != "forward"
    ):
        return {}
    if not (rates.memory and at_size and at_size.needed_cells and at_size.useful_cells):
        return {}
    share = at_size.needed_cells / at_size.useful_cells
    # Without its tokens the size of a batch's inputs is not known.
    sized = {str(batch.index): batch for batch in batches if batch.tokens is not None}
    percent = {}
    for scope, timed in text.gathered((sample.scope, sample) for sample in samples).items():
        if scope != "loss" and not rates.products:  # the loss alone has no matrix products
            continue
        medians = _medians_ms(timed)
        if not medians.keys() <= sized.keys():
            continue
        fractions = []
        for index, ms in medians.items():
            moved_bytes, operations = least_work(scope, kind, sized[index], settings, share)
            seconds = moved_bytes / rates.memory
            if rates.products:
                seconds = max(seconds, operations / rates.products)
            fractions.append(1e3 * seconds / ms)
        percent[scope] = 100 * geometric_mean(fractions)
    return percent
