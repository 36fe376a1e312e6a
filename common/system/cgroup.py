"""Read the limits that the cgroups around this process set, as docker --cpus and --memory do.  Versions 1 and 2."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Dict, List, Optional

TOP, LISTED = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def values(controller: str, *files: str) -> List[Dict[str, List[str]]]:
    """Return the words of these files of each cgroup around this process that has one of them, innermost first.

    controller: "cpu" or "memory".
    """
    groups: List[str] = []
    with suppress(OSError):
        groups = LISTED.read_text().splitlines()
    groups_values = []
    for line in groups:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = TOP / controllers
        inside = top / path.lstrip("/")
        for folder in [inside, *inside.parents][: len(inside.parts) - len(top.parts) + 1]:
            words = {}
            for file in files:
                with suppress(OSError):
                    words[file] = (folder / file).read_text().split()
            groups_values += [words] if words else []
    return groups_values


def memory_room() -> List[int]:
    """Return the bytes left in each cgroup; its page cache counts as used."""
    names = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
    groups = values("memory", *names[0], *names[1])
    pairs = [(words[most][0], words[used][0]) for words in groups for most, used in names if {most, used} <= {*words}]
    return [max(int(most) - int(used), 0) for most, used in pairs if most != "max"]


def cpus() -> Optional[float]:
    """Return how many CPUs this process may use at once by the tightest quota; None where there is none."""
    quotas = []
    for words in values("cpu", "cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us"):
        quota, period = words.get("cpu.max") or [
            *words.get("cpu.cfs_quota_us", []),
            *words.get("cpu.cfs_period_us", []),
        ]
        if quota not in ("max", "-1"):
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def throttled_seconds() -> float:
    """Return for how long the quotas have kept threads of these cgroups from running, summed over CPUs."""
    seconds = 0.0
    for words in values("cpu", "cpu.stat"):
        stat = dict(zip(words["cpu.stat"][::2], words["cpu.stat"][1::2]))
        seconds += int(stat.get("throttled_usec", 0)) / 1e6 + int(stat.get("throttled_time", 0)) / 1e9
    return seconds
