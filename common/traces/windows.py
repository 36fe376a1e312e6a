"""Compute the profiled numbers of traces: step time and peak memory of the windows of one worker,
memory over time.

A window is one trace file: the steps that torch.profiler recorded in one cycle of its schedule.  A
worker is one process of the profiled program; windows of different workers are never merged.
Profiled numbers contain the profiler's own cost.  Bytes over time are those of the fullest GPU, or
of the CPU if no GPU allocated.  They are above the level at which the step began: the counter of a
CPU drifts from step to step.
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
# A step is short if it took less than 1/FEW of the usual duration.  It has few operators if it has
# less than 1/FEW of the usual number.
FEW = 4
FIRST_WINDOW = (
    "profiled peak MB is of the first window only: on CPU the counter drifts from window to window"
)

#: A file, and its contents or the reason why it cannot be read.
Window = tuple[Path, reader.Trace | reader.TraceError]


@dataclass(frozen=True)
class WindowNumbers:
    """Hold the numbers of one trace file.

    A number is None in a file that cannot be read; the average is None without a complete step, the
    peak without memory events.

    Attributes:
        steps: the number of complete steps
        flags: what is odd about the file, in words
    """

    file: str
    average_step_time_us: float | None = None
    steps: int = 0
    peak_memory_mb: float | None = None
    flags: Sequence[str] = ()


@dataclass
class Profiled:
    """Hold the numbers of all traces of one worker, over the complete steps of all windows.

    Attributes:
        label_us: microseconds of each label in a step, on average
        step_us: microseconds of each step, a list for each readable window
        error: why the first unreadable window could not be read; the average and the peak are then
            None, and label_us is empty
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
    """Read the traces.  For a file that cannot be read, or has no step, the window has the
    TraceError, which is not raised."""
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
    """Return the numbers of one worker.

    The last step of a window is left out if the loop ended within it.  It did not if the steps of
    the next window count on from it.

    windows: those of the worker, the earliest first; to_the_end: whether the profiled loop is known
      to have ended as planned, so that no step counts as cut off."""
    result = Profiled()
    totals_us: dict[str, float] = {}  # by label
    before: reader.Trace | None = None  # the latest readable window so far
    for number, (path, trace) in enumerate(windows, start=1):
        if isinstance(trace, reader.TraceError):
            result.windows.append(WindowNumbers(path.name, flags=[str(trace)]))
            result.error = result.error or str(trace)
            continue
        later = windows[number][1] if number < len(windows) else None
        # Another loop that writes to the same folder counts its steps from the start again.
        goes_on = isinstance(later, reader.Trace) and later.steps[0].number > trace.steps[-1].number
        may_be_cut_off = not (to_the_end or goes_on)
        stub = trace.steps[-1] if may_be_cut_off and _is_cut_off(trace, before) else None
        durations = [step.duration for step in trace.steps if step is not stub]
        numbers = _numbers(trace, durations, stub)
        result.windows.append(numbers)
        result.notes += [f"{path.name}: {flag}" for flag in numbers.flags]
        result.on_cuda = result.on_cuda or trace.on_cuda
        if durations:
            result.step_us.append(durations)
            for label, us in trace.label_us(stub.begin if stub else math.inf).items():
                totals_us[label] = totals_us.get(label, 0.0) + us
        before = trace
    if result.step_us and not result.error:
        steps = [us for durations in result.step_us for us in durations]
        result.average_step_time_us = fmean(steps)
        result.label_us = {label: us / len(steps) for label, us in totals_us.items()}
        _set_peak(result)
    return result


def _numbers(
    trace: reader.Trace, durations: Sequence[float], stub: reader.Step | None
) -> WindowNumbers:
    """Return the numbers of a trace.

    durations: of the trace's complete steps, in microseconds; stub: the last step, if it was cut
    off."""
    flags = []
    if stub:
        step = f"ProfilerStep#{stub.number} ({stub.duration:.0f} us)"
        flags.append(
            f"stub step: {step} was cut off by the end of the loop and is left out of the average"
        )
    if trace.salvaged:
        flags.append(f"{trace.salvaged} events are not valid JSON and were read field by field")
    device = trace.fullest()  # the GPU that held most bytes; the CPU if no GPU counted any
    peak_mb = max(trace.memory[device].totals) / MB if device else None
    average = fmean(durations) if durations else None
    return WindowNumbers(trace.path.name, average, len(durations), peak_mb, flags)


def _set_peak(result: Profiled) -> None:
    """Set the peak: the highest of all windows on CUDA, that of the first window on a CPU.

    On a CPU the counter of memory drifts from window to window, so later peaks do not count.
    If there are more windows there, add the note FIRST_WINDOW, which says so."""
    peaks = [
        window.peak_memory_mb for window in result.windows if window.peak_memory_mb is not None
    ]
    if result.on_cuda:
        result.peak_memory_mb = max(peaks, default=None)
    elif peaks:
        result.peak_memory_mb = result.windows[0].peak_memory_mb
        if len(result.windows) > 1:
            result.notes.append(FIRST_WINDOW)


def _is_cut_off(trace: reader.Trace, before: reader.Trace | None) -> bool:
    """Return whether the loop ended within the last step of a trace.

    Such a step is much shorter than the others and also has far fewer operators (under torch 1.13
    one of these is torch's own).  A complete step may be short, or have few operators, but not
    both.  A step that is alone in its trace is compared with the steps of the window `before`.
    Returns False if there is no step to compare with, or if these have fewer than FEW operators on
    average.
    """
    *usual, last = trace.steps
    trace_of_usual = trace
    if not usual:
        if before is None:
            return False
        usual, trace_of_usual = before.steps, before
    if last.duration * FEW >= median([step.duration for step in usual]):
        return False
    operators = fmean([trace_of_usual.operators_in(step) for step in usual])
    # 1/FEW of fewer than FEW operators is less than one operator: that tells nothing.
    return operators >= FEW and trace.operators_in(last) * FEW < operators


# Memory over time.


class SpanMemory(NamedTuple):
    """Hold the bytes allocated at the begin of a span, at most within it, and at its end.  They are
    counted from the level at which the step began.

    name: "" for the span of the whole step; step: its number."""

    name: str
    step: int
    begin: int
    highest: int
    end: int


@dataclass(frozen=True)
class Curve:
    """Hold the memory of one step over time.

    Attributes:
        ms: milliseconds since the step began, of each point of the curve
        mb: MB allocated at that point, above what was allocated when the step began
        stage_mb: name of a labelled stage -> the highest MB, counted so, while the stage ran
    """

    file: str
    step: int
    ms: list[float]
    mb: list[float]
    stage_mb: dict[str, float]

    @property
    def peak_mb(self) -> float:
        """Return the most MB that were allocated at once, counted as `mb` is."""
        return max(self.mb)


class _Level(NamedTuple):
    """Hold how many bytes were allocated after a memory event; moment: in microseconds."""

    moment: float
    total: int


class _Levels:
    """The allocated bytes of one device, sorted by time."""

    def __init__(self, trace: reader.Trace, device: reader.Device):
        counts = trace.memory[device]
        levels = map(_Level, counts.moments, counts.totals)
        self.levels = sorted(levels, key=lambda level: level.moment)
        self.moments = [level.moment for level in self.levels]

    def before(self, moment: float) -> int:
        """Return the bytes that were allocated after the last event before a moment.

        If no event is before the moment, return the bytes after the first event."""
        return self.levels[max(bisect_left(self.moments, moment) - 1, 0)].total

    def between(self, begin: float, end: float) -> list[_Level]:
        """Return the levels of the events from `begin` to `end`, in microseconds."""
        return self.levels[bisect_left(self.moments, begin) : bisect_right(self.moments, end)]


def spans(path: Path, device_type: int | None = None) -> list[SpanMemory]:
    """Return the memory of the spans of all steps: for each step first the span of the whole step,
    then its labelled spans sorted by begin; [] if the trace has no memory events.

    Raises TraceError.  The memory is that of one device, `Trace.fullest`.

    device_type: reader.CPU or reader.CUDA, to choose among devices of that type; None for all."""
    trace = reader.read(path)
    device = trace.fullest(device_type)
    if device is None:
        return []
    levels = _Levels(trace, device)
    result = []
    for step in trace.steps:
        base = levels.before(step.begin)
        whole = reader.Span(step.begin, step.end, "")
        for span in [whole, *sorted(_inside(step, trace.spans))]:
            at_begin = levels.before(span.begin)
            totals = [at_begin, *(level.total for level in levels.between(span.begin, span.end))]
            result.append(
                SpanMemory(
                    span.name, step.number, at_begin - base, max(totals) - base, totals[-1] - base
                )
            )
    return result


def _inside(step: reader.Step, spans: Sequence[reader.Span]) -> list[reader.Span]:
    """Return the spans that begin and end within a step."""
    return [span for span in spans if step.begin <= span.begin and span.end <= step.end]


def curve(path: Path) -> Curve | None:
    """Return the curve of the last complete step of a trace, or None if that step has no memory
    events, or there is no step.  Raises TraceError."""
    trace = reader.read(path)
    device = trace.fullest()
    if device is None or not trace.steps:
        return None
    step = _last_complete(trace.steps)
    levels = _Levels(trace, device)
    inside = levels.between(step.begin, step.end)
    if not inside:
        return None
    if levels.moments[0] < step.begin:
        base = levels.before(step.begin)
    else:  # no event before the step: the level at which it began is not known
        base = min(level.total for level in inside)
    stage_mb: dict[str, float] = {}
    for span in _inside(step, trace.spans):
        for level in levels.between(span.begin, span.end):
            mb = (level.total - base) / MB
            stage_mb[span.name] = max(stage_mb.get(span.name, 0.0), mb)
    points = [_Level(step.begin, base), *_thinned(inside), _Level(step.end, inside[-1].total)]
    return Curve(
        file=trace.path.name,
        step=step.number,
        ms=[(point.moment - step.begin) / 1e3 for point in points],
        mb=[(point.total - base) / MB for point in points],
        stage_mb=stage_mb,
    )


def _last_complete(steps: Sequence[reader.Step]) -> reader.Step:
    """Return the last of one or more steps.  If it took less than 1/FEW of the usual duration, it
    was cut off: then return the step before it."""
    *others, last = steps
    if others and last.duration * FEW < median_high([step.duration for step in others]):
        return others[-1]
    return last


def _thinned(levels: Sequence[_Level]) -> list[_Level]:
    """Return at most MOST_POINTS levels: the highest of each group of neighbours."""
    size = math.ceil(len(levels) / MOST_POINTS)
    groups = (levels[first : first + size] for first in range(0, len(levels), size))
    return [max(group, key=lambda level: level.total) for group in groups]


def rise(path: Path) -> dict[reader.Device, int]:
    """Return for each device in a trace its highest count of bytes minus its lowest.

    The trace need not have steps.  Its counter may start above zero: at the level at which the
    window before ended.  Raises TraceError."""
    return {
        device: max(counts.totals) - min(counts.totals)
        for device, counts in reader.read(path).memory.items()
    }
