"""What this computer is, and how busy others keep it.  Reads /proc where there is one; no torch.

Another busy process makes a two-thread step many times slower, so every timed sample carries the share of the machine's
CPU time that other processes took beside it.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

#: Share of the machine's CPU time, taken by others, from which on a sample is flagged "busy".
BUSY_SHARE = 0.05
#: /proc/stat counts in ticks of 10 ms: shares over less than this are noise.
SHORTEST_WINDOW_NS = 200_000_000


def cpu_count() -> int:
    """CPUs this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _field(path: str, key: str) -> Optional[str]:
    try:
        for line in Path(path).read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == key:
                return value.strip()
    except OSError:
        pass
    return None


def describe() -> Dict[str, Any]:
    """The machine as the ``run`` record keeps it."""
    return {
        "cpu": _field("/proc/cpuinfo", "model name") or platform.processor() or platform.machine(),
        "cores": cpu_count(),
        "memory_bytes": total_memory(),
        "os": platform.platform(),
        "python": platform.python_version(),
    }


def free_bytes() -> Optional[int]:
    """Memory that programs could take now; None where the system does not tell."""
    free = _field("/proc/meminfo", "MemAvailable")
    return int(free.split()[0]) * 1024 if free else None


def cache_bytes() -> Optional[int]:
    """All last-level caches of this machine together; None where the system does not tell."""
    caches: Dict[str, Tuple[int, int]] = {}  # CPUs that share it -> level, bytes
    units = {"K": 2**10, "M": 2**20, "G": 2**30}
    for folder in Path("/sys/devices/system/cpu").glob("cpu[0-9]*/cache/index[0-9]*"):
        try:
            cpus, level, size = ((folder / name).read_text().strip() for name in ("shared_cpu_list", "level", "size"))
            found = (int(level), int(size.rstrip("KMG")) * units.get(size[-1], 1))
        except (OSError, ValueError, IndexError):
            continue
        caches[cpus] = max(caches.get(cpus, found), found)
    last = max((level for level, _ in caches.values()), default=None)
    return None if last is None else sum(size for level, size in caches.values() if level == last)


def git_state(root: Path) -> Tuple[Optional[str], Optional[bool]]:
    """(revision, are there uncommitted changes?) of the checkout, or (None, None) outside one."""
    try:
        command = ["git", "-C", str(root)]
        revision = subprocess.run([*command, "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10)
        if revision.returncode != 0:
            return None, None
        status = subprocess.run([*command, "status", "--porcelain"], capture_output=True, text=True, timeout=30)
        return revision.stdout.strip(), bool(status.stdout.strip())
    except (OSError, subprocess.SubprocessError):
        return None, None


def oom_kills() -> int:
    """How often the kernel has killed for memory since it started; 0 where it does not say."""
    try:
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    except OSError:
        pass
    return 0


def _number(path: Path) -> Optional[int]:
    """The number in a file; None where there is none ("max", no such file)."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


#: Limit and use of a cgroup's memory: version 2, then 1.
CGROUP_FILES = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))


def _cgroup_room() -> List[int]:
    """Bytes that each cgroup around this process has left; what its files hold of the page cache counts as used."""
    found = []
    try:
        groups = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        groups = []
    for line in groups:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        top = Path("/sys/fs/cgroup") / controllers
        inside = top / path.lstrip("/")
        for folder in [inside, *inside.parents][: len(inside.parts) - len(top.parts) + 1]:
            for most, used in CGROUP_FILES:
                bound, now = _number(folder / most), _number(folder / used)
                if bound is not None and now is not None:
                    found.append(max(bound - now, 0))
    return found


def total_memory() -> Optional[int]:
    """Bytes of memory of the machine."""
    field = _field("/proc/meminfo", "MemTotal")
    return int(field.split()[0]) * 1024 if field else None


def available_memory() -> Optional[int]:
    """Bytes that can be taken without swapping, by the machine's count and by that of every cgroup around us."""
    field = _field("/proc/meminfo", "MemAvailable")
    return min([int(field.split()[0]) * 1024, *_cgroup_room()]) if field else None


def gpu_may_be_here() -> bool:
    """Is there a device file of a GPU driver?  Cheap; only torch can tell for sure."""
    return any(Path(path).exists() for path in ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg", "/dev/kfd"))


def _busy_seconds() -> Optional[float]:
    """CPU time all processes have used since the machine started, in seconds; time stolen by a hypervisor counts."""
    try:
        words = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    except OSError:
        return None
    user, nice, system, _idle, _iowait, irq, softirq, steal = (int(word) for word in words[:8])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _own_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


class ForeignLoad:
    """The share of the machine's CPU time that other processes took since the last `share()`."""

    def __init__(self) -> None:
        self.cpus = os.cpu_count() or 1
        self._mark()

    def _mark(self) -> None:
        self.busy, self.own, self.since = _busy_seconds(), _own_seconds(), time.perf_counter_ns()

    def ready(self) -> bool:
        """Has enough time passed for a share to mean something?"""
        return time.perf_counter_ns() - self.since >= SHORTEST_WINDOW_NS

    def share(self) -> Optional[float]:
        """In 0..1; None where the system does not tell.  Starts the next window."""
        before, own, since = self.busy, self.own, self.since
        self._mark()
        elapsed = (self.since - since) / 1e9
        if before is None or self.busy is None or elapsed <= 0:
            return None
        foreign = (self.busy - before) - (self.own - own)
        return round(min(max(foreign / (elapsed * self.cpus), 0.0), 1.0), 4)


def busy_flags(share: Optional[float]) -> List[str]:
    """["busy"] for what was measured beside more load than BUSY_SHARE."""
    return ["busy"] if share is not None and share > BUSY_SHARE else []


def die_with_parent() -> None:
    """Ask Linux to kill this process when its parent ends, so that a killed run leaves nothing measuring behind."""
    if not sys.platform.startswith("linux"):
        return
    import ctypes
    import signal

    PR_SET_PDEATHSIG = 1
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    except (OSError, AttributeError):
        pass
