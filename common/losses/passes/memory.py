"""Measure the peak of a step in a process of its own, above the level before the first call: the
memory pass.

On the batches that take most: that with the most padded cells and that with the most useful cells.
The loss alone is measured on the first of these only if the step is measured too.  Before the step
the process holds its inputs and, in scope "loss", the given logits, which do not count.  What a
loss keeps from one call to the next does: a training lacks it.  The level is that after a step of
the joiner alone, which loads what torch loads once.  The highest of several steps counts, since a
workspace may be taken late.

- CUDA: torch's allocated and reserved peaks, and the memory taken of the device as a whole.
- CPU: the process's resident peak (VmHWM) and that of its children, without the profiler.  A
  further run with the profiler's memory events has the peak of torch's own allocations.  The runner
  fixes MALLOC_MMAP_THRESHOLD_, since glibc would otherwise keep freed memory, and VmHWM show the
  batches before.
- A loss that loops over its cells in Python has one scope, the step, and one batch.  It has no run
  with the profiler, which would take a megabyte and more for each cell.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any

from rnnt_bench.data.batching import heaviest
from rnnt_bench.instruments.memory import held, peaks
from rnnt_bench.records.schema import Memory

#: Steps of one utterance before those that are measured, and steps of the first batch in the first
#: scope, among which a workspace is taken that comes late.  Other batches and scopes have one step:
#: what is kept by then counts there too.
SMALL_STEPS, STEPS = 3, 3


def run(context) -> Iterator[Memory]:
    """Yield the ``memory`` records of every scope and batch."""
    scopes, heavy = context.settings.scopes, heaviest(context.all_batches, context.batches)
    slow = context.loops_in_python
    with suppress(ImportError):  # before torch 2.0
        # which torch.library, checkpoint and profiler load at their first use
        importlib.import_module("torch._dynamo")
    context.model.logits(context.make_batch(context.batches[0], utterances=1)).sum().backward()
    context.model.zero_grad(set_to_none=True)
    level = held(context.device)
    for scope in scopes[-1:] if slow else scopes:
        for _ in range(1 if slow else SMALL_STEPS):
            context.step(scope, context.batches[0], utterances=1).run()
        for batch in heavy[:1] if slow or scope != scopes[-1] else heavy:
            highest: dict[str, Any] = {}
            is_first = scope == scopes[0] and batch == heavy[0] and not (slow or context.same_as)
            steps = STEPS if is_first else 1
            for number in range(steps):
                context.model.zero_grad(set_to_none=True)
                now = held(context.device)
                step, is_last = partial(context.step, scope, batch), number == steps - 1
                of_step = peaks(step, context.device, profiler=is_last and not slow)
                for counter, rise in of_step.items():
                    kept = max(now[counter] - level[counter], 0)
                    highest[counter] = max(highest.get(counter, 0), kept + rise)
            yield Memory(scope=scope, batch=batch, **highest)
