"""Pipelines in words: each stage and the whole, and several pipelines beside each other."""

from __future__ import annotations

from typing import Dict, List, Optional, Sequence

from common.analysis.pipeline import Costs, Pipeline
from common.core.table import Cell, Table, measured, tabulated
from common.core.text import count, number
from common.core.units import MB, quantity
from common.tables.export import csv_text, json_text
from common.tables.text import block, listed

HOW = "run time, MACs and FLOPs of stages add up; memory is the largest of a stage"


def stages(found: Sequence[Pipeline]) -> Table:
    """Each stage, and the whole of pipelines with several."""
    rows = []
    for pipeline in found:
        parts = [*pipeline.stages, *([pipeline.whole] if len(pipeline.stages) > 1 else [])]
        rows += [_row(pipeline, one) for one in parts]
    filled = {title for row in rows for title, cell in row.items() if cell.shown not in ("-", "")}
    kept = [{title: cell for title, cell in row.items() if title in filled} for row in rows]
    return tabulated("pipelines", "An utterance, stage by stage", kept)


def _row(pipeline: Pipeline, one: Costs) -> Dict[str, Cell]:
    return {
        "pipeline": Cell(pipeline.name),
        "stage": Cell(one.name),
        "examples": measured(pipeline.measured),
        "run time s": measured(one.run_time_s),
        "memory MB": _megabytes(one.memory_bytes),
        "at most MB": _megabytes(one.most_memory_bytes),
        "whole process MB": _megabytes(one.process_bytes),
        "process at most MB": _megabytes(one.most_process_bytes),
        "MACs": _amount(one.macs),
        "FLOPs": _amount(one.flops),
        "instructions (perf)": _amount(one.instructions),
    }


def _megabytes(value: Optional[float]) -> Cell:
    return measured(None if value is None else value / MB)


def _amount(value: Optional[float]) -> Cell:
    return Cell("-" if value is None else quantity(round(value)), value)


def lines(found: Pipeline) -> List[str]:
    """Below the table."""
    whole, about = found.whole, found.environment
    result = []
    if whole.run_time_s is not None and whole.memory_bytes is not None and whole.flops is not None:
        result.append(
            f"run time {number(whole.run_time_s)} s, memory {number(whole.memory_bytes / MB)} MB, "
            f"{quantity(round(whole.flops), 'FLOPs')} an utterance (mean of {count(found.measured, 'example')})"
        )
    if len(found.stages) > 1:
        result.append(HOW)
    if about:
        threads = count(about.threads or 0, "thread")
        result.append(f"{found.name} on {about.device_name}, {threads}, torch {about.torch}")
    if whole.not_counted:
        result.append(f"not counted in FLOPs: {', '.join(whole.not_counted)}")
    return result + failures(found)


def failures(found: Pipeline) -> List[str]:
    if found.reason:
        return [found.reason]
    return [f"{one.name}: {one.status}: {one.reason}" for one in found.examples if one.reason]


def render(found: Pipeline, format: str) -> str:
    """As "table", "markdown", "csv" or "json"."""
    if format in ("csv", "json"):
        return (csv_text if format == "csv" else json_text)(found.rows())
    if found.reason:
        return f"{listed(failures(found), format)}\n"
    return f"{block(stages([found]), format)}\n\n{listed(lines(found), format)}\n"
