"""Makes sections of profiles of training steps, for a page of their own and for the report of a log."""

from __future__ import annotations

from pathlib import Path
from typing import List, Sequence

from common.present.section import Failure, Section
from common.present.table import Link, Sentence
from common.tools.profile import table as tables
from common.tools.profile.plot import figures
from common.tools.profile.rows import Size, find

PAGE_NAME = "profile.html"
TITLE = "Where the training step goes"


def sections(paths: Sequence[Path]) -> List[Section]:
    """Return the sections of every profile in the logs; a file that cannot be read has one that says so."""
    shown: List[Section] = []
    for kept in find(paths):
        if kept.reason:
            sentence: Sentence = [
                Link(kept.path.name, kept.path),
                f" cannot be read ({kept.reason}): profile again, or delete it.",
            ]
            shown.append(Section(f"profile-{len(shown)}", TITLE, failures=[Failure("error", "", sentence)]))
        else:
            shown += of_cells(kept.sizes, f"{kept.path.parent.name}-{len(shown)}", kept.path)
    return shown


def of_cells(cells: Sequence[Size], suffix: str, file: Path) -> List[Section]:
    """Return a section of each size, and one of all where there are several.  suffix: what their ids end with; file:
    where the cells are from."""
    result = []
    for number, (size, profile, reason) in enumerate(cells):
        result.append(
            Section(
                f"profile-{suffix}-{number}",
                TITLE,
                heading=size,
                failures=[Failure("error", size, [Link("failed", file), f": {reason}"])] if reason else [],
                tables=[tables.labels(profile)] if profile else [],
                figures=figures(profile) if profile else [],
                notes=[("", [line]) for line in [tables.total(profile), *tables.lines(profile)]] if profile else [],
            )
        )
    if len(cells) > 1:
        table = tables.sweep(cells)
        result.insert(0, Section(f"profile-{suffix}-sizes", TITLE, heading="All sizes", tables=[table]))
    return result
