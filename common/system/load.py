"""What others take of the machine."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import List, Optional

#: Cores that others keep busy, from which on a sample is flagged "busy": however many there are, a step that waits for
#: all of its threads waits for the one that shares its core.
BUSY_CORES = 0.1
#: /proc/stat counts in ticks of 10 ms: shares over less than this are noise.
SHORTEST_WINDOW_NS = 200_000_000


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


def busy_flags(share: Optional[float], cpus: Optional[int] = None) -> List[str]:
    """["busy"] for what was measured beside more load than BUSY_CORES.  share: of `cpus`, of this machine's if None."""
    cores = (share or 0) * (cpus or os.cpu_count() or 1)
    return ["busy"] if cores > BUSY_CORES else []
