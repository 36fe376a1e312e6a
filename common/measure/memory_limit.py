"""Enforce a memory limit, counted from what the process holds once everything is loaded.

CPU: sets RLIMIT_AS to the limit plus the address space of the loaded process (after a small step, so that the package,
its threads and its kernels are loaded); beyond it every malloc and mmap fails.  Address space is never less than
memory: reserved memory counts before it is used.  A cgroup's memory.max would count pages, but few users may set it,
and it ends the process with SIGKILL.

CUDA: one block holds all free memory of the device except the limit, so that no allocator (torch's, numba's, a
package's own cudaMalloc) gets more.  Memory that other processes take is not controlled.
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

#: Making the inputs may take this many times the limit: for scope "loss", a joiner makes the logits.
MAKING = 4


class Limit:
    """A limit on the memory of this process; all sizes are in bytes above those of the loaded process."""

    kind: str  # what is limited, as in the ``probe`` record
    bytes: int  # allowed
    available: int  # what the machine has
    peak_bytes: Optional[int] = None  # the most that was in use in the last `within`; None if the system does not tell
    warnings: Tuple[str, ...] = ()  # that less is left than the user asked for

    def take(self, wanted: int, left: int, where: str) -> None:
        """Set the limit to `wanted` bytes, or to the `left` ones if these are fewer, with a warning that names `where`.

        It is no error, since what a package, its context and its kernels leave is known only once they are loaded.
        """
        self.bytes = min(wanted, left)
        if wanted > left:
            self.warnings = (f"less than the memory limit is left on {where} once it is loaded: see `within`",)

    def within(self, size: int) -> ContextManager[None]:
        """Limit the block to `size` bytes; an allocation beyond them fails as out of memory."""
        raise NotImplementedError

    def enforced(self) -> ContextManager[None]:
        """Limit the block to the limit."""
        return self.within(self.bytes)

    def making(self) -> ContextManager[None]:
        """Limit a block that makes inputs, which are not part of the step, to MAKING times the limit.

        It never gets more than the machine has.
        """
        return self.within(max(self.bytes, min(MAKING * self.bytes, self.available)))


class AddressSpace(Limit):
    """Limits the address space of this process to `size` bytes more than now.

    Raises UserError if the system does not tell the size of a process.
    """

    kind = "address space"

    def __init__(self, size: int):
        memory.give_back_free_memory()
        base, resident = memory.status_bytes("VmSize"), memory.status_bytes("VmRSS")
        if base is None or resident is None:
            raise UserError("--find-largest: needs Linux's /proc on a CPU, to read the size of a process")
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
        finally:  # first of all, since the handler of an error needs memory too
            resource.setrlimit(resource.RLIMIT_AS, before)
            peak = memory.status_bytes("VmHWM")
            self.peak_bytes = max(peak - self.resident, 0) if cleared and peak is not None else None


class Device(Limit):
    """Limits the memory of a GPU to `text` ("8GB", "50%"), all that is free if it is None.

    Raises UserError if the GPU has less memory.
    """

    kind = "device memory"

    def __init__(self, text: Optional[str], device: torch.device):
        self.device = device
        self._give_back()
        self.available, total = torch.cuda.mem_get_info(device)
        self.allocated = torch.cuda.memory_allocated(device)
        wanted = self.available if text is None else units.bytes_of(text, total)
        if wanted > total:
            raise UserError(f"--memory-limit {text}: {wanted} bytes, but {device} has only {total}; use a lower limit")
        self.take(wanted, self.available, str(device))

    def _give_back(self) -> None:
        """Return unused memory of torch to the device."""
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
    """Return the limit of this process, which has loaded everything.

    On CUDA it is `text`, the value of --memory-limit; on a CPU it is `size` in bytes.
    """
    if device.type == "cuda":
        return Device(text, device)
    if size is None:
        raise ValueError("the job has no memory limit in bytes, which a CPU needs")
    return AddressSpace(size)
