"""The trace pass: steps under torch.profiler, written for TensorBoard.  Its times carry the profiler's cost:
"profiled".

Every step is scope "step" on one batch, and nothing else: inputs are views of a pool made before, because ProfilerStep
runs from one ``prof.step()`` to the next and would count their making.  The device is synchronised before the step
ends, since ProfilerStep is host time only.
"""

from __future__ import annotations

import gzip
import os
import shutil
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Dict, Iterator, List

import torch
from torch.profiler import ProfilerActivity, record_function

from common.losses import inputs, peaky, work
from common.losses.stages import observed_by
from common.passes import memory
from common.results import records
from common.running.machine import ForeignLoad, busy_flags

#: Rows of each cycle's key_averages table.
TABLE_ROWS = 30
STACK_DEPTH = 10
#: Bytes from which on a trace is compressed, unless --gzip-traces says otherwise.
LARGE = 50_000_000
#: What is recorded of a loss that loops over its cells in Python: a thousand events and a megabyte and more for each.
UNTRACED = {
    "record": "trace",
    "steps": 0,
    "schedule": None,
    "files": [],
    "key_averages": [],
    "profiler": None,
    "memory_snapshot": None,
    "foreign_cpu": None,
    "flags": [],
    "note": "no trace, and memory is the process's: it loops over the cells in Python, too many operations to profile",
    "warnings": [],
}


def table(profiler: torch.profiler.profile, cuda: bool, with_stack: bool) -> str:
    """key_averages of the cycle that just ended, sorted by what the device offers."""
    averages = profiler.key_averages(group_by_stack_n=STACK_DEPTH if with_stack else 0)
    if not cuda:
        key = "self_cpu_time_total"
    else:  # renamed in torch 2.x
        key = (
            "self_device_time_total"
            if averages and hasattr(averages[0], "self_device_time_total")
            else "self_cuda_time_total"
        )
    return averages.table(sort_by=key, row_limit=TABLE_ROWS)


def compress(path: Path) -> None:
    """Replace a trace by NAME.gz; a reader, or a full disk, meets one whole file or the other."""
    packed, part = path.with_name(f"{path.name}.gz"), path.with_name(f"{path.name}.gz.part")
    try:
        with path.open("rb") as plain, gzip.open(part, "wb", compresslevel=6) as stream:
            shutil.copyfileobj(plain, stream, 4 << 20)
        os.replace(part, packed)
    finally:
        part.unlink(missing_ok=True)
    path.unlink()


def pack(folder: Path, when: str) -> None:
    """Compress the traces in a folder: "auto" the large ones, "true" all, "false" none."""
    for path in folder.glob("*.pt.trace.json"):
        if when == "true" or (when == "auto" and path.stat().st_size > LARGE):
            compress(path)


def take_snapshot(context, step: work.Work, path: Path) -> List[str]:
    """The memory snapshot; a warning where this torch cannot write one: that costs no row."""
    if not hasattr(torch.cuda.memory, "_dump_snapshot"):
        return [f"{context.adapter.name}: no memory snapshot: needs torch 2.1 or newer, this is {torch.__version__}"]
    context.model.zero_grad(set_to_none=True)
    memory.snapshot(step, context.device, path)
    return []


def run(context, folder: Path) -> Iterator[Dict[str, Any]]:
    """One ``trace`` record; traces and <folder name>.txt in `folder`.

    The folder is this run's alone: a trace in it is of an attempt that was interrupted, and is removed.
    """
    records.remove_traces(folder)
    settings, device = context.settings, context.device
    if device.type in context.adapter.python_loops:
        yield UNTRACED
        return
    cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if cuda else [])
    tables: List[str] = []
    write_trace = torch.profiler.tensorboard_trace_handler(str(folder), worker_name=context.adapter.name)

    def cycle_ended(profiler: torch.profiler.profile) -> None:
        write_trace(profiler)
        tables.append(
            f"cycle {len(tables) + 1} of {settings.schedule['repeat']}\n{table(profiler, cuda, settings.with_stack)}\n"
        )
        time.sleep(0.002)  # the file's name is its time in milliseconds: two cycles must not share one

    steps = settings.trace_steps
    order = [context.batches[index % len(context.batches)] for index in range(steps)]
    shapes = {batch: context.shapes(batch) for batch in set(order)}
    pool = inputs.Pool(
        list(shapes.values()),
        vocab_size=settings.vocab_size,
        encoder_dim=settings.encoder_dim,
        device=device,
        dtype=context.dtype,
        seed=settings.seed,
        codes=peaky.codes_of(settings),
    )
    waiting = [
        work.prepare(context.adapter, context.model, pool.batch(shapes[batch], index), "step")
        for index, batch in enumerate(order)
    ]
    load = ForeignLoad()
    with ExitStack() as stack:
        stack.enter_context(observed_by(record_function))
        profiler = stack.enter_context(
            torch.profiler.profile(
                activities=activities,
                schedule=torch.profiler.schedule(**settings.schedule),
                on_trace_ready=cycle_ended,
                record_shapes=settings.record_shapes,
                with_stack=settings.with_stack,
                profile_memory=settings.profile_memory,
            )
        )
        for index in range(steps):
            context.model.zero_grad(set_to_none=True)
            waiting[index].run()
            waiting[index] = None  # and its gradients
            if cuda:
                torch.cuda.synchronize(device)
            profiler.step()
    foreign = load.share() if load.ready() else None
    pack(folder, settings.gzip_traces)
    warnings: List[str] = []
    if settings.memory_snapshot:
        batch = pool.batch(shapes[order[0]], 0)
        step = work.prepare(context.adapter, context.model, batch, "step")
        warnings = take_snapshot(context, step, folder / records.MEMORY_SNAPSHOT)
    text = folder / f"{folder.name}.txt"
    text.write_text("\n".join(tables), encoding="utf-8")
    yield {
        "record": "trace",
        "steps": steps,
        "schedule": dict(settings.schedule),
        "files": sorted(path.name for path in folder.glob("*.pt.trace.json*")),
        "key_averages": [text.name],
        "profiler": {key: getattr(settings, key) for key in ("record_shapes", "with_stack", "profile_memory")},
        "memory_snapshot": records.MEMORY_SNAPSHOT if (folder / records.MEMORY_SNAPSHOT).exists() else None,
        "foreign_cpu": foreign,
        "flags": busy_flags(foreign),
        "note": "",
        "warnings": warnings,
    }
