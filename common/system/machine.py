"""What this computer is, and how busy others keep it.  Reads /proc where there is one; no torch.

Another busy process makes a two-thread step many times slower, so every timed sample carries the share of the machine's
CPU time that other processes took beside it.
"""

from __future__ import annotations

import os
import platform
import re
from contextlib import suppress
from pathlib import Path
from typing import Any, Dict, Iterable, List, Mapping, Optional, Set, Tuple

from common.system import git
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


def _cpus(text: str) -> Set[int]:
    """Of a list as the kernel writes it: "0-3,8"."""
    found: Set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def _as_list(cpus: Iterable[int]) -> str:
    """The other way round."""
    spans: List[List[int]] = []
    for cpu in sorted(cpus):
        if spans and spans[-1][1] == cpu - 1:
            spans[-1][1] = cpu
        else:
            spans.append([cpu, cpu])
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in spans)


def placement(root: Path = Path("/sys/devices/system"), cpus: Optional[Iterable[int]] = None) -> Dict[str, Any]:
    """Where this process runs: `affinity`, the CPUs that it may use ("0-3,8"); `governor`, of their clocks, those that
    there are ("performance"); `numa_nodes`, on how many nodes of memory they are.  None where the system does not tell.
    root, cpus: another machine's, for tests."""
    mine = set(cpus if cpus is not None else os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ())
    governors, nodes = set(), 0
    for cpu in mine:
        with suppress(OSError):
            governors.add((root / f"cpu/cpu{cpu}/cpufreq/scaling_governor").read_text().strip())
    for node in root.glob("node/node[0-9]*/cpulist"):
        with suppress(OSError, ValueError):
            nodes += not mine.isdisjoint(_cpus(node.read_text()))
    return {
        "affinity": _as_list(mine) or None,
        "governor": ", ".join(sorted(governors)) or None,
        "numa_nodes": nodes or None,
    }


def spoiled_by(place: Mapping[str, Any], threads: int) -> List[str]:
    """Lines for the user about what makes times of this many threads on a CPU vary.  place: of `placement`."""
    found, cpus = [], len(_cpus(place["affinity"] or ""))
    if 0 < cpus < threads:
        found.append(
            f"{threads} threads share the CPUs {place['affinity']} (affinity): times vary; give --threads {cpus}"
        )
    if "powersave" in (place["governor"] or ""):
        found.append("the CPU's governor is powersave: clocks vary; set it to performance (cpupower frequency-set -g)")
    if (place["numa_nodes"] or 1) > 1:
        found.append(
            f"threads and memory are spread over {place['numa_nodes']} NUMA nodes: times vary; bind the run to one "
            "(numactl --cpunodebind=0 --membind=0)"
        )
    return found


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
    """Return (revision, whether there are uncommitted changes) of the checkout, or (None, None) outside one."""
    try:
        status = git.run(root, "status", "--porcelain=v2", "--branch", timeout=30)
    except git.GitError:
        return None, None
    revision = re.search(r"^# branch\.oid ([0-9a-f]+)$", status, flags=re.MULTILINE)
    return (revision[1], bool(re.search(r"^[^#]", status, flags=re.MULTILINE))) if revision else (None, None)


def gpu_may_be_here() -> bool:
    """Is there a device file of a GPU driver?  Cheap; only torch can tell for sure."""
    return any(Path(path).exists() for path in ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg", "/dev/kfd"))
