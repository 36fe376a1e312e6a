"""Define the row: everything measured in one run, with its label and look for tables, plots and the
report."""

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

#: The step first, in tables and keys.
SCOPES = settings.SCOPES[::-1]
#: Counters of memory in a row, in MB. The records have bytes.
COUNTERS = ("device_allocated", "device_reserved", "device_used", "torch_allocated", "process")
#: The first counter that is there is the peak: the device's, torch's own, or the process's.
PEAKS = ("device_allocated", "torch_allocated", "process")
#: A setting, or "device", "cores" and the like -> its value; None: it is not known or has no
#: effect.
Configuration = dict[str, Any]
Kind = TypeVar("Kind", bound=JobLine)


#: Above so many times what torch's allocator has, the process (on CUDA the device) takes far more.
#: Compiled losses are within 1.02 times.  It is a share, since a few MB may double a small peak.
BEYOND = 1.1


class Peak(NamedTuple):
    """Hold the highest memory of a batch.

    Attributes:
        counter: the one of COUNTERS that it is by
        beyond: whether it is far above what torch's allocator has
    """

    mb: float
    counter: str
    beyond: bool = False


@dataclass(eq=False)
class Row:
    """Hold one run.

    Attributes:
        name: of the implementation, with its condition: "k2", "fast_rnnt@k2"
        folder: that holds its records
        status, reason: the worst of its jobs, see measured.SEVERITY, and why
        kind: "exact", a lattice, "pruned", or None of traces without records
        header: its ``run`` record
        environment, checked: its newest ``environment`` and ``correctness`` record
        jobs: the records of each job's last attempt
        profile: numbers of its traces
        step, loss_alone: times of the two scopes
        utterances_per_second, frames_per_second: of the step
        timed: the samples in the order taken, without warm-up
        others_cpu: share of the CPUs that other processes took
        repeated: round -> how often it was measured again
        peaks_mb: scope -> counter -> batch -> peak
        rates: how fast the device is
        limits: the records that the rates are from
        limit_percent: scope -> how many percent of the time the device's limit is
        configuration: what it measured, in settings and machine
        against_fastest, loss_against_fastest: Standings (standing.py stands on rows); None where
          not ranked
        with_fast_products: Standing of its control with torch's products at the processor's rate
            against that of the fastest row; None where these were not measured
        under: its torch and the rate of its products, in words, where most rows of its table had
          others
        earlier: earlier runs with the same settings, the newest first
        stopped: later ones that were stopped before they measured anything
        unreadable: whether nothing of it could be read
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
    under: str = ""
    earlier: Sequence[Row] = ()
    stopped: Sequence[Row] = ()
    unreadable: bool = False
    limits: Sequence[Limits] = ()
    label: str = ""
    look: Look = Look()

    @property
    def results(self) -> Path:
        return self.folder / FILE_NAME

    @property
    def trace(self) -> Path | None:
        return (
            self.folder / Path(self.profile.windows[0].file).name if self.profile.windows else None
        )

    @property
    def device(self) -> str | None:
        return self.environment.device or (self.header.settings.device or "").split(":")[0] or None

    @property
    def device_name(self) -> str | None:
        return self.environment.device_name

    @cached_property
    def curve(self) -> windows.Curve | None:
        """Return the memory within a step of the first trace; None if the trace has no memory
        events."""
        try:
            return windows.curve(self.trace) if self.trace else None
        except reader.TraceError:
            return None

    @property
    def is_exact(self) -> bool:
        """Tell whether the loss is exact, or its kind is not known, as of traces without
        records."""
        return self.kind in ("exact", None)

    @property
    def of_one_model(self) -> bool:
        """Tell whether it trains the same model as the exact losses; other lattices train
        others."""
        return self.is_exact or self.kind in (implementations.BY_UTTERANCE, "pruned")

    @property
    def marked(self) -> str:
        return with_kind(self.label, self.kind)

    @property
    def torch(self) -> str:
        """Return the version without its build: "2.11.0"; "" where it is not known."""
        return (self.environment.torch or "").partition("+")[0]

    @property
    def loss(self) -> str:
        """Return the name without the condition that was asked for: "fast_rnnt" of
        "fast_rnnt@k2"."""
        return self.name.partition("@")[0]

    @property
    def is_comparable(self) -> bool:
        """Tell whether its times can be compared; those of an interrupted run can, over its
        complete rounds."""
        return self.status == "ok" or (self.status == "interrupted" and bool(self.checked.ok))

    @property
    def over_fastest(self) -> float | None:
        """Return how many times the fastest's time the row takes; None where that is not known."""
        return self.against_fastest.factor if self.against_fastest else None

    @property
    def is_fastest(self) -> bool:
        """Tell whether it is the fastest of its kind, and other load cannot have made it so."""
        standing = self.against_fastest
        return bool(standing and standing.is_fastest and not standing.beside_load)

    def times_of(self, scope: str) -> Times:
        return self.step if scope == "step" else self.loss_alone

    def median_ms(self, scope: str) -> float | None:
        summary = self.times_of(scope).ms
        return summary.median if summary else None

    @property
    def scope(self) -> str:
        """Return the scope whose time is shown: the step, or the loss where no step was timed."""
        return "step" if self.step.ms or not self.loss_alone.ms else "loss"

    @property
    def ms(self) -> statistics.Summary | None:
        """Return the summary of the scope that is shown; None where nothing was timed."""
        return self.times_of(self.scope).ms

    @property
    def rounds(self) -> int:
        return len({*self.step.medians, *self.loss_alone.medians})

    @property
    def loaded_rounds(self) -> dict[str, Sequence[str]]:
        """Return by scope the rounds that ran mostly beside other load."""
        return {
            scope: self.times_of(scope).loaded for scope in SCOPES if self.times_of(scope).loaded
        }

    def peaks_of(self, scope: str) -> dict[str, Peak]:
        """Return each batch's peak: by the first of PEAKS that is there, or by what counts memory
        beyond torch's allocator where that is far above it."""
        by_counter = {
            counter: self.peaks_mb.get(scope, {}).get(counter, {}) for counter in COUNTERS
        }
        first = next((counter for counter in PEAKS if by_counter[counter]), PEAKS[0])
        peaks = {batch: Peak(mb, first) for batch, mb in by_counter[first].items()}
        for outer, inner in (("process", "torch_allocated"), ("device_used", "device_reserved")):
            inner_mb = by_counter[inner]
            for batch, mb in by_counter[outer].items():
                if batch in peaks and batch in inner_mb and mb > BEYOND * inner_mb[batch]:
                    peaks[batch] = Peak(mb, outer, beyond=True)
        return peaks

    @property
    def memory_scope(self) -> str:
        """Return the scope whose memory is shown: the step, or else the loss."""
        return "step" if self.peaks_mb.get("step") else "loss"

    @property
    def peaks(self) -> dict[str, float]:
        """Return each batch's peak in MB, of the step or else the loss."""
        return {batch: peak.mb for batch, peak in self.peaks_of(self.memory_scope).items()}

    @property
    def peak_mb(self) -> float | None:
        return max(self.peaks.values(), default=None)

    @property
    def memory(self) -> dict[str, dict[str, float | None]]:
        """Return the highest peak over the batches in MB, by scope and counter."""
        return {
            scope: {
                f"{counter}_mb": max(peaks.values(), default=None)
                for counter, peaks in by_counter.items()
            }
            for scope, by_counter in self.peaks_mb.items()
        }

    def newest(self, kind: type[Kind]) -> Kind | None:
        """Return the last record of a kind, of any job."""
        lines = [line for lines in self.jobs.values() for line in lines if isinstance(line, kind)]
        return lines[-1] if lines else None

    def lines_of(self, kind: type[Kind]) -> list[Kind]:
        """Return the records of a kind of the jobs that ended well."""
        ended = [lines for lines in self.jobs.values() if store.ended_well(lines)]
        return [line for lines in ended for line in lines if isinstance(line, kind)]

    @cached_property
    def environments(self) -> list[Environment]:
        """Return the environment of each job; rounds may have batches of their own."""
        return [
            line for lines in self.jobs.values() for line in lines if isinstance(line, Environment)
        ]

    @cached_property
    def batches(self) -> list[Batch]:
        """Return the batches of all jobs, each once."""
        return list(
            {
                batch.index: batch for line in self.environments for batch in line.batches or ()
            }.values()
        )

    @property
    def totals(self) -> Totals | None:
        return next(
            (line.shape_file_totals for line in self.environments if line.shape_file_totals), None
        )

    @cached_property
    def padding(self) -> ratios.Padding | None:
        share = self.totals.mean_log_useful_share if self.totals else None
        if share is None:
            return None
        by_batch = {
            str(batch.index): math.log(batch.padded_cells / batch.useful_cells)
            for batch in self.batches
        }
        return ratios.Padding(by_batch, -share)

    @property
    def cells(self) -> tuple[int, int]:
        """Return (useful cells, padded cells) of all measured batches."""
        useful = sum(batch.useful_cells for batch in self.batches)
        padded = sum(batch.padded_cells for batch in self.batches)
        return useful, padded

    @property
    def useful_fraction(self) -> float | None:
        return self.cells[0] / self.cells[1] if self.batches else None

    @property
    def errors(self) -> tuple[float | None, float | None]:
        """Return the relative errors of loss and gradient at the measured size, or else on small
        batches."""
        judged = self.checked.at_size or self.checked
        return judged.loss_error, judged.grad_error

    @property
    def gap(self) -> float | None:
        """Return the relative difference of an approximate loss to the exact one."""
        gap = self.checked.approximation_gap
        return None if gap is None else abs(gap)

    @property
    def imprecise(self) -> float | None:
        """Return the largest error at size that only rounding explains."""
        return self.checked.at_size.imprecise if self.checked.at_size else None

    @property
    def is_measured(self) -> bool:
        """Tell whether the row has a number that tables show; others are named below the table."""
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

    def busy(self, scope: str) -> float:
        samples = self.samples_of(scope)
        return sum(sample.is_flagged for sample in samples) / max(len(samples), 1)

    def is_beside_load(self, scope: str) -> bool:
        """Tell whether its times are from rounds beside other load, for want of enough others."""
        return ratios.without_load([self.times_of(scope).medians], self.times_of(scope).loaded)[1]


Rows = Sequence[Row]


def gaps(line: Correctness) -> dict[str, float]:
    return {kind: gap for kind, gap in (line.approximation_gaps or {}).items() if gap is not None}


def with_kind(name: str, kind: str | None) -> str:
    """Return a name with a mark for its kind, unless the loss is exact."""
    if kind in implementations.LATTICES:
        return name if name.endswith(f":{kind}") else f"{name} ({kind})"
    return name + (" (approx.)" if kind == "pruned" else "")
