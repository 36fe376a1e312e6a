"""Describe this computer and what changes the speed of a process on it.  Reads /proc, /sys and NVML; no torch.

Each function returns fields of the records of common.records.schema, by name; None where the system does not tell.
"""

from __future__ import annotations

import math
import os
import platform
import re
from contextlib import suppress
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, List, Optional, Set, Tuple

from common.system import git
from common.system.memory import cgroup_cpus, proc_field, total_memory


def cpu_count() -> int:
    """Return how many CPUs this process may use: by its affinity, and by the quota of its cgroups, rounded up."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(count, math.ceil(cgroup_cpus() or count))


def describe() -> Dict[str, Any]:
    """Return this machine, as the ``run`` record keeps it (schema.Machine)."""
    return {
        "cpu": proc_field("/proc/cpuinfo", "model name") or platform.processor() or platform.machine(),
        "cores": cpu_count(),
        "memory_bytes": total_memory(),
        "os": platform.platform(),
        "python": platform.python_version(),
    }


#: Prefixes of environment variables that change how fast a process computes: threads, their CPUs, the allocator, TF32.
TUNING = ("OMP_", "KMP_", "GOMP_", "MKL_", "MALLOC_", "LD_PRELOAD", "NVIDIA_TF32", "TORCH_ALLOW_TF32", "CUBLAS_")


def tuning() -> Dict[str, Any]:
    """Return the variables around this process that change its speed, and the kernel's mode of huge pages."""
    pages = None
    with suppress(OSError, ValueError):
        modes = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
        pages = modes[modes.index("[") + 1 : modes.index("]")]
    variables = {key: value for key, value in sorted(os.environ.items()) if key.startswith(TUNING)}
    return {"variables": variables, "transparent_huge_pages": pages}


def _cpus(text: str) -> Set[int]:
    """Return the numbers in a list of the kernel ("0-3,8")."""
    spans = [part.partition("-") for part in text.strip().split(",") if part]
    return {cpu for first, _, last in spans for cpu in range(int(first), int(last or first) + 1)}


def _as_list(cpus: Iterable[int]) -> str:
    """Return numbers as a list of the kernel ("0-3,8")."""
    spans: List[List[int]] = []
    for cpu in sorted(cpus):
        if spans and spans[-1][1] == cpu - 1:
            spans[-1][1] = cpu
        else:
            spans.append([cpu, cpu])
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in spans)


def placement(root: Path = Path("/sys/devices/system"), cpus: Optional[Iterable[int]] = None) -> Dict[str, Any]:
    """Return where this process runs: its CPUs, the governor of their clocks, and how many memory nodes they belong to.

    root, cpus: of another machine, for tests.
    """
    mine = set(cpus if cpus is not None else os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ())
    governors, nodes = set(), 0
    for cpu in mine:
        with suppress(OSError):
            governors.add((root / f"cpu/cpu{cpu}/cpufreq/scaling_governor").read_text().strip())
    for node in root.glob("node/node[0-9]*/cpulist"):
        with suppress(OSError, ValueError):
            nodes += not mine.isdisjoint(_cpus(node.read_text()))
    governor = ", ".join(sorted(governors)) or None
    return {"affinity": _as_list(mine) or None, "governor": governor, "numa_nodes": nodes or None}


def spoiled_by(placed: Dict[str, Any], threads: int) -> List[str]:
    """Return warnings about what makes times of this many threads on a CPU vary.  placed: as `placement` returns it."""
    warnings, cpus = [], len(_cpus(placed["affinity"] or ""))
    if 0 < cpus < threads:
        warnings.append(
            f"{threads} threads share the CPUs {placed['affinity']} (affinity): times vary; give --threads {cpus}"
        )
    if "powersave" in (placed["governor"] or ""):
        warnings.append("the CPU's governor is powersave: clocks vary; set performance (cpupower frequency-set -g)")
    if (placed["numa_nodes"] or 1) > 1:
        warnings.append(
            f"threads and memory are spread over {placed['numa_nodes']} NUMA nodes: times vary; bind the run to one "
            "(numactl --cpunodebind=0 --membind=0)"
        )
    return warnings


def cache_bytes() -> Optional[int]:
    """Return the size of all last-level caches of this machine in bytes; None if the system does not tell."""
    caches: Dict[str, Tuple[int, int]] = {}  # CPUs that share it -> level, bytes
    units = {"K": 2**10, "M": 2**20, "G": 2**30}
    for folder in Path("/sys/devices/system/cpu").glob("cpu[0-9]*/cache/index[0-9]*"):
        with suppress(OSError, ValueError, IndexError):
            cpus, level, size = ((folder / name).read_text().strip() for name in ("shared_cpu_list", "level", "size"))
            cache = (int(level), int(size.rstrip("KMG")) * units.get(size[-1], 1))
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


#: Bits of NVML's nvmlClocksThrottleReason..., in its words.
THROTTLED_BY = {
    0x1: "idle",
    0x2: "application clocks",
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
    0x100: "display clocks",
    0x200: "board limit",
    0x400: "reliability",
}


def gpu(uuid: Optional[str]) -> Optional[Dict[str, Any]]:
    """Return what NVIDIA's driver tells of a GPU at this moment (schema.Gpu): driver, clocks, power, throttling, ECC.

    None without the package nvidia-ml-py, the driver or the device.  uuid: of the device, as torch has it; None is
    enough for a machine with one GPU.
    """
    try:
        import pynvml as nvml
    except ImportError:
        return None

    def answered(ask: Callable[[], Any]) -> Any:
        """Return the answer, None if this driver, device or version of the package has none."""
        with suppress(nvml.NVMLError, AttributeError):
            value = ask()
            return value.decode() if isinstance(value, bytes) else value

    with suppress(nvml.NVMLError):
        nvml.nvmlInit()
        try:
            if uuid is not None:
                handle = nvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
            elif nvml.nvmlDeviceGetCount() == 1:
                handle = nvml.nvmlDeviceGetHandleByIndex(0)
            else:
                return None
            reasons = answered(lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
            return {
                "uuid": answered(lambda: nvml.nvmlDeviceGetUUID(handle)),
                "driver": answered(lambda: nvml.nvmlSystemGetDriverVersion()),
                "sm_mhz": answered(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
                "sm_most_mhz": answered(lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM)),
                "memory_mhz": answered(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM)),
                "power_cap_watts": answered(lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000),
                "celsius": answered(lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
                "throttled_by": None
                if reasons is None
                else [word for bit, word in THROTTLED_BY.items() if reasons & bit],
                "ecc": answered(lambda: bool(nvml.nvmlDeviceGetEccMode(handle)[0])),
            }
        finally:
            with suppress(nvml.NVMLError):
                nvml.nvmlShutdown()
    return None
