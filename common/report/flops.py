"""Counts of operations as sections: of a page of their own, and of the report of a log."""

from __future__ import annotations

from pathlib import Path
from typing import List, Sequence

from common.analysis.flops import Count, find
from common.core.table import Link
from common.report.section import Failure, Section
from common.tables import flops as tables

TITLE = "Operations of a model"


def sections(paths: Sequence[Path]) -> List[Section]:
    """Return one for every count in the logs."""
    return [section(count, number) for number, count in enumerate(find(paths))]


def section(count: Count, number: int) -> Section:
    """Return the totals, the table of the utterances by length where there is one, and that of the parts."""
    name = f"flops-{number}"
    if count.reason:
        return Section("tables", name, TITLE, failures=[Failure("error", "", [Link(count.reason, count.path)])])
    content, utterances = count.breakdown, [tables.Bucket(**bucket) for bucket in count.buckets]
    return Section(
        "tables",
        name,
        TITLE,
        place=name,
        heading=count.model,
        notes=[("", [line]) for line in [*tables.totals(content), *tables.remarks(content)]],
        about=[*([tables.buckets(utterances)] if utterances else []), tables.parts(content, count.by)],
    )
