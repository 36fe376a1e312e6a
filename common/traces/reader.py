"""What one chrome trace of torch.profiler says: step times, peak memory, labelled spans.  torch 1.13 to 2.11.

Steps are the host's ``ProfilerStep#N`` spans (category "user_annotation"); the "gpu_user_annotation" copies of them
are shorter and are not steps.  Peak memory is the highest "Total Allocated" of the "[memory]" events of each
device.  Leaves out kernels, stacks and everything else: TensorBoard and Perfetto show those.  Reads in bounded memory,
with no torch.
"""

from __future__ import annotations

import gzip
import math
import re
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Tuple

from common.errors import UserError
from common.results.statistics import median
from common.results.trace_events import Broken, Counters, any_events
from common.results.trace_kineto import fast_events

CPU, CUDA = 0, 1  # "Device Type" of the memory events, c10::DeviceType
FEW = 4  # a step is short, or has few operators, below a FEWth of what the others have
MOST_LABELS = 1000  # names; further ones are counted under OTHER_LABELS, so that memory stays bounded
LONGEST_LABEL = 1000  # characters kept, likewise
OTHER_LABELS = "(other labels)"
_STEP = re.compile(r"ProfilerStep#(\d{1,18})$")

Device = Tuple[int, int]  # type, id
Step = Tuple[float, float, int]  # start, duration, number


class TraceError(UserError):
    """A file that is no whole trace, or one without steps.  The message names the file and the place."""


@dataclass(frozen=True)
class TraceSummary:
    """One window (one file).

    steps: (number, duration in microseconds) by start, the stub included; stub: the number of a last step that looks
    cut off by the end of the loop (see ``_stub``); missing: step numbers that are not there between the first and the
    last; peak_bytes: highest "Total Allocated" by (device type, device id), see CPU and CUDA; label_us: total duration
    by record_function name; on_cuda: kernels or CUDA memory were seen; rank: of distributed runs; salvaged: events
    that were not valid JSON.
    """

    path: str
    steps: Tuple[Tuple[int, float], ...]
    stub: Optional[int]
    missing: Tuple[int, ...]
    repeated: bool
    peak_bytes: Dict[Device, int]
    memory_events: int
    label_us: Dict[str, float]
    on_cuda: bool
    device_name: Optional[str]
    rank: Optional[int]
    salvaged: int

    @property
    def whole_steps(self) -> Tuple[Tuple[int, float], ...]:
        """The steps without the stub: those that a mean may use."""
        return self.steps[:-1] if self.stub is not None else self.steps

    @property
    def average_step_us(self) -> float:
        durations = [duration for _, duration in self.whole_steps]
        return sum(durations) / len(durations)

    @property
    def flags(self) -> List[str]:
        """What a reader of the numbers should know, in words."""
        flags = []
        if self.stub is not None:
            flags.append(
                f"stub step: ProfilerStep#{self.stub} ({self.steps[-1][1]:.0f} us) was cut off by the end of the "
                "loop and is left out of the average"
            )
        if self.missing:
            shown = ", ".join(str(number) for number in self.missing[:5]) + (", ..." if len(self.missing) > 5 else "")
            flags.append(f"missing steps: {shown}")
        if self.repeated:
            flags.append("repeated steps: a step number is there more than once")
        if self.salvaged:
            flags.append(f"{self.salvaged} events are not valid JSON and were read field by field")
        return flags


def read(path: Path, fast: bool = True) -> TraceSummary:
    """Read one trace (.json or .json.gz, told by its content).

    fast: try the way for Kineto's own layout first; the answer is the same.  Raises TraceError for a file that cannot
    be read, is cut short or broken, or has no step.
    """
    collector, salvaged = collect(Path(path), fast)
    return collector.summary(str(path), _stub(Path(path), collector.steps, fast), salvaged)


def memory_rise(path: Path) -> Dict[Device, int]:
    """Bytes from the lowest to the highest "Total Allocated" by (device type, device id).

    For a trace that need not have steps and whose counter may start above zero: it goes on from one profiled window of
    a process to the next.  TraceError as for ``read``.
    """
    collector, _ = collect(Path(path))
    return {device: highest - collector.lowest[device] for device, highest in collector.peaks.items()}


def count_operators(path: Path, begin: float = -math.inf, end: float = math.inf, fast: bool = True) -> Tuple[int, int]:
    """How many operators begin within [begin, end), in microseconds of the trace, and how many it has.

    Reads the whole file: where events stand in it does not tell when they began, and only its end tells which step was
    the last.  TraceError as for ``read``.
    """
    counter, _ = collect(path, fast, make=lambda: _OperatorCounter(begin, end))
    return counter.inside, counter.all


def _stub(path: Path, steps: List[Step], fast: bool) -> Optional[int]:
    """The number of the last step when the loop ended in it: it is short next to the other steps, and holds few
    operators (1.13 puts one of its own there) next to them.  Both, since a true step may be either.

    Only a short one is worth reading the file again for its operators.
    """
    if len(steps) < 2:
        return None
    *others, (begin, duration, number) = sorted(steps)
    if duration * FEW >= median([duration for _, duration, _ in others]):
        return None
    inside, all_operators = count_operators(path, begin, begin + duration, fast)
    usual = (all_operators - inside) / len(others)
    return number if usual >= FEW and inside * FEW < usual else None


def collect(path: Path, fast: bool = True, make: Optional[Callable[[], Any]] = None) -> Tuple[Any, int]:
    """Hand the events of a trace to a fresh collector: what `make` gives, with the methods ``event`` and ``header``,
    and ``operator`` where it wants the starts of operators.

    Returns it and how many events were salvaged.  TraceError as for ``read``, but steps are not asked for.
    """
    try:
        with open(path, "rb") as raw:
            packed = raw.read(2) == b"\x1f\x8b"
        for way in (fast_events, any_events) if fast else (any_events,):
            collector = (make or _Collector)()
            with gzip.open(path) if packed else open(path, "rb") as stream:
                salvaged = way(stream, collector.event, collector.header, getattr(collector, "operator", None))
            if salvaged is not None:
                return collector, salvaged
    except (Broken, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise TraceError(f"{path}: not a whole trace: {error}; profile again") from error
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror or error}") from error
    raise AssertionError("any_events always answers")


class _Collector:
    """Gathers the summary event by event.  Fields may be of any type: files can be garbled."""

    def __init__(self) -> None:
        self.steps: List[Step] = []
        self.peaks: Dict[Device, int] = {}
        self.lowest: Dict[Device, int] = {}
        self._memory_events = 0
        self._labels: Dict[str, float] = {}
        self._kernels = False
        self._header: Dict[str, Any] = {}

    def header(self, key: str, value: Any) -> None:
        self._header[key] = value

    def event(self, ph: Any, cat: Any, name: Any, ts: Any, dur: Any, counters: Counters) -> None:
        if name == "[memory]":
            self._memory(counters)
        elif cat == "user_annotation":
            if ph == "X" and isinstance(name, str) and is_number(ts) and is_number(dur) and dur >= 0:
                self._annotation(name, ts, dur)
        elif cat == "kernel":
            self._kernels = True

    def _annotation(self, name: str, ts: float, dur: float) -> None:
        step = _STEP.match(name)
        if step:
            self.steps.append((ts, float(dur), int(step.group(1))))
            return
        name = name[:LONGEST_LABEL]
        if name not in self._labels and len(self._labels) >= MOST_LABELS:
            name = OTHER_LABELS
        self._labels[name] = self._labels.get(name, 0.0) + dur

    def _memory(self, counters: Counters) -> None:
        if counters is None:
            return
        total, device_type, device_id = counters
        if not (is_number(total) and is_number(device_type) and is_number(device_id)):
            return
        total, device_type, device_id = int(total), int(device_type), int(device_id)
        self._memory_events += 1
        device = (device_type, device_id)
        if device not in self.peaks:
            self.peaks[device] = self.lowest[device] = total
        elif total > self.peaks[device]:
            self.peaks[device] = total
        elif total < self.lowest[device]:
            self.lowest[device] = total

    def summary(self, path: str, stub: Optional[int], salvaged: int) -> TraceSummary:
        if not self.steps:
            raise TraceError(f"{path}: no ProfilerStep span in it: the profiled loop has to call prof.step()")
        self.steps.sort()
        numbers = sorted(number for _, _, number in self.steps)
        distinct = sorted(set(numbers))
        gaps = (range(low + 1, min(high, low + 1000)) for low, high in zip(distinct, distinct[1:]))
        properties = self._header.get("deviceProperties")
        first_device = properties[0] if isinstance(properties, list) and properties else None
        distributed = self._header.get("distributedInfo")
        rank = distributed.get("rank") if isinstance(distributed, dict) else None
        return TraceSummary(
            path=path,
            steps=tuple((number, duration) for _, duration, number in self.steps),
            stub=stub,
            missing=tuple(number for gap in gaps for number in gap)[:1000],
            repeated=len(distinct) < len(numbers),
            peak_bytes=self.peaks,
            memory_events=self._memory_events,
            label_us=self._labels,
            on_cuda=self._kernels or any(device_type == CUDA for device_type, _ in self.peaks),
            device_name=str(first_device["name"])
            if isinstance(first_device, dict) and "name" in first_device
            else None,
            rank=int(rank) if is_number(rank) else None,
            salvaged=salvaged,
        )


class _OperatorCounter:
    """Counts operators, and those that begin within [begin, end)."""

    def __init__(self, begin: float, end: float) -> None:
        self._begin, self._end = begin, end
        self.inside = self.all = 0

    def header(self, key: str, value: Any) -> None:
        pass

    def event(self, *fields: Any) -> None:
        pass

    def operator(self, ts: Any) -> None:
        if is_number(ts):
            self.all += 1
            self.inside += self._begin <= ts < self._end


def is_number(value: Any) -> bool:
    """A number that arithmetic can be done with, and no bool."""
    return type(value) in (int, float) and -1e18 < value < 1e18
