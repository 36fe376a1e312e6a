"""What the report shows of each row beyond the row itself: samples in order, memory per batch, the machine, the curve.

Nothing here raises for what is in a folder: what cannot be read is not shown, and the row says why where it can.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from common.errors import UserError
from common.report import memory_curve
from common.report.memory_curve import Curve
from common.results import largest_tables, records, tables
from common.results.exports import plain
from common.results.profiled import MB
from common.results.summary import Row

#: What counts as the peak, in this order: the device's where there is one, else torch's own, else the process's.
PEAKS = ("device_allocated", "torch_allocated", "process")
MALFORMED = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)
LONGEST_LABEL = 40  # characters


class Sample(NamedTuple):
    """at_s: seconds of timed work of this implementation at its end, warm-up included."""

    scope: str
    round: str
    batch: str
    at_s: float
    ms: float
    flagged: bool
    foreign_cpu: Optional[float]


@dataclass
class Entry:
    """One row and what belongs to it.  label: its name, unique in its group, harmless and short; peaks_mb: by scope,
    the peak of each batch in MB; distribution: of the utterances of the shape file, {} where it was not recorded; file:
    the name of its records' file."""

    row: Row
    label: str
    header: Dict[str, Any] = field(default_factory=dict)
    environment: Dict[str, Any] = field(default_factory=dict)
    samples: List[Sample] = field(default_factory=list)
    peaks_mb: Dict[str, Dict[str, float]] = field(default_factory=dict)
    distribution: Dict[str, Any] = field(default_factory=dict)
    curve: Optional[Curve] = None
    file: str = records.FILE_NAME

    @property
    def folder(self) -> Path:
        return Path(self.row["log_dir"])

    @property
    def results(self) -> Path:
        return self.folder / self.file

    @property
    def trace(self) -> Optional[Path]:
        """Its first trace file."""
        return self.folder / Path(str(self.row["windows"][0]["file"])).name if self.row["windows"] else None

    @property
    def exact(self) -> bool:
        return self.row["exact"] is not False

    @property
    def of_one_model(self) -> bool:
        """Whether it trains the model of the exact losses: additive losses and other lattices train others."""
        return self.exact or self.row["kind"] == "pruned"

    @property
    def marked(self) -> str:
        """The label with what sets its kind apart from an exact loss."""
        return tables.marked(self.label, self.row["kind"])

    @property
    def step_ms(self) -> Optional[Dict[str, float]]:
        return _sound(self.row["step_ms"])

    @property
    def loss_ms(self) -> Optional[Dict[str, float]]:
        return _sound(self.row["loss_ms"])

    @property
    def scope(self) -> str:
        """The scope that its time is told of: the step where it was measured."""
        return "step" if self.step_ms or not self.loss_ms else "loss"

    @property
    def peak_mb(self) -> Optional[float]:
        """The highest peak over the batches of the step, or of the loss where no step was measured."""
        peaks = self.peaks_mb.get("step") or self.peaks_mb.get("loss")
        return max(peaks.values()) if peaks else None

    @property
    def batches(self) -> List[Dict[str, Any]]:
        return self.environment.get("batches") or []

    def of_scope(self, scope: str) -> List[Sample]:
        return [sample for sample in self.samples if sample.scope == scope]


@dataclass
class Group:
    """Entries of one configuration, exact ones first, then by step time.  heading: what they have in common; search: of
    --find-largest, by throughput."""

    heading: str
    entries: List[Entry]
    search: bool = False


def collect(rows: Sequence[Row]) -> List[Group]:
    timed, searches = ([row for row in rows if bool(row["largest"]) == is_search] for is_search in (False, True))
    found = [Group(tables.heading(group), _entries(group)) for group in tables.groups(timed)]
    for group in largest_tables.groups(searches):
        found.append(Group(largest_tables.heading(group), _entries(group), search=True))
    return found


def apart(entries: Sequence[Entry]) -> List[Tuple[str, str, List[Entry]]]:
    """(end of the key, end of the title, entries) of each plot: one of the exact losses and one of the others, which
    have other stages and take far less time and memory; one where there is only one of the two."""
    exact, others = ([entry for entry in entries if entry.exact is is_exact] for is_exact in (True, False))
    if exact and others:
        return [("", ", exact losses", exact), ("-others", ", losses of other kinds", others)]
    return [("", "", list(entries))] if entries else []


def is_positive(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < 1e15


def _sound(described: Optional[Dict[str, float]]) -> Optional[Dict[str, float]]:
    """None for times that no clock gave: records may be garbled."""
    return described if described and all(is_positive(described[key]) for key in ("median", "p20", "p80")) else None


def _entries(rows: Sequence[Row]) -> List[Entry]:
    names = [plain(row["name"]) or "(no name)" for row in rows]
    labels: List[str] = []
    for row, name in zip(rows, names):
        label = short(name if names.count(name) == 1 else f"{name} ({plain(Path(row['log_dir']).name)})")
        same = labels.count(label)
        labels.append(label if not same else f"{label} {same + 1}")
    return [_entry(row, label) for row, label in zip(rows, labels)]


def short(label: str) -> str:
    return label if len(label) <= LONGEST_LABEL else label[: LONGEST_LABEL - 1] + "\u2026"


def _entry(row: Row, label: str) -> Entry:
    entry = Entry(row, label)
    if row["run_id"] is not None:
        try:
            _from_records(entry, records.read(entry.folder))
        except (UserError, *MALFORMED):
            pass  # the row has said so, or what is there is shown without them
    if entry.trace is not None:
        try:
            entry.curve = memory_curve.read(entry.trace)
        except (UserError, *MALFORMED):
            pass
    return entry


def entry_of(row: Row, label: str, found: List[Dict[str, Any]], file: str) -> Entry:
    """The entry of a row whose records were `found` in the file of that name in its folder."""
    entry = Entry(row, label, file=file)
    try:
        _from_records(entry, found)
    except MALFORMED:
        pass  # what is there is shown without them
    return entry


def _from_records(entry: Entry, found: List[Dict[str, Any]]) -> None:
    entry.header = records.run_header(found)
    jobs = records.latest_jobs(found)
    lines = [line for ended in jobs.values() for line in ended]
    environments = [line for line in lines if line["record"] == "environment"]
    entry.environment = environments[-1] if environments else {}
    if not all(_is_batch(batch) for batch in entry.batches):
        entry.environment = {**entry.environment, "batches": []}
    told = (line.get("shape_distribution") for line in environments)
    entry.distribution = next((found for found in told if _is_distribution(found)), {})
    well = [line for ended in jobs.values() if _ended_well(ended) for line in ended]
    entry.samples = list(_samples(well))
    for line in well:
        if line["record"] == "memory":
            peak = next((line[f"{key}_bytes"] for key in PEAKS if line.get(f"{key}_bytes") is not None), None)
            if is_positive(peak):
                of_scope = entry.peaks_mb.setdefault(str(line["scope"]), {})
                of_scope[str(line["batch"])] = max(peak / MB, of_scope.get(str(line["batch"]), 0.0))


def _is_batch(batch: Any) -> bool:
    return isinstance(batch, dict) and all(
        is_positive(batch.get(key)) for key in ("N", "T_max", "useful_cells", "padded_cells")
    )


def _is_distribution(found: Any) -> bool:
    return isinstance(found, dict) and all(_is_histogram(found.get(key)) for key in ("T", "U", "padding_percent"))


def _is_histogram(found: Any) -> bool:
    """As records.py says, with numbers that can be drawn."""
    if not isinstance(found, dict) or not is_positive(found.get("width")):
        return False
    counts = [found.get("all"), found.get("measured")]
    numbers = [found.get(key) for key in ("begin", "lowest", "median", "highest")]
    return (
        all(isinstance(some, list) and len(some) == len(counts[0]) for some in counts)
        and all(type(count) is int and 0 <= count < 1e15 for some in counts for count in some)
        and all(sum(some) > 0 for some in counts)
        and all(number == 0 or is_positive(number) for number in numbers)
    )


def _ended_well(lines: List[Dict[str, Any]]) -> bool:
    return lines[-1]["record"] == "status" and lines[-1]["status"] == "ok"


def _samples(lines: List[Dict[str, Any]]) -> Iterator[Sample]:
    elapsed = 0.0
    for line in lines:
        if line["record"] != "sample" or not is_positive(line["total_wall_ns"]):
            continue
        elapsed += line["total_wall_ns"] / 1e9
        if not line["warmup"]:
            foreign = line.get("foreign_cpu")
            yield Sample(
                str(line["scope"]),
                str(line["round"]),
                str(line["batch"]),
                elapsed,
                line["total_wall_ns"] / 1e6,
                bool(line.get("flags")),
                foreign if type(foreign) in (int, float) and math.isfinite(foreign) else None,
            )


def stage_medians(entry: Entry, scope: str) -> Dict[str, float]:
    """Median milliseconds of each stage of a scope."""
    stages = entry.row["stages"].get(scope) or {}
    return {plain(stage): value for stage, value in stages.items() if is_positive(value)}


def pareto(points: Sequence[Tuple[float, float]]) -> List[int]:
    """Indices of the points that no other beats in both (lower is better), by the first coordinate."""
    order = sorted(range(len(points)), key=lambda place: points[place])
    front: List[int] = []
    for place in order:
        if not front or points[place][1] < points[front[-1]][1]:
            front.append(place)
    return front
