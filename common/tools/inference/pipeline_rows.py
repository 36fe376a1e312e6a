"""Reads pipelines from disk into what an example costs: run time, memory and operations, of each stage and of all.

``read`` never raises for what is in a file: one that cannot be read says so in its `reason`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, List, NamedTuple, Optional, Sequence

from common.analysis import metrics
from common.analysis.metrics import metric
from common.core.errors import UserError
from common.core.statistics import mean, median
from common.core.units import MB, quantity
from common.present.table import Values
from common.records import schema, store
from common.records.schema import Call, CallMemory, Environment, JobLine, Operations, PipelineHeader
from common.tools.files import files, newest
from common.tools.inference import records as model_run
from common.tools.inference.rows_of_both import ModelRun, environment_of

#: The status of an example that a run was stopped before.
NOT_RUN = "not run"


@dataclass
class Costs:
    """Numbers of a stage over the examples that ended well, or of the whole.

    run_time_s is the mean of each example's median over repeats; memory_bytes and most_memory_bytes are the mean and
    the maximum of the peaks of examples, above the level before the call (resident on a CPU, of torch's allocator on
    CUDA).  process_bytes and most_process_bytes are likewise of the whole process; macs, flops and instructions are of
    an utterance, the mean.  busy counts examples of which a call ran beside other load; failed counts those that ended
    in this stage, which no mean has.
    """

    name: str
    run_time_s: Optional[float] = None
    memory_bytes: Optional[float] = None
    most_memory_bytes: Optional[float] = None
    process_bytes: Optional[float] = None
    most_process_bytes: Optional[float] = None
    macs: Optional[float] = None
    flops: Optional[float] = None
    instructions: Optional[float] = None
    not_counted: List[str] = field(default_factory=list)
    busy: int = 0
    failed: int = 0


_mb = partial(metric, scale=1 / MB, unit="bytes", better="lower")
#: The numbers of a stage or the whole: keys in CSV and JSON, and columns of the table, in this order.
NUMBERS = (
    metric("run_time_s", "run time s", unit="s", better="lower"),
    _mb("memory_bytes", "memory MB"),
    _mb("most_memory_bytes", "at most MB"),
    _mb("process_bytes", "whole process MB"),
    _mb("most_process_bytes", "process at most MB"),
    metric("macs", "MACs", quantity, better="lower"),
    metric("flops", "FLOPs", quantity, better="lower"),
    metric("instructions", "instructions (perf)", quantity, better="lower"),
)
#: How the stages make the whole: one after the other, so that time and operations add up and memory does not.
ADDED = ("run_time_s", "macs", "flops", "instructions")
HIGHEST = ("memory_bytes", "most_memory_bytes", "process_bytes", "most_process_bytes")
#: Statuses of an example that ended by itself, and did not end well, are all but these.
UNFAILED = ("ok", NOT_RUN, "interrupted")


class Example(NamedTuple):
    name: str
    status: str
    reason: str


@dataclass
class Pipeline(ModelRun[PipelineHeader]):
    """Holds the stages in their order, and all examples; busy of these ran beside other load.

    torches are the versions of torch that the stages ran under.
    """

    stages: List[Costs] = field(default_factory=list)
    examples: List[Example] = field(default_factory=list)
    busy: int = 0
    torches: List[str] = field(default_factory=list)

    @property
    def whole(self) -> Costs:
        return replace(cascade(self.stages), busy=self.busy)

    @property
    def parts(self) -> List[Costs]:
        """Return each stage, and the whole where there are several."""
        return [*self.stages, *([self.whole] if len(self.stages) > 1 else [])]

    @property
    def statuses(self) -> List[str]:
        return [example.status for example in self.examples]

    @property
    def measured(self) -> int:
        """Return how many examples ended well."""
        return self.statuses.count("ok")

    def rows(self) -> List[Values]:
        """Return each stage, and the whole where there are several, as CSV and JSON have them."""
        counts = {"pipeline": self.name, "examples": self.measured, "of": len(self.examples)}
        return [
            {
                **counts,
                "stage": part.name,
                **metrics.values(NUMBERS, part),
                "not_counted": part.not_counted,
                "busy": part.busy,
                "failed": part.failed,
            }
            for part in self.parts
        ]


def cascade(stages: Sequence[Costs]) -> Costs:
    """Return the costs of stages that run one after the other."""
    whole = Costs("all")
    for names, together in ((ADDED, sum), (HIGHEST, max)):
        for name in names:
            values = [getattr(stage, name) for stage in stages]
            setattr(whole, name, None if None in values or not values else together(values))
    whole.failed = sum(part.failed for part in stages)
    whole.not_counted = sorted({name for stage in stages for name in stage.not_counted})
    return whole


def costs(name: str, examples: Sequence[Sequence[JobLine]]) -> Costs:
    """Return the costs of a stage, from the records of each example."""
    times, peaks, processes, counted, busy = [], [], [], [], 0
    for lines in examples:
        of_stage = [line for line in lines if getattr(line, "stage", None) == name]
        calls = _timed(of_stage)
        times += [median([call.total_wall_ns / 1e9 for call in calls])] if calls else []
        busy += any(call.flags for call in calls)
        for line in of_stage:
            if isinstance(line, CallMemory):
                peaks.append(line.process_bytes if line.device_allocated_bytes is None else line.device_allocated_bytes)
                processes.append(line.process_peak_bytes)
        counted += [line for line in of_stage if isinstance(line, Operations)]
    known = [peak for peak in peaks if peak is not None]
    whole = [peak for peak in processes if peak is not None]
    ticks = [record.instructions for record in counted if record.instructions is not None]
    return Costs(
        name,
        run_time_s=mean(times) if times else None,
        memory_bytes=mean(known) if known else None,
        most_memory_bytes=max(known, default=None),
        process_bytes=mean(whole) if whole else None,
        most_process_bytes=max(whole, default=None),
        macs=mean([record.macs for record in counted]) if counted else None,
        flops=mean([record.flops for record in counted]) if counted else None,
        instructions=mean(ticks) if ticks else None,
        not_counted=sorted({name for record in counted for name in record.not_counted}),
        busy=busy,
    )


def _timed(lines: Sequence[JobLine]) -> List[Call]:
    return [line for line in lines if isinstance(line, Call) and not line.warmup]


def failed_in(lines: Sequence[JobLine], stages: Sequence[str]) -> str:
    """Return the first stage whose operations, the last that is measured of one, are not among the records."""
    ended = {line.stage for line in lines if isinstance(line, Operations)}
    return next((name for name in stages if name not in ended), stages[-1])


def find(paths: Sequence[Any]) -> List[Pipeline]:
    """Return the pipelines in, at or under `paths`; of several runs of the same on one machine the newest."""
    return newest(map(read, files(paths, schema.PIPELINE_FILE_NAME)))


def read(path: Path) -> Pipeline:
    """Return the pipeline in a file, or one that says in `reason` why it cannot be read."""
    try:
        header, records = model_run.read(path, PipelineHeader)
    except UserError as error:
        return Pipeline(path, reason=str(error))
    jobs = store.latest_jobs(records)
    examples, well, failed = [], [], []
    for name in header.examples:
        lines = jobs.get(name, [])
        end = store.status_of(lines) if lines else None
        examples.append(Example(name, end.status if end else NOT_RUN, (end.reason or "") if end else ""))
        if end and end.status == "ok":
            well.append(lines)
        if examples[-1].status not in UNFAILED:
            failed.append(failed_in(lines, header.stages))
    stages = [replace(costs(name, well), failed=failed.count(name)) for name in header.stages]
    torches = sorted({line.torch for line in records if isinstance(line, (Environment, Operations)) and line.torch})
    busy = sum(any(call.flags for call in _timed(lines)) for lines in well)
    return Pipeline(path, header, environment_of(records), "", stages, examples, busy, torches)
