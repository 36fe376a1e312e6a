"""What a cell of a sweep takes from the cells before it, instead of measuring it again."""

from __future__ import annotations

from typing import List, Mapping, Optional

from common.core.errors import NOT_RUNNABLE
from common.records import schema
from common.records.schema import Limits, Record
from common.records.store import latest_jobs, status_of
from common.records.sweep import SweepFile, SweepRun

#: Settings that the device's limits depend on.
OF_LIMITS = ("dtype", "threads", "denormals", "tf32")


def reuse(sweep: SweepFile, run_of: Mapping[str, SweepRun]) -> bool:
    """Add to the runs of a cell what other cells found that holds here too: the device's limits, and which
    implementation cannot run.  Returns whether the limits are known."""
    limits = _limits(sweep, next(iter(run_of.values())))
    for run in run_of.values():
        refusal = None if run.is_done("correctness") else _refusal(sweep, run)
        if refusal:
            run.add(refusal)
        elif limits and not any(isinstance(record, Limits) for record in run.records):
            run.add(limits)
    return bool(limits)


def _limits(sweep: SweepFile, run: SweepRun) -> List[Record]:
    """One for each device."""
    wanted = run.header.settings
    for (cell, _), other in sweep.runs.items():
        if all(other.header.settings.get(key) == wanted.get(key) for key in OF_LIMITS):
            found = [record for record in other.records if isinstance(record, Limits)]
            if found:
                return [{"reused_from": cell, **schema.as_written(record)} for record in found]
    return []


def _refusal(sweep: SweepFile, run: SweepRun) -> Optional[List[Record]]:
    """The status with which the implementation could not run in another cell of the same dtype.  Not from an earlier
    process, so that a resumed sweep tries again."""
    dtype = run.header.settings.get("dtype")
    for (cell, name), other in sweep.runs.items():
        if name != run.name or cell == run.cell or not other.touched or other.header.settings.get("dtype") != dtype:
            continue
        lines = latest_jobs(other.records).get("correctness", [])
        end = status_of(lines) if len(lines) == 1 else None
        if end and end.status in NOT_RUNNABLE:
            return [{"reused_from": cell, **schema.as_written(end)}]
    return None
