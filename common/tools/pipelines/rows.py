"""Tells from the records of a pipeline what an utterance costs: time, memory and operations, by
stage."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

from rnnt_bench.analysis.metrics import cells, metric, values
from rnnt_bench.core import text
from rnnt_bench.core.errors import UserError
from rnnt_bench.present.parts import Cell, filled, tabulated
from rnnt_bench.records import schema
from rnnt_bench.tools import configuration
from rnnt_bench.tools.kept import NOT_RUN, Answer, Kept, slice_of

TOOL, TITLE = "pipeline", "Pipelines: what an utterance costs"
#: Statuses of an example that ended by itself, and did not end well, are all but these.
UNFAILED = ("ok", NOT_RUN, "interrupted")
_mb = partial(metric, scale=1 / text.MB, unit="bytes", better="lower")
#: The numbers of a stage or the whole: keys in CSV and JSON, and columns of the table, in this
#: order.
NUMBERS = (
    metric("run_time_s", "run time s", unit="s", better="lower"),
    metric("rtf", "RTF", lambda value: "-" if value is None else f"{value:.2E}", better="lower"),
    _mb("memory_bytes", "memory MB"),
    _mb("most_memory_bytes", "at most MB"),
    _mb("process_bytes", "whole process MB"),
    _mb("most_process_bytes", "process at most MB"),
    metric("macs", "MACs", text.quantity, better="lower"),
    metric("flops", "FLOPs", text.quantity, better="lower"),
)
#: Columns that add up over the stages, which run one after the other. Memory does not.
ADDED = ("run_time_s", "rtf", "macs", "flops")
#: Type of a classic system -> number of its stages.
MODEL_TYPES = {
    **dict.fromkeys(("S2S", "S2T", "TTS", "MT"), (1,)),
    "S2UT": (1, 2),
    "2StageS2ST": (2,),
    "3StageS2ST": (3,),
}


class General(Struct, forbid_unknown_fields=True, kw_only=True):
    """Keys of the whole pipeline, which `general` and the command line give.  dataset_type: "made"
    (noise), or what is at dataset_path, see datasets.READERS; dataset_size: the first examples;
    target_sr: samples in a second."""

    model_type: Literal[tuple(MODEL_TYPES)] | None = None  # type: ignore[valid-type]
    dataset_type: Literal["made", "raw", "npy", "jsonl"] = "made"
    dataset_path: configuration.Text | None = None
    dataset_size: configuration.Positive | None = None
    target_sr: configuration.Positive = 16000
    made_seconds: Annotated[list[configuration.Seconds], Meta(min_length=1)] = field(
        default_factory=lambda: [2, 4, 8]
    )

    def __post_init__(self) -> None:
        configuration.check_list(self.made_seconds, "made_seconds")


class Stage(Struct, forbid_unknown_fields=True, kw_only=True):
    """Keys of a stage; `general` may give all but its name, the command line the numbers.

    factory: "module:name" or "file.py:name" of what makes the model; builder: makes the inputs of
    the example, or of what the stage before gave; converter: makes of the outputs what the next
    gets; python: None for the command's."""

    name: configuration.Text
    factory: configuration.Text
    arguments: dict[str, Any] = {}
    builder: configuration.Text | None = None
    converter: configuration.Text | None = None
    python: configuration.Text | None = None
    warmup: configuration.Count = 2
    repeats: configuration.Positive = 5


class Pipeline(Struct, kw_only=True):
    """A configuration.  examples: the names of those of the data set."""

    general: General
    stages: list[Stage]
    examples: list[str] = []

    def job(self, example: str, stage: Stage) -> str:
        """Return the name of the job that measures a stage on an example."""
        return f"{example} {stage.name}"


class Request(Struct):
    """Hold a configuration and the numbers of the example and the stage of it that a job measures."""

    config: Pipeline
    example: int
    stage: int


class Costs(Struct, kw_only=True):
    """The costs of a stage on an example.

    wall_ns: time of each timed call; busy: calls beside other load; memory_bytes: peak of a call
    above the level before it, resident on a CPU, of torch's allocator on CUDA; process_bytes:
    resident peak of the process; macs, flops: of a call, forward; not_counted: operators without a
    rule; seconds: of audio in the example, for the first stage."""

    wall_ns: Annotated[list[int], Meta(min_length=1)]
    busy: int
    memory_bytes: int | None
    process_bytes: int | None
    macs: int
    flops: int
    not_counted: list[str]
    seconds: float | None = None


def configured(path: Path, flags: Mapping[str, Any], quick: Mapping[str, Any]) -> Pipeline:
    """Return a YAML file's configuration: a stage over `general` over `flags`, `quick` over all.
    Raises UserError."""
    values = configuration.read(path)
    numbered = [key for key in values if re.fullmatch(r"stage\d+", key)]
    names = [f"stage{number}" for number in range(1, 1 + len(numbered))]  # without a gap
    for key, content in values.items():
        if key not in ("general", *names):
            gap = "; stages are numbered from 1, without a gap" if key.startswith("stage") else ""
            raise UserError(
                f"{path}: unknown key {text.shown(key)}{gap or text.closest(key, ['general', *names])}"
            )
        if not isinstance(content, dict) and (key != "general" or content):
            raise UserError(f"{path}: {key}: give keys and values, not {text.shown(content)}")
    if not names:
        raise UserError(f"{path}: has no stage1; a system that is end to end has one stage")
    of_stages = {*Stage.__struct_fields__} - {"name"}
    shared = {**flags, **(values.get("general") or {}), **quick}
    whole = {key: value for key, value in shared.items() if key not in of_stages}
    general = configuration.converted(whole, General, f"{path}: general")
    accepted = MODEL_TYPES.get(general.model_type or "", (len(names),))
    if len(names) not in accepted:
        wanted = " or ".join(map(str, accepted))
        raise UserError(
            f"{path}: general.model_type: {general.model_type} has {wanted} stages, not {len(names)}"
        )
    if general.dataset_path is not None:
        general.dataset_path = str(configuration.located(general.dataset_path, path))
    below = {key: value for key, value in shared.items() if key in of_stages}
    above = {key: value for key, value in quick.items() if key in of_stages}
    stages: list[Stage] = []
    for key in names:
        stage = configuration.converted(
            {"name": key, **below, **values[key], **above}, Stage, f"{path}: {key}"
        )
        if stage.name in [other.name for other in stages]:
            raise UserError(
                f"{path}: two stages are called {text.shown(stage.name)}; give each a name of its own"
            )
        for name in ("factory", "builder", "converter"):
            setattr(
                stage,
                name,
                getattr(stage, name) and configuration.python_name(getattr(stage, name), path),
            )
        stage.python = stage.python and configuration.file(
            stage.python, path, f"{path}: {key}.python"
        )
        stages.append(stage)
    return Pipeline(general=general, stages=stages)


class Part(Struct, kw_only=True):
    """A row of a stage, or of all of them, over the examples that ended well; numbers are null
    where none is known.

    Attributes:
        failed: examples that it ended
        not_counted: operators without a rule
        run_time_s: mean of medians over repeats
        rtf: sum of these over the seconds of all audio
        memory_bytes, process_bytes, macs, flops: means
        most_memory_bytes, most_process_bytes: of the example with the most
    """

    stage: str
    failed: int
    not_counted: list[str]
    run_time_s: float | None
    rtf: float | None
    memory_bytes: float | None
    most_memory_bytes: float | None
    process_bytes: float | None
    most_process_bytes: float | None
    macs: float | None
    flops: float | None


def part(stage: str, costs: list[Costs], seconds: float, failed: int) -> Part:
    """Return a stage.  seconds: of all audio of `costs`."""
    times = [median(cost.wall_ns) / 1e9 for cost in costs]
    memory = [cost.memory_bytes for cost in costs if cost.memory_bytes is not None]
    process = [cost.process_bytes for cost in costs if cost.process_bytes is not None]
    return Part(
        stage=stage,
        failed=failed,
        not_counted=sorted({name for cost in costs for name in cost.not_counted}),
        run_time_s=_mean(times),
        rtf=sum(times) / seconds if seconds else None,
        memory_bytes=_mean(memory),
        most_memory_bytes=max(memory, default=None),
        process_bytes=_mean(process),
        most_process_bytes=max(process, default=None),
        macs=_mean([cost.macs for cost in costs]),
        flops=_mean([cost.flops for cost in costs]),
    )


def _mean(numbers: Sequence[float]) -> float | None:
    return fmean(numbers) if numbers else None


#: How tables call the row of all stages.
ALL = "all (memory: largest)"


def whole(parts: list[Part]) -> Part:
    """Return stages that run one after the other as one."""
    numbers: dict[str, float | None] = {}
    for key in (number.key for number in NUMBERS):
        of_parts = [getattr(part, key) for part in parts]
        numbers[key] = None if None in of_parts else (sum if key in ADDED else max)(of_parts)
    not_counted = sorted({name for part in parts for name in part.not_counted})
    return Part(
        stage="all", failed=sum(part.failed for part in parts), not_counted=not_counted, **numbers
    )


def answer(kept: Kept) -> Answer:
    """Return what a run found out.  Raises ValueError for records that are wrong."""
    config = schema.typed(kept.header.config, Pipeline)
    names = [stage.name for stage in config.stages]
    result = Answer(kept.header.name)
    well: list[list[Costs]] = []
    failed: list[int] = []  # the number of the stage that failed, of each example that did
    for example in config.examples:
        jobs = [kept.job(config.job(example, stage)) for stage in config.stages]
        number, end = next(
            ((n, job) for n, job in enumerate(jobs) if job.status != "ok"), (0, jobs[0])
        )
        result.statuses.append(end.status)
        if end.status == "ok":
            well.append([job.of(Costs)[0] for job in jobs])
        elif end.status not in UNFAILED:
            failed.append(number)
        if end.reason:
            result.failures.append(f"{example}: {names[number]}: {end.status}: {end.reason}")
    seconds = sum(costs[0].seconds or 0 for costs in well)
    every = [
        part(name, [costs[index] for costs in well], seconds, failed.count(index))
        for index, name in enumerate(names)
    ]
    every += [whole(every)] if len(every) > 1 else []
    total = every[-1]
    busy = sum(any(cost.busy for cost in costs) for costs in well)
    if total.run_time_s is not None and total.memory_bytes is not None:
        largest = " of the largest stage" if len(every) > 1 else ""
        memory = text.number(total.memory_bytes / text.MB)
        amounts = f"memory{largest} {memory} MB, {text.quantity(total.flops, 'FLOPs')}"
        mean = f"an utterance (mean of {text.count(len(well), 'example')})"
        load = f" (beside other load in {text.count(busy, 'example')})" if busy else ""
        result.total.append(f"run time {text.number(total.run_time_s)} s{load}, {amounts} {mean}")
    if len(every) > 1:
        result.lines.append(
            "run time, MACs and FLOPs of stages add up; memory is the largest of a stage"
        )
    result.lines += kept.machine
    if failed and well:
        words = f"{len(failed)} of {len(config.examples)} examples failed"
        result.lines.append(f"{words}: means are of the others alone")
    if busy:
        words = f"{text.count(busy, 'example')} ran beside other load"
        result.lines.append(f"{words}: times are too long")
    if total.not_counted:
        result.lines.append(f"not counted in FLOPs: {', '.join(total.not_counted)}")
    rest = "" if len(well) == len(config.examples) else f" of {len(config.examples)}"
    table = [
        {
            "stage": Cell(line.stage if len(names) == 1 or line is not total else ALL),
            "examples": Cell(f"{len(well)}{rest}", len(well)),
            **cells(NUMBERS, line),
            "status": Cell(f"{line.failed} failed" if line.failed else ""),
        }
        for line in every
    ]
    result.tables.append(tabulated("stages", "An utterance, stage by stage", filled(table)))
    counts = {"examples": len(well), "of": len(config.examples), "busy": busy}
    for line in every:
        row = {"stage": line.stage, **counts, **values(NUMBERS, line)}
        result.rows.append({**row, "not_counted": line.not_counted, "failed": line.failed})
    return result


SLICE = slice_of(TOOL, TITLE, answer)
