"""Register profiles of inference, and pipelines, with the page and the summary."""

from __future__ import annotations

from typing import Any, Iterator, Sequence, Tuple

from common.present.slices import Slice
from common.present.style import Figure
from common.records.schema import INFERENCE_FILE_NAME, PIPELINE_FILE_NAME
from common.tools.files import holding
from common.tools.inference import (
    pipeline_plot,
    pipeline_rows,
    pipeline_section,
    pipeline_table,
    plot,
    rows,
    section,
    table,
)


def _figures(paths: Sequence[Any]) -> Iterator[Tuple[str, Figure]]:
    """Yield rtf, rtf-profile-2 of a second profile and so on."""
    for number, profiled in enumerate(rows.find(paths), 1):
        for figure in plot.figures(profiled):
            yield f"{figure.key}-profile-{number}" if number > 1 else figure.key, figure


def _pipeline_figures(paths: Sequence[Any]) -> Iterator[Tuple[str, Figure]]:
    for figure in pipeline_plot.figures([run for run in pipeline_rows.find(paths) if not run.reason]):
        yield figure.key, figure


INFERENCE = Slice(
    lambda base, paths: section.sections(paths),
    holds=holding(INFERENCE_FILE_NAME),
    rows=lambda paths: [{"name": run.name, **cell.row()} for run in rows.find(paths) for cell in run.cells],
    text=lambda paths, format: [table.render(run, format) for run in rows.find(paths)],
    figures=_figures,
)
PIPELINES = Slice(
    lambda base, paths: pipeline_section.sections(paths),
    holds=holding(PIPELINE_FILE_NAME),
    rows=lambda paths: [row for run in pipeline_rows.find(paths) for row in run.rows()],
    text=lambda paths, format: [pipeline_table.render(run, format) for run in pipeline_rows.find(paths)],
    figures=_pipeline_figures,
)
