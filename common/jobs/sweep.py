"""What a cell of a sweep takes from the cells before it, instead of measuring it again."""

from __future__ import annotations

from typing import List, Mapping, Optional

from common.core.errors import NOT_RUNNABLE
from common.core.settings import SETTINGS
from common.records import schema
from common.records.schema import Limits, Record
from common.records.store import latest_jobs, status_of
from common.records.sweep import SweepFile, SweepRun

OF_LIMITS = [key for key, setting in SETTINGS.items() if setting.of_device]


def reuse(sweep: SweepFile, run_of: Mapping[str, SweepRun]) -> bool:
    """Add to the runs of a cell what other cells found that holds here too: the limits of the device, and which
    implementation cannot run.  Returns whether the limits are known."""
    limits = _limits(sweep, next(iter(run_of.values())))
    for run in run_of.values():
        refusal = None if run.is_done("correctness") else _refusal(sweep, run)
        if refusal:
            run.add(refusal)
        else:
            if limits and not any(isinstance(record, Limits) for record in run.records):
                run.add(limits)
    return bool(limits)


def _limits(sweep: SweepFile, run: SweepRun) -> List[Record]:
    """Return the limits of the device, of the first cell that has them."""
    wanted = run.header.settings
    for (cell, _), other in sweep.runs.items():
        if all(other.header.settings.get(key) == wanted.get(key) for key in OF_LIMITS):
            limits = [record for record in other.records if isinstance(record, Limits)]
            if limits:
                return [{"reused_from": cell, **schema.as_written(record)} for record in limits]
    return []


def _refusal(sweep: SweepFile, run: SweepRun) -> Optional[List[Record]]:
    """Return the status with which the implementation could not run in another cell of the same dtype. Not from an
    earlier process, so that a resumed sweep tries again."""
    dtype = run.header.settings.get("dtype")
    for (cell, name), other in sweep.runs.items():
        if name != run.name or cell == run.cell or not other.touched or other.header.settings.get("dtype") != dtype:
            continue
        lines = latest_jobs(other.records).get("correctness", [])
        end = status_of(lines) if len(lines) == 1 else None
        if end and end.status in NOT_RUNNABLE:
            return [{"reused_from": cell, **schema.as_written(end)}]
    return None
