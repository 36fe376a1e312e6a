"""The timing pass: forward and forward+backward of both scopes, profiler off, in a process of its own per round.

Leaves are made anew for every sample, untimed; on a CPU their numbers too.  On CUDA the inputs of each batch are on the
device before the first sample: were they made on the host in between, the device would idle and lower its clocks.  CPU:
perf_counter_ns at both ends, and a warm-up on the batches that take most memory: after a smaller one, the first larger
batch would pay for new pages, and take up to twice its time.  CUDA: events and wall time, the device synchronised at
both ends, and a warm-up on each batch: its kernels, its sizes in the allocator.  Every sample is kept, warm-up samples
too (marked), with the load of other processes beside it.
"""

from __future__ import annotations

from typing import Any, Dict, Iterator, Optional

from common.data.batching import heaviest
from common.measure import sampling
from common.measure.clock import Clock, time_step


def run(context, round_number: Optional[int] = 1) -> Iterator[Dict[str, Any]]:
    """``sample`` records of every scope, each with its ``stop`` record; the scopes change order from round to round.
    `context`: common.losses.context.Context.

    Where rounds have batches of their own on a CPU, each measures the step, and every other one the loss alone too.
    Loops in Python compile nothing and take seconds: no warm-up, and one batch of the first round is enough.
    """
    settings, clock = context.settings, Clock(context.device, context.settings.l2 == "cold")
    if clock.cuda and not settings.find_largest:  # there memory is short
        context.hold_inputs()
    own, number = settings.own_batches, round_number or 1
    if own and context.loops_in_python and number > 1:
        return
    scopes = list(settings.scopes)
    if own and not clock.cuda and number % 2 == 0:
        scopes = scopes[-1:]
    elif number // 2 % 2:
        scopes.reverse()
    heavy = heaviest(context.all_batches, context.batches)
    for scope in scopes:

        def sample(batch: int, repeat: int, warmup: bool, scope: str = scope) -> Dict[str, Any]:
            timed = time_step(context.step(scope, batch, repeat), clock)
            place = {"scope": scope, "round": round_number, "batch": batch, "repeat": repeat}
            return {"record": "sample", **place, "warmup": warmup, **timed}

        why = yield from sampling.sweep(
            sample,
            context.batches[:1] if context.loops_in_python else context.batches,
            spread=settings.spread,
            max_samples=settings.max_samples,
            max_seconds=settings.max_seconds,
            warm_up=() if context.loops_in_python else context.batches if clock.cuda else heavy,
        )
        yield {"record": "stop", "scope": scope, "round": round_number, "why": why}
