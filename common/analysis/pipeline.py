"""Pipelines on disk -> what an example costs: run time, memory and operations, of each stage and of all.

``read`` never raises for what is in a file: one that cannot be read says so in its `reason`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Sequence

from common.analysis import metrics
from common.analysis.metrics import metric
from common.analysis.model_run import ModelRun, environment_of
from common.core.errors import UserError
from common.core.statistics import mean, median
from common.core.units import MB, quantity
from common.records import model_run, schema, store
from common.records.schema import Call, CallMemory, JobLine, Operations, PipelineHeader


@dataclass
class Costs:
    """Of a stage over the examples that ended well, or of the whole.

    run_time_s: mean of each example's median over repeats; memory_bytes, most_memory_bytes: mean and maximum of the
    peaks of examples, above the level before the call (resident on a CPU, of torch's allocator on CUDA); process_bytes,
    most_process_bytes: likewise of the whole process; macs, flops, instructions: of an utterance, the mean.
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


_MB: Dict[str, Any] = {"scale": 1 / MB, "unit": "bytes", "better": "lower"}
#: Of a stage or the whole: its keys in CSV and JSON, and the columns of the table, in this order.
NUMBERS = (
    metric("run_time_s", "run time s", unit="s", better="lower"),
    metric("memory_bytes", "memory MB", **_MB),
    metric("most_memory_bytes", "at most MB", **_MB),
    metric("process_bytes", "whole process MB", **_MB),
    metric("most_process_bytes", "process at most MB", **_MB),
    metric("macs", "MACs", quantity, better="lower"),
    metric("flops", "FLOPs", quantity, better="lower"),
    metric("instructions", "instructions (perf)", quantity, better="lower"),
)
#: How the stages make the whole: one after the other, so that time and operations add up and memory does not.
ADDED = ("run_time_s", "macs", "flops", "instructions")
HIGHEST = ("memory_bytes", "most_memory_bytes", "process_bytes", "most_process_bytes")


class Example(NamedTuple):
    name: str
    status: str
    reason: str


@dataclass
class Pipeline(ModelRun[PipelineHeader]):
    """stages: in their order; examples: all of them."""

    stages: List[Costs] = field(default_factory=list)
    examples: List[Example] = field(default_factory=list)

    @property
    def whole(self) -> Costs:
        return cascade(self.stages)

    @property
    def parts(self) -> List[Costs]:
        """Each stage, and the whole where there are several."""
        return [*self.stages, *([self.whole] if len(self.stages) > 1 else [])]

    @property
    def statuses(self) -> List[str]:
        return [example.status for example in self.examples]

    @property
    def measured(self) -> int:
        """How many examples ended well."""
        return self.statuses.count("ok")

    def rows(self) -> List[Dict[str, Any]]:
        """Each stage, and the whole where there are several, as CSV and JSON have them."""
        about = {"pipeline": self.name, "examples": self.measured}
        return [
            {**about, "stage": one.name, **metrics.values(NUMBERS, one), "not_counted": one.not_counted}
            for one in self.parts
        ]


def cascade(stages: Sequence[Costs]) -> Costs:
    """Stages one after the other."""
    whole = Costs("all")
    for names, together in ((ADDED, sum), (HIGHEST, max)):
        for name in names:
            values = [getattr(one, name) for one in stages]
            setattr(whole, name, None if None in values or not values else together(values))
    whole.not_counted = sorted({name for one in stages for name in one.not_counted})
    return whole


def costs(name: str, examples: Sequence[Sequence[JobLine]]) -> Costs:
    """Of one stage, from the records of each example."""
    times, peaks, processes, counted = [], [], [], []
    for lines in examples:
        of_stage = [line for line in lines if getattr(line, "stage", None) == name]
        seconds = [line.total_wall_ns / 1e9 for line in of_stage if isinstance(line, Call) and not line.warmup]
        times += [median(seconds)] if seconds else []
        for line in of_stage:
            if isinstance(line, CallMemory):
                peaks.append(line.process_bytes if line.device_allocated_bytes is None else line.device_allocated_bytes)
                processes.append(line.process_peak_bytes)
        counted += [line for line in of_stage if isinstance(line, Operations)]
    known = [peak for peak in peaks if peak is not None]
    whole = [peak for peak in processes if peak is not None]
    ticks = [one.instructions for one in counted if one.instructions is not None]
    return Costs(
        name,
        run_time_s=mean(times) if times else None,
        memory_bytes=mean(known) if known else None,
        most_memory_bytes=max(known, default=None),
        process_bytes=mean(whole) if whole else None,
        most_process_bytes=max(whole, default=None),
        macs=mean([one.macs for one in counted]) if counted else None,
        flops=mean([one.flops for one in counted]) if counted else None,
        instructions=mean(ticks) if ticks else None,
        not_counted=sorted({name for one in counted for name in one.not_counted}),
    )


def find(paths: Sequence[Any]) -> List[Pipeline]:
    """In, at or under `paths`, by their files; of several runs of the same on one machine the newest."""
    return model_run.newest(map(read, model_run.files(paths, schema.PIPELINE_FILE_NAME)))


def read(path: Path) -> Pipeline:
    try:
        header, records = model_run.read(path, PipelineHeader)
    except UserError as error:
        return Pipeline(path, reason=str(error))
    jobs = store.latest_jobs(records)
    examples, well = [], []
    for name in header.examples:
        lines = jobs.get(name, [])
        end = store.status_of(lines) if lines else None
        examples.append(Example(name, end.status if end else "not run", (end.reason or "") if end else ""))
        if end and end.status == "ok":
            well.append(lines)
    stages = [costs(name, well) for name in header.stages]
    return Pipeline(path, header, environment_of(records), stages=stages, examples=examples)
