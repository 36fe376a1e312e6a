"""Read one chrome trace of torch.profiler (torch 1.13 to 2.11): its steps, labelled spans and memory.

Steps are the host's ``ProfilerStep#N`` spans (category "user_annotation"); their "gpu_user_annotation" copies are
shorter and do not count.  Memory is "Total Allocated" of the "[memory]" events of each device.  Leaves out kernels,
stacks and everything else: TensorBoard and Perfetto show those.  No torch.
"""

from __future__ import annotations

import gzip
import re
import zlib
from array import array
from bisect import bisect_left
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

from common.core.errors import UserError
from common.core.files import open_file
from common.traces.events import Broken, Event, is_number, read_events

CPU, CUDA = 0, 1  # "Device Type" of the memory events, c10::DeviceType
LONGEST_LABEL = 1000  # characters kept of a name
_STEP = re.compile(r"ProfilerStep#(\d{1,18})$")

Device = Tuple[int, int]  # type, id


class TraceError(UserError):
    """The file is not a complete trace, or has no steps; the message names the file and the position in it."""


class Step(NamedTuple):
    """Hold one step of the profiled loop, in microseconds."""

    begin: float
    duration: float
    number: int


@dataclass
class Trace:
    """Hold one trace file, which is one window of the profiler's schedule.

    Attributes:
        steps: sorted by their begin.
        spans: (begin, end, name) of each other span of record_function, in microseconds.
        memory: by device, (microseconds, bytes allocated) in the order of the file.
        operators: when each operator began, sorted.
        on_cuda: the file has CUDA kernels or CUDA memory.
        salvaged: number of events that were not valid JSON.
    """

    path: Path
    steps: List[Step] = field(default_factory=list)
    spans: List[Tuple[float, float, str]] = field(default_factory=list)
    memory: Dict[Device, Tuple[array[float], array[int]]] = field(default_factory=dict)
    operators: array[float] = field(default_factory=lambda: array("d"))
    on_cuda: bool = False
    salvaged: int = 0

    @property
    def label_us(self) -> Dict[str, float]:
        """Return the total duration of the spans by name."""
        totals: Dict[str, float] = {}
        for begin, end, name in self.spans:
            totals[name] = totals.get(name, 0.0) + end - begin
        return totals

    def operators_in(self, step: Step) -> int:
        """Return the number of operators that began within a step."""
        return bisect_left(self.operators, step.begin + step.duration) - bisect_left(self.operators, step.begin)

    def fullest(self, kind: Optional[int] = None) -> Optional[Device]:
        """Return the GPU with the highest count, or the CPU if no GPU allocated; None where no device did.

        kind: CPU or CUDA, for that kind of device alone.
        """
        devices = [device for device in self.memory if kind in (None, device[0])]
        on_cuda = [device for device in devices if device[0] == CUDA]
        return max(on_cuda or devices, key=lambda device: max(self.memory[device][1]), default=None)

    def add(self, event: Event) -> None:
        """Keep what is used of an event, but for operators."""
        if event.name == "[memory]":
            counters = event.args
            if counters and all(map(is_number, (event.ts, counters.total, counters.device_type, counters.device_id))):
                device = int(counters.device_type or 0), int(counters.device_id or 0)
                times, totals = self.memory.setdefault(device, (array("d"), array("q")))
                times.append(event.ts or 0.0)
                totals.append(int(counters.total or 0))
        elif event.cat == "user_annotation" and event.ph == "X" and event.name:
            if event.ts is not None and event.dur is not None and all(map(is_number, (event.ts, event.dur))):
                step = _STEP.match(event.name)
                if step:
                    self.steps.append(Step(event.ts, float(event.dur), int(step[1])))
                else:
                    self.spans.append((event.ts, event.ts + event.dur, event.name[:LONGEST_LABEL]))
        elif event.cat == "kernel":
            self.on_cuda = True


def read(path: Path) -> Trace:
    """Read one trace (.json or .json.gz, told apart by content), with steps or without.

    Raises TraceError for a file that cannot be read, is cut short or broken.
    """
    trace = Trace(path)
    try:
        with open_file(path) as stream:
            packed = stream.read(2) == b"\x1f\x8b"
            stream.seek(0)
            unpacked: Any = gzip.open(stream) if packed else stream
            for events in read_events(unpacked):
                for event in events:
                    trace.salvaged += event.salvaged
                    if event.cat == "cpu_op" and event.ts is not None and is_number(event.ts):
                        trace.operators.append(event.ts)
                    elif event.cat != "python_function":  # most events of a trace with stacks
                        trace.add(event)
    except (Broken, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise TraceError(f"{path}: not a whole trace: {error}; profile again") from error
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror or error}") from error
    trace.steps.sort()
    trace.operators = array("d", sorted(trace.operators))
    trace.on_cuda = trace.on_cuda or any(device_type == CUDA for device_type, _ in trace.memory)
    return trace
