"""Pipelines as one section, beside each other: of a page of their own, and of the report of a log."""

from __future__ import annotations

from pathlib import Path
from typing import List, Sequence

from common.present.section import TABLES, Failure, Line, Section
from common.present.table import Link
from common.tools.inference import pipeline_table as tables
from common.tools.inference.pipeline_plot import figures
from common.tools.inference.pipeline_rows import Pipeline, find

TITLE = "Pipelines: what an utterance costs"


def sections(paths: Sequence[Path]) -> List[Section]:
    """One of all pipelines in the logs; none where there is none."""
    found = find(paths)
    return [section(found)] if found else []


def section(found: Sequence[Pipeline]) -> Section:
    failures = [Failure("error", one.name, [Link(line, one.path)]) for one in found for line in tables.failures(one)]
    readable = [one for one in found if not one.reason]
    notes: List[Line] = [
        (one.name, [line])
        for one in readable
        for line in [*tables.total(one), *tables.lines(one)]
        if line not in tables.failures(one)
    ]
    return Section(
        TABLES,
        "pipelines",
        TITLE,
        suffix="pipelines",
        heading=", ".join(one.name for one in readable),
        failures=failures,
        figures=figures(readable),
        notes=notes,
        content=[tables.stages(readable)] if readable else [],
    )
