"""Read step times, peak memory and labelled spans from one chrome trace of torch.profiler (torch 1.13 to 2.11).

Steps are the host's ``ProfilerStep#N`` spans (category "user_annotation"); their "gpu_user_annotation" copies are
shorter and do not count.  Peak memory is the highest "Total Allocated" of the "[memory]" events of each device.  Leaves
out kernels, stacks and everything else: TensorBoard and Perfetto show those.  Uses bounded memory, and no torch.
"""

from __future__ import annotations

import gzip
import math
import re
import zlib
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Tuple, TypeVar

from common.core.errors import UserError
from common.core.files import open_file
from common.core.statistics import median
from common.traces.events import Broken, Collector, Enough, read_events
from common.traces.kineto import Event

CPU, CUDA = 0, 1  # "Device Type" of the memory events, c10::DeviceType
FEW = 4  # a step is short, or has few operators, if it has less than 1/FEW of the usual duration or count
# These keep memory and time bounded for a file of any content.
MOST_STEPS = 100_000  # the rest of the trace is not read
MOST_LABELS = 1000  # different names; further ones are counted as OTHER_LABELS
MOST_DEVICES = 64  # memory events of further devices are ignored
LONGEST_LABEL = 1000  # characters kept of a name
OTHER_LABELS = "(other labels)"
_STEP = re.compile(r"ProfilerStep#(\d{1,18})$")

Device = Tuple[int, int]  # type, id
Step = Tuple[float, float, int]  # start, duration, number
Memory = TypeVar("Memory")


class TraceError(UserError):
    """The file is not a complete trace, or has no steps; the message names the file and the position in it."""


@dataclass(frozen=True)
class TraceSummary:
    """The contents of one trace file, which is one window of the profiler's schedule.

    Args:
        path: the file.
        steps: (number, duration in microseconds) of each step, sorted by start, the stub included.
        stub: number of the last step if the end of the loop cut it off (see ``_stub``), else None.
        missing: step numbers that are absent between the first and the last, at most 1000.
        repeated: whether a step number occurs more than once.
        cut: whether the file has more than MOST_STEPS steps, so that its rest was not read.
        peak_bytes: highest "Total Allocated" by (device type, device id).
        memory_events: number of memory events.
        label_us: total duration in microseconds by name of record_function.
        on_cuda: whether the file has CUDA kernels or CUDA memory.
        device_name: name of the first GPU, None if the file does not tell.
        rank: rank in a distributed run, None outside one.
        salvaged: number of events that were not valid JSON.
    """

    path: str
    steps: Tuple[Tuple[int, float], ...]
    stub: Optional[int]
    missing: Tuple[int, ...]
    repeated: bool
    cut: bool
    peak_bytes: Dict[Device, int]
    memory_events: int
    label_us: Dict[str, float]
    on_cuda: bool
    device_name: Optional[str]
    rank: Optional[int]
    salvaged: int

    @property
    def whole_steps(self) -> Tuple[Tuple[int, float], ...]:
        """Return the steps without the stub: those that count for an average."""
        return self.steps[:-1] if self.stub is not None else self.steps

    @property
    def average_step_us(self) -> float:
        """Return the mean duration of the complete steps, in microseconds."""
        durations = [duration for _, duration in self.whole_steps]
        return sum(durations) / len(durations)

    @property
    def flags(self) -> List[str]:
        """Return what limits the meaning of the numbers, a sentence each."""
        flags = []
        if self.stub is not None:
            step = f"ProfilerStep#{self.stub} ({self.steps[-1][1]:.0f} us)"
            flags.append(f"stub step: {step} was cut off by the end of the loop and is left out of the average")
        if self.missing:
            shown = ", ".join(str(number) for number in self.missing[:5]) + (", ..." if len(self.missing) > 5 else "")
            flags.append(f"missing steps: {shown}")
        if self.cut:
            flags.append(f"more than {MOST_STEPS:,} steps: the rest of the file was not read")
        if self.repeated:
            flags.append("repeated steps: a step number occurs more than once")
        if self.salvaged:
            flags.append(f"{self.salvaged} events are not valid JSON and were read field by field")
        return flags


def read(path: Path, fast: bool = True) -> TraceSummary:
    """Read one trace (.json or .json.gz, told apart by content).

    `fast` is that of ``read_events`` and does not change the answer.  Raises TraceError for a file that cannot be read,
    is cut short or broken, or has no step.
    """
    collector = _SummaryCollector()
    salvaged = collect(path, collector, fast)
    stub = None if collector.cut else _stub(path, collector.steps, fast)
    return collector.summary(str(path), stub, salvaged)


def memory_rise(path: Path) -> Dict[Device, int]:
    """Return the bytes from the lowest to the highest "Total Allocated", by (device type, device id).

    The trace need not have steps.  Its counter may start above zero, at the level at which the window before ended.
    Raises TraceError as ``read`` does.
    """
    collector = _SummaryCollector()
    collect(path, collector)
    return {device: highest - collector.lowest[device] for device, highest in collector.peaks.items()}


def count_operators(path: Path, begin: float = -math.inf, end: float = math.inf, fast: bool = True) -> Tuple[int, int]:
    """Return the number of operators that begin within [begin, end), and the number of all operators of the trace.

    Times are in microseconds as in the trace.  Reads the whole file, since events are not sorted by their start.
    Raises TraceError as ``read`` does, but the trace need not have steps.
    """
    counter = _OperatorCounter(begin, end)
    collect(path, counter, fast)
    return counter.inside, counter.all


def _stub(path: Path, steps: List[Step], fast: bool) -> Optional[int]:
    """Return the number of the last step if the loop ended within it, else None.

    Such a step is shorter than the others and also holds fewer operators (torch 1.13 adds one there by itself); a
    complete step may be either, but not both.  The file is read again to count operators only if the step is short.
    """
    if len(steps) < 2:
        return None
    *others, (begin, duration, number) = sorted(steps)
    if duration * FEW >= median([duration for _, duration, _ in others]):
        return None
    inside, all_operators = count_operators(path, begin, begin + duration, fast)
    usual = (all_operators - inside) / len(others)
    return number if usual >= FEW and inside * FEW < usual else None


def collect(path: Path, collector: Collector, fast: bool = True) -> int:
    """Hand the events of a trace to a collector; return how many of them were not valid JSON.

    Raises TraceError as ``read`` does, but the trace need not have steps.
    """
    try:
        with open_file(path) as stream:
            packed = stream.read(2) == b"\x1f\x8b"
            stream.seek(0)
            unpacked: Any = gzip.open(stream) if packed else stream
            return read_events(unpacked, collector, fast)
    except Enough:
        return 0
    except (Broken, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise TraceError(f"{path}: not a whole trace: {error}; profile again") from error
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror or error}") from error


class StepCollector(Collector):
    """Selects the steps, labelled spans and memory events, and hands each to a method that subclasses override."""

    kernels = False  # whether CUDA kernels were seen
    count = 0  # number of steps
    cut = False  # whether reading ended after MOST_STEPS steps

    def event(self, event: Event) -> None:
        """Hand a step, labelled span or memory event to its method; the fields of a garbled event may be of any
        type."""
        if event.name == "[memory]":
            if event.args is not None:
                total, device_type, device_id = event.args.total, event.args.device_type, event.args.device_id
                if is_number(total) and is_number(device_type) and is_number(device_id):
                    self.memory((int(device_type), int(device_id)), event.ts, int(total))
        elif event.cat == "user_annotation" and event.ph == "X" and isinstance(event.name, str):
            if is_number(event.ts) and is_number(event.dur) and event.dur >= 0:
                step = _STEP.match(event.name)
                if step:
                    self.cut = self.count == MOST_STEPS
                    if self.cut:
                        raise Enough
                    self.count += 1
                    self.step(event.ts, float(event.dur), int(step[1]))
                else:
                    self.label(event.ts, event.dur, event.name)
        elif event.cat == "kernel":
            self.kernels = True

    def memory(self, device: Device, ts: Any, total: int) -> None:
        """Receive the bytes allocated on a device at `ts` microseconds; a garbled event may give any type of `ts`."""

    def step(self, ts: float, dur: float, number: int) -> None:
        """Receive a span ProfilerStep#number: its start and duration in microseconds."""

    def label(self, ts: float, dur: float, name: str) -> None:
        """Receive any other span of record_function: its start and duration in microseconds."""


class _SummaryCollector(StepCollector):
    """Collects what a TraceSummary holds."""

    def __init__(self) -> None:
        self.steps: List[Step] = []
        self.peaks: Dict[Device, int] = {}
        self.lowest: Dict[Device, int] = {}
        self._memory_events = 0
        self._labels: Dict[str, float] = {}
        self._header: Dict[str, object] = {}

    def header(self, key: str, value: Any) -> None:
        self._header[key] = value

    def step(self, ts: float, dur: float, number: int) -> None:
        self.steps.append((ts, dur, number))

    def label(self, ts: float, dur: float, name: str) -> None:
        name = name[:LONGEST_LABEL]
        if name not in self._labels and len(self._labels) >= MOST_LABELS:
            name = OTHER_LABELS
        self._labels[name] = self._labels.get(name, 0.0) + dur

    def memory(self, device: Device, ts: Any, total: int) -> None:
        self._memory_events += 1
        if device not in self.peaks and len(self.peaks) >= MOST_DEVICES:
            return
        self.peaks[device] = max(total, self.peaks.get(device, total))
        self.lowest[device] = min(total, self.lowest.get(device, total))

    def summary(self, path: str, stub: Optional[int], salvaged: int) -> TraceSummary:
        """Return the summary of the events so far; raise TraceError if there is no step among them."""
        if not self.steps:
            raise TraceError(f"{path}: has no ProfilerStep span: call prof.step() in the profiled loop")
        self.steps.sort()
        numbers = sorted(number for _, _, number in self.steps)
        distinct = sorted(set(numbers))
        gaps = (range(low + 1, min(high, low + 1000)) for low, high in zip(distinct, distinct[1:]))
        properties = self._header.get("deviceProperties")
        first_device = properties[0] if isinstance(properties, list) and properties else None
        name = str(first_device["name"]) if isinstance(first_device, dict) and "name" in first_device else None
        distributed = self._header.get("distributedInfo")
        rank = distributed.get("rank") if isinstance(distributed, dict) else None
        steps = tuple((number, duration) for _, duration, number in self.steps)
        missing = tuple(islice(chain.from_iterable(gaps), 1000))
        on_cuda = self.kernels or any(device_type == CUDA for device_type, _ in self.peaks)
        rank = int(rank) if rank is not None and is_number(rank) else None
        memory = self.peaks, self._memory_events
        of_steps = steps, stub, missing, len(distinct) < len(numbers), self.cut
        return TraceSummary(path, *of_steps, *memory, self._labels, on_cuda, name, rank, salvaged)


class _OperatorCounter(Collector):
    """Counts all operators, and those that begin within [begin, end) in microseconds."""

    wants_operators = True

    def __init__(self, begin: float, end: float) -> None:
        self._begin, self._end = begin, end
        self.inside = self.all = 0

    def operator(self, ts: Any) -> None:
        if is_number(ts):
            self.all += 1
            self.inside += self._begin <= ts < self._end


def fullest(of_device: Mapping[Device, Memory], highest: Callable[[Memory], float]) -> Optional[Memory]:
    """Return the value of the GPU that `highest` ranks first, or that of the CPU if no GPU allocated.

    Returns None if there is no device at all.
    """
    on_cuda = [memory for (device_type, _), memory in of_device.items() if device_type == CUDA]
    return max(on_cuda or of_device.values(), key=highest, default=None)


def is_number(value: Any) -> bool:
    """Return whether the value is a finite number of usual size, and no bool."""
    return type(value) in (int, float) and -1e18 < value < 1e18
