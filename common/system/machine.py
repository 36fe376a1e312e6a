"""Describe this computer and what changes the speed of a process on it.  Reads /proc and /sys; no torch."""

from __future__ import annotations

import os
import platform
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, Iterable, List, Optional, Set, Tuple

from common.system import git
from common.system.memory import proc_field, total_memory


def cpu_count() -> int:
    """Return how many CPUs this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@dataclass(frozen=True)
class Computer:
    """A machine, as the ``run`` record keeps it."""

    cpu: str  # model name
    cores: int  # that this process may use
    memory_bytes: Optional[int]  # of the whole machine; None if the system does not tell
    os: str
    python: str  # version


def describe() -> Computer:
    """Return this machine."""
    return Computer(
        cpu=proc_field("/proc/cpuinfo", "model name") or platform.processor() or platform.machine(),
        cores=cpu_count(),
        memory_bytes=total_memory(),
        os=platform.platform(),
        python=platform.python_version(),
    )


#: Prefixes of environment variables that change how fast a process computes: threads, their CPUs, the allocator, TF32.
TUNING = ("OMP_", "KMP_", "GOMP_", "MKL_", "MALLOC_", "LD_PRELOAD", "NVIDIA_TF32", "TORCH_ALLOW_TF32", "CUBLAS_")


@dataclass(frozen=True)
class Tuning:
    """Settings around this process that change its speed."""

    variables: Dict[str, str]  # of the environment, those of TUNING
    transparent_huge_pages: Optional[str]  # mode of the kernel ("madvise"); None if the system does not tell


def tuning() -> Tuning:
    """Return the settings around this process that change its speed."""
    try:
        modes = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
        pages: Optional[str] = modes[modes.index("[") + 1 : modes.index("]")]
    except (OSError, ValueError):
        pages = None
    variables = {key: value for key, value in sorted(os.environ.items()) if key.startswith(TUNING)}
    return Tuning(variables, pages)


def _cpus(text: str) -> Set[int]:
    """Return the numbers in a list of the kernel ("0-3,8")."""
    cpus: Set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus |= set(range(int(first), int(last or first) + 1))
    return cpus


def _as_list(cpus: Iterable[int]) -> str:
    """Return numbers as a list of the kernel ("0-3,8")."""
    spans: List[List[int]] = []
    for cpu in sorted(cpus):
        if spans and spans[-1][1] == cpu - 1:
            spans[-1][1] = cpu
        else:
            spans.append([cpu, cpu])
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in spans)


@dataclass(frozen=True)
class Placement:
    """CPUs and memory nodes of a process; None where the system does not tell."""

    affinity: Optional[str]  # CPUs that it may use: "0-3,8"
    governor: Optional[str]  # of the clocks of these CPUs: "performance"
    numa_nodes: Optional[int]  # number of memory nodes that they belong to


def placement(root: Path = Path("/sys/devices/system"), cpus: Optional[Iterable[int]] = None) -> Placement:
    """Return where this process runs.  root, cpus: of another machine, for tests."""
    mine = set(cpus if cpus is not None else os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ())
    governors, nodes = set(), 0
    for cpu in mine:
        with suppress(OSError):
            governors.add((root / f"cpu/cpu{cpu}/cpufreq/scaling_governor").read_text().strip())
    for node in root.glob("node/node[0-9]*/cpulist"):
        with suppress(OSError, ValueError):
            nodes += not mine.isdisjoint(_cpus(node.read_text()))
    return Placement(_as_list(mine) or None, ", ".join(sorted(governors)) or None, nodes or None)


def spoiled_by(placed: Placement, threads: int) -> List[str]:
    """Return warnings about what makes times of this many threads on a CPU vary."""
    warnings, cpus = [], len(_cpus(placed.affinity or ""))
    if 0 < cpus < threads:
        warnings.append(
            f"{threads} threads share the CPUs {placed.affinity} (affinity): times vary; give --threads {cpus}"
        )
    if "powersave" in (placed.governor or ""):
        warnings.append("the CPU's governor is powersave: clocks vary; set performance (cpupower frequency-set -g)")
    if (placed.numa_nodes or 1) > 1:
        warnings.append(
            f"threads and memory are spread over {placed.numa_nodes} NUMA nodes: times vary; bind the run to one "
            "(numactl --cpunodebind=0 --membind=0)"
        )
    return warnings


def cache_bytes() -> Optional[int]:
    """Return the size of all last-level caches of this machine in bytes; None if the system does not tell."""
    caches: Dict[str, Tuple[int, int]] = {}  # CPUs that share it -> level, bytes
    units = {"K": 2**10, "M": 2**20, "G": 2**30}
    for folder in Path("/sys/devices/system/cpu").glob("cpu[0-9]*/cache/index[0-9]*"):
        try:
            cpus, level, size = ((folder / name).read_text().strip() for name in ("shared_cpu_list", "level", "size"))
            cache = (int(level), int(size.rstrip("KMG")) * units.get(size[-1], 1))
        except (OSError, ValueError, IndexError):
            continue
        caches[cpus] = max(caches.get(cpus, cache), cache)
    last = max((level for level, _ in caches.values()), default=None)
    return None if last is None else sum(size for level, size in caches.values() if level == last)


def git_state(root: Path) -> Tuple[Optional[str], Optional[bool]]:
    """Return (revision, whether there are uncommitted changes) of the checkout, or (None, None) outside one.

    Changes in docs/ and results/ do not count: no measurement reads them, and keeping one writes both.
    """
    if not (root / ".git").exists():  # a repository around an installed suite is the user's
        return None, None
    try:
        but = (":(exclude)docs", ":(exclude)results")
        status = git.run(root, "status", "--porcelain=v2", "--branch", "--", ".", *but, timeout=30)
    except git.GitError:
        return None, None
    revision = re.search(r"^# branch\.oid ([0-9a-f]+)$", status, flags=re.MULTILINE)
    return (revision[1], bool(re.search(r"^[^#]", status, flags=re.MULTILINE))) if revision else (None, None)


def gpu_may_be_here() -> bool:
    """Return whether there is a device file of a GPU driver: a cheap hint, only torch knows for sure."""
    return any(Path(path).exists() for path in ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg", "/dev/kfd"))
