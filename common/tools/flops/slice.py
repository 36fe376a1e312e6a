"""Register counts of operations with the page and the summary."""

from __future__ import annotations

from typing import Any, List, Sequence

from common.present.slices import Slice
from common.present.table import Values
from common.tools.files import holding
from common.tools.flops.records import FILE_NAME
from common.tools.flops.rows import Count, breakdown_of, find
from common.tools.flops.section import sections
from common.tools.flops.table import render, spoken


def _rows(paths: Sequence[Any]) -> List[Values]:
    readable = [count.content for count in find(paths) if count.content]
    return [{"model": content.model, **row} for content in readable for row in breakdown_of(content).rows()]


def _text(count: Count, format: str) -> str:
    content = count.content
    if content is None:
        return f"{count.reason}\n"
    return f"{content.model}\n{render(breakdown_of(content), content.by, format, spoken(content))}"


FLOPS = Slice(
    lambda base, paths: sections(paths),
    holds=holding(FILE_NAME),
    rows=_rows,
    text=lambda paths, format: [_text(count, format) for count in find(paths)],
)
