"""Register profiles of inference, and pipelines, with the page and the summary."""

from __future__ import annotations

from common.present.slices import Slice
from common.records.schema import INFERENCE_FILE_NAME, PIPELINE_FILE_NAME
from common.tools.files import holding
from common.tools.inference import (
    pipeline_rows,
    pipeline_section,
    pipeline_table,
    rows,
    section,
    table,
)

INFERENCE = Slice(
    lambda base, paths: section.sections(paths),
    holds=holding(INFERENCE_FILE_NAME),
    rows=lambda paths: [{"name": run.name, **cell.row()} for run in rows.find(paths) for cell in run.cells],
    text=lambda paths, format: [table.render(run, format) for run in rows.find(paths)],
)
PIPELINES = Slice(
    lambda base, paths: pipeline_section.sections(paths),
    holds=holding(PIPELINE_FILE_NAME),
    rows=lambda paths: [row for run in pipeline_rows.find(paths) for row in run.rows()],
    text=lambda paths, format: [pipeline_table.render(run, format) for run in pipeline_rows.find(paths)],
)
