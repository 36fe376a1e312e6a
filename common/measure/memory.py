"""Measure the memory of one step: its peaks above what was in use before, and a snapshot of every allocation."""

from __future__ import annotations

import gc
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import Callable, Dict, Iterator, List, Optional

import torch

from common.core.files import scratch_folder
from common.measure.stages import Step
from common.system.memory import clear_peak, give_back_free_memory, status_bytes
from common.traces import memory as traced
from common.traces import reader

SNAPSHOT_ENTRIES = 100_000  # allocations and frees; a step has far fewer
#: Fields of a ``memory`` record; those that do not apply to a device are None.
PEAKS = (
    "device_allocated_bytes",
    "device_reserved_bytes",
    "device_used_bytes",
    "torch_allocated_bytes",
    "process_bytes",
)
#: Seconds between two readings of the device's free memory.
LOOK_SECONDS = 0.001


def peaks(fresh: Callable[[], Step], device: torch.device, profiler: bool = True) -> Dict[str, Optional[int]]:
    """Return the PEAKS of a step in bytes; `fresh` makes a new step for each run.

    With `profiler`, the allocations of torch's CPU allocator are measured too, in a run of their own.
    """
    result: Dict[str, Optional[int]] = dict.fromkeys(PEAKS)
    if device.type == "cuda":
        return {**result, **cuda_peaks(fresh(), device)}
    result["process_bytes"] = process_peak(fresh())
    if profiler:
        result["torch_allocated_bytes"] = torch_cpu_peak(fresh())
    return result


def process_peak(step: Step) -> Optional[int]:
    """Return by how many bytes the peak of resident memory exceeds that before the step; None if not known."""
    give_back_free_memory()
    if not clear_peak():
        return None
    baseline = status_bytes("VmRSS")
    step.run()
    peak = status_bytes("VmHWM")
    return None if baseline is None or peak is None else max(peak - baseline, 0)


def torch_cpu_peak(step: Step) -> Optional[int]:
    """Return the peak in bytes of what torch's CPU allocator held during the step.

    The profiler's counter does not start at zero, so one byte is allocated and freed first: the counter's lowest
    value is the baseline.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        torch.empty(1, dtype=torch.uint8)
        step.run()
    with scratch_folder() as folder:
        path = Path(folder) / "step.pt.trace.json"
        profiler.export_chrome_trace(str(path))
        rise = traced.rise(path)
    return max((size for (kind, _), size in rise.items() if kind == reader.CPU), default=None)


def cuda_peaks(step: Step, device: torch.device) -> Dict[str, int]:
    """Return how many bytes the peaks of a step exceed the values before it.

    The peaks are of torch's allocated bytes, torch's reserved bytes, and all bytes in use on the device, by whatever
    allocator.
    """
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    with watched(device) as free:
        step.run()
        torch.cuda.synchronize(device)
    return {
        "device_allocated_bytes": torch.cuda.max_memory_allocated(device) - allocated,
        "device_reserved_bytes": torch.cuda.max_memory_reserved(device) - reserved,
        "device_used_bytes": free[0] - min(free),
    }


@contextmanager
def watched(device: torch.device) -> Iterator[List[int]]:
    """Record the free bytes of the device (cudaMemGetInfo): before the block, every LOOK_SECONDS within, and after it.

    No other counter sees allocators beside torch's, such as numba's or a package's own cudaMalloc.
    """
    free, ended = [torch.cuda.mem_get_info(device)[0]], threading.Event()

    def look() -> None:
        while not ended.wait(LOOK_SECONDS):
            free.append(torch.cuda.mem_get_info(device)[0])

    watcher = threading.Thread(target=look, daemon=True)
    watcher.start()
    try:
        yield free
    finally:
        ended.set()
        watcher.join()
        free.append(torch.cuda.mem_get_info(device)[0])


def snapshot(step: Step, device: torch.device, path: Path) -> None:
    """Run the step and write all its allocations with their stacks to `path`; needs CUDA and torch 2.1.

    The file is a pickle for https://pytorch.org/memory_viz; nothing in this suite reads it.
    """
    torch.cuda.memory._record_memory_history(max_entries=SNAPSHOT_ENTRIES)
    try:
        step.run()
        torch.cuda.synchronize(device)
        torch.cuda.memory._dump_snapshot(str(path))
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
