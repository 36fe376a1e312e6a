"""Read the configuration and the records of a pipeline: what an utterance costs, stage by stage.

A pipeline is a speech system of one or more stages, such as recognition, translation, synthesis.
An utterance of its data set is called an example."""

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
#: Statuses of an example that did not fail: it ended well, did not begin, or was interrupted.
NOT_FAILED = ("ok", NOT_RUN, "interrupted")
#: What the table calls the row of all stages.
ALL = "all (memory: largest)"
#: Makes a metric of bytes that are shown in MB.
_mb = partial(metric, scale=1 / text.MB, unit="bytes", better="lower")
#: The numbers of a stage, or of all stages: keys in CSV and JSON, columns of the table, in order.
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
#: Numbers that add up over the stages, which run one after the other.  Of the other numbers,
#: which are bytes of memory, the largest counts.
ADDED = ("run_time_s", "rtf", "macs", "flops")
#: Type of a classic system -> how many stages it may have.
MODEL_TYPES = {
    **dict.fromkeys(("S2S", "S2T", "TTS", "MT"), (1,)),
    "S2UT": (1, 2),
    "2StageS2ST": (2,),
    "3StageS2ST": (3,),
}


class General(Struct, forbid_unknown_fields=True, kw_only=True):
    """Keys of the whole pipeline, which `general` and the command line give.

    Attributes:
        model_type: of a classic system, which fixes its number of stages
        dataset_type: "made" (noise), or the kind of file at dataset_path, see datasets.READERS
        dataset_size: how many examples are measured, the first ones; None for all
        target_sr: sample rate of audio, Hz
        made_seconds: duration of each made example
    """

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
    """Keys of a stage.  `general` may give all but the name, the command line warmup and repeats.

    Attributes:
        factory: makes the model; this and the next two are "module:name" or "file.py:name"
        builder: makes the inputs, from the example or from what the stage before left
        converter: makes from the outputs what the next stage gets
        python: path of the Python in which the stage runs; None for the command's
        warmup, repeats: number of calls before the timed ones, and of timed calls
    """

    name: configuration.Text
    factory: configuration.Text
    arguments: dict[str, Any] = {}
    builder: configuration.Text | None = None
    converter: configuration.Text | None = None
    python: configuration.Text | None = None
    warmup: configuration.Count = 2
    repeats: configuration.Positive = 5


#: Keys of a stage that `general` may give for all stages.
SHARED = frozenset(Stage.__struct_fields__) - {"name"}


class Pipeline(Struct, kw_only=True):
    """A configuration, with the names of the examples of its data set."""

    general: General
    stages: list[Stage]
    examples: list[str] = []

    def job(self, example: str, stage: Stage) -> str:
        """Return the name of the job that measures a stage on an example."""
        return f"{example} {stage.name}"


class Request(Struct):
    """Ask a job for the costs of a stage on an example; both are indices in the configuration."""

    config: Pipeline
    example: int
    stage: int


class Costs(Struct, kw_only=True):
    """The costs of a stage on an example.

    Attributes:
        wall_ns: time of each timed call
        busy: how many timed calls ran beside other load
        memory_bytes: peak of a call above the level before it; resident memory on a CPU, torch's
            allocator on CUDA
        process_bytes: resident peak of the process
        macs, flops: operations of a call, forward
        not_counted: operators for which no rule counts operations
        seconds: duration of the example's audio; None for later stages, and for text
    """

    wall_ns: Annotated[list[int], Meta(min_length=1)]
    busy: int
    memory_bytes: int | None
    process_bytes: int | None
    macs: int
    flops: int
    not_counted: list[str]
    seconds: float | None = None


def configured(path: Path, flags: Mapping[str, Any], quick: Mapping[str, Any]) -> Pipeline:
    """Return the configuration in a YAML file.  Raises UserError.

    If a key has several values, that of `quick` wins over that of the stage, which wins over that
    of the file's part "general", which wins over that of `flags`.

    flags: values by key that flags gave; quick: values by key that --preset quick sets"""
    content = configuration.read(path)
    names = _check_keys(path, content)
    values = {**flags, **(content.get("general") or {}), **quick}
    for_stages = {key: value for key, value in values.items() if key in SHARED}
    for_general = {key: value for key, value in values.items() if key not in SHARED}
    general = configuration.converted(for_general, General, f"{path}: general")
    if general.dataset_path is not None:
        general.dataset_path = str(configuration.located(general.dataset_path, path))
    if general.model_type:
        allowed = MODEL_TYPES[general.model_type]
        if len(names) not in allowed:
            raise UserError(
                f"{path}: general.model_type: {general.model_type} has {' or '.join(map(str, allowed))} stages, "
                f"not {len(names)}"
            )
    # `for_stages` has these too, but there the stage's own values would win over them.
    of_quick = {key: value for key, value in quick.items() if key in SHARED}
    stages = [
        _stage(path, key, {"name": key, **for_stages, **content[key], **of_quick}) for key in names
    ]
    for index, stage in enumerate(stages):
        if stage.name in [other.name for other in stages[:index]]:
            raise UserError(
                f"{path}: two stages are called {text.shown(stage.name)}; give each a name of its own"
            )
    return Pipeline(general=general, stages=stages)


def _check_keys(path: Path, content: Mapping[str, Any]) -> list[str]:
    """Return the keys of the stages in a YAML file: ["stage1", "stage2"].

    Raises UserError for other keys than these and "general", for a gap in the numbers, for no
    stage, and for a value that is no mapping.  "general" may have no value."""
    numbered = [key for key in content if re.fullmatch(r"stage\d+", key)]
    names = [f"stage{number}" for number in range(1, 1 + len(numbered))]
    for key, value in content.items():
        if key not in ("general", *names):
            advice = text.closest(key, ["general", *names])
            if key.startswith("stage"):
                advice = "; stages are numbered from 1, without a gap"
            raise UserError(f"{path}: unknown key {text.shown(key)}{advice}")
        is_empty = key == "general" and not value
        if not isinstance(value, dict) and not is_empty:
            raise UserError(f"{path}: {key}: give keys and values, not {text.shown(value)}")
    if not names:
        raise UserError(f"{path}: has no stage1; a system that is end to end has one stage")
    return names


def _stage(path: Path, key: str, content: Mapping[str, Any]) -> Stage:
    """Return the stage `key` of the file at `path`, with absolute paths.  Raises UserError.

    content: the values of the stage by key"""
    stage = configuration.converted(content, Stage, f"{path}: {key}")
    for name in ("factory", "builder", "converter"):
        value = getattr(stage, name)
        if value:
            setattr(stage, name, configuration.python_name(value, path))
    if stage.python:
        stage.python = configuration.file(stage.python, path, f"{path}: {key}.python")
    return stage


class Row(Struct, kw_only=True):
    """The costs of a stage, or of all stages, over the examples that ended well.

    A number is None where no example has it.  How the row of all stages combines the numbers of the
    stages, see total_row.

    Attributes:
        failed: number of examples that failed at this stage, or at any stage
        not_counted: operators for which no rule counts operations
        run_time_s: mean over examples of the median over repeats
        rtf: real-time factor, the sum of run times over the seconds of all audio
        memory_bytes, process_bytes, macs, flops: means over examples
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


def stage_row(stage: str, costs: Sequence[Costs], seconds: float, failed: int) -> Row:
    """Return the row of a stage.

    costs: of each example that ended well; seconds: duration of the audio of all these examples, 0
    for text; failed: number of examples that failed at this stage"""
    times = [median(cost.wall_ns) / 1e9 for cost in costs]
    memory = [cost.memory_bytes for cost in costs if cost.memory_bytes is not None]
    process = [cost.process_bytes for cost in costs if cost.process_bytes is not None]
    return Row(
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
    """Return the mean; None for no numbers."""
    return fmean(numbers) if numbers else None


def total_row(rows: Sequence[Row]) -> Row:
    """Return the row of all stages, which run one after the other.

    Numbers of ADDED are summed over `rows`, and of other numbers the largest counts.  A number that
    any stage lacks is None."""
    numbers: dict[str, float | None] = {}
    for number in NUMBERS:
        of_stages = [getattr(row, number.key) for row in rows]
        combine = sum if number.key in ADDED else max
        numbers[number.key] = None if None in of_stages else combine(of_stages)
    not_counted = sorted({name for row in rows for name in row.not_counted})
    failed = sum(row.failed for row in rows)
    return Row(stage="all", failed=failed, not_counted=not_counted, **numbers)


class Ended(Struct):
    """Hold how the examples of a run ended.

    Attributes:
        costs: of each example that ended well, a Costs for each stage
        failed: of each example that failed, the index of the stage at which it did
        statuses: of every example
        failures: lines that say which example failed, where and why
    """

    costs: list[list[Costs]] = []
    failed: list[int] = []
    statuses: list[str] = []
    failures: list[str] = []

    @property
    def busy(self) -> int:
        """Return how many of the examples that ended well ran beside other load."""
        return sum(any(cost.busy for cost in costs) for costs in self.costs)


def ended(config: Pipeline, kept: Kept) -> Ended:
    """Return how the examples of a run ended.  Raises ValueError for records that are wrong."""
    result = Ended()
    for example in config.examples:
        costs = []
        for stage in config.stages:
            job = kept.job(config.job(example, stage))
            if job.status != "ok":
                break
            costs.append(job.of(Costs)[0])
        # `job` and `stage` are now where the example stopped: at the first that did not end well;
        # if all did, at the last.
        result.statuses.append(job.status)
        if job.status == "ok":
            result.costs.append(costs)
        elif job.status not in NOT_FAILED:
            result.failed.append(len(costs))  # the index of `stage`
        if job.reason:
            result.failures.append(f"{example}: {stage.name}: {job.status}: {job.reason}")
    return result


def answer(kept: Kept) -> Answer:
    """Return the answer of a run: a row for each stage, and one more for all if there are several.

    Raises ValueError for records that are wrong."""
    config = schema.typed(kept.header.config, Pipeline)
    examples = ended(config, kept)
    # Only the costs of the first stage have the duration of the audio.
    seconds = sum(costs[0].seconds or 0 for costs in examples.costs)
    rows = []
    for index, stage in enumerate(config.stages):
        costs = [of_example[index] for of_example in examples.costs]
        # `failed` has the index of a stage for each failed example: counted here are this stage's.
        rows.append(stage_row(stage.name, costs, seconds, examples.failed.count(index)))
    if len(rows) > 1:
        rows.append(total_row(rows))
    measured = len(examples.costs)
    of_all = f" of {len(config.examples)}" if measured < len(config.examples) else ""
    titles = [*(stage.name for stage in config.stages), ALL]
    table = [
        {
            "stage": Cell(title),
            "examples": Cell(f"{measured}{of_all}", measured),
            **cells(NUMBERS, row),
            "status": Cell(f"{row.failed} failed" if row.failed else ""),
        }
        for title, row in zip(titles, rows)
    ]
    counts = {"examples": measured, "of": len(config.examples), "busy": examples.busy}
    return Answer(
        kept.header.name,
        total=_total(rows, examples),
        tables=[tabulated("stages", "An utterance, stage by stage", filled(table))],
        lines=_notes(rows, examples, kept),
        failures=examples.failures,
        rows=[
            {
                "stage": row.stage,
                **counts,
                **values(NUMBERS, row),
                "not_counted": row.not_counted,
                "failed": row.failed,
            }
            for row in rows
        ],
        statuses=examples.statuses,
    )


def _total(rows: Sequence[Row], examples: Ended) -> list[str]:
    """Return the mean costs of an utterance as a list of one line; [] where the run time or the
    memory is not known."""
    total = rows[-1]  # of all stages; that of a single stage is the total too
    if total.run_time_s is None or total.memory_bytes is None:
        return []
    busy = text.count(examples.busy, "example")
    load = f" (beside other load in {busy})" if examples.busy else ""
    largest = " of the largest stage" if len(rows) > 1 else ""
    memory = text.number(total.memory_bytes / text.MB)
    mean = f"mean of {text.count(len(examples.costs), 'example')}"
    return [
        f"run time {text.number(total.run_time_s)} s{load}, memory{largest} {memory} MB, "
        f"{text.quantity(total.flops, 'FLOPs')} an utterance ({mean})"
    ]


def _notes(rows: Sequence[Row], examples: Ended, kept: Kept) -> list[str]:
    """Return the lines below the table: how to read it, the machine, and why numbers may be off.

    rows: of the stages; with several stages the last is the total."""
    lines = []
    if len(rows) > 1:
        lines.append("run time, MACs and FLOPs of stages add up; memory is the largest of a stage")
    lines += kept.machine
    if examples.failed and examples.costs:
        failed = f"{len(examples.failed)} of {len(examples.statuses)} examples failed"
        lines.append(f"{failed}: means are of the others alone")
    if examples.busy:
        busy = text.count(examples.busy, "example")
        lines.append(f"{busy} ran beside other load: times are too long")
    if rows[-1].not_counted:
        lines.append(f"not counted in FLOPs: {', '.join(rows[-1].not_counted)}")
    return lines


SLICE = slice_of(TOOL, TITLE, answer)
