"""Describe this computer, and measure how much of its CPU time other processes take.

The descriptions are fields of records.schema.

/proc/stat counts the load of the whole machine, in a container that of the host.  Other processes
slow a step only on the cores that it needs.  So only the CPUs of this process's affinity count, and
on cores that the step leaves free some load is allowed.  The quota of a cgroup (docker --cpus) also
slows a step, so the time for which it holds this process back counts as load.
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


def affinity() -> Set[int]:
    """Return the numbers of the CPUs that this process may use now."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


#: CPUs that this process may use, when it starts.  OpenMP may bind threads to some of them later.
CPUS = frozenset(affinity())


def cpu_count() -> int:
    """Return the number of CPUs that this process may use, by its affinity and cgroups.

    The quota of a cgroup is rounded up."""
    count = len(affinity())
    return min(count, math.ceil(memory.cgroup_cpus() or count))


def cpu_name() -> str:
    """Return the name of the processor; where Linux does not tell, what Python knows of it."""
    return memory.proc_field(CPUINFO, "model name") or platform.processor() or platform.machine()


def describe() -> dict[str, Any]:
    """Return this machine as fields of schema.Machine."""
    return {
        "cpu": cpu_name(),
        **processor(),
        "cores": cpu_count(),
        "memory_bytes": memory.total_memory(),
        "os": platform.platform(),
        "python": platform.python_version(),
    }


CPUINFO = "/proc/cpuinfo"
#: Field of schema.Machine -> its names in /proc/cpuinfo, on x86 and on Arm.
NUMBERS = {
    "family": ("cpu family", "CPU implementer"),
    "model": ("model", "CPU part"),
    "stepping": ("stepping", "CPU revision"),
}
#: Flags of /proc/cpuinfo for vector instructions, which matrix products use: "avx2", "fma", "sve2".
VECTORS = re.compile(r"sse4_2|fma|(avx|amx|asimd|neon|sve)\w*")


def processor(cpuinfo: str = CPUINFO) -> dict[str, Any]:
    """Return fields of schema.Machine that tell apart processors with the same name.

    A virtual machine may hide them: then they are None or empty."""
    fields: dict[str, Any] = {}
    for key, (x86, arm) in NUMBERS.items():
        value = memory.proc_field(cpuinfo, x86) or memory.proc_field(cpuinfo, arm) or ""
        fields[key] = int(value, 0) if re.fullmatch(r"\d+|0x[0-9a-f]+", value) else None
    flags = memory.proc_field(cpuinfo, "flags") or memory.proc_field(cpuinfo, "Features") or ""
    fields["vectors"] = sorted(filter(VECTORS.fullmatch, flags.split()))
    caches = [cache for cache in _caches("cpu0") if cache.kind != "Instruction"]
    fields["caches"] = {f"L{cache.level}": cache.bytes for cache in sorted(caches)}
    return fields


#: Prefixes of environment variables that change how fast a process computes: its threads, their
#: CPUs, its allocator, TF32.
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
    """Return fields of a record: the environment variables of TUNING, and the mode of huge pages.

    The mode is "always", "madvise" or "never"; None if the system does not tell."""
    pages = None
    with suppress(OSError, ValueError):
        modes = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
        pages = modes[modes.index("[") + 1 : modes.index("]")]  # "always [madvise] never"
    variables = {key: value for key, value in sorted(os.environ.items()) if key.startswith(TUNING)}
    return {"variables": variables, "transparent_huge_pages": pages}


def mkl_as_intel() -> bool:
    """Tell whether the preloaded library of setup.libraries.mkl_as_intel is in this process.

    The library defines a function that MKL calls to ask whether the processor is Intel's.  MKL's
    own function of this name is hidden, so only that of the library is seen here."""
    function = getattr(ctypes.CDLL(None), "mkl_serv_intel_cpu_true", None)
    return bool(function and function())


def cache_bytes() -> int | None:
    """Return the bytes of all last-level caches together; None if the system does not tell."""
    caches = set(_caches("cpu[0-9]*"))  # a set, since all CPUs that share a cache list it
    last_level = max((cache.level for cache in caches), default=None)
    if last_level is None:
        return None
    return sum(cache.bytes for cache in caches if cache.level == last_level)


class Cache(NamedTuple):
    """Hold a cache: its level, its kind ("Data", "Instruction" or "Unified"), its size, its CPUs.

    cpus: those that share it, as the system lists them: "0-3"."""

    level: int
    kind: str
    bytes: int
    cpus: str


def _caches(cpus: str) -> Iterator[Cache]:
    """Yield the caches of CPUs; one that CPUs share is yielded for each of them.

    cpus: names of CPUs as a glob: "cpu0", "cpu[0-9]*"."""
    units = {"K": 2**10, "M": 2**20, "G": 2**30}
    names = ("level", "type", "size", "shared_cpu_list")
    for folder in Path("/sys/devices/system/cpu").glob(f"{cpus}/cache/index[0-9]*"):
        with suppress(OSError, ValueError, IndexError):
            level, kind, size, sharing = ((folder / name).read_text().strip() for name in names)
            size_bytes = int(size.rstrip("KMG")) * units.get(size[-1], 1)  # "512K"
            yield Cache(int(level), kind, size_bytes, sharing)


def git_state(root: Path) -> tuple[str | None, bool | None]:
    """Return (revision, whether there are uncommitted changes) of the checkout `root`.

    (None, None) if it is no checkout.  Changes in docs/ and results/ do not count: keeping a
    measurement writes both."""
    if not (root / ".git").exists():  # a repository above an installed suite is a user's
        return None, None
    # In a git hook, variables such as GIT_DIR name the repository of the hook.  Those of settings,
    # such as GIT_CONFIG_GLOBAL, stay.
    variables = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("GIT_") or "CONFIG_" in name
    }
    # Without optional locks no other git has to wait.
    command = ["git", "--no-optional-locks", "-C", str(root), "status", "--porcelain=v2"]
    command += ["--branch", "--", ".", ":(exclude)docs", ":(exclude)results"]
    status = processes.output(command, timeout=30, env=variables)
    revision = re.search(r"^# branch\.oid ([0-9a-f]+)$", status, flags=re.MULTILINE)
    if not revision:
        return None, None
    # Lines without "#" are of changed or new files.
    return revision[1], bool(re.search(r"^[^#]", status, flags=re.MULTILINE))


def gpu_may_be_here() -> bool:
    """Tell whether there is a device file of a GPU driver.

    This takes no time, but only torch knows whether it can use a GPU."""
    return any(
        Path(path).exists() for path in ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg", "/dev/kfd")
    )


#: Bit of NVML's nvmlClocksThrottleReason... -> the words for it in records.
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
    """Return the fields of schema.Gpu for the present state of a GPU, as NVIDIA's driver tells it.

    None if nvidia-ml-py is missing or the driver has no such GPU.  A field is None if the driver
    does not tell it.

    uuid: UUID of the GPU, as torch has it; None for the only GPU of the machine."""
    try:
        import pynvml as nvml
    except ImportError:
        return None

    def answered(name: str, *arguments: Any) -> Any:
        """Return what nvmlNAME returns; None if this driver, device or package lacks it."""
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
        throttled_by = None
        if reasons is not None:
            throttled_by = [words for bit, words in THROTTLED_BY.items() if reasons & bit]
        return {
            "uuid": answered("DeviceGetUUID", handle),
            "driver": answered("SystemGetDriverVersion"),
            "sm_mhz": answered("DeviceGetClockInfo", handle, nvml.NVML_CLOCK_SM),
            "sm_most_mhz": answered("DeviceGetMaxClockInfo", handle, nvml.NVML_CLOCK_SM),
            "memory_mhz": answered("DeviceGetClockInfo", handle, nvml.NVML_CLOCK_MEM),
            "power_cap_watts": None if milliwatts is None else milliwatts / 1000,
            "celsius": answered("DeviceGetTemperature", handle, nvml.NVML_TEMPERATURE_GPU),
            "throttled_by": throttled_by,
            "ecc": None if ecc is None else bool(ecc[0]),
        }
    return None


#: Environment variable with the folder where a container mounts the host's /proc, as monitors of
#: machines have it.
PROC = "HOST_PROC"
# The load of others is noticeable ("busy") if they use more cores than a limit.  The limit is the
# larger of BUSY_CORES and BUSY_SHARE of the CPUs, plus FREE_SHARE of the cores that the step leaves
# free.
#: Cores.  It is small, since a step waits for all its threads.
BUSY_CORES = 0.1
#: Share of the CPUs.  A large server always runs something else.
BUSY_SHARE = 0.01
#: Share of free cores, not all of them: they share caches, memory and clocks with the step's cores.
FREE_SHARE = 0.5
#: Load of this many times the limit is flagged "loaded" too: it can change the order of two losses.
LOADED = 2.0
#: Shortest window for a share of the CPU time, in ns: /proc/stat counts in ticks of 10 ms.
SHORTEST_WINDOW_NS = 200_000_000


def cores(cpus: Set[int] = CPUS, root: Path = Path("/sys/devices/system/cpu")) -> int:
    """Return the number of physical cores that these CPUs share, or the number of the CPUs if the
    system does not tell.

    root: folder of the system's description of CPUs."""
    try:
        return len(
            {(root / f"cpu{cpu}/topology/thread_siblings_list").read_text().strip() for cpu in cpus}
        )
    except OSError:
        return len(cpus)


def _busy_seconds(cpus: Set[int], stat: Path) -> float | None:
    """Return the seconds of CPU time that all processes have used since the machine started.

    They include time stolen by a hypervisor, and time for which a quota held this process back.
    None if the system does not tell.

    cpus: those that count; stat: path of /proc/stat."""
    try:
        rows = [line.split() for line in stat.read_text().splitlines() if line.startswith("cpu")]
    except OSError:
        return None
    names = {f"cpu{cpu}" for cpu in cpus}
    rows = [row for row in rows if row[0] in names] or rows[:1]  # the first is of all CPUs
    if not rows:
        return None
    # user, nice, system, irq, softirq and steal, but not idle and iowait
    ticks = sum(int(row[column]) for row in rows for column in (1, 2, 3, 6, 7, 8))
    return ticks / os.sysconf("SC_CLK_TCK") + memory.throttled_seconds()


class Look(NamedTuple):
    """Hold the CPU times at the beginning or the end of a window.

    Attributes:
        busy_seconds: of all processes; None if the system does not tell
        own_seconds: of this process and its ended children
        ns: the time, in nanoseconds of time.perf_counter_ns
    """

    busy_seconds: float | None
    own_seconds: float
    ns: int


class ForeignLoad:
    """Measure the share of CPU time that other processes take.

    A window begins when this object is made or at a call of `share`; the next call of `share` ends
    it.

    cpus: those that count; stat: path of /proc/stat; None for that of the host."""

    def __init__(self, cpus: Set[int] = CPUS, stat: Path | None = None) -> None:
        self.cpus = cpus
        self.stat = stat or Path(os.environ.get(PROC) or "/proc", "stat")
        self.start = self._look()
        self.start_before: Look | None = None  # start of the last window that has ended

    def _look(self) -> Look:
        """Return the CPU times of this moment."""
        # The first four of os.times: user and system time, of this process and ended children.
        return Look(
            _busy_seconds(self.cpus, self.stat), sum(os.times()[:4]), time.perf_counter_ns()
        )

    def ready(self) -> bool:
        """Tell whether the window is long enough for `share`."""
        return time.perf_counter_ns() - self.start.ns >= SHORTEST_WINDOW_NS

    def share(self) -> float | None:
        """Return the share of the CPU time that other processes took in the window, and begin the
        next window.

        The share is in 0..1; None if the system does not tell.  A window that is too short is
        joined with the window before it.  If it is the first, this waits until it is long enough.
        """
        start, end = self.start, self._look()
        short_ns = SHORTEST_WINDOW_NS - (end.ns - start.ns)
        if short_ns > 0:
            if self.start_before:  # join: the window keeps the earlier start
                start = self.start_before
            else:
                time.sleep(short_ns / 1e9)
                end = self._look()
        self.start_before = start
        self.start = end
        if start.busy_seconds is None or end.busy_seconds is None or end.ns <= start.ns:
            return None
        foreign = end.busy_seconds - start.busy_seconds - (end.own_seconds - start.own_seconds)
        available = (end.ns - start.ns) / 1e9 * len(self.cpus)
        return round(min(max(foreign / available, 0.0), 1.0), 4)


def busy_flags(
    share: float | None,
    threads: int | None = None,
    cpus: int | None = None,
    physical: int | None = None,
) -> list[str]:
    """Return flags for a sample: ["busy"] if the load of others was noticeable, ["busy", "loaded"]
    if it was much, [] if neither.

    Args:
        share: share of the CPU time that others took, from ForeignLoad; None counts as 0.
        threads: number of threads that the sample kept busy; None for one on each core.
        cpus: number of CPUs that the process may use; None for the number of CPUS.
        physical: number of physical cores of these CPUs; None for cores(), those of CPUS."""
    cpus = cpus or len(CPUS)
    physical = physical or cores()
    free = 0 if threads is None else max(physical - threads, 0)
    limit = max(BUSY_CORES, BUSY_SHARE * cpus) + FREE_SHARE * free
    taken = (share or 0.0) * cpus
    if taken > LOADED * limit:
        return ["busy", "loaded"]
    return ["busy"] if taken > limit else []


def disturbance(load: ForeignLoad, threads: int | None = None) -> str:
    """Return how busy other processes keep this machine; "" if they leave it quiet.

    Example: "load 24 on 2 cores, others use 97% of the CPU".  The load average ("load 24") is of
    the last minute, so it may still count the user's own set-up.  If the average is high but the
    share of the CPU is not, this waits a second, and the share in that second decides.

    Args:
        load: this ends its present window, and waits if the window is too short (see `share`).
        threads: see `busy_flags`."""
    share = load.share()
    average = 0.0
    with suppress(OSError, ValueError, IndexError):
        average = float(load.stat.with_name("loadavg").read_text().split()[0])
    if "loaded" not in busy_flags(share, threads) and average > len(load.cpus):
        time.sleep(1.0)
        share = load.share()
    if share is None or "loaded" not in busy_flags(share, threads):
        return ""
    count = len(load.cpus)
    cores_here = "1 core" if count == 1 else f"{count} cores"
    return f"load {average:.3g} on {cores_here}, others use {share:.0%} of the CPU"
