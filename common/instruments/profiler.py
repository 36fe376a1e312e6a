"""Run steps under torch.profiler; write a trace and a table of operators for each cycle of the
schedule."""

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

#: Rows of operators in the table of a cycle.  The labels of record_function follow them, since they
#: take hardly any time of their own.
TABLE_ROWS = 200
#: Frames of the stack by which operators are told apart in the table.
STACK_DEPTH = 10
#: The scope of record_function's labels, at::RecordScope::USER_SCOPE.
USER_SCOPE = 7
#: Bytes; larger traces are compressed.
LARGE = 50_000_000
#: Options of the profiler, which are fields of the settings and of the ``trace`` record.
OPTIONS = ("record_shapes", "with_stack", "profile_memory")


def profile(
    steps: Iterator[Step],
    settings: Settings,
    device: torch.device,
    folder: Path,
    name: str,
    on_cycle: Callable[[torch.profiler.profile], None] = lambda _: None,
) -> float | None:
    """Run the steps, one profiler step each, and write a trace and a table of each cycle to a
    folder.  Large traces are compressed.

    Returns the share of the CPU that other processes took; None if the system does not tell, or the
    steps were too short.  Raises OSError where the disk is full.

    Args:
        steps: makes each step when it is wanted.
        settings: has the schedule and the OPTIONS.
        device: it is synchronised before a profiler step ends, since the profiler measures host
            time only.
        folder: where the files go.
        name: of the worker in the file names of the traces.
        on_cycle: called with the profiler at the end of each cycle.
    """
    cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU]
    if cuda:
        activities.append(ProfilerActivity.CUDA)
    tables: list[str] = []
    write_trace = torch.profiler.tensorboard_trace_handler(str(folder), worker_name=name)

    def cycle_ended(profiler: torch.profiler.profile) -> None:
        write_trace(profiler)
        on_cycle(profiler)
        heading = f"cycle {len(tables) + 1} of {settings.schedule['repeat']}"
        averages = profiler.key_averages(group_by_stack_n=STACK_DEPTH if settings.with_stack else 0)
        # the name of the attribute by which the table is sorted
        key = _cuda_time(averages) if cuda else "self_cpu_time_total"
        tables.append(f"{heading}\n{table(averages, key)}\n")
        # A trace is named by its time in milliseconds: two cycles must not have the same name.
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
            del step  # and its gradients
            if cuda:
                torch.cuda.synchronize(device)
            profiler.step()
    foreign = load.share() if load.ready() else None
    pack(folder)
    try:
        table_file = folder / f"{folder.name}.txt"
        write_whole((table_file, "\n".join(tables)), advice="free some space")
    except UserError as error:
        raise OSError(str(error)) from error  # ends this row; a UserError would end the run
    return foreign


def table(averages: Any, key: str) -> str:
    """Return key averages as text: the TABLE_ROWS rows with the largest `key`, all other labels of
    record_function, the sums of all rows, and how many rows are left out.

    It puts `averages` into the order of the table."""
    rows = sorted(averages, key=lambda row: getattr(row, key), reverse=True)
    first, others = rows[:TABLE_ROWS], rows[TABLE_ROWS:]
    labels = [row for row in others if row.scope == USER_SCOPE]
    averages[:] = [*first, *labels, *(row for row in others if row.scope != USER_SCOPE)]
    shown = len(first) + len(labels)
    text: str = averages.table(row_limit=shown)
    if shown < len(rows):
        text += f"{len(rows) - shown} rows of operators with less time of their own are left out\n"
    return text


def _cuda_time(averages: Sequence[Any]) -> str:
    """Return the name of the attribute of key averages that holds the self time on CUDA.  Later
    versions of torch 2 have another name for it."""
    is_renamed = averages and hasattr(averages[0], "self_device_time_total")
    return "self_device_time_total" if is_renamed else "self_cuda_time_total"


def self_times(profiler: torch.profiler.profile) -> tuple[float, float]:
    """Return (CPU, CUDA) in microseconds: the sum of the self times of all operators on the CPU,
    and that of all kernels on CUDA."""
    averages = profiler.key_averages()
    attribute = _cuda_time(averages)
    # A label of record_function spans kernels on CUDA: with it their time would count twice.
    cuda = sum(
        getattr(row, attribute)
        for row in averages
        if "CUDA" in str(row.device_type) and not getattr(row, "is_user_annotation", False)
    )
    return float(sum(row.self_cpu_time_total for row in averages)), float(cuda)


def pack(folder: Path) -> None:
    """Replace each trace NAME of more than LARGE bytes in a folder by a compressed NAME.gz.

    At any time NAME or NAME.gz is complete."""
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
