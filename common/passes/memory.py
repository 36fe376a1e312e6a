"""The memory pass: peaks of one step of each batch above the baseline before it, in a process of its own.

The baseline is the process with its inputs (and, in scope "loss", the given logits) in memory, just before forward.
CUDA: torch's allocated and reserved peaks.  CPU: the process's resident peak (VmHWM), taken without the profiler, and
the peak of torch's own allocations, taken from a second run with the profiler's memory events.  A loss that loops over
its cells in Python goes without the latter: the profiler would take a megabyte and more for each cell.  The runner
starts this process with MALLOC_MMAP_THRESHOLD_ fixed, without which glibc keeps freed memory and VmHWM tells of earlier
batches.

`snapshot` is for the trace pass, beside whose files it stands: recording costs time and would be no measurement here.
"""

from __future__ import annotations

import ctypes
import gc
import tempfile
from pathlib import Path
from typing import Any, Dict, Iterator, Optional

import torch

from common.losses import work
from common.results import trace_reader

SNAPSHOT_ENTRIES = 100_000  # allocations and frees; one step has far fewer
CLEAR_PEAK = "5"  # to /proc/self/clear_refs: start VmHWM anew (proc(5))


def status_bytes(key: str) -> Optional[int]:
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(key + ":"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def give_back_free_memory() -> None:
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):
        pass  # not glibc: nothing is kept back that this would return


def clear_peak() -> bool:
    """Start VmHWM anew; False where the system does not let us."""
    try:
        Path("/proc/self/clear_refs").write_text(CLEAR_PEAK)
    except OSError:
        return False
    return True


def process_peak(prepared: work.Work) -> Optional[int]:
    """Bytes that the resident peak rises above the resident size before; None where the system does not tell."""
    give_back_free_memory()
    if not clear_peak():
        return None
    baseline = status_bytes("VmRSS")
    prepared.run()
    peak = status_bytes("VmHWM")
    return None if baseline is None or peak is None else max(peak - baseline, 0)


def torch_cpu_peak(prepared: work.Work) -> Optional[int]:
    """Bytes: the peak of what torch's CPU allocator handed out during the work and had not got back.

    The profiler's counter keeps what earlier windows left in it, so one byte is taken and given back first: its lowest
    value is the baseline.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        torch.empty(1, dtype=torch.uint8)
        prepared.run()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "step.pt.trace.json"
        profiler.export_chrome_trace(str(path))
        rise = trace_reader.memory_rise(path)
    return max((size for (kind, _), size in rise.items() if kind == trace_reader.CPU), default=None)


def cuda_peaks(prepared: work.Work, device: torch.device) -> Dict[str, int]:
    """Allocated and reserved bytes above what was there before."""
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    prepared.run()
    torch.cuda.synchronize(device)
    return {
        "device_allocated_bytes": torch.cuda.max_memory_allocated(device) - allocated,
        "device_reserved_bytes": torch.cuda.max_memory_reserved(device) - reserved,
    }


def snapshot(step: work.Work, device: torch.device, path: Path) -> None:
    """Run the step once more and let torch write every allocation of it, with stacks, to `path`.  CUDA, torch 2.1 on.

    A pickle for https://pytorch.org/memory_viz; nothing of this suite reads it.
    """
    torch.cuda.memory._record_memory_history(max_entries=SNAPSHOT_ENTRIES)
    try:
        step.run()
        torch.cuda.synchronize(device)
        torch.cuda.memory._dump_snapshot(str(path))
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


def prepared(context, scope: str, batch: int, utterances: Optional[int] = None) -> work.Work:
    """Fresh work on a batch, or on its first `utterances`."""
    return work.prepare(context.adapter, context.model, context.make_batch(batch, 0, utterances), scope)


def run(context, round_number: Optional[int] = None) -> Iterator[Dict[str, Any]]:
    """``memory`` records of every scope and batch, after one small step that loads what is loaded once."""
    first = context.batches[0]
    for scope in context.settings.scopes:
        prepared(context, scope, first, utterances=1).run()
        for batch in context.batches:
            record: Dict[str, Any] = dict.fromkeys(
                ("device_allocated_bytes", "device_reserved_bytes", "torch_allocated_bytes", "process_bytes")
            )
            if context.device.type == "cuda":
                record.update(cuda_peaks(prepared(context, scope, batch), context.device))
            else:
                record["process_bytes"] = process_peak(prepared(context, scope, batch))
                if context.device.type not in context.adapter.python_loops:
                    record["torch_allocated_bytes"] = torch_cpu_peak(prepared(context, scope, batch))
            yield {"record": "memory", "scope": scope, "batch": batch, **record}
