"""Makes one section of all pipelines, for a page of their own and for the report of a log."""

from __future__ import annotations

from pathlib import Path
from typing import List, Sequence

from common.present.section import Failure, Line, Section
from common.present.table import Link
from common.tools.inference import pipeline_table as tables
from common.tools.inference.pipeline_plot import figures
from common.tools.inference.pipeline_rows import Pipeline, find

TITLE = "Pipelines: what an utterance costs"


def sections(paths: Sequence[Path]) -> List[Section]:
    """Return the section of all pipelines in the logs, if there are any."""
    pipelines = find(paths)
    return [section(pipelines)] if pipelines else []


def section(pipelines: Sequence[Pipeline]) -> Section:
    """Return the section of these pipelines, beside each other."""
    failures = [
        Failure("error", pipeline.name, [Link(line, pipeline.path)])
        for pipeline in pipelines
        for line in tables.failures(pipeline)
    ]
    readable = [pipeline for pipeline in pipelines if not pipeline.reason]
    notes: List[Line] = [
        (pipeline.name, [line])
        for pipeline in readable
        for line in [*tables.total(pipeline), *tables.lines(pipeline)]
        if line not in tables.failures(pipeline)
    ]
    return Section(
        "pipelines",
        TITLE,
        heading=", ".join(pipeline.name for pipeline in readable),
        failures=failures,
        figures=figures(readable),
        notes=notes,
        tables=[tables.stages(readable)] if readable else [],
    )
