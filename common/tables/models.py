"""All runs of models in a log in words: profiles of inference, pipelines, profiles of steps, counts of operations."""

from __future__ import annotations

from typing import Any, Dict, List, Sequence

from common.analysis import flops as counts
from common.analysis import inference as grids
from common.analysis import pipeline as pipelines
from common.analysis import profile as profiles
from common.tables import flops, inference, pipeline, profile
from common.tables.export import csv_text, json_text


def render(paths: Sequence[Any], format: str) -> str:
    """Return them as "table", "markdown", "csv" or "json"; "" where there is none.  paths: default ``log``."""
    folders = paths or ["log"]
    measured, piped = grids.find(folders), pipelines.find(folders)
    profiled, counted = profiles.find(folders), counts.find(folders)
    if not (measured or piped or profiled or counted):
        return ""
    if format in ("csv", "json"):
        rows: List[Dict[str, Any]] = [{"name": run.name, **cell.row()} for run in measured for cell in run.cells]
        rows += [row for run in piped for row in run.rows()]
        rows += [
            {"profile": kept.path.parent.name, "size": words, **row}
            for kept in profiled
            for words, of_size, _ in kept.sizes
            if of_size
            for row in of_size.rows()
        ]
        rows += [
            {"model": count.model, **row} for count in counted if not count.reason for row in count.breakdown.rows()
        ]
        return (csv_text if format == "csv" else json_text)(rows)
    texts = [inference.render(run, format) for run in measured]
    texts += [pipeline.render(run, format) for run in piped]
    texts += [
        f"{kept.path}: {kept.reason}\n" if kept.reason else profile.render(kept.sizes, format) for kept in profiled
    ]
    texts += [_count(count, format) for count in counted]
    return "\n".join(texts)


def _count(count: counts.Count, format: str) -> str:
    if count.reason:
        return f"{count.reason}\n"
    utterances = [flops.Bucket(**bucket) for bucket in count.buckets]
    return f"{count.model}\n{flops.render(count.breakdown, count.by, format, utterances)}"
