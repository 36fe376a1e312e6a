"""What a search knows so far."""

from __future__ import annotations

from typing import Dict, List, Mapping, Optional, Sequence, Tuple

from common.records.schema import JobLine, Status
from common.records.store import status_of

Jobs = Mapping[str, Sequence[JobLine]]

#: Does a size fit, by the status of its probe?  Any other status is no answer.
OUTCOMES = {"ok": True, "oom": False, "timeout": False}
TOO_LARGE = ("oom", "timeout")


def ends(jobs: Jobs, pass_name: str) -> List[Status]:
    """Return the status records of the jobs of a pass."""
    return [end for end in map(status_of, jobs.values()) if end and end.pass_name == pass_name]


def answers(jobs: Jobs) -> Dict[int, bool]:
    """Return whether each size fits, as far as it was tried.

    A size at which the throughput pass ran out of memory or time does not.
    """
    known = {end.size: OUTCOMES[end.status] for end in ends(jobs, "probe") if end.status in OUTCOMES}
    known.update({end.size: False for end in ends(jobs, "throughput") if end.status in TOO_LARGE})
    return {size: fits for size, fits in known.items() if size is not None}


def bounds(known: Mapping[int, bool]) -> Tuple[Optional[int], Optional[int]]:
    """Return (largest size that fits below all that do not, smallest that does not fit); None for one that does not
    exist."""
    fails = min((size for size, fits in known.items() if not fits), default=None)
    fits = max((size for size, fits in known.items() if fits and (fails is None or size < fails)), default=None)
    return fits, fails
