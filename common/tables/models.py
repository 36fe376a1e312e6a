"""All runs of models in a log, profiles of inference and pipelines, in words."""

from __future__ import annotations

from typing import Any, Sequence

from common.analysis.inference import find as find_inference
from common.analysis.pipeline import find as find_pipelines
from common.tables import inference, pipeline
from common.tables.export import csv_text, json_text


def render(paths: Sequence[Any], format: str) -> str:
    """As "table", "markdown", "csv" or "json"; "" where there is none.  paths: default ``log``."""
    grids, pipelines = find_inference(paths or ["log"]), find_pipelines(paths or ["log"])
    if not grids and not pipelines:
        return ""
    if format in ("csv", "json"):
        rows = [{"name": one.name, **cell.row()} for one in grids for cell in one.cells]
        return (csv_text if format == "csv" else json_text)([*rows, *(row for one in pipelines for row in one.rows())])
    return "\n".join(
        [*(inference.render(one, format) for one in grids), *(pipeline.render(one, format) for one in pipelines)]
    )
