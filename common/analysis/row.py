"""Define the row: all that one run of one implementation measured, with its label and look for
tables, plots and the report."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from rnnt_bench.analysis import ratios
from rnnt_bench.analysis.times import DeviceRates, Times
from rnnt_bench.core import implementations, settings, statistics
from rnnt_bench.present.style import Look
from rnnt_bench.records import store
from rnnt_bench.records.schema import (
    FILE_NAME,
    Batch,
    Correctness,
    Environment,
    Header,
    JobLine,
    Limits,
    Sample,
    Totals,
)
from rnnt_bench.traces import reader, windows

#: Scopes in the order of tables and keys: the step first.
SCOPES = settings.SCOPES[::-1]
#: Counters of memory, see schema.Memory.
COUNTERS = ("device_allocated", "device_reserved", "device_used", "torch_allocated", "process")
#: The counters that give the peak: the first of these that was measured.
PEAKS = ("device_allocated", "torch_allocated", "process")
#: Name of a setting, or "device", "cores" and the like -> its value; None: it is not known, or has
#: no effect.
Configuration = dict[str, Any]
Record = TypeVar("Record", bound=JobLine)


#: The peak of the process (on CUDA of the device) counts if it is above this many times that of
#: torch's allocator: then a loss takes memory that the allocator does not see. Compiled losses are
#: within 1.02 times.
BEYOND = 1.1


class Peak(NamedTuple):
    """Hold the highest memory of a batch.

    Attributes:
        counter: the one of COUNTERS that measured it
        beyond: whether it is far above the peak of torch's allocator (see BEYOND)
    """

    mb: float
    counter: str
    beyond: bool = False


class Errors(NamedTuple):
    """Hold relative errors against the float64 oracle; None where they were not measured."""

    loss: float | None
    gradient: float | None


@dataclass(eq=False)
class Row:
    """Hold one run of one implementation.

    Attributes:
        name: of the implementation, with its condition: "k2", "fast_rnnt@k2"
        folder: that holds its records
        status, reason: of its worst job, see measured.SEVERITY
        kind: one of implementations.KINDS; None for traces without records
        header: its ``run`` record
        environment, checked: its newest ``environment`` and ``correctness`` record
        jobs: name of a job -> the records of its last attempt
        profile: numbers of its traces
        step, loss_alone: times of the two scopes
        utterances_per_second, frames_per_second: of the step
        timed: the samples in the order taken, without warm-up
        others_cpu: share of the CPUs that other processes took
        repeated: round -> how often it was measured again
        peaks_mb: scope -> counter -> batch -> peak in MB
        rates: how fast the device is; from another row of its run where its own records do not tell
        limit_percent: scope -> percent of the measured time that the device needs at least
        configuration: its settings, and its machine
        against_fastest: Standing against the fastest row, by the step or else the loss; None where
            the row is not ranked (no type here, since standing.py imports this module)
        loss_against_fastest: Standing against the fastest row by the loss alone, or None
        with_fast_products: Standing of its control with torch's products at the processor's rate
            against that of the fastest row; None where these were not measured
        other_torch: what sets its torch apart from that of most rows of its table, as "under torch
            1.13.1"; "" where nothing does
        earlier: earlier runs with the same settings, the newest first
        stopped: later runs that were stopped before they measured anything
        unreadable: whether nothing of it could be read
        limits: its ``limits`` records, also those of one thread, which `rates` leaves out
        label: its name, unique in its group
        look: its colour and form in plots
    """

    name: str = ""
    folder: Path = Path()
    status: str = "ok"
    reason: str = ""
    kind: str | None = None
    header: Header = field(default_factory=lambda: Header(name=""))
    environment: Environment = field(default_factory=Environment)
    checked: Correctness = field(default_factory=Correctness)
    jobs: Mapping[str, Sequence[JobLine]] = field(default_factory=dict)
    profile: windows.Profiled = field(default_factory=windows.Profiled)
    step: Times = Times()
    loss_alone: Times = Times()
    utterances_per_second: float | None = None
    frames_per_second: float | None = None
    timed: list[Sample] = field(default_factory=list)
    others_cpu: float | None = None
    repeated: Mapping[int, int] = field(default_factory=dict)
    peaks_mb: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    rates: DeviceRates = DeviceRates()
    limit_percent: dict[str, float] = field(default_factory=dict)
    configuration: Configuration = field(default_factory=dict)
    against_fastest: Any = None
    loss_against_fastest: Any = None
    with_fast_products: Any = None
    other_torch: str = ""
    earlier: Sequence[Row] = ()
    stopped: Sequence[Row] = ()
    unreadable: bool = False
    limits: Sequence[Limits] = ()
    label: str = ""
    look: Look = Look()

    @property
    def results(self) -> Path:
        """Return the path of the results.jsonl of the run."""
        return self.folder / FILE_NAME

    @property
    def trace(self) -> Path | None:
        """Return the path of the run's first trace; None if the run has no traces."""
        windows = self.profile.windows
        return self.folder / Path(windows[0].file).name if windows else None

    @property
    def device(self) -> str | None:
        """Return "cpu" or "cuda"; None where it is not known."""
        return self.environment.device or (self.header.settings.device or "").split(":")[0] or None

    @property
    def device_name(self) -> str | None:
        return self.environment.device_name

    @cached_property
    def curve(self) -> windows.Curve | None:
        """Return the memory within a step of the first trace. Return None without a trace, or if
        it cannot be read or has no memory events in that step."""
        try:
            return windows.curve(self.trace) if self.trace else None
        except reader.TraceError:
            return None

    @property
    def is_exact(self) -> bool:
        """Tell whether the loss is exact, or of unknown kind (traces without records)."""
        return self.kind in ("exact", None)

    @property
    def trains_exact_model(self) -> bool:
        """Tell whether the loss trains a model on the lattice of exact losses.

        True for a pruned loss too, which approximates the exact one, and for an unknown kind; False
        for a loss on another lattice."""
        return self.is_exact or self.kind in (implementations.BY_UTTERANCE, "pruned")

    @property
    def marked_label(self) -> str:
        """Return its label with a mark for its kind, unless the loss is exact."""
        return with_kind(self.label, self.kind)

    @property
    def torch(self) -> str:
        """Return the version of torch without its build: "2.11.0"; "" where it is not known."""
        return (self.environment.torch or "").partition("+")[0]

    @property
    def loss(self) -> str:
        """Return the row's name without its condition: "fast_rnnt" for "fast_rnnt@k2"."""
        return self.name.partition("@")[0]

    @property
    def is_comparable(self) -> bool:
        """Tell whether the row's times can be compared: the run ended well, or was interrupted and
        the loss is right, so that the complete rounds count."""
        return self.status == "ok" or (self.status == "interrupted" and bool(self.checked.ok))

    @property
    def over_fastest(self) -> float | None:
        """Return the row's time over that of the fastest row; None if they cannot be compared."""
        return self.against_fastest.factor if self.against_fastest else None

    @property
    def is_fastest(self) -> bool:
        """Tell whether the row is the fastest of its kind, and has enough rounds without other load
        to say so."""
        standing = self.against_fastest
        return bool(standing and standing.is_fastest and not standing.beside_load)

    def times_of(self, scope: str) -> Times:
        """Return the times of "step" or "loss"."""
        return self.step if scope == "step" else self.loss_alone

    def median_ms(self, scope: str) -> float | None:
        """Return the median time of a scope in ms; None where it was not timed."""
        summary = self.times_of(scope).ms
        return summary.median if summary else None

    @property
    def scope(self) -> str:
        """Return the scope whose time is shown: "loss" if only that was timed, else "step"."""
        return "step" if self.step.ms or not self.loss_alone.ms else "loss"

    @property
    def ms(self) -> statistics.Summary | None:
        """Return the summary of the scope that is shown; None where nothing was timed."""
        return self.times_of(self.scope).ms

    @property
    def rounds(self) -> int:
        """Return the number of rounds that were timed."""
        return len({*self.step.medians, *self.loss_alone.medians})

    @property
    def loaded_rounds(self) -> dict[str, Sequence[str]]:
        """Return scope -> the rounds that ran mostly beside other load, without scopes that have
        none."""
        loaded = {scope: self.times_of(scope).loaded for scope in SCOPES}
        return {scope: rounds for scope, rounds in loaded.items() if rounds}

    def peaks_of(self, scope: str) -> dict[str, Peak]:
        """Return batch -> its peak in a scope, "step" or "loss".

        The first counter of PEAKS that was measured gives the peaks. But where the process's peak
        (on CUDA the device's) is over BEYOND times that of torch's allocator, it counts instead."""
        measured = self.peaks_mb.get(scope, {})
        by_counter = {counter: measured.get(counter, {}) for counter in COUNTERS}
        first = next((counter for counter in PEAKS if by_counter[counter]), PEAKS[0])
        peaks = {batch: Peak(mb, first) for batch, mb in by_counter[first].items()}
        # The outer counter counts all memory, the inner one only that of torch's allocator.
        for outer, inner in (("process", "torch_allocated"), ("device_used", "device_reserved")):
            inner_mb = by_counter[inner]
            for batch, mb in by_counter[outer].items():
                if batch in peaks and batch in inner_mb and mb > BEYOND * inner_mb[batch]:
                    peaks[batch] = Peak(mb, outer, beyond=True)
        return peaks

    @property
    def memory_scope(self) -> str:
        """Return the scope whose memory is shown: the step, or the loss where no step was
        measured."""
        return "step" if self.peaks_mb.get("step") else "loss"

    @property
    def peaks(self) -> dict[str, float]:
        """Return batch -> its peak in MB, of the scope whose memory is shown."""
        return {batch: peak.mb for batch, peak in self.peaks_of(self.memory_scope).items()}

    @property
    def peak_mb(self) -> float | None:
        """Return the highest peak over the batches in MB; None where none was measured."""
        return max(self.peaks.values(), default=None)

    @property
    def memory(self) -> dict[str, dict[str, float | None]]:
        """Return {scope: {"COUNTER_mb": the highest peak over the batches in MB, or None}}."""
        return {
            scope: {
                f"{counter}_mb": max(peaks.values(), default=None)
                for counter, peaks in by_counter.items()
            }
            for scope, by_counter in self.peaks_mb.items()
        }

    def newest(self, kind: type[Record]) -> Record | None:
        """Return the last record of a type, such as schema.Trace, of any job; None without any."""
        lines = [line for lines in self.jobs.values() for line in lines if isinstance(line, kind)]
        return lines[-1] if lines else None

    def lines_of(self, kind: type[Record]) -> list[Record]:
        """Return the records of a type, such as schema.Sample, of the jobs that ended well."""
        ended = [lines for lines in self.jobs.values() if store.ended_well(lines)]
        return [line for lines in ended for line in lines if isinstance(line, kind)]

    @cached_property
    def environments(self) -> list[Environment]:
        """Return the environment records of all jobs.  Jobs of different rounds may name different
        batches."""
        return [
            line for lines in self.jobs.values() for line in lines if isinstance(line, Environment)
        ]

    @cached_property
    def batches(self) -> list[Batch]:
        """Return the batches of all jobs, each once."""
        batches = [batch for line in self.environments for batch in line.batches or ()]
        return list({batch.index: batch for batch in batches}.values())

    @property
    def totals(self) -> Totals | None:
        """Return the totals of the shape file; None where they are not known."""
        # All jobs of a run read one shape file, so the first record that has them will do.
        totals = (line.shape_file_totals for line in self.environments)
        return next(filter(None, totals), None)

    @cached_property
    def padding(self) -> ratios.Padding | None:
        """Return the padding of the row's batches and of its whole shape file; None if that of the
        shape file is not known."""
        mean_log_share = self.totals.mean_log_useful_share if self.totals else None
        if mean_log_share is None:
            return None
        by_batch = {
            str(batch.index): math.log(batch.padded_cells / batch.useful_cells)
            for batch in self.batches
        }
        # A Padding holds -log(useful / padded); `by_batch` has this sign by its quotient already.
        return ratios.Padding(by_batch, -mean_log_share)

    @property
    def cells(self) -> tuple[int, int]:
        """Return (useful, padded): the number of lattice cells of all measured batches without and
        with padding."""
        useful = sum(batch.useful_cells for batch in self.batches)
        padded = sum(batch.padded_cells for batch in self.batches)
        return useful, padded

    @property
    def useful_fraction(self) -> float | None:
        """Return the share of the padded cells that is no padding; None where no batch is known."""
        useful, padded = self.cells
        return useful / padded if padded else None

    @property
    def errors(self) -> Errors:
        """Return the errors at the measured size, or else on small batches."""
        judged = self.checked.at_size or self.checked
        return Errors(judged.loss_error, judged.grad_error)

    @property
    def gap(self) -> float | None:
        """Return the size of the relative difference of an approximate loss to the exact one; None
        for other losses, or if it is not known."""
        gap = self.checked.approximation_gap
        return None if gap is None else abs(gap)

    @property
    def imprecise(self) -> float | None:
        """Return the largest error at the measured size that only rounding explains; None if there
        is no such error, or if nothing was judged at this size."""
        return self.checked.at_size.imprecise if self.checked.at_size else None

    @property
    def is_measured(self) -> bool:
        """Tell whether the run ended well or has a number. Other rows are left out of tables, and
        named below them."""
        numbers = (
            self.ms,
            self.profile.average_step_time_us,
            self.peak_mb,
            self.profile.peak_memory_mb,
        )
        return self.status == "ok" or any(numbers)

    @property
    def is_empty(self) -> bool:
        """Tell whether its run was stopped before it measured anything."""
        return self.status == "interrupted" and not self.is_measured

    def samples_of(self, scope: str) -> list[Sample]:
        return [sample for sample in self.timed if sample.scope == scope]

    def busy_share(self, scope: str) -> float:
        """Return the share of the samples of a scope that ran beside other load; 0 without any."""
        samples = self.samples_of(scope)
        return sum(sample.is_flagged for sample in samples) / max(len(samples), 1)

    def is_beside_load(self, scope: str) -> bool:
        """Tell whether comparisons of its times in a scope include rounds beside other load, since
        too few other rounds are left."""
        times = self.times_of(scope)
        _, is_loaded = ratios.without_load([times.medians], times.loaded)
        return is_loaded


Rows = Sequence[Row]


def gaps(line: Correctness) -> dict[str, float]:
    """Return kind of logits -> the known relative difference of a pruned loss to the exact one."""
    return {kind: gap for kind, gap in (line.approximation_gaps or {}).items() if gap is not None}


def with_kind(name: str, kind: str | None) -> str:
    """Return a name followed by its kind: "fast_rnnt (approx.)" for a pruned loss, "k2 (modified)"
    for another lattice, unless the name ends in ":modified".

    All other names stay as they are."""
    if kind == "pruned":
        return f"{name} (approx.)"
    if kind in implementations.LATTICES and not name.endswith(f":{kind}"):
        return f"{name} ({kind})"
    return name
