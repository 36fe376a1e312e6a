"""Time forward and forward+backward of both scopes, without a profiler, in a process for each
round: the timing pass.

Leaves are made anew for every sample, untimed.  Every sample is kept, warm-up samples too (marked),
with the load of other processes beside it.

- CPU: perf_counter_ns at both ends.  The warm-up is on the batches that take most memory: else the
  first larger batch would pay for new pages and take up to twice its time.  With --allocator reuse
  the heap then gets as much again in one piece, since smaller steps split what was free.
- CUDA: events and wall time, synchronised at both ends, and a warm-up on each batch: its kernels,
  its sizes in the allocator.  All inputs are on the device before the first sample, or it would
  idle in between and lower its clocks.

After the last sample the loss is judged again (after_timing.py): one that is wrong then has no
times.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from statistics import median_low

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

#: On a CPU the loss alone is timed on one in BATCHES_FOR_A_LOSS batches of a round, for at most
#: LOSS_SHARE_OF_SECONDS of the time that a step has: making its logits takes the joiner's time, which
#: no sample shows.
BATCHES_FOR_A_LOSS = 3
LOSS_SHARE_OF_SECONDS = 0.05
#: Samples before the first level of memory, and at least between it and the last.
LEAST_KEPT = 3


class OfScope:
    """Takes the samples of a scope, and keeps what is judged after them."""

    def __init__(self, context, clock: Clock, scope: str):
        self.context, self.clock, self.scope = context, clock, scope
        self.taken: dict[int, Taken] = {}
        # the step of the last sample, which the next one drops first
        self.latest: list[tuple[int, LossStep]] = []
        self.count = 0  # samples
        # bytes in use before each further sample, once each batch and LEAST_KEPT samples were measured
        self.levels: list[int] = []

    def sample(self, batch: int, repeat: int, warmup: bool) -> Sample:
        """Return a sample; arguments as of sampling.Sampler."""
        self.latest.clear()
        if not warmup:
            first = max(LEAST_KEPT, len(self.taken))
            if self.count == first:
                self.levels.clear()
                gc.collect()
            if self.count >= first:
                self.levels.append(in_use(self.context.device))
            self.count += 1
        # its own: a loss must not know an answer before
        numbers = 4 * repeat + 2 * warmup + (self.scope == "step")
        step = self.context.step(self.scope, batch, numbers)
        times, loss = time_step(step, self.clock, read=float)
        self.latest.append((batch, step))
        if not warmup:
            self.taken[batch] = Taken(numbers, loss, getattr(step.prepared, "ranges", None))
        return Sample(
            scope=self.scope,
            round=self.context.round,
            batch=batch,
            repeat=repeat,
            warmup=warmup,
            loss=finite(loss),
            **times._asdict(),
        )

    def kept(self) -> int | None:
        """Return how many bytes more are in use after each further sample, once the last step is
        dropped; None where there were too few samples to tell, or the system does not.

        A leak adds to most samples, and to the level in the end. A cache that is filled once does
        not add to most, and memory that comes and goes is given back in the end."""
        self.latest.clear()
        gc.collect()
        levels = [*self.levels, in_use(self.context.device)]
        added = [after - before for before, after in zip(levels, levels[1:])]
        if len(added) < LEAST_KEPT or not levels[0]:
            return None
        mean = (levels[-1] - levels[0]) // len(added)
        return max(min(mean, median_low(added)), 0)


def in_use(where: torch.device) -> int:
    """Return the bytes that torch has on this GPU, or malloc in this process; 0 where the C library
    does not tell."""
    return (
        torch.cuda.memory_allocated(where) if where.type == "cuda" else memory.allocated_bytes()[0]
    )


def run(context) -> Iterator[Sample | Stop]:
    """Yield the ``sample`` records of every scope, then their ``stop`` records; raise WrongResult
    if a loss was wrong.

    Rounds differ in the order of scopes.  If they have batches of their own on a CPU, each measures
    the step, which also warms up the loss, and then the loss alone on some of its batches.  A loss
    that loops in Python needs no warm-up and takes seconds: only the lightest batch of the first
    round is measured.
    """
    settings = context.settings
    clock = Clock(context.device, settings.l2 == "cold")
    if clock.cuda:
        context.hold_inputs(context.batches)
    number = context.round or 1
    threads = device.host_threads(context.device)
    if settings.own_batches and context.loops_in_python and number > 1:
        return
    batches = context.batches
    warm_up = batches
    if context.loops_in_python:
        batches = [lightest(context.all_batches, batches)]
        warm_up = []
    elif not clock.cuda:
        warm_up = heaviest(context.all_batches, batches)
    loss_last = settings.own_batches and not clock.cuda
    resident = memory.status_bytes("VmRSS")
    scopes = list(settings.scopes)
    if loss_last or number // 2 % 2:
        scopes.reverse()
    weights = dict(context.model.named_parameters())
    weights_before = fingerprints(weights)
    ends: list[tuple[Stop, dict[int, Taken]]] = []
    for scope in scopes:
        of_scope = OfScope(context, clock, scope)
        # The gradient of the last batch is judged: another one in each round.
        turn = number % len(batches)
        chosen = [*batches[turn:], *batches[:turn]]
        seconds = settings.max_seconds
        if loss_last and scope == "loss" and len(scopes) > 1:
            # A third of the batches, at least one, and others in the next round, since they may be
            # sorted by size. The step has warmed up the loss.
            count = max(1, len(batches) // BATCHES_FOR_A_LOSS)
            chosen = [batches[(number * count + index) % len(batches)] for index in range(count)]
            seconds *= LOSS_SHARE_OF_SECONDS
        else:
            yield from sampling.warm_up(of_scope.sample, warm_up, settings.max_seconds, threads)
            if settings.allocator == "reuse" and not clock.cuda and resident is not None:
                memory.widen_heap((memory.status_bytes("VmRSS") or 0) - resident)
        caps = {
            "spread": settings.spread,
            "max_samples": settings.max_samples,
            "max_seconds": seconds,
        }
        yield from sampling.sweep(of_scope.sample, chosen, **caps, threads=threads)
        if of_scope.taken:
            batch, step = of_scope.latest.pop()
            of_scope.taken[batch].keep(context, scope, step)
            del step
        end = Stop(scope=scope, round=context.round, leaked_bytes=of_scope.kept())
        ends.append((end, of_scope.taken))
    state = device.state()
    changed_weights = ", ".join(changed(weights_before, weights))
    changed_state = [name for name, value in context.state.items() if value != state[name]]
    for end, _ in ends:
        end.changed = changed_state
    yield from after_timing.run(context, ends, changed_weights)
