"""Measure the peak of one step above the level before it, in a process of its own: the memory pass.

On the batches that take most: that with the most padded cells and that with the most useful cells.  The loss alone is
measured on the first of these only if the step is measured too.  Before the step the process holds its inputs and, in
scope "loss", the given logits.

- CUDA: torch's allocated and reserved peaks, and the memory taken of the device as a whole.
- CPU: the process's resident peak (VmHWM), without the profiler, and, in a second run with the profiler's memory
  events, the peak of torch's own allocations.  The runner fixes MALLOC_MMAP_THRESHOLD_, since glibc would otherwise
  keep freed memory, and VmHWM show the batches before.
- A loss that loops over its cells in Python has one scope, the step, one batch, and no second run: the profiler would
  take a megabyte and more for each cell.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Iterator

from rnnt_bench.data.batching import heaviest
from rnnt_bench.instruments.memory import peaks
from rnnt_bench.records.schema import Memory


def run(context) -> Iterator[Memory]:
    """Yield the ``memory`` records of every scope and batch, after a small step that loads what is loaded once."""
    scopes, heavy = context.settings.scopes, heaviest(context.all_batches, context.batches)
    for scope in scopes[-1:] if context.loops_in_python else scopes:
        context.step(scope, context.batches[0], utterances=1).run()
        for batch in heavy[:1] if context.loops_in_python or scope != scopes[-1] else heavy:
            fresh = partial(context.step, scope, batch)
            of_step: Any = peaks(fresh, context.device, profiler=not context.loops_in_python)
            yield Memory(scope=scope, batch=batch, **of_step)
