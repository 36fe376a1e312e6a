"""Makes sections of profiles of inference, for a page of their own and for the report of a log."""

from __future__ import annotations

from pathlib import Path
from typing import List, Sequence

from common.present.section import Failure, Section
from common.present.table import Link
from common.tools.inference import table as tables
from common.tools.inference.plot import figures
from common.tools.inference.rows import Inference, find

TITLE = "Inference: is it faster than real time?"


def sections(paths: Sequence[Path]) -> List[Section]:
    """Return the section of every profile in the logs."""
    return [section(profile, number) for number, profile in enumerate(find(paths))]


def section(profile: Inference, number: int) -> Section:
    """Return the section of a profile, with a table of all cells and the grids of factors and memory."""
    name = f"inference-{number}"
    failures = [Failure("error", "", [Link(line, profile.path)]) for line in tables.failures(profile)]
    if profile.reason:
        return Section(name, TITLE, failures=failures)
    every = [*tables.total(profile), *tables.lines(profile)]
    shown = [line for line in every if line not in tables.failures(profile)]
    return Section(
        name,
        TITLE,
        heading=profile.name,
        failures=failures,
        figures=figures(profile),
        notes=[("", [line]) for line in shown],
        tables=[*tables.grids(profile), tables.cells(profile)],
    )
