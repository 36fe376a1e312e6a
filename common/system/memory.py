"""Read how much memory is free and how much this process has, in bytes, and recognize
out-of-memory errors.  Also reads the CPU quotas of cgroups."""

from __future__ import annotations

import ctypes
import gc
import re
from contextlib import suppress
from itertools import chain
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
CGROUP = Path("/proc/self/cgroup")


def _cgroup_values(controller: str, *files: str) -> list[dict[str, list[str]]]:
    """Return {file: words in it} for each cgroup of this process, from the innermost outwards.

    Cgroups that have none of the files are left out.

    controller: "cpu" or "memory"; files: names of files in the folder of a cgroup."""
    if not CGROUP.exists():
        return []
    groups = []
    for line in CGROUP.read_text().splitlines():
        # Version 2 has one line, "0::/user.slice"; version 1 has "4:cpu,cpuacct:/user.slice" too.
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = CGROUPS / controllers
        innermost = top / path.lstrip("/")
        for folder in (innermost, *innermost.parents):
            if not folder.is_relative_to(top):
                break
            words = {}
            for file in files:
                with suppress(OSError):
                    words[file] = (folder / file).read_text().split()
            if words:
                groups.append(words)
    return groups


def cgroup_cpus() -> float | None:
    """Return the CPUs that the tightest quota allows, such as 1.5; None if there is no quota."""
    counts = []
    for words in _cgroup_values("cpu", "cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us"):
        # Version 2 has both numbers in cpu.max, version 1 each in a file of its own.
        quota, period = chain(*words.values())
        if quota not in ("max", "-1"):
            counts.append(int(quota) / int(period))
    return min(counts, default=None)


def throttled_seconds() -> float:
    """Return the seconds for which quotas have kept threads from running.

    They are summed over CPUs, and over the cgroups of this process."""
    seconds = 0.0
    for words in _cgroup_values("cpu", "cpu.stat"):
        names, numbers = words["cpu.stat"][::2], words["cpu.stat"][1::2]
        stat = dict(zip(names, map(int, numbers)))
        # Version 2 has microseconds, version 1 nanoseconds.
        seconds += stat.get("throttled_usec", 0) / 1e6 + stat.get("throttled_time", 0) / 1e9
    return seconds


#: Words of out-of-memory errors, in lower case: of torch on CPU and CUDA, of C++, the C library and
#: its loader, of cuBLAS, numba and OpenMP.  cuBLAS says "not initialized" if it has no memory.
NO_MEMORY = (
    "out of memory",
    "out_of_memory",
    "can't allocate memory",
    "cannot allocate memory",
    "failed to map segment",
    "bad_alloc",
    "alloc_failed",
    "status_not_initialized",
    "memoryallocation",
    "memoryerror",
    "thread creation failed",
)
#: An error of torch's stable ABI, which torchaudio's kernels use: "aoti_torch_empty_strided(...)
#: API call failed".  Functions that make a tensor fail only for lack of memory, which they do not
#: say.
NO_TENSOR = re.compile(
    r"(aten::|aoti_torch_)(new_)?(empty|zeros|ones|full)\w*\b.*api call failed", re.DOTALL
)


def proc_field(path: str, key: str) -> str | None:
    """Return the value of the first line "key: value" in a file; None without one."""
    with suppress(OSError):
        match = re.search(
            rf"^{re.escape(key)}\s*:(.*)$", Path(path).read_text(), flags=re.MULTILINE
        )
        return match[1].strip() if match else None
    return None


def _proc_bytes(path: str, key: str) -> int | None:
    """Return a size in a file of /proc in bytes; None if it is not there."""
    field = proc_field(path, key)  # "1234 kB"
    return int(field.split()[0]) * 1024 if field else None


def total_memory() -> int | None:
    """Return the memory of the machine in bytes; None if the system does not tell."""
    return _proc_bytes("/proc/meminfo", "MemTotal")


def available_memory() -> int | None:
    """Return the bytes that can be allocated without swapping; None if the system does not tell.

    That is the least of what the machine and each cgroup have left."""
    available = _proc_bytes("/proc/meminfo", "MemAvailable")
    if available is None:
        return None
    for limit, usage in (
        ("memory.max", "memory.current"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        for words in _cgroup_values("memory", limit, usage):
            if len(words) == 2 and words[limit] != ["max"]:  # both files are there
                room = int(words[limit][0]) - int(words[usage][0])  # page cache counts as used
                available = min(available, max(room, 0))
    return available


def status_bytes(key: str) -> int | None:
    """Return a size of this process in bytes; None if the system does not tell.

    key: "VmRSS", "VmSize", or "VmHWM", the peak of VmRSS."""
    return _proc_bytes("/proc/self/status", key)


def clear_peak() -> bool:
    """Reset VmHWM; return False if the system does not allow it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM (proc(5))
    except OSError:
        return False
    return True


def give_back_free_memory() -> None:
    """Collect garbage, and return freed memory to the system."""
    gc.collect()
    with suppress(OSError, AttributeError):  # only glibc has malloc_trim
        ctypes.CDLL(None).malloc_trim(0)


class _Mallinfo(ctypes.Structure):
    """Hold struct mallinfo2 of <malloc.h>."""

    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    _fields_ = [(name, ctypes.c_size_t) for name in _names]


def allocated_bytes() -> tuple[int, int]:
    """Return (bytes that malloc has handed out, bytes of these in large blocks).

    Large blocks, above MALLOC_MMAP_THRESHOLD_, are mapped one by one.  Without mallinfo2, which
    glibc has since 2.33, returns (0, 0)."""
    try:
        mallinfo = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError):
        return 0, 0
    mallinfo.restype = _Mallinfo
    info = mallinfo()
    mapped = info.hblkhd  # `uordblks` lacks these
    return info.uordblks + mapped, mapped


def children_bytes(process: str = "self") -> int:
    """Return the bytes that the descendants of a process have written and share with no process.

    0 if the system does not tell who the children are (CONFIG_PROC_CHILDREN).

    process: the number of the process, or "self"."""
    size = 0
    for thread in Path(f"/proc/{process}/task").glob("*"):
        with suppress(OSError):  # the thread has ended
            children = (thread / "children").read_text().split()
            # A thread in vfork sleeps uninterruptibly ("D") until its child runs another program.
            # Until then the child has the memory of its parent, so it does not count.
            if (proc_field(f"{thread}/status", "State") or "").startswith("D"):
                continue
            for child in children:
                size += _proc_bytes(f"/proc/{child}/smaps_rollup", "Private_Dirty") or 0
                size += children_bytes(child)
    return size


def widen_heap(count: int) -> None:
    """Allocate, write and free a block of `count` bytes.

    Under REUSE_VARIABLES glibc keeps the pages of the block, so that later allocations need no new
    ones.  Do nothing if `count` is more than half of the free memory, or without the C library."""
    if count <= 0 or count > (available_memory() or 0) // 2:
        return
    try:
        library = ctypes.CDLL(None)
        library.malloc.restype = ctypes.c_void_p
        library.malloc.argtypes = [ctypes.c_size_t]
        library.free.argtypes = [ctypes.c_void_p]
        block = library.malloc(count)
    except (OSError, AttributeError):
        return
    if block:
        ctypes.memset(block, 0, count)
        library.free(block)


def oom_kills() -> int:
    """Return how many processes the kernel has killed for lack of memory since the machine started;
    0 if the kernel does not tell."""
    with suppress(OSError):
        kills = re.search(r"^oom_kill (\d+)$", Path("/proc/vmstat").read_text(), flags=re.MULTILINE)
        return int(kills[1]) if kills else 0
    return 0


def tells_of_no_memory(text: str) -> bool:
    """Tell whether an error message is about a lack of memory."""
    message = text.lower()
    return any(words in message for words in NO_MEMORY) or bool(NO_TENSOR.search(message))


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an error is a lack of memory, by its type or message.

    Do not call this with a UserError: its message may quote any text."""
    is_named = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return is_named or tells_of_no_memory(str(error))
