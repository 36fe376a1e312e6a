"""Measure the peak of a step in a process of its own, above the level before the first call: the
memory pass.

The step is measured on the batch with the most padded cells and on that with the most useful cells,
which take most.  The loss alone is measured on the first of these, or on both if the step is not
measured.  The level is that after a step of the joiner alone, which loads what torch loads once.
What is in a peak:

- Memory that a loss keeps from one call to the next counts, since a training lacks it.
- The inputs of the step and, in scope "loss", the given logits do not count.
- The highest of several steps counts, since a workspace may be taken late.

How it is measured:

- CUDA: torch's allocated and reserved peaks, and the memory taken of the device as a whole.
- CPU: the process's resident peak (VmHWM) and that of its children, without the profiler.  A
  further run with the profiler's memory events has the peak of torch's own allocations.  The runner
  fixes MALLOC_MMAP_THRESHOLD_: glibc would else keep freed memory, and VmHWM would show the batches
  before.
- A loss that loops over its cells in Python has one scope, the step, and one batch.  It has no run
  with the profiler, which would take a megabyte and more for each cell.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from rnnt_bench.data.batching import heaviest
from rnnt_bench.instruments.memory import held, peaks
from rnnt_bench.records.schema import Memory

#: Steps of one utterance before those that are measured.
SMALL_STEPS = 3
#: Steps of the first batch in the first scope, among which a late workspace is taken.  Other batches
#: and scopes have one step: what is kept by then counts there too.
STEPS = 3


def load_all(context) -> None:
    """Load what torch loads once: import torch._dynamo, which torch.library, checkpoint and the
    profiler would import at their first use, and run a step of the joiner alone."""
    with suppress(ImportError):  # before torch 2.0
        importlib.import_module("torch._dynamo")
    context.model.logits(context.make_batch(context.batches[0], utterances=1)).sum().backward()
    context.model.zero_grad(set_to_none=True)


def run(context) -> Iterator[Memory]:
    """Yield a ``memory`` record for each scope of a subject.Context, on the batches that take most:
    all of these in the last scope, the first of these in the others.

    A loss that loops in Python has one record, of the last scope and the first of these batches."""
    load_all(context)
    level = held(context.device)  # bytes before the first step, which no peak includes
    scopes = context.settings.scopes
    heavy = heaviest(context.all_batches, context.batches)
    small_steps, steps = SMALL_STEPS, STEPS
    if context.loops_in_python:
        scopes, heavy = scopes[-1:], heavy[:1]
        small_steps = steps = 1
    if context.same_as:  # another row has the same code, and runs all STEPS
        steps = 1
    for scope in scopes:
        for _ in range(small_steps):
            context.step(scope, context.batches[0], utterances=1).run()
        for batch in heavy if scope == scopes[-1] else heavy[:1]:
            yield Memory(
                scope=scope, batch=batch, **highest_peaks(context, scope, batch, steps, level)
            )
            steps = 1  # in all further batches and scopes, see STEPS


def highest_peaks(
    context, scope: str, batch: int, steps: int, level: Mapping[str, int]
) -> dict[str, Any]:
    """Run `steps` steps; return the highest peak of each counter, in bytes above `level`.

    On a CPU the last call of `peaks` runs one more step, with the profiler, unless the loss loops in
    Python.

    level: bytes in use by counter, as `held` returns them."""
    highest: dict[str, Any] = {}
    new_step = partial(context.step, scope, batch)
    for number in range(steps):
        context.model.zero_grad(set_to_none=True)
        before = held(context.device)
        profiler = number == steps - 1 and not context.loops_in_python
        for counter, rise in peaks(new_step, context.device, profiler).items():
            # What the loss has kept from earlier calls is in the peak too.
            kept = max(before[counter] - level[counter], 0)
            highest[counter] = max(highest.get(counter, 0), kept + rise)
    return highest
