"""Collects the committed results into one small file, results/which.json, which travels with the package.

docs/_figures.py writes it anew; a test compares it with the records.
"""

from __future__ import annotations

import json
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Iterator, Optional, Sequence

from common.analysis import logs, verdict
from common.analysis.row import Row
from common.analysis.verdict import EXACT, Pick
from common.core.paths import ROOT
from common.records.documents import typed
from common.tools.which.answer import FILE, Measurement, Picked, Timed, Workload

#: Folders of results/ that are left out: an earlier run of another folder, settings that are no user's, other logits,
#: and another lattice.
LEFT_OUT = ("before", "system", "threads", "largest", "fused-table", "logits", "tdt")
#: Rows of other kinds are of another model, and controls of another torch.
KINDS = (*EXACT, "pruned")


def text(results: Path = ROOT / "results") -> str:
    """Return the content of the file: a list of measurements as JSON, one a line."""
    lines = [json.dumps(asdict(entry)) for entry in _entries(results)]
    return "[\n" + ",\n".join(lines) + "\n]\n"


def write() -> None:
    """Write the file anew."""
    FILE.write_text(text(), encoding="utf-8")


def _entries(results: Path) -> Iterator[Measurement]:
    """Yield each configuration that was measured, with its rows and picks."""
    for folder in sorted(results.iterdir()):
        if folder.is_dir() and not folder.name.endswith(LEFT_OUT):
            log = logs.read([folder])
            cells = [
                [run.row for run in swept.runs if run.cell == cell]
                for swept in log.sweeps
                for cell in dict.fromkeys(run.cell for run in swept.runs)
            ]
            for rows in [*(group.rows for group in log.groups), *cells]:
                entry = _entry(folder.name, [row for row in rows if row.status == "ok" and row.step_ms])
                if entry:
                    yield entry


def _entry(folder: str, rows: Sequence[Row]) -> Optional[Measurement]:
    """Return one configuration; None where no two exact losses were timed."""
    if sum(row.kind in EXACT for row in rows) < 2:
        return None
    first = rows[0]
    machine = first.header.machine
    picks = {"outputs": verdict.fastest(rows), "approximation": verdict.fastest(rows, ("pruned",))}
    logits = verdict.given_logits(rows)
    if logits:
        leader = logits.loss if logits.basis == "loss" or not logits.step else logits.step
        picks["logits"] = leader if logits.row else replace(leader, rivals=leader.rivals or [logits.loss.row])
    return Measurement(
        results=folder,
        date=(first.started or "")[:10],
        device=first.device or "cpu",
        device_name=first.device_name,
        cores=machine.cores if first.device == "cpu" else None,
        torch=(first.torch_version or "").partition("+")[0],
        settings=typed({each.name: first.configuration.get(each.name) for each in fields(Workload)}, Workload),
        picks={need: _pick(pick) for need, pick in picks.items() if pick},
        rows=[_row(row) for row in sorted(rows, key=_step_ms) if row.kind in KINDS and "@" not in row.name],
    )


def _pick(pick: Pick) -> Picked:
    ratio = pick.next_ratio
    return Picked(
        name=pick.row.name,
        scope=pick.scope,
        rivals=[rival.name for rival in pick.rivals],
        next=pick.next.name if pick.next else None,
        times=[_digits(ratio.ratio), _digits(ratio.low), _digits(ratio.high)] if ratio else None,
    )


def _step_ms(row: Row) -> float:
    return row.step_ms.median if row.step_ms else 0.0


def _row(row: Row) -> Timed:
    return Timed(
        name=row.name,
        kind=row.kind or "exact",
        step_ms=_digits(row.step_ms.median if row.step_ms else None),
        loss_ms=_digits(row.loss_ms.median if row.loss_ms else None),
        peak_mb=_digits(row.peak_mb),
    )


def _digits(value: Optional[float]) -> Optional[float]:
    """Return a number with four significant digits, so that the file stays small."""
    return None if value is None else float(f"{value:.4g}")
