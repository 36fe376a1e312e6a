"""What this computer is, and how busy others keep it.  Reads /proc where there is one; no torch.

Another busy process makes a two-thread step many times slower, so every timed sample carries the share of the machine's
CPU time that other processes took beside it.
"""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any, Dict, Optional, Tuple

from common.system.memory import proc_field, total_memory


def cpu_count() -> int:
    """CPUs this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def describe() -> Dict[str, Any]:
    """The machine as the ``run`` record keeps it."""
    return {
        "cpu": proc_field("/proc/cpuinfo", "model name") or platform.processor() or platform.machine(),
        "cores": cpu_count(),
        "memory_bytes": total_memory(),
        "os": platform.platform(),
        "python": platform.python_version(),
    }


#: Variables that change how fast a process computes: threads and their places, the allocator, TF32.
TUNING = ("OMP_", "KMP_", "GOMP_", "MKL_", "MALLOC_", "LD_PRELOAD", "NVIDIA_TF32", "TORCH_ALLOW_TF32", "CUBLAS_")


def tuning() -> Dict[str, Any]:
    """What of this process's surroundings changes how fast it computes: its `variables`, and the kernel's
    `transparent_huge_pages` ("madvise"; None where the system does not tell)."""
    try:
        modes = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
        pages: Optional[str] = modes[modes.index("[") + 1 : modes.index("]")]
    except (OSError, ValueError):
        pages = None
    variables = {key: value for key, value in sorted(os.environ.items()) if key.startswith(TUNING)}
    return {"variables": variables, "transparent_huge_pages": pages}


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


def gpu_may_be_here() -> bool:
    """Is there a device file of a GPU driver?  Cheap; only torch can tell for sure."""
    return any(Path(path).exists() for path in ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg", "/dev/kfd"))
