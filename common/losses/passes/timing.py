"""Time forward and forward+backward of both scopes, without a profiler, in a process for each
round: the timing pass.

Leaves are made anew for every sample, untimed.  Every sample is kept with the load of other
processes beside it; warm-up samples are marked.

- CPU: the clock is perf_counter_ns.  The warm-up is on the batches that take most memory.  Without
  it the first larger batch would pay for new pages, and take up to twice its time.  With --allocator
  reuse the heap then gets as much again in one piece, since smaller steps split what was free.
- CUDA: times are of events and of the wall clock, synchronised at both ends.  Each batch is warmed
  up, since it has its own kernels, and its own sizes in the allocator.  All inputs are on the device
  before the first sample: the device would else idle in between, and lower its clocks.

After the last sample the loss is judged again (after_timing.py); a loss that is wrong then has no
times.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from statistics import median_low
from typing import NamedTuple

import torch

from rnnt_bench.core.text import finite
from rnnt_bench.data.batching import heaviest, lightest
from rnnt_bench.instruments import device, sampling
from rnnt_bench.instruments.clock import Clock, time_step
from rnnt_bench.losses.passes import after_timing
from rnnt_bench.losses.passes.after_timing import Taken
from rnnt_bench.losses.step import LossStep, changed, fingerprints
from rnnt_bench.records.schema import Sample, Stop
from rnnt_bench.system import memory

#: On a CPU the loss alone is timed on one in BATCHES_FOR_A_LOSS batches of a round.  Its time cap
#: is LOSS_SHARE_OF_SECONDS of the step's.  It is low, since samples do not count the time in which
#: the joiner makes their logits.
BATCHES_FOR_A_LOSS = 3
LOSS_SHARE_OF_SECONDS = 0.05
#: At least so many samples are taken before the memory in use is first read.  At least so many must
#: follow until the last reading, to tell a leak.
LEAST_KEPT = 3


class Part(NamedTuple):
    """Hold what a round measures of a scope.

    Attributes:
        scope: "loss" or "step".
        warm_up: the batches that are warmed up, as indices.
        batches: the batches that are timed, in their order.
        seconds: time cap of the samples.
    """

    scope: str
    warm_up: Sequence[int]
    batches: Sequence[int]
    seconds: float


def parts(context) -> list[Part]:
    """Return what the round of a subject.Context measures, in its order.

    Rounds differ in the order of the scopes, and in the batch that comes last, whose gradient is
    judged.  Rounds that draw batches of their own on a CPU measure the step first, which warms up
    the loss too, and then the loss alone on some of the batches.  A loss that loops in Python takes
    seconds and needs no warm-up: it is timed on the lightest batch, and in the first round alone if
    rounds draw batches.
    """
    settings = context.settings
    number = context.round or 1
    is_cuda = context.device.type == "cuda"
    batches = warm_up = context.batches
    if context.loops_in_python:
        if settings.own_batches and number > 1:
            return []
        batches = [lightest(context.all_batches, batches)]
        warm_up = []
    elif not is_cuda:
        warm_up = heaviest(context.all_batches, batches)
    step_first = settings.own_batches and not is_cuda
    scopes = list(settings.scopes)
    # Unless the step is always first, "loss" is first in rounds 1, 4, 5, 8, 9, ..., the step in
    # rounds 2, 3, 6, 7, ...
    if step_first or number // 2 % 2:
        scopes.reverse()
    order = rotated(batches, number)
    result = [Part(scope, warm_up, order, settings.max_seconds) for scope in scopes]
    if step_first and len(scopes) > 1:
        # Reversed, `scopes` ends with "loss", whose part is replaced: the step has warmed it up.
        # Batches may be sorted by size, so the next round takes others of them.
        count = max(1, len(batches) // BATCHES_FOR_A_LOSS)
        some = rotated(batches, number * count)[:count]
        seconds = settings.max_seconds * LOSS_SHARE_OF_SECONDS
        result[-1] = Part("loss", warm_up=[], batches=some, seconds=seconds)
    return result


def rotated(batches: Sequence[int], count: int) -> list[int]:
    """Return the batches with the first `count` moved to the end; `count` may be larger than their
    number."""
    turn = count % len(batches)
    return [*batches[turn:], *batches[:turn]]


class OfScope:
    """Take the samples of a scope, and keep what is judged after them."""

    def __init__(self, context, clock: Clock, part: Part):
        self.context, self.clock, self.scope = context, clock, part.scope
        self.taken: dict[int, Taken] = {}  # by batch
        # the batch and the step of the last sample, whose tensors the next sample drops first
        self.latest: tuple[int, LossStep] | None = None
        self.count = 0  # of samples, without those of the warm-up
        # samples to take before the memory in use is first read: each batch once, or more, since
        # what a loss keeps after its first sample of a size is no leak
        self.settled = max(LEAST_KEPT, len(part.batches))
        self.levels: list[int] = []  # bytes in use before each further sample

    def sample(self, batch: int, repeat: int, warmup: bool) -> Sample:
        """Take a sample, as a sampling.Sampler; return its record.

        Unless it is a warm-up, note what is judged of it and, after `settled` samples, how much
        memory was in use before it."""
        self.latest = None  # drops its tensors before memory is read or taken
        if not warmup:
            if self.count == self.settled:
                gc.collect()  # so that garbage of the first samples is in no level
            if self.count >= self.settled:
                self.levels.append(in_use(self.context.device))
            self.count += 1
        # Each sample of a batch has its own numbers, so that a loss cannot know the answer.
        # The two lowest bits of `draw` are the warm-up and the scope, so no two samples share one.
        draw = 4 * repeat + 2 * int(warmup) + int(self.scope == "step")
        step = self.context.step(self.scope, batch, draw)
        times, loss = time_step(step, self.clock, read=float)
        self.latest = batch, step
        if not warmup:
            self.taken[batch] = Taken(draw, loss, getattr(step.prepared, "ranges", None))
        return Sample(
            scope=self.scope,
            round=self.context.round,
            batch=batch,
            repeat=repeat,
            warmup=warmup,
            loss=finite(loss),
            **times._asdict(),
        )

    def end(self) -> Stop:
        """Keep digests of the inputs of the last sample and the sketch of its gradients; return the
        ``stop`` record.

        The step of the last sample is dropped first: `leaked_bytes` would count its memory."""
        if self.latest and self.taken:
            batch, step = self.latest
            self.taken[batch].keep(self.context, self.scope, step)
            del step  # this reference, too, would keep its memory
        self.latest = None
        return Stop(scope=self.scope, round=self.context.round, leaked_bytes=self.leaked_bytes())

    def leaked_bytes(self) -> int | None:
        """Return how many bytes each further sample leaks, 0 if none; None if there were too few
        samples to tell, or if the system does not tell how many bytes are in use.

        A leak makes the bytes in use grow in most samples, and from the first to the last.  A cache
        that is filled once does not make them grow in most samples.  Memory that comes and goes
        does not make them grow from the first to the last.
        """
        gc.collect()
        levels = [*self.levels, in_use(self.context.device)]
        added = [after - before for before, after in zip(levels, levels[1:])]
        if len(added) < LEAST_KEPT or not levels[0]:  # 0: the system does not tell
            return None
        mean = (levels[-1] - levels[0]) // len(added)
        return max(min(mean, median_low(added)), 0)


def in_use(where: torch.device) -> int:
    """Return the bytes that torch has on this GPU, or malloc in this process; 0 where the C library
    does not tell."""
    if where.type == "cuda":
        return torch.cuda.memory_allocated(where)
    return memory.allocated_bytes()[0]


def run(context) -> Iterator[Sample | Stop]:
    """Time the losses of a subject.Context.  Yield the ``sample`` records of every scope, then the
    ``stop`` record of each.  Raise WrongResult if a loss was wrong."""
    settings = context.settings
    clock = Clock(context.device, settings.l2 == "cold")
    if clock.cuda:
        context.hold_inputs(context.batches)
    threads = device.host_threads(context.device)
    resident = memory.status_bytes("VmRSS")
    weights = dict(context.model.named_parameters())
    weights_before = fingerprints(weights)
    reuses_heap = settings.allocator == "reuse" and not clock.cuda
    ends: list[tuple[Stop, dict[int, Taken]]] = []
    for part in parts(context):
        of_scope = OfScope(context, clock, part)
        yield from sampling.warm_up(of_scope.sample, part.warm_up, settings.max_seconds, threads)
        # A loss that is timed after its step has no warm-up, and reuses the heap of the step.  A
        # loss that loops in Python has no warm-up either, but needs a heap.
        needs_heap = part.warm_up or context.loops_in_python
        if reuses_heap and needs_heap and resident is not None:
            # The heap gets as much again as the process has grown by since the start.
            grown_bytes = (memory.status_bytes("VmRSS") or 0) - resident
            memory.widen_heap(grown_bytes)
        yield from sampling.sweep(
            of_scope.sample,
            part.batches,
            spread=settings.spread,
            max_samples=settings.max_samples,
            max_seconds=part.seconds,
            threads=threads,
        )
        ends.append((of_scope.end(), of_scope.taken))
    state = device.state()
    changed_state = [name for name, value in context.state.items() if value != state[name]]
    for end, _ in ends:
        end.changed = changed_state
    changed_weights = ", ".join(changed(weights_before, weights))
    yield from after_timing.run(context, ends, changed_weights)
