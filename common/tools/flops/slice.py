"""Counts of operations, as the page and the summary see them."""

from __future__ import annotations

from typing import Any, List, Sequence

from common.present.slices import Slice
from common.present.table import Values
from common.tools.files import files
from common.tools.flops.records import FILE_NAME
from common.tools.flops.rows import Count, find
from common.tools.flops.section import sections
from common.tools.flops.table import Bucket, render


def _rows(paths: Sequence[Any]) -> List[Values]:
    readable = [count for count in find(paths) if not count.reason]
    return [{"model": count.model, **row} for count in readable for row in count.breakdown.rows()]


def _text(count: Count, format: str) -> str:
    if count.reason:
        return f"{count.reason}\n"
    utterances = [Bucket(**bucket) for bucket in count.buckets]
    return f"{count.model}\n{render(count.breakdown, count.by, format, utterances)}"


FLOPS = Slice(
    lambda base, paths: sections(paths),
    holds=lambda path: bool(files([path], FILE_NAME)),
    rows=_rows,
    text=lambda paths, format: [_text(count, format) for count in find(paths)],
)
