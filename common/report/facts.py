"""The tables of the report: results of all implementations, what they were measured on, where the time goes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

from common import workloads
from common.report.collect import Entry
from common.report.markup import Cell, Column, Table
from common.results import remarks, statistics, tables
from common.results.exports import plain
from common.results.wording import number

GIB = 2**30

Shown = Tuple[Optional[float], str]  # value, words


def _described(key: str, part: str) -> Callable[[Entry], Shown]:
    return lambda entry: _shown((entry.row[key] or {}).get(part))


def _shown(value: Any) -> Shown:
    return value, str(value) if type(value) is int else number(value)


def _error(value: Optional[float]) -> Shown:
    """What is not finite is stored as 1e300."""
    return value, "-" if value is None else "inf" if value >= 1e300 else f"{value:.1e}"


def _process_mb(entry: Entry) -> Shown:
    memory = entry.row["memory"]
    return _shown((memory.get("step") or memory.get("loss") or {}).get("process_mb"))


def _over_fastest(entry: Entry) -> Shown:
    return entry.row["against_fastest"].get("ratio"), tables.over_fastest(entry.row)


def _percent(scope: str) -> Callable[[Entry], Shown]:
    def shown(entry: Entry) -> Shown:
        value = tables.limit_percent(entry.row, scope)
        return value, number(value, 2)

    return shown


#: Title, number of an entry with its words, whether it is from the trace; what decides comes first.
NUMBERS: Sequence[Tuple[str, Callable[[Entry], Shown], bool]] = (
    ("step ms", _described("step_ms", "median"), False),
    ("loss ms", _described("loss_ms", "median"), False),
    ("over the fastest", _over_fastest, False),
    ("% of limit, step", _percent("step"), False),
    ("% of limit, loss", _percent("loss"), False),
    ("peak MB", lambda entry: _shown(entry.peak_mb), False),
    ("loss error", lambda entry: _error(entry.row["loss_error"]), False),
    ("gradient error", lambda entry: _error(entry.row["grad_error"]), False),
    ("p20", _described("step_ms", "p20"), False),
    ("p80", _described("step_ms", "p80"), False),
    ("n", _described("step_ms", "n"), False),
    ("forward ms", _described("step_forward_ms", "median"), False),
    ("loss n", _described("loss_ms", "n"), False),
    ("process MB", _process_mb, False),
    ("profiled step us", lambda entry: _shown(entry.row["average_step_time_us"]), True),
    ("profiled peak MB", lambda entry: _shown(entry.row["peak_memory_mb"]), True),
)


def results(entries: Sequence[Entry]) -> Table:
    """The summary table, one number a cell, each with the file it is from."""
    columns = [Column(title, False) for title in ("implementation", "status")]
    columns += [Column(title) for title, _, _ in NUMBERS]
    columns += [Column(title, False) for title in ("version", "torch")]
    return Table("results", "Results", columns, [_result(entry) for entry in entries])


def _result(entry: Entry) -> List[Cell]:
    cells = []
    for _, number_of, profiled in NUMBERS:
        value, words = number_of(entry)
        cells.append(Cell(words, value, entry.trace if profiled else entry.results))
    row = entry.row
    return [
        Cell(entry.marked, mark="name"),
        Cell(plain(row["status"]), mark="good" if row["status"] == "ok" else "bad"),
        *cells,
        Cell(_version(row["implementation_version"])),
        Cell(_version(row["torch_version"])),
    ]


def _version(value: Optional[str]) -> str:
    return plain(value or "-").split("+")[0]


def load(entries: Sequence[Entry]) -> Optional[Table]:
    """How busy others kept the machine while each was timed."""
    rows = []
    for entry in entries:
        shares = [100 * sample.foreign_cpu for sample in entry.samples if sample.foreign_cpu is not None]
        if shares:
            flagged = sum(sample.flagged for sample in entry.samples)
            values = (statistics.median(shares), max(shares))
            cells = [Cell(f"{value:.1f}", value, entry.results) for value in values]
            counts = [Cell(str(count), count, entry.results) for count in (flagged, len(entry.samples))]
            rows.append([Cell(entry.label, mark="name"), *cells, *counts])
    if not rows:
        return None
    columns = [Column("implementation", False)]
    columns += [Column(title) for title in ("others' CPU, median %", "highest %", "samples flagged", "of")]
    return Table("load", "Load of the machine by others while timing", columns, rows)


def versions(entries: Sequence[Entry]) -> Table:
    columns = ("implementation", "version", "torch", "Python", "CUDA", "options", "run started (UTC)", "folder")
    rows = []
    for entry in entries:
        about = entry.environment
        values = [
            entry.row["implementation_version"],
            entry.row["torch_version"],
            about.get("python"),
            about.get("cuda"),
        ]
        cells = [Cell(plain(value or "-")) for value in values]
        started = plain(entry.row["started"] or "-").replace("T", " ").replace("+00:00", "")
        name = plain(entry.folder.resolve().name)
        folder = Cell(name, name, entry.results if entry.header else entry.folder)
        options = Cell(plain(remarks.options_text(entry.row["options"])) or "-", mark="long")
        rows.append([Cell(entry.label, mark="name"), *cells, options, Cell(started, mark="whole"), folder])
    return Table("versions", "Versions", [Column(title, False) for title in columns], rows)


def machine(entries: Sequence[Entry]) -> List[Tuple[str, str]]:
    """(term, description) of what the entries were measured on; several values where they differ."""
    facts: Dict[str, List[str]] = {}
    named = {plain(entry.row["device"]) for entry in entries if entry.row["device_name"]}
    for entry in entries:
        for term, description in _facts(entry):
            values = facts.setdefault(term, [])
            is_told = term == "Device" and description in named  # a row that did not run knows no device's name
            if description not in values and not is_told:
                values.append(description)
    return [(term, "; ".join(values)) for term, values in facts.items()]


def _facts(entry: Entry) -> List[Tuple[str, str]]:
    settings = entry.header.get("settings")
    settings = settings if isinstance(settings, dict) else {}
    about = entry.header.get("machine")
    about = about if isinstance(about, dict) else {}
    size = about.get("memory_bytes")
    memory = f", {size / GIB:.0f} GiB" if type(size) is int else ""
    cores = f", {about['cores']} cores" if about.get("cores") else ""
    batches, rounds = entry.batches, entry.row["rounds"]
    revision = str(entry.header.get("git_revision") or "")[:12]
    schedule = settings.get("schedule")
    found: List[Tuple[str, Any]] = [
        ("Machine", f"{about['cpu']}{cores}{memory}" if about.get("cpu") else None),
        ("System", about.get("os")),
        ("Device", " ".join(str(part) for part in (entry.row["device"], entry.row["device_name"]) if part)),
        ("Threads", entry.environment.get("threads")),
        ("Denormals", entry.environment.get("denormals")),
        ("Copies, at best", _rate(entry.row["copy_bytes_per_second"], "GB/s read and written")),
        (
            "Matrix products, at best",
            _rate(entry.row["flops_per_second"], f"GFLOP/s in {settings.get('dtype')}"),
        ),
        ("Batches", _batches(settings, batches) if batches else None),
        (
            "Joiner",
            f"{settings.get('encoder_dim')} to V = {settings['vocab_size']}" if "vocab_size" in settings else None,
        ),
        ("Dtype", settings.get("dtype")),
        ("Shapes", _shapes(entry, settings)),
        ("Seed", settings.get("seed")),
        ("Rounds", f"{rounds} fresh process{'es' * (rounds != 1)}" if rounds else None),
        ("Trace", ", ".join(f"{k} {v}" for k, v in schedule.items()) if isinstance(schedule, dict) else None),
        ("Suite", revision and revision + (" with uncommitted changes" if entry.header.get("git_dirty") else "")),
        ("Command", _command(entry.header.get("command"))),
    ]
    return [(term, plain(value)) for term, value in found if value is not None and str(value)]


def _rate(value: Optional[float], unit: str) -> Optional[str]:
    return f"{number(value / 1e9, 3)} {unit}" if value else None


def _batches(settings: Dict[str, Any], batches: Sequence[Dict[str, Any]]) -> str:
    utterances = sum(batch["N"] for batch in batches)
    useful = sum(batch["useful_cells"] for batch in batches) / sum(batch["padded_cells"] for batch in batches)
    order = "sorted by length" if settings.get("sort_utterance") else "in file order"
    chosen = f"{len(batches)} ({settings.get('batches')}) of {utterances} utterances"
    return f"{chosen}, {order}; {useful:.0%} of the cells useful"


def _shapes(entry: Entry, settings: Dict[str, Any]) -> Optional[str]:
    path, digest = entry.environment.get("shape_file"), entry.environment.get("shape_file_sha256")
    if not path or not digest:
        return None
    return ", ".join([f"{Path(str(path)).name} (sha256 {str(digest)[:12]})", *workloads.described(settings)])


def _command(command: Any) -> Optional[str]:
    return " ".join(str(word) for word in command) if isinstance(command, list) and command else None
