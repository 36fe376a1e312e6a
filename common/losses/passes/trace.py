"""Run steps under torch.profiler, whose times are labelled "profiled": the trace pass.

Every step is of scope "step" on one batch.  The inputs of all steps are made first, since a
ProfilerStep in the trace lasts from one ``prof.step()`` to the next.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle, islice

from rnnt_bench.instruments import device, profiler
from rnnt_bench.losses.step import LossStep
from rnnt_bench.records.schema import Schedule, Trace
from rnnt_bench.system.machine import busy_flags
from rnnt_bench.traces import reader

#: Note of a loss that loops over its cells in Python: its trace would have a thousand events, and a
#: megabyte, for each cell.
UNTRACED = "no trace, and memory is the process's: it loops over the cells in Python, too many operations to profile"


def run(context) -> Iterator[Trace]:
    """Profile steps of a subject.Context: write traces and tables to its folder, and yield one
    ``trace`` record.  A loss that loops in Python is not profiled: its record has no files.

    Traces that an interrupted attempt has left in the folder are removed.
    """
    settings, folder = context.settings, context.folder
    reader.remove(folder)
    if context.loops_in_python:
        yield Trace(files=[], note=UNTRACED)
        return
    batches = list(islice(cycle(context.batches), settings.trace_steps))
    context.hold_inputs(batches)
    waiting = [context.step("step", batch) for batch in batches]

    def steps() -> Iterator[LossStep]:
        while waiting:
            context.model.zero_grad(set_to_none=True)
            yield waiting.pop(0)  # a step left in `waiting` would hold its gradients

    foreign = profiler.profile(steps(), settings, context.device, folder, context.adapter.name)
    yield Trace(
        steps=len(batches),
        schedule=Schedule(**settings.schedule),
        files=sorted(path.name for path in folder.glob("*.pt.trace.json*")),
        profiler={option: getattr(settings, option) for option in profiler.OPTIONS},
        foreign_cpu=foreign,
        flags=busy_flags(foreign, device.host_threads(context.device)),
    )
