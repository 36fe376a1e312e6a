"""Read the memory over time within one step from a trace: "Total Allocated" of its [memory] events.

The times are profiled: they contain the profiler's own cost.  The curve is of the last complete step of the file, since
only the events before a step tell what was allocated when it began.  It shows bytes above that level, because the
counter of a CPU drifts from step to step.  Uses bounded memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from statistics import median_high
from typing import Any, Dict, List, Optional, Tuple

from common.core.units import MB
from common.traces import reader
from common.traces.reader import FEW, MOST_DEVICES, Device, Step, StepCollector

MOST_BINS = 1 << 14  # per device, over the whole file; if there are more, neighbours are merged
MOST_SPANS = 1 << 15  # labelled spans kept
MOST_POINTS = 600  # of a curve as it is drawn

Span = Tuple[float, float, str]  # start and end in microseconds, label


@dataclass(frozen=True)
class Curve:
    """The memory of one step over time.

    step: number of the step.  ms: milliseconds since it began, one for each point.  mb: the highest MB allocated within
    the bin of each point, above what was allocated when the step began.  stage_mb: the highest of these while each
    labelled stage ran, by label.
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


def read(path: Path) -> Optional[Curve]:
    """Return the curve of one trace, or None if it has no memory events; raises TraceError as ``reader.read`` does."""
    collector = _Collector()
    reader.collect(path, collector)
    return collector.curve(path.name)


class Timeline:
    """The highest and the last value in each of at most MOST_BINS bins, whose width doubles as time goes on."""

    def __init__(self) -> None:
        self.width = 1.0  # microseconds
        self.bins: Dict[int, Tuple[float, float, float]] = {}  # highest value, time of the last value, last value

    def add(self, time: float, value: float) -> None:
        """Add a value at a time in microseconds; values may come in any order."""
        self._merge(math.floor(time / self.width), (value, time, value))
        while len(self.bins) > MOST_BINS:
            old, self.bins, self.width = self.bins, {}, self.width * 2
            for index in sorted(old):
                self._merge(index // 2, old[index])

    def _merge(self, index: int, new: Tuple[float, float, float]) -> None:
        """Merge a bin into that of number `index`."""
        old = self.bins.get(index)
        if old is None:
            self.bins[index] = new
        else:
            latest = new if new[1] >= old[1] else old
            self.bins[index] = (max(old[0], new[0]), latest[1], latest[2])

    def between(self, begin: float, end: float) -> List[Tuple[float, float]]:
        """Return (time, highest value) of the bins whose last value is in [begin, end], sorted by time."""
        bins = (self.bins[index] for index in sorted(self.bins))
        return [(at, highest) for highest, at, _ in bins if begin <= at <= end]

    def before(self, time: float) -> Optional[float]:
        """Return the last value before `time`, None if there is none."""
        earlier = [(at, last) for _, at, last in self.bins.values() if at < time]
        return max(earlier)[1] if earlier else None


class _Collector(StepCollector):
    """Keeps the steps, the labelled spans and the memory over time of each device."""

    def __init__(self) -> None:
        self._steps: List[Step] = []
        self._spans: List[Span] = []
        self._timelines: Dict[Device, Timeline] = {}

    def memory(self, device: Device, ts: Any, total: int) -> None:
        if reader.is_number(ts) and (device in self._timelines or len(self._timelines) < MOST_DEVICES):
            self._timelines.setdefault(device, Timeline()).add(ts, total)

    def step(self, ts: float, dur: float, number: int) -> None:
        if len(self._steps) < MOST_SPANS:
            self._steps.append((ts, dur, number))

    def label(self, ts: float, dur: float, name: str) -> None:
        if len(self._spans) < MOST_SPANS:
            self._spans.append((ts, ts + dur, name))

    def curve(self, file: str) -> Optional[Curve]:
        """Return the curve of the last complete step, None if there is no step or no memory event in it."""
        step = self._step()
        timeline = reader.fullest(self._timelines, lambda line: max(highest for highest, _, _ in line.bins.values()))
        if step is None or timeline is None:
            return None
        begin, duration, number = step
        end = begin + duration
        levels = timeline.between(begin, end)
        if not levels:
            return None
        start = timeline.before(begin)
        base = start if start is not None else min(value for _, value in levels)
        stage_mb: Dict[str, float] = {}
        for first, last, label in self._spans:
            if first >= begin and last <= end:
                inside = [value for time, value in levels if first <= time <= last]
                if inside:
                    stage_mb[label] = max(stage_mb.get(label, 0.0), (max(inside) - base) / MB)
        points = [(begin, base), *_thinned(levels), (end, levels[-1][1])]
        ms, mb = [(time - begin) / 1e3 for time, _ in points], [(value - base) / MB for _, value in points]
        return Curve(file, number, ms, mb, stage_mb)

    def _step(self) -> Optional[Step]:
        """Return the last step, or the step before it if the end of the loop cut the last one off."""
        steps = sorted(self._steps)
        if len(steps) > 1 and steps[-1][1] * FEW < median_high([duration for _, duration, _ in steps[:-1]]):
            return steps[-2]
        return steps[-1] if steps else None


def _thinned(points: List[Tuple[float, float]]) -> List[Tuple[float, float]]:
    """Return at most MOST_POINTS of the points, keeping the highest of each group of neighbours."""
    if len(points) <= MOST_POINTS:
        return points
    size = math.ceil(len(points) / MOST_POINTS)
    groups = (points[first : first + size] for first in range(0, len(points), size))
    return [max(group, key=lambda point: point[1]) for group in groups]
