"""Tells from the records of a pipeline what an utterance costs: time, memory and operations, by stage."""

from __future__ import annotations

from functools import partial
from typing import Dict, List, NamedTuple, Optional

from common.analysis.metrics import cells, values
from common.core.statistics import mean, median
from common.core.text import count, number
from common.core.units import MB, quantity
from common.present.table import Cell, filled, tabulated
from common.records import schema
from common.tools.kept import NOT_RUN, Answer, Job, Kept, of_row
from common.tools.pipelines.stages import Costs, Pipeline

TOOL, TITLE = "pipeline", "Pipelines: what an utterance costs"
#: Statuses of an example that ended by itself, and did not end well, are all but these.
UNFAILED = ("ok", NOT_RUN, "interrupted")
_mb = partial(of_row, scale=1 / MB, unit="bytes", better="lower")
#: The numbers of a stage or the whole: keys in CSV and JSON, and columns of the table, in this order.
NUMBERS = (
    of_row("run_time_s", "run time s", unit="s", better="lower"),
    of_row("rtf", "RTF", lambda value: "-" if value is None else f"{value:.2E}", better="lower"),
    _mb("memory_bytes", "memory MB"),
    _mb("most_memory_bytes", "at most MB"),
    _mb("process_bytes", "whole process MB"),
    _mb("most_process_bytes", "process at most MB"),
    of_row("macs", "MACs", quantity, better="lower"),
    of_row("flops", "FLOPs", quantity, better="lower"),
)
#: How the stages make the whole: one after the other, so that time and operations add up and memory does not.
ADDED = ("run_time_s", "rtf", "macs", "flops")


class Part(NamedTuple):
    """A stage over the examples that ended well, or the whole; its numbers are those of NUMBERS that are known.

    failed: how many examples ended in it."""

    stage: str
    failed: int
    not_counted: List[str]
    numbers: Dict[str, Optional[float]]


def part(stage: str, costs: List[Costs], seconds: Optional[float], failed: int) -> Part:
    """Return a stage from what it costs on each example.  seconds: of all their audio.

    run_time_s is the mean of each example's median over repeats, rtf all of these over the seconds of all audio;
    memory_bytes and process_bytes are means over examples."""
    times = [median(each.wall_ns) / 1e9 for each in costs]
    numbers: Dict[str, Optional[float]] = {"run_time_s": mean(times) if times else None}
    numbers["rtf"] = sum(times) / seconds if seconds else None
    for key in ("memory_bytes", "process_bytes", "macs", "flops"):
        known = [getattr(each, key) for each in costs if getattr(each, key) is not None]
        numbers[key], numbers[f"most_{key}"] = (mean(known) if known else None), max(known, default=None)
    return Part(stage, failed, sorted({name for each in costs for name in each.not_counted}), numbers)


def whole(parts: List[Part]) -> Part:
    """Return stages that run one after the other as one."""
    numbers: Dict[str, Optional[float]] = {}
    for key in parts[0].numbers:
        known = [each.numbers[key] for each in parts]
        added = [each for each in known if each is not None]
        numbers[key] = None if None in known else (sum if key in ADDED else max)(added)
    names = sorted({name for each in parts for name in each.not_counted})
    return Part("all", sum(each.failed for each in parts), names, numbers)


def answer(kept: Kept) -> Answer:
    """Return what a run found out.  Raises ValueError for records that are wrong."""
    config = schema.typed(kept.header.config, Pipeline)
    names = [stage.name for stage in config.stages]
    jobs = {example: [kept.job(config.job(example, stage)) for stage in config.stages] for example in config.examples}
    ends = {example: _end(each) for example, each in jobs.items()}
    statuses = {example: each[number].status for (example, each), number in zip(jobs.items(), ends.values())}
    well = {name: [job.of(Costs)[0] for job in each] for name, each in jobs.items() if statuses[name] == "ok"}
    lengths = [costs[0].seconds for costs in well.values()]
    seconds = None if None in lengths else sum(filter(None, lengths))
    failed = [ends[example] for example, status in statuses.items() if status not in UNFAILED]
    parts = [
        part(name, [costs[number] for costs in well.values()], seconds, failed.count(number))
        for number, name in enumerate(names)
    ]
    every = [*parts, *([whole(parts)] if len(parts) > 1 else [])]
    lines = ["run time, MACs and FLOPs of stages add up; memory is the largest of a stage"] if parts[1:] else []
    lines += kept.machine
    if failed and well:
        lines.append(f"{len(failed)} of {len(jobs)} examples failed: means are of the others alone")
    busy = sum(any(each.busy for each in costs) for costs in well.values())
    if busy:
        lines.append(f"{count(busy, 'example')} ran beside other load: times are too long")
    if every[-1].not_counted:
        lines.append(f"not counted in FLOPs: {', '.join(every[-1].not_counted)}")
    seconds, memory, flops = (every[-1].numbers[key] for key in ("run_time_s", "memory_bytes", "flops"))
    total = []
    if seconds is not None and memory is not None and flops is not None:
        words = (
            f"run time {number(seconds)} s, memory {number(memory / MB)} MB, {quantity(flops, 'FLOPs')} an utterance"
        )
        total = [f"{words} (mean of {count(len(well), 'example')})"]
    shown = f"{len(well)}" if len(well) == len(jobs) else f"{len(well)} of {len(jobs)}"
    table = [
        {
            "stage": Cell(each.stage),
            "examples": Cell(shown, len(well)),
            **cells(NUMBERS, each),
            "status": Cell(f"{each.failed} failed" if each.failed else ""),
        }
        for each in every
    ]
    counts = {"examples": len(well), "of": len(jobs), "busy": busy}
    return Answer(
        kept.header.name,
        total,
        [tabulated("stages", "An utterance, stage by stage", filled(table))],
        lines,
        [
            f"{example}: {names[ends[example]]}: {each[ends[example]].status}: {each[ends[example]].reason}"
            for example, each in jobs.items()
            if each[ends[example]].reason
        ],
        [
            {
                **{"stage": each.stage, **counts},
                **values(NUMBERS, each),
                **{"not_counted": each.not_counted, "failed": each.failed},
            }
            for each in every
        ],
        list(statuses.values()),
    )


def _end(jobs: List[Job]) -> int:
    """Return the number of the first stage that did not end well, or of the last."""
    return next((number for number, job in enumerate(jobs) if job.status != "ok"), len(jobs) - 1)
