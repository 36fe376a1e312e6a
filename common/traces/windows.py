"""Compute the profiled numbers of one folder of traces: average step time and peak memory of its windows (files).

Profiled numbers contain the profiler's own cost.  Windows of different workers are never merged.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Dict, List, Optional, Sequence, Tuple, Union

from common.core import statistics
from common.core.text import MB
from common.traces import reader
from common.traces.reader import Step, Trace, TraceError

FEW = 4  # a step is short, or has few operators, if it has less than 1/FEW of the usual duration or count
FIRST_WINDOW = "profiled peak MB is of the first window only: on CPU the counter drifts from window to window"

#: A file, and its contents or the reason why it cannot be read.
Window = Tuple[Path, Union[Trace, TraceError]]


@dataclass(frozen=True)
class WindowNumbers:
    """The numbers of one trace file; None if it cannot be read or holds no complete step."""

    file: str
    average_step_time_us: Optional[float] = None
    steps: int = 0
    peak_memory_mb: Optional[float] = None
    flags: Sequence[str] = ()


@dataclass
class Profiled:
    """The numbers of all traces of one worker.

    Attributes:
        average_step_time_us: over the complete steps of all windows.
        label_us: microseconds per step by label.
        step_us: of each readable window, the microseconds of its complete steps.
        error: why the first unreadable window could not be read; the numbers are then None.
    """

    windows: List[WindowNumbers] = field(default_factory=list)
    average_step_time_us: Optional[float] = None
    peak_memory_mb: Optional[float] = None
    label_us: Dict[str, float] = field(default_factory=dict)
    step_us: List[List[float]] = field(default_factory=list)
    on_cuda: bool = False
    error: Optional[str] = None
    notes: List[str] = field(default_factory=list)


def read_windows(files: List[Path]) -> List[Window]:
    """Read the traces; a file that cannot be read, or has no step, comes with its error, which is not raised."""
    windows: List[Window] = []
    for path in files:
        try:
            trace = reader.read(path)
            if not trace.steps:
                raise TraceError(f"{path}: has no ProfilerStep span: call prof.step() in the profiled loop")
            windows.append((path, trace))
        except TraceError as error:
            windows.append((path, error))
    return windows


def profiled(windows: List[Window], to_the_end: bool = False) -> Profiled:
    """Return the numbers of one worker from its windows, sorted by time.

    With `to_the_end` the profiled loop is known to have ended as planned, so that no step counts as cut off.
    """
    result = Profiled()
    before: Optional[Trace] = None
    for at, (path, trace) in enumerate(windows, start=1):
        if isinstance(trace, TraceError):
            result.windows.append(WindowNumbers(path.name, flags=[str(trace)]))
            result.error = result.error or str(trace)
            continue
        later = windows[at][1] if at < len(windows) else None
        # Another loop that writes to the same folder counts its steps from the start again.
        goes_on = isinstance(later, Trace) and later.steps[0].number > trace.steps[-1].number
        flags, whole = _flags(trace), trace.steps
        if not to_the_end and not goes_on and _is_cut_off(trace, before):
            *whole, stub = trace.steps
            step = f"ProfilerStep#{stub.number} ({stub.duration:.0f} us)"
            flags.insert(0, f"stub step: {step} was cut off by the end of the loop and is left out of the average")
        durations = [step.duration for step in whole]
        device = trace.fullest()
        peak_mb = max(trace.memory[device][1]) / MB if device else None
        average = statistics.mean(durations) if durations else None
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
    else:
        result.average_step_time_us = statistics.mean(steps)
        result.label_us = {label: total / len(steps) for label, total in result.label_us.items()}
        _peak(result)
    return result


def _flags(trace: Trace) -> List[str]:
    """Return what limits the meaning of the numbers of a trace, a sentence each."""
    flags = []
    numbers = sorted(step.number for step in trace.steps)
    gaps = [f"{low + 1} to {high - 1}" for low, high in zip(numbers, numbers[1:]) if high - low > 1]
    if gaps:
        flags.append(f"missing steps: {', '.join(gaps[:5])}")
    if len(set(numbers)) < len(numbers):
        flags.append("repeated steps: a step number occurs more than once")
    if trace.salvaged:
        flags.append(f"{trace.salvaged} events are not valid JSON and were read field by field")
    return flags


def _is_cut_off(trace: Trace, before: Optional[Trace]) -> bool:
    """Return whether the loop ended within the last step of a trace.

    Such a step is shorter than the others and also holds fewer operators (torch 1.13 adds one there by itself); a
    complete step may be either, but not both.  One that is alone is held against the window before.
    """
    *others, last = trace.steps
    usual: Sequence[Step] = others or (before.steps if before else [])
    whole = trace if others else before
    if whole is None or last.duration * FEW >= statistics.median([step.duration for step in usual]):
        return False
    operators = statistics.mean([whole.operators_in(step) for step in usual])
    return operators >= FEW and trace.operators_in(last) * FEW < operators


def _peak(result: Profiled) -> None:
    """Set the peak: the highest of all windows on CUDA, that of the first on a CPU, whose counter drifts."""
    peaks = [window.peak_memory_mb for window in result.windows if window.peak_memory_mb is not None]
    if not peaks:
        return
    if result.on_cuda:
        result.peak_memory_mb = max(peaks)
        return
    result.peak_memory_mb = result.windows[0].peak_memory_mb
    if len(result.windows) > 1:
        result.notes.append(FIRST_WINDOW)
