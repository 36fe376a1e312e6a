"""Profiles of training steps as sections: of a page of their own, and of the report of a log."""

from __future__ import annotations

from pathlib import Path
from typing import List, Sequence

from common.analysis.profile import profile
from common.core.errors import UserError
from common.core.table import Link, Sentence
from common.plots.profile import figures
from common.records import documents
from common.records.documents import Profile
from common.records.profile import FILE_NAME
from common.report.section import Failure, Section
from common.tables import profile as tables
from common.tables.profile import Size

PAGE_NAME = "profile.html"
TITLE = "Where the training step goes"


def sections(paths: Sequence[Path]) -> List[Section]:
    """Of every profile in the logs; of a file that cannot be read one that says so."""
    found: List[Section] = []
    for file in sorted({file for path in paths for file in path.rglob(FILE_NAME)}):
        try:
            sizes = documents.read(file, List[Profile])
        except (FileNotFoundError, UserError) as error:
            reason: Sentence = [
                Link(file.name, file),
                f" cannot be read ({error}): profile again, or delete it.",
            ]
            place = f"profile-{len(found)}"
            found.append(Section("profile", place, TITLE, failures=[Failure("error", "", reason)]))
        else:
            cells = [(one["size"], profile(one) if one.get("spans") else None, one["reason"]) for one in sizes]
            found += of_cells(cells, f"{file.parent.name}-{len(found)}", file)
    return found


def of_cells(cells: Sequence[Size], place: str, file: Path) -> List[Section]:
    """place: what their ids end with; file: where the cells are from."""
    result = []
    for number, (size, found, reason) in enumerate(cells):
        result.append(
            Section(
                "profile",
                f"profile-{place}-{number}",
                TITLE,
                place=f"{place}-{number}",
                heading=size,
                failures=[Failure("error", size, [Link("failed", file), f": {reason}"])] if reason else [],
                table=tables.labels(found) if found else None,
                figures=figures(found) if found else [],
                notes=[("", [line]) for line in tables.lines(found)] if found else [],
            )
        )
    if len(cells) > 1:
        about = tables.sweep(cells)
        result.insert(0, Section("profile", f"profile-{place}-sizes", TITLE, heading="All sizes", table=about))
    return result
