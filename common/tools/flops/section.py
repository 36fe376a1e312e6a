"""Counts of operations as sections: of a page of their own, and of the report of a log."""

from __future__ import annotations

from pathlib import Path
from typing import List, Sequence

from common.present.section import TABLES, Failure, Section
from common.present.table import Link
from common.tools.flops import table as tables
from common.tools.flops.rows import Count, breakdown_of, find

TITLE = "Operations of a model"


def sections(paths: Sequence[Path]) -> List[Section]:
    """Return one for every count in the logs."""
    return [section(count, number) for number, count in enumerate(find(paths))]


def section(count: Count, number: int) -> Section:
    """Return the totals, the table of the utterances by length where there is one, and that of the parts."""
    name = f"flops-{number}"
    kept = count.content
    if kept is None:
        return Section(TABLES, name, TITLE, failures=[Failure("error", "", [Link(count.reason, count.path)])])
    content, utterances = breakdown_of(kept), tables.spoken(kept)
    return Section(
        TABLES,
        name,
        TITLE,
        suffix=name,
        heading=kept.model,
        notes=[("", [line]) for line in [*tables.totals(content), *tables.remarks(content)]],
        content=[*([tables.buckets(utterances)] if utterances else []), tables.parts(content, kept.by)],
    )
