"""Describe this computer, in fields of records.schema; measure how much of its CPU time other
processes take.

/proc/stat counts the whole machine; in a container, that of the host.  A step is slowed by a
process on a core that it needs.  So only the CPUs of this process's affinity count, and cores that
its threads leave free may bear some load. Time for which the quota of a cgroup (docker --cpus)
holds this process back counts as load: it slows a step likewise.
"""

from __future__ import annotations

import ctypes
import math
import os
import platform
import re
import time
from collections.abc import Iterator, Set
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from rnnt_bench.system import memory, processes


def cpu_count() -> int:
    """Return how many CPUs this process may use: by its affinity, and by the quota of its cgroups,
    rounded up."""
    count = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return min(count, math.ceil(memory.cgroup_cpus() or count))


def cpu_name() -> str:
    return memory.proc_field(CPUINFO, "model name") or platform.processor() or platform.machine()


def describe() -> dict[str, Any]:
    """Return this machine, as the ``run`` record keeps it (schema.Machine)."""
    return {
        "cpu": cpu_name(),
        **processor(),
        "cores": cpu_count(),
        "memory_bytes": memory.total_memory(),
        "os": platform.platform(),
        "python": platform.python_version(),
    }


CPUINFO = "/proc/cpuinfo"
#: Field of schema.Machine -> its name in /proc/cpuinfo on x86, and that of the like on Arm.
NUMBERS = {
    "family": ("cpu family", "CPU implementer"),
    "model": ("model", "CPU part"),
    "stepping": ("stepping", "CPU revision"),
}
#: Flags of /proc/cpuinfo that decide which vectors a product is made of.
VECTORS = re.compile(r"sse4_2|fma|(avx|amx|asimd|neon|sve)\w*")


def processor(cpuinfo: str = CPUINFO) -> dict[str, Any]:
    """Return what tells processors of one name apart, in fields of schema.Machine; a virtual
    machine may hide it."""
    fields: dict[str, Any] = {}
    for key, (x86, arm) in NUMBERS.items():
        value = memory.proc_field(cpuinfo, x86) or memory.proc_field(cpuinfo, arm) or ""
        fields[key] = int(value, 0) if re.fullmatch(r"\d+|0x[0-9a-f]+", value) else None
    flags = memory.proc_field(cpuinfo, "flags") or memory.proc_field(cpuinfo, "Features") or ""
    fields["vectors"] = sorted(filter(VECTORS.fullmatch, flags.split()))
    caches = sorted(cache[:3] for cache in _caches("cpu0"))
    fields["caches"] = {f"L{level}": size for level, kind, size in caches if kind != "Instruction"}
    return fields


#: Prefixes of environment variables that change how fast a process computes: threads, their CPUs,
#: the allocator, TF32.
TUNING = (
    "OMP_",
    "KMP_",
    "GOMP_",
    "MKL_",
    "MALLOC_",
    "LD_PRELOAD",
    "NVIDIA_TF32",
    "TORCH_ALLOW_TF32",
    "CUBLAS_",
)


def tuning() -> dict[str, Any]:
    """Return the variables around this process that change its speed, and the kernel's mode of huge
    pages."""
    pages = None
    with suppress(OSError, ValueError):
        modes = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
        pages = modes[modes.index("[") + 1 : modes.index("]")]
    variables = {key: value for key, value in sorted(os.environ.items()) if key.startswith(TUNING)}
    return {"variables": variables, "transparent_huge_pages": pages}


def mkl_as_intel() -> bool:
    """Return whether a library that was preloaded into this process makes MKL take the path that it
    takes on Intel's processors.  MKL's own function is not to be seen from here."""
    function = getattr(ctypes.CDLL(None), "mkl_serv_intel_cpu_true", None)
    return bool(function and function())


def cache_bytes() -> int | None:
    """Return the size of all last-level caches of this machine in bytes; None if the system does
    not tell."""
    caches = {(level, cpus): size for level, _, size, cpus in _caches("cpu[0-9]*")}
    last = max((level for level, _ in caches), default=None)
    return (
        None if last is None else sum(size for (level, _), size in caches.items() if level == last)
    )


def _caches(cpus: str) -> Iterator[tuple[int, str, int, str]]:
    """Yield (level, type, bytes, CPUs that share it) of each cache of the CPUs whose name matches,
    as "cpu0"."""
    units = {"K": 2**10, "M": 2**20, "G": 2**30}
    names = ("level", "type", "size", "shared_cpu_list")
    for folder in Path("/sys/devices/system/cpu").glob(f"{cpus}/cache/index[0-9]*"):
        with suppress(OSError, ValueError, IndexError):
            level, kind, size, sharing = ((folder / name).read_text().strip() for name in names)
            yield int(level), kind, int(size.rstrip("KMG")) * units.get(size[-1], 1), sharing


def git_state(root: Path) -> tuple[str | None, bool | None]:
    """Return (revision, whether there are uncommitted changes) of the checkout, or (None, None)
    outside one.

    Changes in docs/ and results/ do not count: keeping a measurement writes both.  Variables of a
    git hook, which name its repository, are not handed on, and no lock is taken that another git
    may wait for."""
    if not (root / ".git").exists():  # a repository around an installed suite is the user's
        return None, None
    from_hook = [name for name in os.environ if name.startswith("GIT_") and "CONFIG_" not in name]
    variables = {name: value for name, value in os.environ.items() if name not in from_hook}
    command = [
        "git",
        "--no-optional-locks",
        "-C",
        str(root),
        "status",
        "--porcelain=v2",
        "--branch",
    ]
    command += ["--", ".", ":(exclude)docs", ":(exclude)results"]
    status = processes.output(command, timeout=30, env=variables)
    revision = re.search(r"^# branch\.oid ([0-9a-f]+)$", status, flags=re.MULTILINE)
    if not revision:
        return None, None
    return revision[1], bool(re.search(r"^[^#]", status, flags=re.MULTILINE))


def gpu_may_be_here() -> bool:
    """Return whether there is a device file of a GPU driver: a cheap hint, only torch knows for
    sure."""
    return any(
        Path(path).exists() for path in ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg", "/dev/kfd")
    )


#: Bit of NVML's nvmlClocksThrottleReason... -> its words.
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


def gpu(uuid: str | None) -> dict[str, Any] | None:
    """Return what NVIDIA's driver tells of a GPU at this moment (schema.Gpu); None without
    nvidia-ml-py or the device.

    uuid: of the device, as torch has it; None is enough for a machine with one GPU."""
    try:
        import pynvml as nvml
    except ImportError:
        return None

    def answered(name: str, *arguments: Any) -> Any:
        """Return the answer, None if this driver, device or version of the package has none."""
        with suppress(nvml.NVMLError, AttributeError):
            value = getattr(nvml, f"nvml{name}")(*arguments)
            return value.decode() if isinstance(value, bytes) else value

    with suppress(nvml.NVMLError):
        nvml.nvmlInit()
        if uuid is None and nvml.nvmlDeviceGetCount() != 1:
            return None
        if uuid:
            handle = nvml.nvmlDeviceGetHandleByUUID("GPU-" + uuid.removeprefix("GPU-"))
        else:
            handle = nvml.nvmlDeviceGetHandleByIndex(0)
        reasons = answered("DeviceGetCurrentClocksThrottleReasons", handle)
        milliwatts = answered("DeviceGetEnforcedPowerLimit", handle)
        ecc = answered("DeviceGetEccMode", handle)
        words = THROTTLED_BY.items()
        return {
            "uuid": answered("DeviceGetUUID", handle),
            "driver": answered("SystemGetDriverVersion"),
            "sm_mhz": answered("DeviceGetClockInfo", handle, nvml.NVML_CLOCK_SM),
            "sm_most_mhz": answered("DeviceGetMaxClockInfo", handle, nvml.NVML_CLOCK_SM),
            "memory_mhz": answered("DeviceGetClockInfo", handle, nvml.NVML_CLOCK_MEM),
            "power_cap_watts": None if milliwatts is None else milliwatts / 1000,
            "celsius": answered("DeviceGetTemperature", handle, nvml.NVML_TEMPERATURE_GPU),
            "throttled_by": None
            if reasons is None
            else [word for bit, word in words if reasons & bit],
            "ecc": None if ecc is None else bool(ecc[0]),
        }
    return None


#: Environment variable with the folder of the host's /proc, where a container mounts it (a
#: convention of monitors).
PROC = "HOST_PROC"
#: A sample that needs all cores is flagged "busy" if others use more cores than this: a step waits
#: for all its threads.
BUSY_CORES = 0.1
#: The same limit as a share of the CPUs: a large server always runs something else.
BUSY_SHARE = 0.01
#: Others may use this share of the cores that the threads leave free: cores share caches, memory
#: and clocks.
FREE_SHARE = 0.5
#: Load of this many times the limit is flagged "loaded" too: it can change the order of two losses.
LOADED = 2.0
#: Shortest window of a share, in ns: /proc/stat counts in ticks of 10 ms.
SHORTEST_WINDOW_NS = 200_000_000

#: CPUs of this process at import: OpenMP may bind threads that it starts later.
CPUS: Set[int] = frozenset(
    os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
)


def cores(cpus: Set[int] = CPUS, root: Path = Path("/sys/devices/system/cpu")) -> int:
    """Return the number of cores of these CPUs.  Hyper-threads of one core count once, if the
    system tells."""
    try:
        return len(
            {(root / f"cpu{cpu}/topology/thread_siblings_list").read_text().strip() for cpu in cpus}
        )
    except OSError:
        return len(cpus)


def _busy_seconds(cpus: Set[int], stat: Path) -> float | None:
    """Return the CPU time that all processes have used on these CPUs since the machine started, in
    seconds.

    Time stolen by a hypervisor counts, and time for which a quota held us back.  None if the system
    does not tell."""
    try:
        rows = [line.split() for line in stat.read_text().splitlines() if line.startswith("cpu")]
    except OSError:
        return None
    names = {f"cpu{cpu}" for cpu in cpus}
    rows = [row for row in rows if row[0] in names] or rows[:1]
    if not rows:
        return None
    # all but idle and iowait
    ticks = sum(int(row[column]) for row in rows for column in (1, 2, 3, 6, 7, 8))
    return ticks / os.sysconf("SC_CLK_TCK") + memory.throttled_seconds()


class Look(NamedTuple):
    """Hold what begins or ends a window.

    Attributes:
        busy: CPU time of all processes in seconds, None if the system does not tell
        own: CPU time of this process and its ended children in seconds
        ns: the clock
    """

    busy: float | None
    own: float
    ns: int


class ForeignLoad:
    """The share of the CPU time that other processes took since the last `share()`, of the CPUs of
    this one."""

    def __init__(self, cpus: Set[int] = CPUS, stat: Path | None = None) -> None:
        self.cpus, self.stat = cpus, stat or Path(os.environ.get(PROC) or "/proc", "stat")
        self.start = self._look()
        self.start_before: Look | None = None

    def _look(self) -> Look:
        return Look(
            _busy_seconds(self.cpus, self.stat), sum(os.times()[:4]), time.perf_counter_ns()
        )

    def ready(self) -> bool:
        """Return whether the window is long enough for a share that means something."""
        return time.perf_counter_ns() - self.start.ns >= SHORTEST_WINDOW_NS

    def share(self) -> float | None:
        """Return the share of other processes in 0..1, None if the system does not tell, and start
        the next window.

        A window that is too short is looked at together with the one before; where there is none,
        this waits.
        """
        start, end = self.start, self._look()
        short_ns = SHORTEST_WINDOW_NS - (end.ns - start.ns)
        if short_ns > 0 and self.start_before:
            start = self.start_before
        elif short_ns > 0:
            time.sleep(short_ns / 1e9)
            end = self._look()
        self.start_before = start
        self.start = end
        if start.busy is None or end.busy is None or end.ns <= start.ns:
            return None
        foreign = (end.busy - start.busy) - (end.own - start.own)
        available = (end.ns - start.ns) / 1e9 * len(self.cpus)
        return round(min(max(foreign / available, 0.0), 1.0), 4)


def busy_flags(
    share: float | None,
    threads: int | None = None,
    cpus: int | None = None,
    physical: int | None = None,
) -> list[str]:
    """Return ["busy"] for what was measured beside noticeable load, ["busy", "loaded"] beside
    LOADED times as much.

    share: of the CPUs that this process may use, from ForeignLoad; threads: number that what was
    measured keeps busy (None: all cores); cpus, physical: how many CPUs and cores there are (None:
    as this machine says)."""
    physical = physical or cpus or cores()
    cpus = cpus or len(CPUS)
    free = 0 if threads is None else max(physical - threads, 0)
    limit = max(BUSY_CORES, BUSY_SHARE * cpus) + FREE_SHARE * free
    taken = (share or 0.0) * cpus
    if taken > LOADED * limit:
        return ["busy", "loaded"]
    return ["busy"] if taken > limit else []


def disturbance(load: ForeignLoad, threads: int | None = None, longer: float = 1.0) -> str:
    """Return how busy others keep this machine ("load 24 on 2 cores, others use 97% of the CPU"),
    "" if it is quiet.

    The load average alone tells of the last minute, the user's own set-up included: where only that
    is high, a longer look (seconds) decides.  load: since when others are looked at; where that was
    just now, this waits."""
    share = load.share()
    average = 0.0
    with suppress(OSError, ValueError, IndexError):
        average = float(load.stat.with_name("loadavg").read_text().split()[0])
    if "loaded" not in busy_flags(share, threads) and average > len(load.cpus):
        time.sleep(longer)
        share = load.share()
    if share is None or "loaded" not in busy_flags(share, threads):
        return ""
    count = len(load.cpus)
    cores_here = "1 core" if count == 1 else f"{count} cores"
    return f"load {average:.3g} on {cores_here}, others use {share:.0%} of the CPU"
