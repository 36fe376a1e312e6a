"""A memory limit that is enforced, on top of what the process holds once everything is loaded.

CPU: RLIMIT_AS, at the address space of the loaded process (after a small step, so that the package, its threads and its
kernels are loaded) plus the limit; beyond it every malloc and mmap fails.  It counts address space, which is never less
than memory: reserved memory counts before it is used.  A cgroup's memory.max would count pages, but few users may set
one, and it ends the process with SIGKILL.

CUDA: one block of this process holds all free memory of the device except the limit, so that no allocator (torch's,
numba's, a package's own cudaMalloc) gets more.  Memory that other processes take is not controlled.
"""

from __future__ import annotations

import gc
import resource
from contextlib import contextmanager
from typing import ContextManager, Iterator, Optional, Tuple

import torch

from common.core import units
from common.core.errors import UserError
from common.system import memory
from common.system.memory import available_memory

#: Making inputs may take this many times the limit: for scope "loss" a joiner makes the logits.
MAKING = 4


class Limit:
    """kind: as in the ``probe`` record; bytes: allowed above the loaded process; available: what the machine has above
    it; peak_bytes: the most that was in use above it in the last `within`, None where the system cannot say; warnings:
    that less is left than the user asked for."""

    kind: str
    bytes: int
    available: int
    peak_bytes: Optional[int] = None
    warnings: Tuple[str, ...] = ()

    def take(self, wanted: int, left: int, where: str) -> None:
        """Set the limit to `wanted` bytes, or to the `left` ones where that is less.  How much a package, its context
        and its kernels leave is known only once they are loaded, so this is a warning and not an error."""
        self.bytes = min(wanted, left)
        if wanted > left:
            self.warnings = (f"less than the memory limit is left on {where} once it is loaded: see `within`",)

    def within(self, size: int) -> ContextManager[None]:
        """Inside, `size` bytes above the loaded process may be in use; more fails as out of memory."""
        raise NotImplementedError

    def enforced(self) -> ContextManager[None]:
        return self.within(self.bytes)

    def making(self) -> ContextManager[None]:
        """For making inputs, which is not part of the step: some slack, but never more than the machine has."""
        return self.within(max(self.bytes, min(MAKING * self.bytes, self.available)))


class AddressSpace(Limit):
    kind = "address space"

    def __init__(self, size: int):
        memory.give_back_free_memory()
        base, resident = memory.status_bytes("VmSize"), memory.status_bytes("VmRSS")
        if base is None or resident is None:
            raise UserError("--find-largest: on a CPU it needs Linux's /proc, which tells the size of a process")
        self.base, self.resident = base, resident
        self.available = available_memory() or size
        self.bounds = [bound for bound in resource.getrlimit(resource.RLIMIT_AS) if bound != resource.RLIM_INFINITY]
        self.take(size, min([size, *(max(bound - base, 0) for bound in self.bounds)]), "this machine (ulimit -v)")

    @contextmanager
    def within(self, size: int) -> Iterator[None]:
        before = resource.getrlimit(resource.RLIMIT_AS)
        memory.give_back_free_memory()
        cleared = memory.clear_peak()
        resource.setrlimit(resource.RLIMIT_AS, (min([self.base + size, *self.bounds]), before[1]))
        try:
            yield
        finally:  # the handler of an error needs memory, too
            resource.setrlimit(resource.RLIMIT_AS, before)
            peak = memory.status_bytes("VmHWM")
            self.peak_bytes = max(peak - self.resident, 0) if cleared and peak is not None else None


class Device(Limit):
    kind = "device memory"

    def __init__(self, text: Optional[str], device: torch.device):
        self.device = device
        self._give_back()
        self.available, total = torch.cuda.mem_get_info(device)
        self.allocated = torch.cuda.memory_allocated(device)
        wanted = self.available if text is None else units.bytes_of(text, total)
        if wanted > total:
            raise UserError(f"--memory-limit {text}: is {wanted} bytes, but {device} has {total} in all; give less")
        self.take(wanted, self.available, str(device))

    def _give_back(self) -> None:
        gc.collect()
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()

    @contextmanager
    def within(self, size: int) -> Iterator[None]:
        self._give_back()
        block = torch.empty(self.available - size, dtype=torch.uint8, device=self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        try:
            yield
            torch.cuda.synchronize(self.device)
            others = self.allocated + block.numel()
            self.peak_bytes = max(torch.cuda.max_memory_allocated(self.device) - others, 0)
        finally:
            del block


def start(device: torch.device, text: Optional[str], size: Optional[int]) -> Limit:
    """The limit of a process that has loaded everything.  text: --memory-limit, read on CUDA; size: bytes on a CPU."""
    if device.type == "cuda":
        return Device(text, device)
    if size is None:
        raise ValueError("on a CPU the job says its limit in bytes")
    return AddressSpace(size)
