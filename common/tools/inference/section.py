"""Profiles of inference as sections: of a page of their own, and of the report of a log."""

from __future__ import annotations

from pathlib import Path
from typing import List, Sequence

from common.present.section import TABLES, Failure, Section
from common.present.table import Link
from common.tools.inference import table as tables
from common.tools.inference.plot import figures
from common.tools.inference.rows import Inference, find

TITLE = "Inference: is it faster than real time?"


def sections(paths: Sequence[Path]) -> List[Section]:
    """Of every profile in the logs."""
    return [section(one, place) for place, one in enumerate(find(paths))]


def section(found: Inference, place: int) -> Section:
    """With a table of all cells, and the grids of factors and memory."""
    name = f"inference-{place}"
    failures = [Failure("error", "", [Link(line, found.path)]) for line in tables.failures(found)]
    if found.reason:
        return Section(TABLES, name, TITLE, failures=failures)
    every = [*tables.total(found), *tables.lines(found)]
    shown = [line for line in every if line not in tables.failures(found)]
    return Section(
        TABLES,
        name,
        TITLE,
        suffix=name,
        heading=found.name,
        failures=failures,
        figures=figures(found),
        notes=[("", [line]) for line in shown],
        content=[*tables.grids(found), tables.cells(found)],
    )
