"""Compute the profiled numbers of one folder of traces: average step time and peak memory of its windows (files).

Profiled numbers contain the profiler's own cost.  Windows of different workers or ranks are never merged.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Dict, List, Optional, Sequence, Tuple, Union

from common.core import statistics
from common.core.units import MB
from common.traces import reader
from common.traces.reader import FEW, TraceError, TraceSummary

FIRST_WINDOW = "profiled peak MB is of the first window only: on CPU the counter drifts from window to window"

#: A file, and its contents or the reason why it cannot be read.
Window = Tuple[Path, Union[TraceSummary, TraceError]]


@dataclass(frozen=True)
class WindowNumbers:
    """The numbers of one trace file; None if it cannot be read or holds no complete step."""

    file: str
    average_step_time_us: Optional[float] = None
    steps: int = 0
    peak_memory_mb: Optional[float] = None
    rank: Optional[int] = None
    flags: Sequence[str] = ()


@dataclass
class Profiled:
    """The numbers of all traces of one worker."""

    windows: List[WindowNumbers] = field(default_factory=list)
    average_step_time_us: Optional[float] = None  # over the complete steps of all windows
    peak_memory_mb: Optional[float] = None
    label_us: Dict[str, float] = field(default_factory=dict)  # microseconds per step by label
    step_us: List[List[float]] = field(default_factory=list)  # of each readable window: microseconds of complete steps
    on_cuda: bool = False
    device_name: Optional[str] = None
    error: Optional[str] = None  # why the first unreadable window could not be read; the numbers are then None
    notes: List[str] = field(default_factory=list)


def read_windows(files: List[Path]) -> List[Window]:
    """Read the traces; a file that cannot be read comes with its error, which is not raised."""
    windows: List[Window] = []
    for path in files:
        try:
            windows.append((path, reader.read(path)))
        except TraceError as error:
            windows.append((path, error))
    return windows


def profiled(windows: List[Window], to_the_end: bool = False) -> Profiled:
    """Return the numbers of one worker from its windows, sorted by time.

    With `to_the_end` the profiled loop is known to have ended as planned, so that no step counts as cut off.
    """
    result = Profiled()
    windows = [
        _without_stub(window) if to_the_end or _goes_on(window, later) else window
        for window, later in zip_longest(windows, windows[1:])
    ]
    for path, summary in windows:
        result.windows.append(_window(path, summary))
        if isinstance(summary, TraceError):
            result.error = result.error or str(summary)
        else:
            result.notes += [f"{path.name}: {flag}" for flag in summary.flags]
    summaries = [summary for _, summary in windows if isinstance(summary, TraceSummary)]
    files = [path for path, _ in windows]
    if not to_the_end:
        _leave_out_lone_stub(files, summaries, result)
    result.step_us = [[duration for _, duration in summary.whole_steps] for summary in summaries]
    result.on_cuda = any(summary.on_cuda for summary in summaries)
    result.device_name = next((summary.device_name for summary in summaries if summary.device_name), None)
    durations = [duration for window in result.step_us for duration in window]
    if result.error is None and durations:
        result.average_step_time_us = statistics.mean(durations)
        _peak(result)
        for summary in summaries:
            for label, total in summary.label_us.items():
                result.label_us[label] = result.label_us.get(label, 0.0) + total / len(durations)
    return result


def _goes_on(window: Window, later: Optional[Window]) -> bool:
    """Return whether `later` is a window of the same loop, which then did not end in `window`.

    Another loop that writes to the same folder counts its steps from the start again.
    """
    summaries = [each[1] for each in (window, later) if each is not None and isinstance(each[1], TraceSummary)]
    return len(summaries) == 2 and summaries[1].steps[0][0] > summaries[0].steps[-1][0]


def _without_stub(window: Window) -> Window:
    """Return the window with its last step counted as complete."""
    path, summary = window
    return (path, replace(summary, stub=None)) if isinstance(summary, TraceSummary) else window


def _window(path: Path, summary: Union[TraceSummary, TraceError]) -> WindowNumbers:
    """Return the numbers of one file."""
    if isinstance(summary, TraceError):
        return WindowNumbers(path.name, flags=[str(summary)])
    peak = reader.fullest(summary.peak_bytes, float)
    peak_mb = None if peak is None else peak / MB
    steps = len(summary.whole_steps)
    return WindowNumbers(path.name, summary.average_step_us, steps, peak_mb, summary.rank, summary.flags)


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


def _leave_out_lone_stub(files: List[Path], summaries: List[TraceSummary], result: Profiled) -> None:
    """Remove the last window from `summaries` if its only step is one that the end of the loop cut off.

    A loop that ends in the first active step of a window leaves such a file.  The step is shorter than those of the
    windows before and holds fewer operators; if those hold none, the duration alone decides.
    """
    if len(summaries) < max(2, len(files)) or len(summaries[-1].steps) != 1 or summaries[-2].cut:
        return
    number, duration = summaries[-1].steps[0]
    short = duration * FEW < min(summary.average_step_us for summary in summaries[:-1])
    if short and _few_operators(files[-1], files[-2], len(summaries[-2].steps)):
        step = f"ProfilerStep#{number} ({duration:.0f} us)"
        flag = f"stub step: {step} is alone in its window and left out of the average"
        last = result.windows[-1]
        result.windows[-1] = replace(last, average_step_time_us=None, steps=0, flags=[*last.flags, flag])
        result.notes.append(f"{files[-1].name}: {flag}")
        summaries.pop()


def _few_operators(alone: Path, before: Path, steps_before: int) -> bool:
    """Return whether the only step of `alone` has few operators next to the steps of the window before it.

    True if those have no operators at all.
    """
    (_, mine), (_, others) = map(reader.count_operators, (alone, before))
    return others == 0 or mine * FEW < others / steps_before
