"""Run steps under torch.profiler; write a trace of each cycle of the schedule for TensorBoard, and
operator tables."""

from __future__ import annotations

import gzip
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, record_function

from rnnt_bench.core.errors import UserError
from rnnt_bench.core.files import write_whole
from rnnt_bench.core.settings import Settings
from rnnt_bench.instruments.clock import Step, observed_by
from rnnt_bench.system.machine import ForeignLoad

#: Rows of operators in each cycle's table; those of labels, which take hardly any time of their
#: own, follow them.
TABLE_ROWS = 200
STACK_DEPTH = 10
#: The scope of record_function's labels, at::RecordScope::USER_SCOPE.
USER_SCOPE = 7
#: Bytes; larger traces are compressed.
LARGE = 50_000_000
#: Options of the profiler; they are fields of the settings and of the ``trace`` record.
OPTIONS = ("record_shapes", "with_stack", "profile_memory")


def profile(
    steps: Iterator[Step],
    settings: Settings,
    device: torch.device,
    folder: Path,
    name: str,
    on_cycle: Callable[[torch.profiler.profile], None] = lambda _: None,
) -> float | None:
    """Run the steps, one profiler step each, and write traces and operator tables of every cycle to
    `folder`.

    The device is synchronised before a profiler step ends, since the profiler measures host time
    only.  Returns the share of the CPU that other processes took, None if the system does not tell
    or the steps were too short.  name: of the worker in the file names of the traces; on_cycle:
    called with the profiler at the end of each cycle.
    """
    cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if cuda else [])
    tables: list[str] = []
    write_trace = torch.profiler.tensorboard_trace_handler(str(folder), worker_name=name)

    def cycle_ended(profiler: torch.profiler.profile) -> None:
        write_trace(profiler)
        on_cycle(profiler)
        number = f"cycle {len(tables) + 1} of {settings.schedule['repeat']}"
        averages = profiler.key_averages(group_by_stack_n=STACK_DEPTH if settings.with_stack else 0)
        tables.append(
            f"{number}\n{table(averages, _cuda_time(averages) if cuda else 'self_cpu_time_total')}\n"
        )
        # a file is named by its time in milliseconds: two cycles must not have the same
        time.sleep(0.002)

    load = ForeignLoad()
    with (
        observed_by(record_function),
        torch.profiler.profile(
            activities=activities,
            schedule=torch.profiler.schedule(**settings.schedule),
            on_trace_ready=cycle_ended,
            **{option: getattr(settings, option) for option in OPTIONS},
        ) as profiler,
    ):
        for step in steps:
            step.run()
            del step  # frees its gradients, too
            if cuda:
                torch.cuda.synchronize(device)
            profiler.step()
    foreign = load.share() if load.ready() else None
    pack(folder)
    try:
        write_whole("free some space", (folder / f"{folder.name}.txt", "\n".join(tables)))
    except UserError as error:
        raise OSError(str(error)) from error  # a full disk costs this row, not the run
    return foreign


def table(averages: Any, key: str) -> str:
    """Return the table of key averages: TABLE_ROWS of the largest `key`, all other labels of
    record_function, a line that says how many rows are left out, and sums of all rows."""
    rows = sorted(averages, key=lambda row: getattr(row, key), reverse=True)
    first, others = rows[:TABLE_ROWS], rows[TABLE_ROWS:]
    labels = [row for row in others if row.scope == USER_SCOPE]
    averages[:] = [*first, *labels, *(row for row in others if row.scope != USER_SCOPE)]
    shown = len(first) + len(labels)
    text = averages.table(row_limit=shown)
    left_out = len(rows) - shown
    return (
        f"{text}{left_out} rows of operators with less time of their own are left out\n"
        if left_out
        else text
    )


def _cuda_time(averages: Sequence[Any]) -> str:
    """Return the attribute of key averages that holds the self time on CUDA; torch 2.x renamed
    it."""
    renamed = averages and hasattr(averages[0], "self_device_time_total")
    return "self_device_time_total" if renamed else "self_cuda_time_total"


def self_times(profiler: torch.profiler.profile) -> tuple[float, float]:
    """Return the sum of the self times of all operators and kernels in microseconds: (on the CPU,
    on CUDA)."""
    averages = profiler.key_averages()
    cuda = sum(
        getattr(row, _cuda_time(averages))
        for row in averages
        if "CUDA" in str(row.device_type) and not getattr(row, "is_user_annotation", False)
    )
    return float(sum(row.self_cpu_time_total for row in averages)), float(cuda)


def pack(folder: Path) -> None:
    """Compress the traces of a folder above LARGE bytes to NAME.gz; one of the two files is
    complete at any time."""
    for path in folder.glob("*.pt.trace.json"):
        if path.stat().st_size <= LARGE:
            continue
        part = path.with_name(f"{path.name}.gz.part")
        try:
            with path.open("rb") as plain, part.open("wb") as stream:
                with gzip.open(stream, "wb", compresslevel=6) as packing:
                    shutil.copyfileobj(plain, packing, 4 << 20)
            os.replace(part, path.with_name(f"{path.name}.gz"))
        finally:
            part.unlink(missing_ok=True)
        path.unlink()
