"""Read the memory of labelled spans from a trace: the bytes allocated at the start, at most, and at the end of each.

The numbers are "Total Allocated" of [memory] events, above the level at which the step of the span began: those of the
fullest GPU, or of the CPU if no GPU allocated.  Holds all memory events of the file, so it is meant for few steps.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

from common.traces import reader
from common.traces.reader import Device, Step, StepCollector


class SpanMemory(NamedTuple):
    """Bytes allocated at the start of a span, at most within it, and at its end, above the level at the step's start.

    The span of the whole step has the name "".
    """

    name: str
    step: int
    begin: int
    highest: int
    end: int


def read(path: Path, device_type: Optional[int] = None) -> List[SpanMemory]:
    """Return the spans of all steps, sorted by start within each step; empty if the trace has no memory events.

    With `device_type` reader.CPU or reader.CUDA, only that kind of device counts.  Raises TraceError as ``reader.read``
    does.
    """
    collector = _Collector()
    reader.collect(path, collector)
    return collector.spans(device_type)


class _Collector(StepCollector):
    """Keeps all steps, labelled spans and memory events."""

    def __init__(self) -> None:
        self._steps: List[Step] = []
        self._spans: List[Tuple[float, float, str]] = []
        self._levels: Dict[Device, List[Tuple[float, int]]] = {}

    def memory(self, device: Device, ts: Any, total: int) -> None:
        if reader.is_number(ts):
            self._levels.setdefault(device, []).append((ts, total))

    def step(self, ts: float, dur: float, number: int) -> None:
        self._steps.append((ts, dur, number))

    def label(self, ts: float, dur: float, name: str) -> None:
        self._spans.append((ts, ts + dur, name))

    def spans(self, device_type: Optional[int]) -> List[SpanMemory]:
        """Return the spans as ``read`` does."""
        levels = {device: line for device, line in self._levels.items() if device_type in (None, device[0])}
        fullest = reader.fullest(levels, lambda events: max(total for _, total in events))
        if fullest is None:
            return []
        times, totals = zip(*sorted(fullest, key=lambda event: event[0]))

        def measured(begin: float, end: float, name: str, step: int, base: int) -> SpanMemory:
            first, last = bisect_left(times, begin), bisect_right(times, end)
            before = totals[first - 1] if first else totals[0]
            inside = totals[first:last] or [before]
            return SpanMemory(name, step, before - base, max(before, *inside) - base, inside[-1] - base)

        result = []
        for ts, dur, number in sorted(self._steps):
            base = measured(ts, ts + dur, "", number, 0).begin
            inside = [(begin, end, name) for begin, end, name in self._spans if ts <= begin and end <= ts + dur]
            result += [measured(*span, number, base) for span in [(ts, ts + dur, ""), *sorted(inside)]]
        return result
