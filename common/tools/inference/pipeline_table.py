"""Pipelines in words: each stage and the whole, and several pipelines beside each other."""

from __future__ import annotations

from typing import Dict, List, Sequence

from common.analysis import metrics
from common.core.text import count, number
from common.core.units import MB, quantity
from common.present.export import csv_text, json_text
from common.present.table import Cell, Table, filled, measured, tabulated
from common.present.text import block, listed
from common.tools.inference import pipeline_rows as pipeline
from common.tools.inference.pipeline_rows import Costs, Pipeline

HOW = "run time, MACs and FLOPs of stages add up; memory is the largest of a stage"


def stages(found: Sequence[Pipeline]) -> Table:
    """Each stage, and the whole of pipelines with several."""
    rows = [_row(of, one) for of in found for one in of.parts]
    return tabulated("pipelines", "An utterance, stage by stage", filled(rows))


def _row(of: Pipeline, part: Costs) -> Dict[str, Cell]:
    """Return the cells of a stage; the status names how many examples ended there, which none of its numbers has."""
    total = len(of.examples)
    examples = measured(of.measured) if of.measured == total else Cell(f"{of.measured} of {total}", of.measured)
    names = {"pipeline": Cell(of.name), "stage": Cell(part.name), "examples": examples}
    status = Cell(f"{part.failed} failed") if part.failed else Cell("")
    return {**names, **metrics.cells(pipeline.NUMBERS, part), "status": status}


def total(piped: Pipeline) -> List[str]:
    """Return a line about the whole, where its numbers are known."""
    whole = piped.whole
    if whole.run_time_s is None or whole.memory_bytes is None or whole.flops is None:
        return []
    return [
        f"run time {number(whole.run_time_s)} s, memory {number(whole.memory_bytes / MB)} MB, "
        f"{quantity(whole.flops, 'FLOPs')} an utterance (mean of {count(piped.measured, 'example')})"
    ]


def lines(found: Pipeline) -> List[str]:
    """Below the table."""
    whole, about = found.whole, found.environment
    result = []
    if len(found.stages) > 1:
        result.append(HOW)
    if about:
        threads = count(about.threads or 0, "thread")
        result.append(f"{found.name} on {about.device_name}, {threads}, torch {' and '.join(found.torches)}")
    if whole.failed and found.measured:
        result.append(f"{whole.failed} of {len(found.examples)} examples failed: means are of the others alone")
    if found.busy:
        result.append(f"{count(found.busy, 'example')} ran beside other load: times are too long")
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
    first = [listed(total(found), format)] if total(found) else []
    return "\n\n".join([*first, block(stages([found]), format), listed(lines(found), format)]) + "\n"
