"""Time forward and forward+backward of both scopes, without a profiler, in a process for each round: the timing pass.

Leaves are made anew for every sample, untimed.  Every sample is kept, warm-up samples too (marked), with the load of
other processes beside it.  After the last sample the last timed steps are judged (afterwards.py): a loss that is wrong
then has no times.

- CPU: perf_counter_ns at both ends.  The warm-up is on the batches that take most memory: else the first larger batch
  would pay for new pages and take up to twice its time.  With --allocator reuse the heap then gets as much again in one
  piece, since smaller steps split what was free.
- CUDA: events and wall time, synchronised at both ends, and a warm-up on each batch: its kernels, its sizes in the
  allocator.  All inputs are on the device before the first sample, or it would idle in between and lower its clocks.
"""

from __future__ import annotations

from typing import Dict, Iterator, List, Optional, Tuple, Union

from common.core.errors import WrongResult
from common.core.text import finite
from common.data.batching import heaviest, lightest
from common.losses.passes.afterwards import Last, Taken, check
from common.losses.step import LossStep
from common.measure import sampling
from common.measure.clock import Clock, time_step
from common.measure.device import host_threads, state
from common.records.schema import Sample, Stop
from common.system import memory

#: On a CPU the loss alone is timed on one in BATCHES_FOR_A_LOSS batches of a round, for a small share of a step's time
#: cap: making its logits takes the joiner's time, which no sample shows.
BATCHES_FOR_A_LOSS = 3
LOSS_SHARE_OF_SECONDS = 0.05


class OfScope:
    """Takes the samples of a scope, and keeps what is judged after them."""

    def __init__(self, context, clock: Clock, scope: str):
        self.context, self.clock, self.scope = context, clock, scope
        self.taken: Dict[int, Taken] = {}
        self.latest: List[Tuple[int, LossStep]] = []  # the step of the last sample, which the next one drops first

    def sample(self, batch: int, repeat: int, warmup: bool) -> Sample:
        """Return a sample; arguments as of sampling.Sampler."""
        self.latest.clear()
        numbers = 4 * repeat + 2 * warmup + (self.scope == "step")  # its own: a loss must not know an answer before
        step = self.context.step(self.scope, batch, numbers)
        timed = time_step(step, self.clock)
        self.latest.append((batch, step))
        taken = Taken.of(step, numbers)
        if not warmup:
            self.taken[batch] = taken
        of = {"scope": self.scope, "round": self.context.round, "batch": batch, "repeat": repeat, "warmup": warmup}
        return Sample(**of, loss=finite(taken.loss), **timed)


def run(context) -> Iterator[Union[Sample, Stop]]:
    """Yield the ``sample`` records of every scope, then their ``stop`` records; rounds differ in the order of scopes.

    If rounds have batches of their own on a CPU, each round measures the step, which also warms up the loss.  Then it
    measures the loss alone on some of its batches.  A loss that loops in Python needs no warm-up and takes seconds:
    only the lightest batch of the first round is measured.

    `context` is a common.losses.subject.Context.  Raises WrongResult if a loss was wrong.
    """
    settings, clock = context.settings, Clock(context.device, context.settings.l2 == "cold")
    if clock.cuda and not settings.find_largest:  # there memory is short
        context.hold_inputs(context.batches)
    differing, number, threads = settings.own_batches, context.round or 1, host_threads(context.device)
    if differing and context.loops_in_python and number > 1:
        return
    batches, warm_up = context.batches, context.batches
    if context.loops_in_python:
        batches, warm_up = [lightest(context.all_batches, batches)], []
    elif not clock.cuda:
        warm_up = heaviest(context.all_batches, batches)
    loss_last, before = differing and not clock.cuda, memory.status_bytes("VmRSS")
    scopes = list(settings.scopes)
    ends: List[Tuple[Stop, Dict[int, Taken], Optional[Last]]] = []
    for scope in scopes[::-1] if loss_last or number // 2 % 2 else scopes:
        of_scope = OfScope(context, clock, scope)
        chosen, seconds, after_step = batches, settings.max_seconds, loss_last and scope == "loss" and len(scopes) > 1
        if after_step:  # a third of the batches, at least one; others in the next round: they may be sorted by size
            count = max(1, len(batches) // BATCHES_FOR_A_LOSS)
            chosen = [batches[(number * count + index) % len(batches)] for index in range(count)]
            seconds *= LOSS_SHARE_OF_SECONDS
        else:
            yield from sampling.warm_up(of_scope.sample, warm_up, settings.max_seconds, threads)
            if settings.allocator == "reuse" and not clock.cuda and before is not None:
                memory.widen_heap((memory.status_bytes("VmRSS") or 0) - before)
        caps = {"spread": settings.spread, "max_samples": settings.max_samples, "max_seconds": seconds}
        why = yield from sampling.sweep(of_scope.sample, chosen, **caps, threads=threads)
        if after_step and why == "time cap":
            why = "time share"
        last = None
        if of_scope.taken and not settings.find_largest:  # in a search memory is short
            last = Last.of(context, scope, *of_scope.latest.pop())
        ends.append((Stop(scope=scope, round=context.round, why=why), of_scope.taken, last))
    now = state()
    changed = [name for name, value in context.state.items() if value != now[name]]
    for end, taken, last in ends:
        wrong, end.changed = "", changed
        if last is not None:
            end.loss_error, end.grad_error, wrong = check(context, end.scope, taken, last)
        yield end
        if wrong:
            raise WrongResult(wrong)
