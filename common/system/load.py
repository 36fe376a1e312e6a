"""Measure the CPU time that other processes take, and decide whether times measured beside it can be compared.

/proc/stat counts the whole machine; in a container, that of the host.  A step is slowed by a process on a core that it
needs.  So only the CPUs of this process's affinity count, and cores that its threads leave free may bear some load.
Time for which the quota of a cgroup (docker --cpus) holds this process back counts as load: it slows a step likewise.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import AbstractSet, List, Optional

from common.system import memory

#: Environment variable with the folder of the host's /proc, where a container mounts it (a convention of monitors).
PROC = "HOST_PROC"
#: A sample that needs all cores is flagged "busy" if others use more cores than this: a step waits for all of its
#: threads, also for the one that shares its core.
BUSY_CORES = 0.1
#: The same limit as a share of the CPUs: a large server always runs something else.
BUSY_SHARE = 0.01
#: Others may use this share of the cores that the threads leave free: cores share caches, memory and clocks.
FREE_SHARE = 0.5
#: Load of this many times the limit is flagged "loaded" too: it can change the order of two losses.
LOADED = 2.0
#: Shortest window of a share, in ns: /proc/stat counts in ticks of 10 ms.
SHORTEST_WINDOW_NS = 200_000_000

#: CPUs of this process at import: OpenMP may bind threads that it starts later.
CPUS: AbstractSet[int] = frozenset(
    os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
)


def cores(cpus: AbstractSet[int] = CPUS, root: Path = Path("/sys/devices/system/cpu")) -> int:
    """Return the number of cores of these CPUs.  Hyper-threads of one core count once, if the system tells."""
    try:
        return len({(root / f"cpu{cpu}/topology/thread_siblings_list").read_text().strip() for cpu in cpus})
    except OSError:
        return len(cpus)


def _busy_seconds(cpus: AbstractSet[int], stat: Path) -> Optional[float]:
    """Return the CPU time that all processes have used on these CPUs since the machine started, in seconds.

    Time stolen by a hypervisor counts, and time for which a quota held us back.  None if the system does not tell.
    """
    try:
        rows = [line.split() for line in stat.read_text().splitlines() if line.startswith("cpu")]
    except OSError:
        return None
    mine = [row for row in rows if row[0][3:].isdigit() and int(row[0][3:]) in cpus] or rows[:1]
    ticks = 0
    for row in mine:
        user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, row[1:9])
        ticks += user + nice + system + irq + softirq + steal
    return ticks / os.sysconf("SC_CLK_TCK") + memory.throttled_seconds() if mine else None


def _own_seconds() -> float:
    """Return the CPU time of this process and its ended children, in seconds."""
    return sum(os.times()[:4])


class ForeignLoad:
    """The share of the CPU time that other processes took since the last `share()`, of the CPUs of this one."""

    def __init__(self, cpus: AbstractSet[int] = CPUS, stat: Optional[Path] = None) -> None:
        self.cpus, self.stat = cpus, stat or Path(os.environ.get(PROC) or "/proc", "stat")
        self._mark()

    def _mark(self) -> None:
        """Start the next window."""
        self.busy, self.used = _busy_seconds(self.cpus, self.stat), _own_seconds()
        self.since = time.perf_counter_ns()

    def ready(self) -> bool:
        """Return whether the window is long enough for a share that means something."""
        return time.perf_counter_ns() - self.since >= SHORTEST_WINDOW_NS

    def share(self) -> Optional[float]:
        """Return the share of other processes in 0..1, None if the system does not tell, and start the next window."""
        before, used, since = self.busy, self.used, self.since
        self._mark()
        elapsed = (self.since - since) / 1e9
        if before is None or self.busy is None or elapsed <= 0:
            return None
        foreign = (self.busy - before) - (self.used - used)
        return round(min(max(foreign / (elapsed * len(self.cpus)), 0.0), 1.0), 4)


def busy_flags(
    share: Optional[float], threads: Optional[int] = None, cpus: Optional[int] = None, physical: Optional[int] = None
) -> List[str]:
    """Return ["busy"] for what was measured beside noticeable load, ["busy", "loaded"] beside LOADED times as much.

    Args:
        share: of the CPUs that this process may use, from ForeignLoad; None where it is not known, which is no load.
        threads: number that what was measured keeps busy; None: as many as there are cores.
        cpus, physical: how many CPUs this process may use, and how many cores these are; None: as this machine says.
    """
    physical = physical or cpus or cores()
    cpus = cpus or len(CPUS)
    free = 0 if threads is None else max(physical - threads, 0)
    bearable = max(BUSY_CORES, BUSY_SHARE * cpus) + FREE_SHARE * free
    taken = (share or 0.0) * cpus
    if taken <= bearable:
        return []
    return ["busy", "loaded"] if taken > LOADED * bearable else ["busy"]


def disturbance(load: ForeignLoad, threads: Optional[int] = None, longer: float = 1.0) -> str:
    """Return how busy others keep this machine ("load 24 on 2 cores, others use 97% of the CPU"), "" if it is quiet.

    The load average alone tells of the last minute, the user's own set-up included: where only that is high, a longer
    look decides.

    Args:
        load: since when others are looked at; where that was just now, this waits.
        threads: see busy_flags.
        longer: seconds of that look.
    """
    time.sleep(max(0, SHORTEST_WINDOW_NS - (time.perf_counter_ns() - load.since)) / 1e9)
    share, average = load.share(), 0.0
    with suppress(OSError, ValueError, IndexError):
        average = float(load.stat.with_name("loadavg").read_text().split()[0])
    if "loaded" not in busy_flags(share, threads) and average > len(load.cpus):
        time.sleep(longer)
        share = load.share()
    if share is None or "loaded" not in busy_flags(share, threads):
        return ""
    cores_here = "1 core" if len(load.cpus) == 1 else f"{len(load.cpus)} cores"
    return f"load {average:.3g} on {cores_here}, others use {share:.0%} of the CPU"
