"""The passes whose times do not count: memory, trace, and the probe and throughput passes of --find-largest.

The memory pass measures the peak of one step above the level before it, in a process of its own, on the batches that
take most: that with the most padded cells and that with the most useful cells.  The loss alone is measured on the first
of these only if the step is measured too.  Before the step the process holds its inputs and, in scope "loss", the given
logits.

- CUDA: torch's allocated and reserved peaks, and the memory taken of the device as a whole.
- CPU: the process's resident peak (VmHWM), without the profiler, and, in a second run with the profiler's memory
  events, the peak of torch's own allocations.  The runner fixes MALLOC_MMAP_THRESHOLD_, since glibc would otherwise
  keep freed memory, and VmHWM show the batches before.
- A loss that loops over its cells in Python has one scope, the step, one batch, and no second run: the profiler would
  take a megabyte and more for each cell.

The trace pass runs steps under torch.profiler; its times are labelled "profiled".  Every step is scope "step" on one
batch.  Inputs are made before: ProfilerStep lasts from one ``prof.step()`` to the next.

The probe runs one step of the heaviest batches of a size, in a process of its own, under an enforced limit: a step that
runs out of memory, whatever the error is called, does not fit.  The throughput pass is the timing pass at the largest
size that fits, under the limit of making inputs.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Iterator, Union

from common.data.batching import heaviest
from common.losses.passes import timing
from common.losses.step import LossStep
from common.measure import device, profiler
from common.measure.memory import AddressSpace, Device, Limit, peaks
from common.records.schema import Fit, Memory, Probe, Sample, Schedule, Stop, Trace
from common.system.machine import busy_flags
from common.traces import reader


def memory(context) -> Iterator[Memory]:
    """Yield the ``memory`` records of every scope and batch, after a small step that loads what is loaded once."""
    scopes, heavy = context.settings.scopes, heaviest(context.all_batches, context.batches)
    for scope in scopes[-1:] if context.loops_in_python else scopes:
        context.step(scope, context.batches[0], utterances=1).run()
        for batch in heavy[:1] if context.loops_in_python or scope != scopes[-1] else heavy:
            fresh = partial(context.step, scope, batch)
            of_step: Any = peaks(fresh, context.device, profiler=not context.loops_in_python)
            yield Memory(scope=scope, batch=batch, **of_step)


def limit_of(context, scope: str) -> Limit:
    """Return the memory limit, after a step of one utterance, which loads and compiles all that a first step does.

    On CUDA a step of one utterance of each batch: each size may have kernels of its own, which take memory when first
    launched.
    """
    tried = heaviest(context.all_batches) if context.device.type == "cuda" else context.batches[:1]
    for batch in tried:
        context.step(scope, batch, utterances=1).run()
        context.model.zero_grad(set_to_none=True)
    if context.device.type == "cuda":
        return Device(context.settings.memory_limit, context.device)
    return AddressSpace(context.limit_bytes)


def probe(context) -> Iterator[Union[Probe, Fit]]:
    """Yield a ``probe`` record before each step, which says what is tried, and a ``fit`` record after it."""
    (scope,) = context.settings.scopes
    limited = limit_of(context, scope)
    for batch in heaviest(context.all_batches):
        sizes = context.all_batches.describe(batch)
        yield Probe(
            scope=scope,
            **{name: sizes[name] for name in sizes if name in Probe.__struct_fields__},
            limit_bytes=limited.bytes,
            warnings=[f"{context.adapter.name}: {warning}" for warning in limited.warnings],
        )
        with limited.making():
            step = context.step(scope, batch)
        with limited.enforced():
            loss = float(step.run())
        del step
        if not math.isfinite(loss):
            raise ArithmeticError(f"the loss of a batch that fits is {loss}")
        yield Fit(scope=scope, batch=batch, loss=loss, peak_bytes=limited.peak_bytes)
        context.model.zero_grad(set_to_none=True)


def throughput(context) -> Iterator[Union[Sample, Stop]]:
    """Yield ``sample`` records as the timing pass does; the limit protects the machine, with the slack for inputs."""
    with limit_of(context, context.settings.scopes[0]).making():
        yield from timing.run(context)


#: Note of a loss that loops over its cells in Python: each cell would be a thousand events and a megabyte.
UNTRACED = "no trace, and memory is the process's: it loops over the cells in Python, too many operations to profile"


def trace(context) -> Iterator[Trace]:
    """Yield one ``trace`` record, and write traces and tables to the context's folder.

    The folder belongs to this run alone: a trace in it is left from an interrupted attempt, and is removed.
    """
    settings, folder = context.settings, context.folder
    reader.remove(folder)
    if context.loops_in_python:
        yield Trace(files=[], note=UNTRACED)
        return
    order = [context.batches[index % len(context.batches)] for index in range(settings.trace_steps)]
    context.hold_inputs(order)
    waiting = [context.step("step", batch) for batch in order]

    def steps() -> Iterator[LossStep]:
        while waiting:
            context.model.zero_grad(set_to_none=True)
            yield waiting.pop(0)

    foreign = profiler.profile(steps(), settings, context.device, folder, context.adapter.name)
    yield Trace(
        steps=len(order),
        schedule=Schedule(**settings.schedule),
        files=sorted(path.name for path in folder.glob("*.pt.trace.json*")),
        profiler={option: getattr(settings, option) for option in profiler.OPTIONS},
        foreign_cpu=foreign,
        flags=busy_flags(foreign, device.host_threads(context.device)),
    )
