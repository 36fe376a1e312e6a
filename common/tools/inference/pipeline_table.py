"""Prints pipelines: each stage and the whole, and several pipelines beside each other."""

from __future__ import annotations

from typing import Dict, List, Sequence

from common.analysis import metrics
from common.core.text import count, number
from common.core.units import MB, quantity
from common.present.export import csv_text, json_text
from common.present.table import Cell, Table, filled, measured, tabulated
from common.present.text import block, listed
from common.tools.inference import pipeline_rows
from common.tools.inference.pipeline_rows import Costs, Pipeline

HOW = "run time, MACs and FLOPs of stages add up; memory is the largest of a stage"


def stages(pipelines: Sequence[Pipeline]) -> Table:
    """Return each stage, and the whole of pipelines with several."""
    rows = [_row(pipeline, part) for pipeline in pipelines for part in pipeline.parts]
    return tabulated("pipelines", "An utterance, stage by stage", filled(rows))


def _row(pipeline: Pipeline, part: Costs) -> Dict[str, Cell]:
    """Return the cells of a stage; the status names how many examples ended there, which none of its numbers has."""
    total = len(pipeline.examples)
    examples = (
        measured(pipeline.measured)
        if pipeline.measured == total
        else Cell(f"{pipeline.measured} of {total}", pipeline.measured)
    )
    names = {"pipeline": Cell(pipeline.name), "stage": Cell(part.name), "examples": examples}
    status = Cell(f"{part.failed} failed") if part.failed else Cell("")
    return {**names, **metrics.cells(pipeline_rows.NUMBERS, part), "status": status}


def total(pipeline: Pipeline) -> List[str]:
    """Return a line about the whole, where its numbers are known."""
    whole = pipeline.whole
    if whole.run_time_s is None or whole.memory_bytes is None or whole.flops is None:
        return []
    return [
        f"run time {number(whole.run_time_s)} s, memory {number(whole.memory_bytes / MB)} MB, "
        f"{quantity(whole.flops, 'FLOPs')} an utterance (mean of {count(pipeline.measured, 'example')})"
    ]


def lines(pipeline: Pipeline) -> List[str]:
    """Return the lines below the table."""
    whole, environment = pipeline.whole, pipeline.environment
    result = []
    if len(pipeline.stages) > 1:
        result.append(HOW)
    if environment:
        threads = count(environment.threads or 0, "thread")
        result.append(
            f"{pipeline.name} on {environment.device_name}, {threads}, torch {' and '.join(pipeline.torches)}"
        )
    if whole.failed and pipeline.measured:
        result.append(f"{whole.failed} of {len(pipeline.examples)} examples failed: means are of the others alone")
    if pipeline.busy:
        result.append(f"{count(pipeline.busy, 'example')} ran beside other load: times are too long")
    if whole.not_counted:
        result.append(f"not counted in FLOPs: {', '.join(whole.not_counted)}")
    return result + failures(pipeline)


def failures(pipeline: Pipeline) -> List[str]:
    """Return why the pipeline could not be read, or why examples failed."""
    if pipeline.reason:
        return [pipeline.reason]
    return [f"{example.name}: {example.status}: {example.reason}" for example in pipeline.examples if example.reason]


def render(pipeline: Pipeline, format: str) -> str:
    """Return a pipeline as "table", "markdown", "csv" or "json"."""
    if format in ("csv", "json"):
        return (csv_text if format == "csv" else json_text)(pipeline.rows())
    if pipeline.reason:
        return f"{listed(failures(pipeline), format)}\n"
    first = [listed(total(pipeline), format)] if total(pipeline) else []
    return "\n\n".join([*first, block(stages([pipeline]), format), listed(lines(pipeline), format)]) + "\n"
