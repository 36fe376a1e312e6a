"""Measure the memory of one step above the level before it, in a process of its own: the memory pass; and find out
whether a batch size fits, for --find-largest: the probe and throughput passes.

The memory pass measures the batches that take most: that with the most padded cells and that with the most useful
cells.  The loss alone is measured on the first of these only if the step is measured too.  Before the step the process
holds its inputs and, in scope "loss", the given logits.

- CUDA: torch's allocated and reserved peaks, and the memory taken of the device as a whole.
- CPU: the process's resident peak (VmHWM), without the profiler, and, in a second run with the profiler's memory
  events, the peak of torch's own allocations.  The runner fixes MALLOC_MMAP_THRESHOLD_, since glibc would otherwise
  keep freed memory, and VmHWM show the batches before.
- A loss that loops over its cells in Python has one scope, the step, one batch, and no second run: the profiler would
  take a megabyte and more for each cell.

The probe runs one step of the heaviest batches of a size under an enforced limit: a step that runs out of memory,
whatever the error is called, does not fit; the status record of the job says so.  Each size has a process of its own.
The throughput pass is the timing pass at the largest size that fits, under the limit of making inputs.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Iterator, Union

from common.data import batching
from common.losses.passes import timing
from common.measure import memory
from common.records.schema import Fit, Memory, Probe, Sample, Stop


def run(context) -> Iterator[Memory]:
    """Yield the ``memory`` records of every scope and batch, after a small step that loads what is loaded once.

    `context` is a common.losses.subject.Context.
    """
    scopes, heavy = context.settings.scopes, batching.heaviest(context.all_batches, context.batches)
    for scope in scopes[-1:] if context.loops_in_python else scopes:
        context.step(scope, context.batches[0], utterances=1).run()
        for batch in heavy[:1] if context.loops_in_python or scope != scopes[-1] else heavy:
            fresh = partial(context.step, scope, batch)
            peaks: Any = memory.peaks(fresh, context.device, profiler=not context.loops_in_python)
            yield Memory(scope=scope, batch=batch, **peaks)


def limit_of(context, scope: str) -> memory.Limit:
    """Return the memory limit, after a step of one utterance, which loads and compiles all that a first step does.

    On CUDA a step of one utterance of each batch runs first: a kernel takes memory when it is first launched, and each
    size may have kernels of its own.
    """
    tried = batching.heaviest(context.all_batches) if context.device.type == "cuda" else context.batches[:1]
    for batch in tried:
        context.step(scope, batch, utterances=1).run()
        context.model.zero_grad(set_to_none=True)
    return memory.limit(context.device, context.settings.memory_limit, context.limit_bytes)


def probe(context) -> Iterator[Union[Probe, Fit]]:
    """Yield a ``probe`` record before each step, which says what is tried, and a ``fit`` record after it."""
    (scope,) = context.settings.scopes
    limit = limit_of(context, scope)
    for batch in batching.heaviest(context.all_batches):
        sizes = context.all_batches.describe(batch)
        yield Probe(
            scope=scope,
            **{name: sizes[name] for name in sizes if name in Probe.__struct_fields__},
            limit_bytes=limit.bytes,
            limit_kind=limit.kind,
            warnings=[f"{context.adapter.name}: {warning}" for warning in limit.warnings],
        )
        with limit.making():
            step = context.step(scope, batch)
        with limit.enforced():
            loss = float(step.run())
        del step
        if not math.isfinite(loss):
            raise ArithmeticError(f"the loss of a batch that fits is {loss}")
        yield Fit(scope=scope, batch=batch, loss=loss, peak_bytes=limit.peak_bytes)
        context.model.zero_grad(set_to_none=True)


def throughput(context) -> Iterator[Union[Sample, Stop]]:
    """Yield ``sample`` records as the timing pass does; the limit protects the machine, with the slack for inputs."""
    with limit_of(context, context.settings.scopes[0]).making():
        yield from timing.run(context)
