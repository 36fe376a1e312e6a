"""Read memory from a trace: over time within one step, of labelled spans, and how far it rises.

The times are profiled: they contain the profiler's own cost.  Bytes are those of the fullest GPU, or of the CPU if no
GPU allocated, above the level at which the step began, because the counter of a CPU drifts from step to step.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from pathlib import Path
from statistics import median_high
from typing import Dict, List, NamedTuple, Optional, Tuple

from common.core.text import MB
from common.traces import reader
from common.traces.reader import Device, Trace

FEW = 4  # the last step is cut off if it is shorter than 1/FEW of the usual
MOST_POINTS = 600  # of a curve as it is drawn


class Span(NamedTuple):
    """Bytes allocated at the start of a span, at most within it, and at its end, above the level at the step's start.

    The span of the whole step has the name "".
    """

    name: str
    step: int
    begin: int
    highest: int
    end: int


@dataclass(frozen=True)
class Curve:
    """Hold the memory of one step over time.

    Attributes:
        file, step: the trace, and the number of the step.
        ms: milliseconds since it began, one for each point.
        mb: MB allocated at each point, above what was allocated when the step began.
        stage_mb: the highest of these while each labelled stage ran, by label.
    """

    file: str
    step: int
    ms: List[float]
    mb: List[float]
    stage_mb: Dict[str, float]

    @property
    def peak_mb(self) -> float:
        """Return the highest point of the curve in MB."""
        return max(self.mb)


class _Levels:
    """The allocated bytes of one device, sorted by time."""

    def __init__(self, trace: Trace, device: Device):
        self.events = sorted(zip(*trace.memory[device]), key=lambda event: event[0])
        self.times = [time for time, _ in self.events]

    def before(self, time: float) -> int:
        """Return the bytes when `time` came: after the last event before it, else of the first."""
        return self.events[max(bisect_left(self.times, time) - 1, 0)][1]

    def between(self, begin: float, end: float) -> List[Tuple[float, int]]:
        """Return (microseconds, bytes) of the events from `begin` to `end`."""
        return self.events[bisect_left(self.times, begin) : bisect_right(self.times, end)]


def spans(path: Path, kind: Optional[int] = None) -> List[Span]:
    """Return the spans of all steps, sorted by start within each step; empty if the trace has no memory events.

    With `kind` reader.CPU or reader.CUDA, only that kind of device counts.  Raises TraceError.
    """
    trace = reader.read(path)
    device = trace.fullest(kind)
    if device is None:
        return []
    levels = _Levels(trace, device)
    result = []
    for step in trace.steps:
        first, last = step.begin, step.begin + step.duration
        base = levels.before(first)
        inside = sorted(span for span in trace.spans if first <= span[0] and span[1] <= last)
        for begin, end, name in [(first, last, ""), *inside]:
            at_begin = levels.before(begin)
            within = [total for _, total in levels.between(begin, end)] or [at_begin]
            highest = max(at_begin, *within)
            result.append(Span(name, step.number, at_begin - base, highest - base, within[-1] - base))
    return result


def curve(path: Path) -> Optional[Curve]:
    """Return the curve of the last complete step of a trace, or None if it has no memory events.  Raises TraceError."""
    trace = reader.read(path)
    device, steps = trace.fullest(), trace.steps
    if device is None or not steps:
        return None
    cut_off = len(steps) > 1 and steps[-1].duration * FEW < median_high([step.duration for step in steps[:-1]])
    step = steps[-2 if cut_off else -1]
    begin, end = step.begin, step.begin + step.duration
    levels = _Levels(trace, device)
    events = levels.between(begin, end)
    if not events:
        return None
    base = levels.before(begin) if levels.times[0] < begin else min(total for _, total in events)
    stage_mb: Dict[str, float] = {}
    for first, last, label in trace.spans:
        inside = [total for _, total in levels.between(first, last)] if begin <= first and last <= end else []
        if inside:
            stage_mb[label] = max(stage_mb.get(label, 0.0), (max(inside) - base) / MB)
    size = math.ceil(len(events) / MOST_POINTS)  # of each group of neighbours, the highest is drawn
    groups = (events[first : first + size] for first in range(0, len(events), size))
    points = [(begin, base), *(max(group, key=lambda point: point[1]) for group in groups), (end, events[-1][1])]
    ms, mb = [(time - begin) / 1e3 for time, _ in points], [(total - base) / MB for _, total in points]
    return Curve(trace.path.name, step.number, ms, mb, stage_mb)


def rise(path: Path) -> Dict[Device, int]:
    """Return the bytes from the lowest to the highest count of each device.  The trace need not have steps; its counter
    may start above zero, at the level at which the window before ended.  Raises TraceError."""
    return {device: max(totals) - min(totals) for device, (_, totals) in reader.read(path).memory.items()}
