"""Measure the peaks of the memory of one step above what was in use before it, and enforce a limit
on memory.

A limit counts from what the process holds once everything is loaded.

CPU: RLIMIT_AS is the limit plus the address space of the loaded process; beyond it every malloc and
mmap fails.  Address space is never less than memory: reserved memory counts before it is used.  A
cgroup's memory.max would count pages, but few users may set it, and it ends the process with
SIGKILL.

CUDA: one block holds all free memory of the device except the limit, so that no allocator (torch's,
numba's, a package's own cudaMalloc) gets more.  Memory that other processes take is not controlled.
"""

from __future__ import annotations

import gc
import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import torch

from rnnt_bench.core.errors import UserError
from rnnt_bench.core.files import scratch_folder
from rnnt_bench.core.flag_types import bytes_of
from rnnt_bench.instruments.clock import Step
from rnnt_bench.system.memory import (
    allocated_bytes,
    available_memory,
    children_bytes,
    clear_peak,
    give_back_free_memory,
    status_bytes,
)
from rnnt_bench.traces import reader, windows

#: Seconds between two readings of the device's free memory, or of what children hold.
LOOK_SECONDS = 0.001
#: Making the inputs may take this many times the limit, since in scope "loss" a joiner makes the
#: logits.
MAKING = 4


def held(device: torch.device) -> dict[str, int]:
    """Give unused memory back to the system; return how many bytes are then in use, by the counters
    of a ``memory`` record.

    On a CPU, two things count: the memory of child processes, and the large blocks of malloc, each
    of which malloc maps by itself.  Small blocks are left out: modules that are imported late hold
    them, not a step.
    """
    give_back_free_memory()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        return {
            "device_allocated_bytes": torch.cuda.memory_allocated(device),
            "device_reserved_bytes": torch.cuda.memory_reserved(device),
            "device_used_bytes": total - free,
        }
    _, mapped = allocated_bytes()
    return {"process_bytes": mapped + children_bytes(), "torch_allocated_bytes": mapped}


@contextmanager
def watched(read: Callable[[], int]) -> Iterator[list[int]]:
    """Call `read` before the block, every LOOK_SECONDS during it, and after it.

    Yield the list of the numbers that it returned; the list grows until the block has ended."""
    readings = [read()]
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(LOOK_SECONDS):
            readings.append(read())

    watcher = threading.Thread(target=look, daemon=True)
    watcher.start()
    try:
        yield readings
    finally:
        ended.set()
        watcher.join()
        readings.append(read())


def peaks(fresh: Callable[[], Step], device: torch.device, profiler: bool = True) -> dict[str, int]:
    """Return by how many bytes the peaks of a step exceed the level before it, as fields of a
    ``memory`` record.

    Args:
        fresh: makes a new step for each run.
        device: where the step runs.
        profiler: whether a further run on a CPU measures torch's allocator too.
    """
    if device.type == "cuda":
        return cuda_peaks(fresh(), device)
    result = process_peak(fresh())
    if profiler:
        result.update(allocator_peak(fresh()))
    return result


def process_peak(step: Step) -> dict[str, int]:
    """Return {"process_bytes": by how many bytes the peaks of this process and of its children
    exceed their levels before the step}; {} if the system does not tell."""
    give_back_free_memory()
    with watched(children_bytes) as children:
        cleared = clear_peak()
        before = status_bytes("VmRSS")
        step.run()
        peak = status_bytes("VmHWM")
    if not cleared or before is None or peak is None:
        return {}
    # children[0] is from before the step, see `watched`.
    return {"process_bytes": max(peak - before, 0) + max(children) - children[0]}


def allocator_peak(step: Step) -> dict[str, int]:
    """Return by how many bytes the peak of torch's CPU allocator exceeds its level before the step.

    These are {"torch_allocated_bytes": bytes}; {} if the profiler has no memory events."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as events:
        # The events of this tensor, which is freed at once, show the level before the step.  The
        # allocator's counter does not start at zero, so its lowest value is the base.
        torch.empty(1, dtype=torch.uint8)
        step.run()
    with scratch_folder() as folder:
        path = Path(folder) / "step.pt.trace.json"
        events.export_chrome_trace(str(path))
        sizes = [size for (kind, _), size in windows.rise(path).items() if kind == reader.CPU]
    return {"torch_allocated_bytes": max(sizes)} if sizes else {}


def cuda_peaks(step: Step, device: torch.device) -> dict[str, int]:
    """Return by how many bytes the peaks of a step on a GPU exceed the level before it.

    "device_used_bytes" counts all bytes in use on the device, as cudaMemGetInfo tells them.  Only
    this counter includes what allocators beside torch's take, such as numba's or a package's own.
    """
    before = held(device)
    torch.cuda.reset_peak_memory_stats(device)
    with watched(lambda: torch.cuda.mem_get_info(device)[0]) as free:
        step.run()
        torch.cuda.synchronize(device)
    allocated = torch.cuda.max_memory_allocated(device)
    reserved = torch.cuda.max_memory_reserved(device)
    return {
        "device_allocated_bytes": allocated - before["device_allocated_bytes"],
        "device_reserved_bytes": reserved - before["device_reserved_bytes"],
        "device_used_bytes": free[0] - min(free),
    }


class Limit:
    """A limit on the memory of this process, in bytes above what the loaded process holds.

    If less memory than wanted is left, that is the limit.  It is no error, since what a package, its
    context and its kernels leave is known only once they are loaded.

    Attributes:
        bytes: the limit.
        available: what was free when the limit was made; it bounds `making`.
        peak_bytes: the most that the last `within` had in use, in bytes above what the loaded
            process holds; None if the system does not tell.  A `within` that fails on a GPU does
            not change it.
    """

    peak_bytes: int | None = None

    def __init__(self, limit_bytes: int, available: int):
        self.bytes = limit_bytes
        self.available = available

    def within(self, size: int) -> AbstractContextManager[None]:
        """Limit the block to `size` bytes; an allocation beyond them fails as out of memory."""
        raise NotImplementedError

    def enforced(self) -> AbstractContextManager[None]:
        """Limit the block to `bytes`."""
        return self.within(self.bytes)

    def making(self) -> AbstractContextManager[None]:
        """Limit the block, which makes the inputs of a step, to MAKING times `bytes`, since making
        them may take more memory than the step.  The limit is at most `available`, but in any case
        at least `bytes`."""
        return self.within(max(self.bytes, min(MAKING * self.bytes, self.available)))


class AddressSpace(Limit):
    """Limits the address space of this process to `size` bytes more than now.

    Raises UserError without Linux's /proc.
    """

    def __init__(self, size: int):
        give_back_free_memory()
        base = status_bytes("VmSize")
        resident = status_bytes("VmRSS")
        if base is None or resident is None:
            raise UserError(
                "a limit on memory needs Linux's /proc on a CPU, to read the size of a process"
            )
        self.base = base  # RLIMIT_AS bounds the whole address space: this, and what is added
        self.resident = resident  # `peak_bytes` is of resident memory, above this
        # The soft and the hard limit that the process already has; [] if it has neither.
        self.bounds = [
            bound
            for bound in resource.getrlimit(resource.RLIMIT_AS)
            if bound != resource.RLIM_INFINITY
        ]
        # At most what the process's own limits leave.
        limit_bytes = min([size, *(max(bound - base, 0) for bound in self.bounds)])
        super().__init__(limit_bytes, available=available_memory() or size)

    @contextmanager
    def within(self, size: int) -> Iterator[None]:
        """Limit the address space of the process during the context: to `size` bytes more than it
        had when this object was made.  Set `peak_bytes` at the end, also after an error."""
        before = resource.getrlimit(resource.RLIMIT_AS)
        give_back_free_memory()
        cleared = clear_peak()
        # The new soft limit is within the limits that the process already had; the hard one stays,
        # since a process cannot raise it again.
        resource.setrlimit(resource.RLIMIT_AS, (min([self.base + size, *self.bounds]), before[1]))
        try:
            yield
        finally:
            # End the limit first, since the handler of an error needs memory too.
            resource.setrlimit(resource.RLIMIT_AS, before)
            peak = status_bytes("VmHWM")  # of this block, if the earlier peak could be cleared
            self.peak_bytes = max(peak - self.resident, 0) if cleared and peak is not None else None


class Device(Limit):
    """Limits the memory of a GPU to `text`: "8GB", "50%", or None for all that is free.

    Raises UserError if the whole memory of the GPU is less than `text`.  If only its free memory is
    less, the free memory is the limit.
    """

    def __init__(self, text: str | None, device: torch.device):
        self.device = device
        free, total = self._give_back_unused()  # bytes of the device, free after giving back
        # Bytes of the tensors that are there already: no peak counts them.
        self.allocated = torch.cuda.memory_allocated(device)
        wanted = free if text is None else bytes_of(text, total)
        if wanted > total:
            raise UserError(
                f"--memory-limit {text}: {wanted} bytes, but {device} has only {total}; use a lower limit"
            )
        super().__init__(min(wanted, free), available=free)

    def _give_back_unused(self) -> tuple[int, int]:
        """Give torch's unused memory back to the device; return (free, total) bytes of the device."""
        gc.collect()
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self.device)

    @contextmanager
    def within(self, size: int) -> Iterator[None]:
        """Leave `size` bytes of the device free during the context: hold the rest in one tensor.
        If the context ends without an error, set `peak_bytes`."""
        self._give_back_unused()
        block = torch.empty(self.available - size, dtype=torch.uint8, device=self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        try:
            yield
            torch.cuda.synchronize(self.device)
            others = self.allocated + block.numel()
            self.peak_bytes = max(torch.cuda.max_memory_allocated(self.device) - others, 0)
        finally:
            del block
