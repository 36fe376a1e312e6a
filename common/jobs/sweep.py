"""What a cell of a sweep takes from the cells before it, instead of measuring it again."""

from __future__ import annotations

from typing import Dict, List, Mapping, Optional, Set

from common.core.errors import NOT_RUNNABLE
from common.core.settings import SETTINGS
from common.records import schema
from common.records.schema import Limits, Record
from common.records.store import latest_jobs, status_of
from common.records.sweep import SweepFile, SweepRun

OF_LIMITS = [key for key, setting in SETTINGS.items() if setting.of_device]


def reuse(sweep: SweepFile, run_of: Mapping[str, SweepRun]) -> Set[str]:
    """Add to the runs of a cell what other cells found that holds here too: the limits of devices, and which
    implementation cannot run.  Returns the devices whose limits are known ("" for the one that has no label)."""
    limits = _limits(sweep, next(iter(run_of.values())))
    for run in run_of.values():
        refusal = None if run.is_done("correctness") else _refusal(sweep, run)
        if refusal:
            run.add(refusal)
        else:
            known = {record.node for record in run.records if isinstance(record, Limits)}
            lacking = [record for node, of_node in limits.items() if node not in known for record in of_node]
            if lacking:
                run.add(lacking)
    return {node or "" for node in limits}


def _limits(sweep: SweepFile, run: SweepRun) -> Dict[Optional[str], List[Record]]:
    """Return the limits of each device, of the first cell that has them."""
    wanted = run.header.settings
    limits_of: Dict[Optional[str], List[Record]] = {}
    for (cell, _), other in sweep.runs.items():
        if all(other.header.settings.get(key) == wanted.get(key) for key in OF_LIMITS):
            of_cell: Dict[Optional[str], List[Record]] = {}
            for record in other.records:
                if isinstance(record, Limits):
                    of_cell.setdefault(record.node, []).append({"reused_from": cell, **schema.as_written(record)})
            limits_of = {**of_cell, **limits_of}
    return limits_of


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
