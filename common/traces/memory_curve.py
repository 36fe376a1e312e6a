"""Memory over time within one step, from a trace: "Total Allocated" of the [memory] events, in bounded memory.

Profiled: with the profiler's own cost in the times.  The step is the last whole one of the file, since what was
allocated when it began is only known from the events before it.  The counter of a CPU drifts from step to step, so the
curve is what is allocated above the step's start.
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

MOST_BINS = 1 << 14  # per device, over the whole file; past it, neighbours are merged
MOST_SPANS = 1 << 15  # labelled spans kept
MOST_POINTS = 600  # of the curve that is drawn

Span = Tuple[float, float, str]  # start, end in microseconds, label


@dataclass(frozen=True)
class Curve:
    """step: its number; ms: since it began; mb: allocated above what was allocated then, the highest within each bin;
    stage_mb: the highest while each labelled stage ran."""

    file: str
    step: int
    ms: List[float]
    mb: List[float]
    stage_mb: Dict[str, float]

    @property
    def peak_mb(self) -> float:
        return max(self.mb)


def read(path: Path) -> Optional[Curve]:
    """The curve of one trace; None when it has no memory events.  Raises TraceError as ``reader.read`` does."""
    collector = _Collector()
    reader.collect(path, collector)
    return collector.curve(path.name)


class Timeline:
    """The highest and the last value in bins of equal width, which doubles when there are too many of them."""

    def __init__(self) -> None:
        self.width = 1.0  # microseconds
        self.bins: Dict[int, Tuple[float, float, float]] = {}  # highest, time of the last, last

    def add(self, time: float, value: float) -> None:
        self._merge(math.floor(time / self.width), (value, time, value))
        while len(self.bins) > MOST_BINS:
            old, self.bins, self.width = self.bins, {}, self.width * 2
            for place in sorted(old):
                self._merge(place // 2, old[place])

    def _merge(self, place: int, new: Tuple[float, float, float]) -> None:
        old = self.bins.get(place)
        if old is None:
            self.bins[place] = new
        else:
            latest = new if new[1] >= old[1] else old
            self.bins[place] = (max(old[0], new[0]), latest[1], latest[2])

    def between(self, begin: float, end: float) -> List[Tuple[float, float]]:
        """(time, highest) of the bins whose last event is in [begin, end]."""
        bins = (self.bins[place] for place in sorted(self.bins))
        return [(at, highest) for highest, at, _ in bins if begin <= at <= end]

    def before(self, time: float) -> Optional[float]:
        """The last value before `time`."""
        earlier = [(at, last) for _, at, last in self.bins.values() if at < time]
        return max(earlier)[1] if earlier else None


class _Collector(StepCollector):
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
        step = self._step()
        timeline = reader.fullest(self._timelines, lambda line: max(highest for highest, _, _ in line.bins.values()))
        if step is None or timeline is None:
            return None
        begin, duration, number = step
        end = begin + duration
        found = timeline.between(begin, end)
        if not found:
            return None
        start = timeline.before(begin)
        base = start if start is not None else min(value for _, value in found)
        stage_mb: Dict[str, float] = {}
        for first, last, label in self._spans:
            if first >= begin and last <= end:
                inside = [value for time, value in found if first <= time <= last]
                if inside:
                    stage_mb[label] = max(stage_mb.get(label, 0.0), (max(inside) - base) / MB)
        points = [(begin, base), *_thinned(found), (end, found[-1][1])]
        ms, mb = [(time - begin) / 1e3 for time, _ in points], [(value - base) / MB for _, value in points]
        return Curve(file, number, ms, mb, stage_mb)

    def _step(self) -> Optional[Step]:
        """The last step, or the one before it when the end of the loop cut the last one off."""
        steps = sorted(self._steps)
        if len(steps) > 1 and steps[-1][1] * FEW < median_high([duration for _, duration, _ in steps[:-1]]):
            return steps[-2]
        return steps[-1] if steps else None


def _thinned(points: List[Tuple[float, float]]) -> List[Tuple[float, float]]:
    """At most MOST_POINTS of them; of each run of neighbours the highest stays."""
    if len(points) <= MOST_POINTS:
        return points
    size = math.ceil(len(points) / MOST_POINTS)
    runs = (points[place : place + size] for place in range(0, len(points), size))
    return [max(run, key=lambda point: point[1]) for run in runs]
