"""Profiles of training steps as sections: of a page of their own, and of the report of a log."""

from __future__ import annotations

from pathlib import Path
from typing import List, Sequence

from common.present.section import Failure, Section
from common.present.table import Link, Sentence
from common.tools.profile import table as tables
from common.tools.profile.plot import figures
from common.tools.profile.rows import Size, find

PAGE_NAME = "profile.html"
#: Shows a section, as a path below common/.
TEMPLATE = "tools/profile/profile.html.jinja"
TITLE = "Where the training step goes"


def sections(paths: Sequence[Path]) -> List[Section]:
    """Of every profile in the logs; of a file that cannot be read one that says so."""
    shown: List[Section] = []
    for kept in find(paths):
        if kept.reason:
            sentence: Sentence = [
                Link(kept.path.name, kept.path),
                f" cannot be read ({kept.reason}): profile again, or delete it.",
            ]
            shown.append(Section(TEMPLATE, f"profile-{len(shown)}", TITLE, failures=[Failure("error", "", sentence)]))
        else:
            shown += of_cells(kept.sizes, f"{kept.path.parent.name}-{len(shown)}", kept.path)
    return shown


def of_cells(cells: Sequence[Size], place: str, file: Path) -> List[Section]:
    """place: what their ids end with; file: where the cells are from."""
    result = []
    for number, (size, found, reason) in enumerate(cells):
        result.append(
            Section(
                TEMPLATE,
                f"profile-{place}-{number}",
                TITLE,
                suffix=f"{place}-{number}",
                heading=size,
                failures=[Failure("error", size, [Link("failed", file), f": {reason}"])] if reason else [],
                table=tables.labels(found) if found else None,
                figures=figures(found) if found else [],
                notes=[("", [line]) for line in [tables.total(found), *tables.lines(found)]] if found else [],
            )
        )
    if len(cells) > 1:
        about = tables.sweep(cells)
        result.insert(0, Section(TEMPLATE, f"profile-{place}-sizes", TITLE, heading="All sizes", table=about))
    return result
