"""Made sweeps for tests: a sweep.jsonl as the runner writes it."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any, Callable, Dict, List, Sequence

from fixtures_runs import Record, correctness, header, memory, timing

from common.records import schema, store


def write_sweep(
    folder: Path,
    grid: Dict[str, List[Any]],
    names: Sequence[str] = ("torchaudio",),
    jobs_of: Callable[[str, Dict[str, Any]], List[List[Record]]] = lambda name, values: measured(10),
    **head: Any,
) -> Path:
    """A sweep over `grid` with the jobs that `jobs_of` makes of an implementation and a cell's values; none for what
    was not begun."""
    lines = [
        {
            "record": "sweep",
            "schema": 1,
            "sweep_id": folder.name,
            "grid": grid,
            "settings": {},
            "names": list(names),
            "command": [],
            "started": "2026-01-01T00:00:00+00:00",
            "git_revision": "",
            "git_dirty": False,
            "machine": {},
            **head,
        }
    ]
    for cell, combined in enumerate(product(*grid.values())):
        values = dict(zip(grid, combined))
        for name in names:
            jobs = jobs_of(name, values)
            if jobs:
                kind = "pruned" if "pruned" in name else "exact"
                passes = ["correctness", "timing", "memory"]
                described = {**header(name, passes=passes, rounds=1, **values), "kind": kind, "values": values}
                written = [described, *(line for job in jobs for line in job)]
                lines += [{**line, "cell": cell, "implementation": name} for line in written]
    folder.mkdir(parents=True)
    store.append(folder / schema.SWEEP_FILE_NAME, lines)
    return folder / schema.SWEEP_FILE_NAME


def measured(step_ms: float, peak_mb: float = 8) -> List[List[Record]]:
    """Three samples 10% apart and one peak."""
    samples = [0.9 * step_ms, step_ms, 1.1 * step_ms]
    return [correctness(), timing("timing-1", samples, samples), memory(peak_mb)]
