"""Define the row: everything measured in one run, with its label and look for tables, plots and the report."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple, Type, TypeVar

from common.analysis import ratios
from common.analysis.parts import Largest, Sample
from common.analysis.ratios import Padding, Ratio
from common.analysis.roofline import Floor
from common.core import settings, statistics
from common.core.implementations import LATTICES
from common.core.statistics import Summary
from common.core.text import plain
from common.present.style import Look
from common.records import schema
from common.records.schema import (
    FILE_NAME,
    AtSize,
    Batch,
    Correctness,
    Environment,
    GapRange,
    Header,
    JobLine,
    Option,
    Record,
)
from common.records.store import status_of
from common.traces import memory as traced
from common.traces.memory import Curve
from common.traces.reader import TraceError
from common.traces.windows import WindowNumbers

#: Fields of `at_size` that are elsewhere in the row, or in its status.
NOT_IN_JSON = ("ok", "imprecise")
#: The step first, in tables and keys.
SCOPES = settings.SCOPES[::-1]
#: Of memory, in MB, as the records have them in bytes.
COUNTERS = ("device_allocated", "device_reserved", "device_used", "torch_allocated", "process")
#: What counts as the peak, in this order: the device's where there is one, else torch's own, else the process's.
PEAKS = ("device_allocated", "torch_allocated", "process")
T = TypeVar("T", bound=JobLine)
#: A setting, or "device", "cores" and the like -> its value; None: it is not known or has no effect.
Configuration = Dict[str, Any]


@dataclass(eq=False)
class Exported:
    """Hold what CSV and JSON show of a run: the fields are their keys, in this order, with their values where nothing
    is known.

    Units are in the names: ms, us and MB (2**20 bytes).
    """

    name: str = ""
    log_dir: str = ""
    status: str = "ok"
    reason: str = ""
    device: Optional[str] = None
    device_name: Optional[str] = None
    torch_version: Optional[str] = None
    implementation_version: Optional[str] = None
    kind: Optional[str] = None
    options: Mapping[str, Option] = field(default_factory=dict)  # of the package's function: name -> ours, default
    exact: Optional[bool] = None
    # profiled
    windows: List[WindowNumbers] = field(default_factory=list)
    average_step_time_us: Optional[float] = None
    peak_memory_mb: Optional[float] = None
    profiled_stages_us: Dict[str, float] = field(default_factory=dict)
    profiler_inflation: Optional[float] = None
    # timing pass
    step_ms: Optional[Summary] = None
    loss_ms: Optional[Summary] = None
    step_ms_interval: Optional[List[float]] = None
    loss_ms_interval: Optional[List[float]] = None
    step_event_ms: Optional[Summary] = None
    loss_event_ms: Optional[Summary] = None
    step_wall_ms: Optional[Summary] = None  # on CUDA, beside the events
    loss_wall_ms: Optional[Summary] = None
    against_fastest: Optional[Standing] = None  # of its kind, set by analysis/ranking
    loss_against_fastest: Optional[Standing] = None  # likewise, of the loss alone
    step_forward_ms: Optional[Summary] = None
    loss_forward_ms: Optional[Summary] = None
    stages: Dict[str, Dict[str, float]] = field(default_factory=dict)  # scope -> stage -> ms, as above
    round_medians_ms: Dict[str, Dict[str, Dict[str, float]]] = field(default_factory=dict)  # scope -> round -> batch
    utterances_per_second: Optional[float] = None  # of the step
    frames_per_second: Optional[float] = None  # T of the encoder outputs, summed
    stopped: Dict[str, Dict[str, int]] = field(default_factory=dict)  # scope -> why sampling ended -> rounds
    samples: int = 0
    flagged_samples: int = 0
    loaded_samples: int = 0  # beside so much other load that their times cannot be compared
    others_cpu: Optional[float] = None  # share of the CPUs that others took beside the samples, mean over their time
    loaded_rounds: Dict[str, List[str]] = field(default_factory=dict)  # scope -> those mostly beside such load
    rounds: int = 0
    # correctness and memory passes, batches
    loss_error: Optional[float] = None
    grad_error: Optional[float] = None
    at_size: Optional[AtSize] = None
    imprecise: Optional[float] = None
    approximation_gap: Optional[float] = None
    approximation_gaps: Dict[str, float] = field(default_factory=dict)
    gap_ranges: Mapping[str, GapRange] = field(default_factory=dict)
    memory: Dict[str, Dict[str, Optional[float]]] = field(default_factory=dict)  # scope -> counter -> highest peak
    measured_batches: Optional[int] = None  # fewer than asked for where there are no more
    padded_cells: Optional[int] = None
    useful_cells: Optional[int] = None
    useful_fraction: Optional[float] = None
    # what the device does at best, what the loss must do at least, and how much of the median that is
    bytes_per_second: Optional[float] = None
    flops_per_second: Optional[float] = None
    exps_per_second: Optional[float] = None
    limit_ranges: Dict[str, Dict[str, float]] = field(default_factory=dict)  # of these three: measurements, lowest, ...
    needed_share: Optional[float] = None  # of the cells, those with a gradient that float32 can tell from zero
    floor: Dict[str, Dict[str, Floor]] = field(default_factory=dict)  # scope -> layout
    limit_percent: Dict[str, Dict[str, Optional[float]]] = field(default_factory=dict)  # scope -> packed, padded
    # the run
    configuration: Configuration = field(default_factory=dict)
    largest: Optional[Largest] = None  # of --find-largest alone: see analysis/search
    suffix: Optional[str] = None
    sweep: Dict[str, schema.Value] = field(default_factory=dict)  # id, cell, and the values of the swept settings
    run_id: Optional[str] = None
    started: Optional[str] = None
    earlier_runs: int = 0
    unreadable: bool = False  # nothing of it could be read
    notes: List[str] = field(default_factory=list)

    def as_json(self) -> Record:
        """Return the fields as JSON has them."""
        values = {key: getattr(self, key) for key in Exported.__dataclass_fields__}
        for key in ("against_fastest", "loss_against_fastest"):
            values[key] = values[key].as_json() if values[key] else {}
        values["largest"] = self.largest or {}
        written = {key: schema.as_written(value) for key, value in values.items()}
        if self.at_size:
            written["at_size"] = {key: value for key, value in written["at_size"].items() if key not in NOT_IN_JSON}
        return written


@dataclass(eq=False)
class Row(Exported):
    """Hold one run.

    Attributes:
        label: its name, unique in its group, harmless and short.
        look: its colour and form in plots.
        header, environment: its ``run`` and newest ``environment`` record; empty for traces alone.
        jobs: the records of each job's last attempt.
        timed: the samples in the order taken.
        peaks_mb: scope -> counter -> batch -> peak.
        file: the name of its records' file.
    """

    label: str = ""
    look: Look = Look()
    header: Header = Header(name="")
    environment: Environment = Environment(job="")
    jobs: Mapping[str, Sequence[JobLine]] = field(default_factory=dict)
    timed: List[Sample] = field(default_factory=list)
    peaks_mb: Dict[str, Dict[str, Dict[str, float]]] = field(default_factory=dict)
    file: str = FILE_NAME

    @property
    def folder(self) -> Path:
        return Path(self.log_dir)

    @property
    def results(self) -> Path:
        return self.folder / self.file

    @property
    def trace(self) -> Optional[Path]:
        """Return the first trace file."""
        return self.folder / Path(self.windows[0].file).name if self.windows else None

    @cached_property
    def curve(self) -> Optional[Curve]:
        """Return the memory within a step of the first trace; None if the trace has no memory events."""
        try:
            return traced.curve(self.trace) if self.trace else None
        except TraceError:
            return None

    @property
    def is_exact(self) -> bool:
        """Tell whether the loss is exact; true also if its kind is not known, as of traces without records."""
        return self.exact is not False

    @property
    def of_one_model(self) -> bool:
        """Return whether it trains the same model as the exact losses; additive losses and other lattices train
        others."""
        return self.is_exact or self.kind == "pruned"

    @property
    def marked(self) -> str:
        """Return the label with what sets its kind apart from an exact loss."""
        return marked(self.label, self.kind)

    @property
    def torch(self) -> str:
        """Return the version without its build: "2.11.0"; "" where it is not known."""
        return (self.torch_version or "").partition("+")[0]

    @property
    def loss(self) -> str:
        """Return the name without the environment that was asked for: "fast_rnnt" of "fast_rnnt@k2"."""
        return self.name.partition("@")[0]

    @property
    def is_comparable(self) -> bool:
        """Return whether its times can be compared; those of an interrupted run can, over its complete rounds."""
        checked = self.correctness
        return self.status == "ok" or (self.status == "interrupted" and bool(checked and checked.ok))

    @property
    def over_fastest(self) -> Optional[float]:
        """Return how many times the fastest's time the row takes, as measured; None where that is not known."""
        return self.against_fastest.times if self.against_fastest else None

    @property
    def is_fastest(self) -> bool:
        """Return whether the row is the fastest of its kind, and other load cannot have made it so."""
        standing = self.against_fastest
        return bool(standing and standing.is_fastest and not standing.beside_load)

    @property
    def same_torch(self) -> List[float]:
        """Return the range of `over_fastest` under the fastest's torch; empty where no control gives it."""
        standing = self.against_fastest
        ratios_known = [standing.through_control, standing.surplus_kept] if standing else []
        return sorted(ratio.ratio for ratio in ratios_known if ratio)

    def ms(self, scope: str) -> Optional[Summary]:
        """Return the times of a scope in milliseconds; None where it was not timed."""
        return self.step_ms if scope == "step" else self.loss_ms

    def median_ms(self, scope: str) -> Optional[float]:
        """Return the median of the times of a scope; None where it was not timed."""
        times = self.ms(scope)
        return times.median if times else None

    @property
    def scope(self) -> str:
        """Return the scope whose time is shown: "step" where it was measured, else "loss"."""
        return "step" if self.step_ms or not self.loss_ms else "loss"

    @property
    def times(self) -> Optional[Summary]:
        """Return the times of that scope; None where it was not timed."""
        return self.ms(self.scope)

    @property
    def peaks(self) -> Dict[str, float]:
        """Return the peak of each batch in MB, of the step, or of the loss where no step was measured."""
        of_scope = self.peaks_mb.get("step") or self.peaks_mb.get("loss") or {}
        return next((of_scope[counter] for counter in PEAKS if of_scope[counter]), {}) if of_scope else {}

    @property
    def peak_mb(self) -> Optional[float]:
        """Return the highest peak over the batches in MB."""
        return max(self.peaks.values(), default=None)

    @cached_property
    def environments(self) -> List[Environment]:
        """Return the environment of each job; rounds may have batches of their own."""
        return [line for lines in self.jobs.values() for line in lines if isinstance(line, Environment)]

    @cached_property
    def batches(self) -> List[Batch]:
        """Return the batches of all jobs, each once."""
        return batches_of(self.environments)

    @cached_property
    def padding(self) -> Optional[Padding]:
        """Return the padding of the measured batches and of all of the file; None where it is not known."""
        totals = (line.shape_file_totals for line in self.environments if line.shape_file_totals)
        share = next((each.mean_log_useful_share for each in totals if each.mean_log_useful_share is not None), None)
        if share is None:
            return None
        of_batch = {str(batch.index): math.log(batch.padded_cells / batch.useful_cells) for batch in self.batches}
        return Padding(of_batch, -share)

    @property
    def measured_errors(self) -> Tuple[Optional[float], Optional[float]]:
        """Return the relative errors of loss and gradient at the measured size; on small batches where no other was
        judged."""
        if self.at_size:
            return self.at_size.loss_error, self.at_size.grad_error
        return self.loss_error, self.grad_error

    @property
    def correctness(self) -> Optional[Correctness]:
        """Return the record of the check, also of a failed one; None where there is none."""
        return newest(self.jobs, Correctness)

    @property
    def failure(self) -> Optional[Tuple[str, str]]:
        """Return (status, reason) of the first job that is not ok; None when all are."""
        for job, lines in self.jobs.items():
            end = status_of(lines)
            if end is None or end.status != "ok":
                reason = end and end.reason
                return (end.status if end else "interrupted"), f"{job}: {reason or 'stopped before its end'}"
        return None if self.jobs else ("interrupted", "stopped before its first pass")

    @property
    def is_measured(self) -> bool:
        """Return whether the row has a number that tables show; rows without one are named below the table."""
        times = (self.step_ms, self.loss_ms, self.average_step_time_us)
        sizes = (self.peak_mb, self.peak_memory_mb, self.largest and self.largest.size)
        return self.status == "ok" or any(times) or any(sizes)

    def of_scope(self, scope: str) -> List[Sample]:
        return [sample for sample in self.timed if sample.scope == scope]

    def is_beside_load(self, scope: str) -> bool:
        """Return whether its times of a scope are from rounds beside other load, for want of enough others."""
        return ratios.without_load([self.round_medians_ms.get(scope, {})], self.loaded_rounds.get(scope, ()))[1]

    def stage_medians(self, scope: str) -> Dict[str, float]:
        """Return the median milliseconds of each stage of a scope."""
        stages = self.stages.get(scope) or {}
        return {plain(stage): value for stage, value in stages.items() if is_positive(value)}


#: Verdicts of a row that cannot be judged.
OTHER_TORCH = "other torch"
BESIDE_LOAD = "beside load"
#: A ratio that no noise explains, where too few rounds give no interval: a loop in Python on one batch.
FAR = 3.0
#: A ratio that other load beside one of two rows is not taken to explain.
BEYOND_LOAD = 10.0


@dataclass(frozen=True, eq=False)
class Standing:
    """Hold how a row stands against the fastest of its kind.

    Attributes:
        scope: "step" or "loss", whose times are compared.
        ratio: the row's time over the fastest's, as measured; None for the fastest itself, and where the two have no
            batch or round in common.
        paired: the rounds of both ran beside each other.
        other_torch: the row ran under another torch than the fastest.
        control: the row whose two runs set the torches apart; None where none was measured.
        through_control: the ratio under the fastest's torch if that torch slows the row as it slows the control.
        surplus_kept: the ratio if the row's surplus over the control stays the same in milliseconds.
        beside_load: too few rounds of both are without other load, so the ratio gives no verdict; for the fastest:
            other load may have made it the fastest.
    """

    row: Row
    fastest: Row
    scope: str
    ratio: Optional[Ratio] = None
    paired: bool = True
    other_torch: bool = False
    control: Optional[Row] = None
    through_control: Optional[Ratio] = None
    surplus_kept: Optional[Ratio] = None
    beside_load: bool = False

    @property
    def is_fastest(self) -> bool:
        return self.row is self.fastest

    @property
    def times(self) -> Optional[float]:
        """Return the ratio, 1 for the fastest; None where it is not known."""
        return 1.0 if self.is_fastest else self.ratio.ratio if self.ratio else None

    @property
    def by_round(self) -> List[float]:
        """Return the ratio of each round, in the order of time; empty where rounds were not paired."""
        ratio = self.ratio
        if ratio is None or len(ratio.baseline) != len(ratio.new):
            return []
        return [after / before for before, after in zip(ratio.baseline, ratio.new)]

    @property
    def verdict(self) -> str:
        """Return "fastest", "faster", "slower", "same" (within 2%), "unclear", BESIDE_LOAD or OTHER_TORCH."""
        if self.other_torch:
            return OTHER_TORCH
        if self.beside_load:
            return BESIDE_LOAD
        if self.is_fastest:
            return "fastest"
        ratio = self.ratio
        return statistics.verdict(ratio.low, ratio.high, statistics.TOLERANCE) if ratio else "unclear"

    @property
    def may_be_as_fast(self) -> bool:
        """Return whether noise or other load may explain all of the difference to the fastest."""
        times = self.times or 1.0
        if self.verdict == BESIDE_LOAD:
            return times < BEYOND_LOAD
        return self.verdict != "slower" and (times < FAR or bool(self.ratio and self.ratio.low is not None))

    def as_json(self) -> Record:
        """Return the standing for JSON, with names in the place of rows."""
        controlled = {"through_control": self.through_control, "surplus_kept": self.surplus_kept}
        return {
            "scope": self.scope,
            "fastest": self.fastest.name,
            "is_fastest": self.is_fastest,
            **_ratio_as_json(self.ratio),
            "ratio": self.times,
            "by_round": self.by_round,
            "verdict": self.verdict,
            "paired": self.paired,
            "other_torch": self.other_torch,
            "beside_load": self.beside_load,
            "control": self.control and self.control.name,
            **{key: _ratio_as_json(ratio) if ratio else {} for key, ratio in controlled.items()},
        }


def _ratio_as_json(ratio: Optional[Ratio]) -> Record:
    """Return a ratio's numbers for JSON; each is None where there is no ratio."""
    keys = ("ratio", "low", "high", "batches", "least", "most")
    numbers = {key: getattr(ratio, key, None) for key in keys}
    return {**numbers, "rounds": len(ratio.new) if ratio else None, "of_file": bool(ratio and ratio.of_file)}


def batches_of(environments: Sequence[Environment]) -> List[Batch]:
    """Return the batches of all jobs, each once: rounds may have batches of their own."""
    return list({batch.index: batch for line in environments for batch in line.batches or ()}.values())


def newest(jobs: Mapping[str, Sequence[JobLine]], kind: Type[T]) -> Optional[T]:
    """Return the last record of a kind."""
    lines_of_kind = [line for lines in jobs.values() for line in lines if isinstance(line, kind)]
    return lines_of_kind[-1] if lines_of_kind else None


def search_of(row: Row) -> Largest:
    """Return the result of --find-largest in its row."""
    assert row.largest
    return row.largest


def is_positive(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < 1e15


def marked(name: str, kind: Optional[str]) -> str:
    """Return a name with a mark for its kind, unless the loss is exact."""
    if kind in LATTICES:
        return name if name.endswith(f":{kind}") else f"{name} ({kind})"
    mark = {"pruned": " (approx.)", "additive": " (additive)"}.get(kind or "", "")
    return name + mark
