"""Compute the profiled numbers of traces: step time and peak memory of the windows of one worker,
memory over time.

Profiled numbers contain the profiler's own cost.  Windows of different workers are never merged.
Bytes over time are those of the fullest GPU, or of the CPU if no GPU allocated.  They are above the
level at which the step began: the counter of a CPU drifts from step to step.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median, median_high
from typing import NamedTuple

from rnnt_bench.core.text import MB
from rnnt_bench.traces import reader

MOST_POINTS = 600  # of a curve as it is drawn
# a step is short, or has few operators, if it has less than 1/FEW of the usual duration or count
FEW = 4
FIRST_WINDOW = (
    "profiled peak MB is of the first window only: on CPU the counter drifts from window to window"
)

#: A file, and its contents or the reason why it cannot be read.
Window = tuple[Path, reader.Trace | reader.TraceError]


@dataclass(frozen=True)
class WindowNumbers:
    """The numbers of one trace file; None if it cannot be read or holds no complete step."""

    file: str
    average_step_time_us: float | None = None
    steps: int = 0
    peak_memory_mb: float | None = None
    flags: Sequence[str] = ()


@dataclass
class Profiled:
    """The numbers of all traces of one worker, over the complete steps of all windows.

    Attributes:
        label_us: per step
        step_us: of each readable window
        error: why the first unreadable window could not be read; the numbers are then None
    """

    windows: list[WindowNumbers] = field(default_factory=list)
    average_step_time_us: float | None = None
    peak_memory_mb: float | None = None
    label_us: dict[str, float] = field(default_factory=dict)
    step_us: list[list[float]] = field(default_factory=list)
    on_cuda: bool = False
    error: str | None = None
    notes: list[str] = field(default_factory=list)


def read_windows(files: list[Path]) -> list[Window]:
    """Read the traces; a file that cannot be read, or has no step, comes with its error, which is
    not raised."""
    windows: list[Window] = []
    for path in files:
        try:
            trace = reader.read(path)
            if not trace.steps:
                raise reader.TraceError(
                    f"{path}: has no ProfilerStep span: call prof.step() in the profiled loop"
                )
            windows.append((path, trace))
        except reader.TraceError as error:
            windows.append((path, error))
    return windows


def profiled(windows: list[Window], to_the_end: bool = False) -> Profiled:
    """Return the numbers of one worker from its windows, sorted by time.  to_the_end: the profiled
    loop is known to have ended as planned, so that no step counts as cut off."""
    result = Profiled()
    before: reader.Trace | None = None
    for number, (path, trace) in enumerate(windows, start=1):
        if isinstance(trace, reader.TraceError):
            result.windows.append(WindowNumbers(path.name, flags=[str(trace)]))
            result.error = result.error or str(trace)
            continue
        later = windows[number][1] if number < len(windows) else None
        # Another loop that writes to the same folder counts its steps from the start again.
        goes_on = isinstance(later, reader.Trace) and later.steps[0].number > trace.steps[-1].number
        flags = []
        whole = trace.steps
        if not to_the_end and not goes_on and _is_cut_off(trace, before):
            *whole, stub = trace.steps
            step = f"ProfilerStep#{stub.number} ({stub.duration:.0f} us)"
            flags.append(
                f"stub step: {step} was cut off by the end of the loop and is left out of the average"
            )
        if trace.salvaged:
            flags.append(f"{trace.salvaged} events are not valid JSON and were read field by field")
        durations = [step.duration for step in whole]
        device = trace.fullest()
        peak_mb = max(trace.memory[device][1]) / MB if device else None
        average = fmean(durations) if durations else None
        result.windows.append(WindowNumbers(path.name, average, len(durations), peak_mb, flags))
        result.notes += [f"{path.name}: {flag}" for flag in flags]
        result.on_cuda = result.on_cuda or trace.on_cuda
        if durations:
            result.step_us.append(durations)
            for label, total in trace.label_us.items():
                result.label_us[label] = result.label_us.get(label, 0.0) + total
        before = trace
    steps = [duration for durations in result.step_us for duration in durations]
    if result.error or not steps:
        result.label_us = {}
        return result
    result.average_step_time_us = fmean(steps)
    result.label_us = {label: total / len(steps) for label, total in result.label_us.items()}
    peaks = [
        window.peak_memory_mb for window in result.windows if window.peak_memory_mb is not None
    ]
    if result.on_cuda:
        result.peak_memory_mb = max(peaks, default=None)
    elif peaks:
        result.peak_memory_mb = result.windows[0].peak_memory_mb
        if len(windows) > 1:
            result.notes.append(FIRST_WINDOW)
    return result


def _is_cut_off(trace: reader.Trace, before: reader.Trace | None) -> bool:
    """Return whether the loop ended within the last step of a trace.

    Such a step is shorter than the others and also holds fewer operators (torch 1.13 adds one there
    by itself); a complete step may be either, but not both.  One that is alone is held against the
    window before.
    """
    *others, last = trace.steps
    usual: Sequence[reader.Step] = others or (before.steps if before else [])
    whole = trace if others else before
    if whole is None or last.duration * FEW >= median([step.duration for step in usual]):
        return False
    operators = fmean([whole.operators_in(step) for step in usual])
    return operators >= FEW and trace.operators_in(last) * FEW < operators


# Memory over time.


class Span(NamedTuple):
    """Bytes allocated at the start of a span, at most within it, and at its end, above the level at
    the step's start; the span of the whole step has the name ""."""

    name: str
    step: int
    begin: int
    highest: int
    end: int


@dataclass(frozen=True)
class Curve:
    """Hold the memory of one step over time: at `ms` milliseconds since it began `mb` MB were
    allocated, above what was when it began; stage_mb: the highest of these while each labelled
    stage ran."""

    file: str
    step: int
    ms: list[float]
    mb: list[float]
    stage_mb: dict[str, float]

    @property
    def peak_mb(self) -> float:
        """Return the highest point of the curve in MB."""
        return max(self.mb)


class _Levels:
    """The allocated bytes of one device, sorted by time."""

    def __init__(self, trace: reader.Trace, device: reader.Device):
        self.events = sorted(zip(*trace.memory[device]), key=lambda event: event[0])
        self.moments = [moment for moment, _ in self.events]

    def before(self, moment: float) -> int:
        """Return the bytes when `moment` came: after the last event before it, else of the
        first."""
        return self.events[max(bisect_left(self.moments, moment) - 1, 0)][1]

    def between(self, begin: float, end: float) -> list[tuple[float, int]]:
        """Return (microseconds, bytes) of the events from `begin` to `end`."""
        return self.events[bisect_left(self.moments, begin) : bisect_right(self.moments, end)]


def spans(path: Path, kind: int | None = None) -> list[Span]:
    """Return the spans of all steps, sorted by start within each step; none if the trace has no
    memory events.  kind: reader.CPU or reader.CUDA, where only that kind of device counts.  Raises
    TraceError."""
    trace = reader.read(path)
    device = trace.fullest(kind)
    if device is None:
        return []
    levels = _Levels(trace, device)
    result = []
    for step in trace.steps:
        base = levels.before(step.begin)
        inside = sorted(
            span for span in trace.spans if step.begin <= span[0] and span[1] <= step.end
        )
        for begin, end, name in [(step.begin, step.end, ""), *inside]:
            at_begin = levels.before(begin)
            within = [total for _, total in levels.between(begin, end)] or [at_begin]
            highest = max(at_begin, *within)
            result.append(
                Span(name, step.number, at_begin - base, highest - base, within[-1] - base)
            )
    return result


def curve(path: Path) -> Curve | None:
    """Return the curve of the last complete step of a trace, or None if it has no memory events.
    Raises TraceError."""
    trace = reader.read(path)
    device = trace.fullest()
    steps = trace.steps
    if device is None or not steps:
        return None
    cut_off = len(steps) > 1 and steps[-1].duration * FEW < median_high(
        [step.duration for step in steps[:-1]]
    )
    step = steps[-2 if cut_off else -1]
    levels = _Levels(trace, device)
    events = levels.between(step.begin, step.end)
    if not events:
        return None
    base = (
        levels.before(step.begin)
        if levels.moments[0] < step.begin
        else min(total for _, total in events)
    )
    stage_mb: dict[str, float] = {}
    for begin, end, label in trace.spans:
        if step.begin <= begin and end <= step.end:
            for _, total in levels.between(begin, end):
                stage_mb[label] = max(stage_mb.get(label, 0.0), (total - base) / MB)
    size = math.ceil(len(events) / MOST_POINTS)  # of each group of neighbours, the highest is drawn
    groups = (events[first : first + size] for first in range(0, len(events), size))
    highest = (max(group, key=lambda event: event[1]) for group in groups)
    points = [(step.begin, base), *highest, (step.end, events[-1][1])]
    ms = [(moment - step.begin) / 1e3 for moment, _ in points]
    mb = [(total - base) / MB for _, total in points]
    return Curve(trace.path.name, step.number, ms, mb, stage_mb)


def rise(path: Path) -> dict[reader.Device, int]:
    """Return the bytes from the lowest to the highest count of each device.  The trace need not
    have steps; its counter may start above zero, at the level at which the window before ended.
    Raises TraceError."""
    return {
        device: max(totals) - min(totals)
        for device, (_, totals) in reader.read(path).memory.items()
    }
