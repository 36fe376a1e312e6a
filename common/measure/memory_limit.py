"""A limit on memory that is enforced for real, on top of what the process holds with everything loaded.

CPU: RLIMIT_AS, at the address space of the loaded process (after a small step, so that the package, its threads and its
kernels are there) plus the limit; malloc and mmap fail beyond it, whoever calls them.  It counts address space, which
is never less than memory: what is reserved and not touched counts.  A cgroup's memory.max would count pages, but needs
rights that few users have, and answers with SIGKILL.

CUDA: all that is free on the device but the limit is held back by one block of this process, so that no allocator
(torch's, numba's, a package's own cudaMalloc) gets at more.  What other processes take of the device is not held off.
"""

from __future__ import annotations

import gc
import resource
from contextlib import contextmanager
from typing import ContextManager, Iterator, Optional, Tuple

import torch

from common import flag_types
from common.errors import UserError
from common.passes import memory
from common.running import machine

#: Making inputs may take this many times the limit: in scope "loss" a joiner makes the given logits.
MAKING = 4


class Limit:
    """kind: as the ``probe`` record has it; bytes: above the loaded process; available: what there is beyond it;
    peak_bytes: the most that was taken above it within the last `within`, or None where nobody tells; warnings: that
    there is less than was asked for."""

    kind: str
    bytes: int
    available: int
    peak_bytes: Optional[int] = None
    warnings: Tuple[str, ...] = ()

    def take(self, wanted: int, left: int, where: str) -> None:
        """Be a limit of `wanted` bytes, or of the `left` ones where that is less: how much a package, its context and
        its kernels leave is known only once they are loaded, and is no reason to end the search of others."""
        self.bytes = min(wanted, left)
        if wanted > left:
            self.warnings = (f"less than the memory limit is left on {where} once it is loaded: see `within`",)

    def within(self, size: int) -> ContextManager[None]:
        """`size` bytes above the loaded process may be in use in here; more than that is out of memory."""
        raise NotImplementedError

    def enforced(self) -> ContextManager[None]:
        return self.within(self.bytes)

    def making(self) -> ContextManager[None]:
        """For making inputs, which is no part of the step: some slack, yet never more than there is."""
        return self.within(max(self.bytes, min(MAKING * self.bytes, self.available)))


class AddressSpace(Limit):
    kind = "address space"

    def __init__(self, size: int):
        memory.give_back_free_memory()
        base, resident = memory.status_bytes("VmSize"), memory.status_bytes("VmRSS")
        if base is None or resident is None:
            raise UserError("--find-largest: on a CPU it needs Linux's /proc, which tells the size of a process")
        self.base, self.resident = base, resident
        self.available = machine.available_memory() or size
        self.bounds = [bound for bound in resource.getrlimit(resource.RLIMIT_AS) if bound != resource.RLIM_INFINITY]
        self.take(size, min([size, *(max(bound - base, 0) for bound in self.bounds)]), "this machine (ulimit -v)")

    @contextmanager
    def within(self, size: int) -> Iterator[None]:
        before = resource.getrlimit(resource.RLIMIT_AS)
        memory.give_back_free_memory()
        told = memory.clear_peak()
        resource.setrlimit(resource.RLIMIT_AS, (min([self.base + size, *self.bounds]), before[1]))
        try:
            yield
        finally:  # so that whoever handles an error has memory to do it with
            resource.setrlimit(resource.RLIMIT_AS, before)
            peak = memory.status_bytes("VmHWM")
            self.peak_bytes = max(peak - self.resident, 0) if told and peak is not None else None


class Device(Limit):
    kind = "device memory"

    def __init__(self, text: Optional[str], device: torch.device):
        self.device = device
        self._give_back()
        self.available, total = torch.cuda.mem_get_info(device)
        self.allocated = torch.cuda.memory_allocated(device)
        wanted = self.available if text is None else flag_types.bytes_of(text, total)
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


def start(context) -> Limit:
    """The run's limit, from here on.  `context`: common.running.worker.Context, everything in it loaded and used."""
    if context.device.type == "cuda":
        return Device(context.settings.memory_limit, context.device)
    return AddressSpace(context.limit_bytes)
