"""Reads profiles of inference from disk into cells with their numbers.

``read`` never raises for what is in a file: one that cannot be read says so in its `reason`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Dict, Iterable, List, Optional, Sequence, Tuple

from common.analysis import metrics
from common.analysis.metrics import metric
from common.core.errors import UserError
from common.core.statistics import median, quantile
from common.core.text import error
from common.core.units import MB
from common.present.table import Values
from common.records import schema, store
from common.records.schema import (
    Call,
    CallMemory,
    InferenceHeader,
    JobLine,
    OutputCheck,
    ProfiledCalls,
)
from common.tools.files import files, newest
from common.tools.inference import grid
from common.tools.inference import records as model_run
from common.tools.inference.rows_of_both import ModelRun, environment_of

SKIPPED, NOT_RUN = "skipped", "not run"


@dataclass
class GridCell:
    """One cell of the grid with its numbers, None for what was not measured.

    Attributes:
        position: its place on each axis of the grid.
        status: that of its job, "skipped", or "not run".
        n: timed calls.
        rtf: median seconds of a call over the seconds of audio in its batch.
        profiled_cpu_rtf, profiled_cuda_rtf: the same of self time, with the profiler's cost in it.
        p50_s, p90_s, p99_s: percentiles of the seconds of a call.
        first_token_s: seconds to the first token, all audio at hand.
        streams: see `streams`.
        cpu_peak_bytes, cuda_peak_bytes: highest running sum of allocations in a profiled batch.
        process_bytes: peak above the level before a call.
        process_peak_bytes: peak of the whole process.
    """

    position: grid.Position
    status: str = NOT_RUN
    reason: str = ""
    n: int = 0
    rtf: Optional[float] = None
    rtf_p20: Optional[float] = None
    rtf_p80: Optional[float] = None
    profiled_cpu_rtf: Optional[float] = None
    profiled_cuda_rtf: Optional[float] = None
    p50_s: Optional[float] = None
    p90_s: Optional[float] = None
    p99_s: Optional[float] = None
    first_token_s: Optional[float] = None
    utterances_per_second: Optional[float] = None
    streams: Optional[int] = None
    cpu_peak_bytes: Optional[int] = None
    cuda_peak_bytes: Optional[int] = None
    process_bytes: Optional[int] = None
    process_peak_bytes: Optional[int] = None
    device_allocated_bytes: Optional[int] = None
    device_reserved_bytes: Optional[int] = None
    device_used_bytes: Optional[int] = None
    output_error: Optional[float] = None
    busy: int = 0

    @property
    def seconds(self) -> float:
        return float(self.position.seconds)

    @property
    def size(self) -> int:
        return self.position.size

    def row(self) -> Values:
        """Return the cell as CSV and JSON have it."""
        return {
            **self.position.to_json(),
            "status": self.status,
            "reason": self.reason,
            **metrics.values(NUMBERS, self),
        }


def factor(value: Optional[float]) -> str:
    """Return a real-time factor as "4.31E-03"."""
    return "-" if value is None else f"{value:.2E}"


def _spread(cell: GridCell) -> str:
    return f"{factor(cell.rtf_p20)} to {factor(cell.rtf_p80)}" if cell.rtf_p20 is not None else "-"


_ms = partial(metric, scale=1e3, unit="s", better="lower")
_mb = partial(metric, scale=1 / MB, unit="bytes", better="lower")
#: The numbers of a cell: keys in CSV and JSON, and columns of its table where they have a title, in this order.
NUMBERS = (
    metric("n"),
    metric("rtf", "RTF", factor, better="lower"),
    metric("rtf_p20", "p20 to p80")._replace(words=_spread, numeric=False),
    metric("rtf_p80"),
    metric("profiled_cpu_rtf", better="lower", profiled=True),
    metric("profiled_cuda_rtf", better="lower", profiled=True),
    *(_ms(f"p{part}_s", f"p{part} ms") for part in (50, 90, 99)),
    _ms("first_token_s", "first token ms"),
    metric("utterances_per_second", "utterances /s", better="higher"),
    metric("streams", "streams", better="higher"),
    metric("cpu_peak_bytes", unit="bytes", better="lower", profiled=True),
    metric("cuda_peak_bytes", unit="bytes", better="lower", profiled=True),
    _mb("process_bytes", "process MB"),
    _mb("process_peak_bytes", "whole process MB"),
    _mb("device_allocated_bytes", "device MB"),
    metric("device_reserved_bytes", unit="bytes", better="lower"),
    _mb("device_used_bytes", "device used MB"),
    metric("output_error", "output error", error, better="lower"),
    metric("busy"),
)


@dataclass
class Inference(ModelRun[InferenceHeader]):
    """One profile, with all cells of its grid."""

    cells: List[GridCell] = field(default_factory=list)

    @property
    def axes(self) -> Dict[str, List[Any]]:
        return {key: list(values) for key, values in self.header.grid.items()} if self.header else {}

    def variants(self) -> List[Tuple[grid.Variant, List[GridCell]]]:
        """Return the cells of each way to run the model, in the order of the grid."""
        result: List[Tuple[grid.Variant, List[GridCell]]] = []
        for cell in self.cells:
            variant = cell.position.variant
            if not result or result[-1][0] != variant:
                result.append((variant, []))
            result[-1][1].append(cell)
        return result

    @property
    def statuses(self) -> List[str]:
        return [cell.status for cell in self.cells if cell.status != SKIPPED]


def self_time_rtf(us: float, batches: int, size: int, seconds: float) -> float:
    """Return the real-time factor of the self time of some batches.  us: microseconds; size, seconds: of each batch."""
    return us / 1e6 / batches / (size * seconds)


def streams(p90_s: float, size: int, seconds: float) -> int:
    """Return how many speakers the device keeps up with: the utterances in the batches of `size` that end one after the
    other while `seconds` of audio come in, at the speed that 90% of calls have."""
    return size * math.floor(seconds / p90_s)


def find(paths: Sequence[Any]) -> List[Inference]:
    """Return the profiles in, at or under `paths`; of several runs of the same on one machine the newest."""
    return newest(map(read, files(paths, schema.INFERENCE_FILE_NAME)))


def read(path: Path) -> Inference:
    """Return the profile in a file, or one that says in `reason` why it cannot be read."""
    try:
        header, records = model_run.read(path, InferenceHeader)
        jobs = store.latest_jobs(records)
        every = [_cell(position, header, jobs) for position in grid.positions(header.grid)]
    except UserError as mistake:
        return Inference(path, reason=str(mistake))
    return Inference(path, header, environment_of(records), cells=every)


def _cell(position: grid.Position, header: InferenceHeader, jobs: Dict[str, List[JobLine]]) -> GridCell:
    """Return the cell at a position with its numbers."""
    cell = GridCell(position)
    if header.config["profiling_dimensions"]["triangle_only"] and grid.is_skipped(position, header.grid):
        cell.status = SKIPPED
        return cell
    lines = jobs.get(position.job, [])
    end = store.status_of(lines) if lines else None
    if end is not None:
        cell.status, cell.reason = end.status, end.reason or ""
    for line in lines:
        if isinstance(line, OutputCheck):
            cell.output_error = line.error
        elif isinstance(line, CallMemory):
            _take(cell, line, "process_bytes", "process_peak_bytes")
            _take(cell, line, "device_allocated_bytes", "device_reserved_bytes", "device_used_bytes")
        elif isinstance(line, ProfiledCalls):
            _take(cell, line, "cpu_peak_bytes", "cuda_peak_bytes")
            amounts = line.batches, cell.size, cell.seconds
            cell.profiled_cpu_rtf = self_time_rtf(line.cpu_us, *amounts)
            cell.profiled_cuda_rtf = self_time_rtf(line.cuda_us, *amounts) if line.cuda_us else None
    calls = [line for line in lines if isinstance(line, Call) and not line.warmup]
    if calls and cell.status == "ok":
        _times(cell, calls)
    return cell


def _take(cell: GridCell, line: Any, *names: str) -> None:
    for name in names:
        setattr(cell, name, getattr(line, name))


def _times(cell: GridCell, calls: Iterable[Call]) -> None:
    calls = list(calls)
    seconds = [call.total_wall_ns / 1e9 for call in calls]
    audio = cell.size * cell.seconds
    cell.n, cell.busy = len(seconds), sum(bool(call.flags) for call in calls)
    cell.p50_s, cell.p90_s, cell.p99_s = (quantile(seconds, part) for part in (0.5, 0.9, 0.99))
    cell.rtf, cell.rtf_p20, cell.rtf_p80 = (quantile(seconds, part) / audio for part in (0.5, 0.2, 0.8))
    cell.utterances_per_second = cell.size / cell.p50_s
    cell.streams = streams(cell.p90_s, cell.size, cell.seconds)
    first = [call.first_ns / 1e9 for call in calls if call.first_ns is not None]
    cell.first_token_s = median(first) if first else None


def most_streams(cells: Sequence[GridCell]) -> Optional[GridCell]:
    """Return the cell with the largest number of real-time streams, None where none has one."""
    known = [cell for cell in cells if cell.streams is not None]
    return max(known, key=lambda cell: cell.streams or 0, default=None)
