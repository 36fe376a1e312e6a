"""Time forward and forward+backward of both scopes, without a profiler, in a process for each round: the timing pass.

Leaves are made anew for every sample, untimed.  Every sample is kept, warm-up samples too (marked), with the load of
other processes beside it.  After the last sample the losses of the last timed steps are judged (afterwards.py): a loss
that is wrong then has no times.

- CPU: perf_counter_ns at both ends.  The warm-up is on the batches that take most memory: else the first larger batch
  would pay for new pages and take up to twice its time.  With --allocator reuse the heap then gets as much again in one
  piece, since smaller steps split what was free.
- CUDA: events and wall time, synchronised at both ends, and a warm-up on each batch: its kernels, its sizes in the
  allocator.  All inputs are on the device before the first sample, or it would idle in between and lower its clocks.
"""

from __future__ import annotations

from typing import Dict, Iterator, List, Optional, Sequence, Union

from common.core.errors import WrongResult
from common.core.settings import Settings
from common.core.text import finite
from common.data.batching import heaviest, lightest
from common.losses.passes.afterwards import Taken, check
from common.measure import sampling
from common.measure.clock import Clock, time_step
from common.measure.device import host_threads
from common.records.schema import Sample, Stop
from common.system import memory

#: On a CPU the loss alone is timed on one in BATCHES_FOR_A_LOSS batches of a round, for a small share of a step's time
#: cap: making its logits takes the joiner's time, which no sample shows.
BATCHES_FOR_A_LOSS = 3
LOSS_SHARE_OF_SECONDS = 0.05
#: One in so many rounds ends with a further step of a scope, see afterwards.py.
FURTHER_EVERY = 3


def run(context, round_number: Optional[int] = 1) -> Iterator[Union[Sample, Stop]]:
    """Yield the ``sample`` records of every scope, then their ``stop`` records; rounds differ in the order of scopes.

    If rounds have batches of their own on a CPU, each round measures the step, which also warms up the loss.  Then it
    measures the loss alone on some of its batches.  A loss that loops in Python needs no warm-up and takes seconds:
    only the lightest batch of the first round is measured.

    `context` is a common.losses.context.Context.  Raises WrongResult if a loss was wrong.
    """
    settings, clock = context.settings, Clock(context.device, context.settings.l2 == "cold")
    if clock.cuda and not settings.find_largest:  # there memory is short
        context.hold_inputs(context.batches)
    differing, number = settings.own_batches, round_number or 1
    if differing and context.loops_in_python and number > 1:
        return
    batches, warm_up = context.batches, context.batches
    if context.loops_in_python:
        batches, warm_up = [lightest(context.all_batches, batches)], []
    elif not clock.cuda:
        warm_up = heaviest(context.all_batches, batches)
    ends: List[Stop] = []
    last: Dict[str, Dict[int, Taken]] = {}
    loss_last, before = differing and not clock.cuda, memory.status_bytes("VmRSS")
    threads = host_threads(context.device)
    for scope in _scopes(settings, loss_last, number):

        def sample(batch: int, repeat: int, warmup: bool, scope: str = scope) -> Sample:
            step = context.step(scope, batch, repeat)
            timed = time_step(step, clock)
            taken = Taken.of(step, repeat)
            if not warmup:
                last.setdefault(scope, {})[batch] = taken
            return Sample(
                scope=scope,
                round=round_number,
                batch=batch,
                repeat=repeat,
                warmup=warmup,
                loss=finite(taken.loss),
                **vars(timed),
            )

        after_step = loss_last and scope == "loss" and "step" in settings.scopes
        if not after_step:
            yield from sampling.warm_up(sample, warm_up, settings.max_seconds, threads)
        if settings.allocator == "reuse" and not clock.cuda and before is not None and not after_step:
            memory.widen_heap((memory.status_bytes("VmRSS") or 0) - before)
        why = yield from sampling.sweep(
            sample,
            _for_the_loss(batches, number) if after_step else batches,
            spread=settings.spread,
            max_samples=settings.max_samples,
            max_seconds=settings.max_seconds * (LOSS_SHARE_OF_SECONDS if after_step else 1),
            threads=threads,
        )
        if after_step and why == "time cap":
            why = "time share"
        ends.append(Stop(scope=scope, round=round_number, why=why))
    for end in ends:
        wrong = ""
        if end.scope in last and not settings.find_largest:  # there memory is short
            further = end.scope in _further_scopes(settings, number)
            end.loss_error, wrong = check(context, end.scope, last[end.scope], further)
        yield end
        if wrong:
            raise WrongResult(wrong)


def _scopes(settings: Settings, loss_last: bool, number: int) -> List[str]:
    """Return the scopes in the order of round `number`."""
    scopes = list(settings.scopes)
    return scopes[::-1] if loss_last or number // 2 % 2 else scopes


def _further_scopes(settings: Settings, number: int) -> Sequence[str]:
    """Return the scopes that take a further step after round `number`: all where there is one round, else one in turn,
    the step first, in every third round: a row may begin with a later round than the others."""
    scopes = settings.scopes
    if settings.rounds == 1:
        return scopes
    turn, rest = divmod(number - 1, FURTHER_EVERY)
    return [] if rest else [scopes[-1 - turn % len(scopes)]]


def _for_the_loss(batches: Sequence[int], number: int) -> List[int]:
    """Return a third of a round's batches, at least one; others in the next round, since they may be sorted by size."""
    count = max(1, len(batches) // BATCHES_FOR_A_LOSS)
    return [batches[(number * count + index) % len(batches)] for index in range(count)]
