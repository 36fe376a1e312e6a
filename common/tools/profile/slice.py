"""Register profiles of training steps with the page and the summary."""

from __future__ import annotations

from typing import Any, List, Sequence

from common.present.slices import Slice
from common.present.table import Values
from common.tools.files import holding
from common.tools.profile.records import FILE_NAME
from common.tools.profile.rows import Kept, find
from common.tools.profile.section import sections
from common.tools.profile.table import render


def _rows(paths: Sequence[Any]) -> List[Values]:
    return [
        {"profile": kept.path.parent.name, "size": words, **row}
        for kept in find(paths)
        for words, profile, _ in kept.sizes
        if profile
        for row in profile.rows()
    ]


def _text(kept: Kept, format: str) -> str:
    return f"{kept.path}: {kept.reason}\n" if kept.reason else render(kept.sizes, format)


PROFILE = Slice(
    lambda base, paths: sections(paths),
    holds=holding(FILE_NAME),
    rows=_rows,
    text=lambda paths, format: [_text(kept, format) for kept in find(paths)],
)
