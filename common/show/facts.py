"""Make tables of the report that hold no result: versions, machine and load."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

from common.analysis.row import Row
from common.core import statistics
from common.core.settings import LENGTHS, MEASURED, described
from common.core.text import GIB, number, plain
from common.present.parts import Cell, Column, Table, measured, tabulated
from common.records.schema import Batch, Record
from common.show import results


def load(entries: Sequence[Row]) -> Optional[Table]:
    """Return a table of the other processes' load while each row was timed."""
    rows = []
    for entry in entries:
        shares = [100 * sample.foreign_cpu for sample in entry.timed if sample.foreign_cpu is not None]
        if shares:
            values = {"others' CPU, median %": statistics.median(shares), "highest %": max(shares)}
            counts = {"samples flagged": sum(sample.flagged for sample in entry.timed), "of": len(entry.timed)}
            cells = {title: Cell(f"{value:.1f}", value, entry.results) for title, value in values.items()}
            cells.update({title: measured(count, entry.results) for title, count in counts.items()})
            rows.append({"implementation": Cell(entry.label, mark="name"), **cells})
    return tabulated("load", "Load of the machine by others while timing", rows) if rows else None


def versions(entries: Sequence[Row]) -> Table:
    """Return a table of the versions that each row ran under, of the rows that ran where any did."""
    columns = ("implementation", "version", "torch", "Python", "CUDA", "options", "run started (UTC)", "folder")
    rows = []
    for entry in [entry for entry in entries if entry.is_measured] or entries:
        values = (
            entry.environment.implementation_version,
            entry.environment.torch,
            entry.environment.python,
            entry.environment.cuda,
        )
        cells = [Cell(plain(value or "-")) for value in values]
        started = plain(entry.started or "-").replace("T", " ").replace("+00:00", "")
        name = plain(entry.folder.resolve().name)
        folder = Cell(name, name, entry.results if entry.jobs else entry.folder)
        options = Cell(plain(results.options_text(entry.environment.options)) or "-", mark="long")
        rows.append([Cell(entry.label, mark="name"), *cells, options, Cell(started, mark="whole"), folder])
    return Table("versions", "Versions", [Column(title, False) for title in columns], rows)


def machine(entries: Sequence[Row]) -> List[Tuple[str, str]]:
    """Return (term, description) of the machine and conditions of the rows; several values where they differ."""
    facts: Dict[str, List[str]] = {}
    named = {plain(entry.device) for entry in entries if entry.device_name}
    for entry in entries:
        for term, description in _facts(entry):
            values = facts.setdefault(term, [])
            is_told = term == "Device" and description in named  # a row that did not run knows no device's name
            if description not in values and not is_told:
                values.append(description)
    return [(term, "; ".join(values)) for term, values in facts.items()]


def _facts(entry: Row) -> List[Tuple[str, str]]:
    settings, machine = entry.header.settings, entry.header.machine
    memory = f", {machine.memory_bytes / GIB:.0f} GiB" if machine.memory_bytes is not None else ""
    cores = f", {machine.cores} cores" if machine.cores else ""
    batches, rounds = entry.batches, entry.rounds
    revision = str(entry.header.git_revision or "")[:12]
    schedule, vocabulary = settings.get("schedule"), settings.get("vocab_size")
    command, rate = entry.header.command, entry.bytes_per_second
    facts: List[Tuple[str, Any]] = [
        ("Machine", f"{machine.cpu}{cores}{memory}" if machine.cpu else None),
        ("System", machine.os),
        ("Device", " ".join(str(part) for part in (entry.device, entry.device_name) if part)),
        ("Driver", entry.environment.gpu and entry.environment.gpu.driver),
        ("Threads", entry.environment.threads),
        ("Denormals", entry.environment.denormals),
        ("Allocator", entry.environment.allocator),
        ("Memory, at best", rate and f"{number(rate / 1e9, 3)} GB/s read and written"),
        ("Batches", _batches(settings, batches) if batches else None),
        ("Joiner", f"{settings.get('encoder_dim')} to V = {vocabulary}" if vocabulary else None),
        ("Dtype", settings.get("dtype")),
        ("Shapes", _shapes(entry, settings)),
        ("Options", ", ".join(described(settings, (MEASURED,))) or None),
        ("Seed", settings.get("seed")),
        ("Rounds", f"{rounds} fresh process{'' if rounds == 1 else 'es'}" if rounds else None),
        ("Plotly", ", ".join(f"{k} {v}" for k, v in schedule.items()) if schedule else None),
        ("Suite", revision and revision + (" with uncommitted changes" if entry.header.git_dirty else "")),
        ("Command", " ".join(map(str, command)) if isinstance(command, list) else None),
    ]
    return [(term, plain(value)) for term, value in facts if value is not None and str(value)]


def _batches(settings: Record, batches: Sequence[Batch]) -> str:
    utterances = sum(batch.N for batch in batches)
    useful = sum(batch.useful_cells for batch in batches) / sum(batch.padded_cells for batch in batches)
    order = "sorted by length" if settings.get("sort_utterance") else "in file order"
    begin = f"{len(batches)} ({settings.get('batches')}) of {utterances} utterances"
    return f"{begin}, {order}; {useful:.0%} of the cells useful"


def _shapes(entry: Row, settings: Record) -> Optional[str]:
    path, digest = entry.environment.shape_file, entry.environment.shape_file_sha256
    if not path or not digest:
        return None
    return ", ".join([f"{Path(path).name} (sha256 {digest[:12]})", *described(settings, (LENGTHS,))])
