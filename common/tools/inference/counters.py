"""Reads the processor's own counter of instructions, where the system lets a process (perf_event_open(2))."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from typing import Any, Callable, List, Optional

#: System call by machine; perf_event_attr's type and config of retired instructions, its size, and its flags: inherited
#: by threads that start later, without the kernel and the hypervisor.
CALLS = {"x86_64": 298, "aarch64": 241}
HARDWARE, INSTRUCTIONS, SIZE = 0, 1, 112
INHERIT, NO_KERNEL, NO_HYPERVISOR = 1 << 1, 1 << 5, 1 << 6


def instructions(run: Callable[[], Any]) -> Optional[int]:
    """Return the instructions of all threads while `run` runs, and of those that they start.  None where the system
    does not allow it (``/proc/sys/kernel/perf_event_paranoid``, a virtual machine without the counter)."""
    descriptors = _counters()
    if not descriptors:
        return None
    try:
        before = sum(map(_read, descriptors))
        run()
        return sum(map(_read, descriptors)) - before
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _counters() -> List[int]:
    """Return descriptors of a counter for each thread; none where one of them cannot be had."""
    number = CALLS.get(platform.machine())
    flags = INHERIT | NO_KERNEL | NO_HYPERVISOR
    attributes = struct.pack("IIQQQQQ", HARDWARE, SIZE, INSTRUCTIONS, 0, 0, 0, flags).ljust(SIZE, b"\0")
    descriptors: List[int] = []
    try:
        library = ctypes.CDLL(None, use_errno=True)
        for thread in map(int, os.listdir("/proc/self/task") if number else ()):
            descriptor = library.syscall(number, attributes, thread, -1, -1, 0)
            if descriptor < 0:
                raise OSError("not allowed")
            descriptors.append(descriptor)
    except (OSError, AttributeError):
        for descriptor in descriptors:
            os.close(descriptor)
        return []
    return descriptors


def _read(descriptor: int) -> int:
    return int(struct.unpack("Q", os.read(descriptor, 8))[0])
