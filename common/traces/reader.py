"""Find the chrome traces of torch.profiler (torch 1.13 to 2.11) in a folder, and read their steps,
spans and memory.  No torch.

Steps are the host's ``ProfilerStep#N`` spans (category "user_annotation"); their
"gpu_user_annotation" copies are shorter and do not count.  Memory is "Total Allocated" of the
"[memory]" events of each device.

Events are decoded piece by piece, in bounded memory.  Kineto, the library in torch that writes
traces, does not escape names and stacks (torch 1.13 never, later ones not everywhere).  So an event
may be invalid JSON; it is then salvaged: read field by field, by regular expressions.  See
https://github.com/pytorch/kineto/pull/1459.  A trace that another program wrote again (json.dump,
jq, a merge) has another layout.  It is JSON, and is decoded event by event, which takes ten times
as long.
"""

from __future__ import annotations

import codecs
import gzip
import json
import math
import re
import zlib
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeGuard

import msgspec

from rnnt_bench.core.errors import UserError
from rnnt_bench.core.files import open_file

#: Bytes of a file in which `is_trace` searches the list of events.
SEARCHED_BYTES = 1 << 16
#: The name of a trace as torch writes it: "host_1234.1700000000000.pt.trace.json.gz".
_FILE_NAME = re.compile(r"(?P<worker>.*?)(?:\.(?P<time>\d+))?\.pt\.trace\.json(\.gz)?$", re.DOTALL)


def is_trace(path: Path) -> bool:
    """Return whether a file is a chrome trace, gzipped or not.

    Its name must end in .json or .json.gz.  A file is a trace if its name is one that torch gives,
    or if its first SEARCHED_BYTES show events.  False for any other file that cannot be read."""
    if not path.name.endswith((".json", ".json.gz")) or not path.is_file():
        return False
    if _FILE_NAME.match(path.name):
        return True
    with suppress(OSError, EOFError, zlib.error), unpacked(path) as stream:
        head = stream.read(SEARCHED_BYTES)
        is_list = head.lstrip().startswith(b"[")
        return b'"traceEvents"' in head or (is_list and b'"ph"' in head)
    return False


@contextmanager
def unpacked(path: Path) -> Iterator[Any]:
    """Yield a binary stream of the content of a file.  Its first bytes tell whether it is
    gzipped."""
    with open_file(path) as stream:
        packed = stream.read(2) == b"\x1f\x8b"
        stream.seek(0)
        yield gzip.open(stream) if packed else stream


def trace_files(folder: Path) -> list[Path]:
    """Return the trace files directly in a folder, sorted by the time in their names."""

    def order(path: Path) -> tuple[int, int, str]:
        match = _FILE_NAME.match(path.name)
        digits = match["time"] if match else None
        # Newer versions of torch count in a smaller unit, so a number of more digits is later.
        return len(digits or ""), int(digits or 0), path.name

    return sorted(filter(is_trace, folder.iterdir()), key=order)


def worker(path: Path) -> str:
    """Return the part of a trace file's name before its time, or before its ending without a time.

    By default this part is the host and the process, so each rank has another."""
    match = _FILE_NAME.match(path.name)
    return match["worker"] if match else path.name


def perhaps_packed(path: Path) -> Path:
    """Return the path of the trace, or of the .gz file that has replaced it."""
    packed = path.with_name(f"{path.name}.gz")
    return packed if packed.exists() and not path.exists() else path


def remove(folder: Path) -> None:
    """Delete the files that an earlier attempt of the trace pass left in a folder, complete or
    not."""
    for path in [*folder.glob("*.pt.trace.json*"), folder / f"{folder.name}.txt"]:
        path.unlink(missing_ok=True)


# Events.

CHUNK = 1 << 18  # bytes read at once
# A trace with an event of more characters is refused: reading it would take the memory that the
# other rows need.
LARGEST = 64 << 20
# An event is not salvaged if its fields before "args", the name included, have more characters.
LONGEST_HEAD = 16 << 10
# Kineto indents an event by two spaces and its fields by four.
EVENT_END = "\n  }"
BOUNDARY = EVENT_END + ",\n  {"  # between two events
_BOUNDARY_COMMA = re.compile(r"(?<=\n  \}),(?=\n  \{)")
_LIST_BEGIN = re.compile(r'"traceEvents": \[(?=\s*\n  \{\n)')
_LIST_END = re.compile(r"\n  \}(?=\s*\n  ?\])")
# In another layout: the begin of the list, in an object or bare, and what is between two events.
_ANY_LIST_BEGIN = re.compile(r'"traceEvents"\s*:\s*\[|\A\s*\[')
_ANY_GAP = re.compile(r"[\s,]*")
# {"ph": "X", "cat": "cpu_op", "name": "aten::add", "pid": 1, "tid": 1,
#     "ts": 12.5, "dur": 3
_EVENT_HEAD = re.compile(
    r'\s*\{\s*"ph": "(?P<ph>\w)", "cat": "(?P<cat>[\w ]*)",(?: "s": "\w",)? "name": "(?P<name>.*)",\s+"pid": .*?'
    r'\n    "ts": (?P<ts>-?\d{1,18}(?:\.\d+)?)(?:, "dur": (?P<dur>-?\d{1,18}(?:\.\d+)?))?',
    re.DOTALL,
)
_Number = int | float | None


class Counters(msgspec.Struct, gc=False):
    """Hold the arguments of a memory event."""

    total: _Number = msgspec.field(default=None, name="Total Allocated")
    device_type: _Number = msgspec.field(default=None, name="Device Type")
    device_id: _Number = msgspec.field(default=None, name="Device Id")


class Event(msgspec.Struct, gc=False):
    """Hold the fields of an event that are used.

    Attributes:
        ts, dur: begin and duration in microseconds
        salvaged: whether it was invalid JSON
    """

    ph: str | None = None
    cat: str | None = None
    name: str | None = None
    ts: _Number = None
    dur: _Number = None
    args: Counters | None = None
    salvaged: bool = False


_DECODER = msgspec.json.Decoder(list[Event])
_JSON = json.JSONDecoder(strict=False)  # names often have control characters
# "Total Allocated": 1024
_COUNTERS = [
    re.compile(f'"{field.encode_name}": (-?\\d{{1,18}})\\b')
    for field in msgspec.structs.fields(Counters)
]


class Broken(Exception):
    """The file is not a complete trace; the message says what is wrong and where."""


class _Text:
    """Hold the text of a file that is read, but not yet decoded as events.

    text: begins at character `position` of the file."""

    def __init__(self, stream: BinaryIO):
        self.stream = stream
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.text = self.decoder.decode(stream.read(CHUNK))
        self.position = 0

    def drop(self, count: int) -> None:
        """Forget the first `count` characters."""
        self.text = self.text[count:]
        self.position += count

    def read_more(self) -> None:
        """Add the next piece of the file, for an event that has only begun in the text.  Raises
        Broken for an event that is too long, and at the end of the file."""
        length = len(self.text)
        if length > LARGEST:
            raise Broken(
                f"an event after character {self.position:,} has more than {LARGEST:,} characters"
            )
        # Each piece doubles the text of a long event, since all of it is searched again each time.
        data = self.stream.read(max(CHUNK, length))
        if not data:
            end = self.position + length
            raise Broken(f"it ends too early, after character {end:,}: the file was cut short")
        self.text += self.decoder.decode(data)

    def read_rest(self) -> None:
        """Read the rest of the file, after the events.  Raises Broken if the file does not end with
        "}", as a JSON object does."""
        # The last character is kept: it may be the "}", if the next pieces are blank.
        while data := self.stream.read(CHUNK):
            self.text = self.text.rstrip()[-1:] + self.decoder.decode(data)
        if not self.text.rstrip().endswith("}"):
            raise Broken(
                f"it ends too early, after the events that end at character {self.position:,}: the file was cut short"
            )


def read_events(stream: BinaryIO) -> Iterator[Sequence[Event]]:
    """Yield the events of an uncompressed trace in groups.  Raises Broken if the file is no trace,
    or was cut short."""
    unread = _Text(stream)
    begin = _LIST_BEGIN.search(unread.text)
    if begin is None:
        yield from _events_of_any_layout(unread)
        return
    unread.drop(begin.end())
    while True:
        # The last complete event ends at the last boundary (-1: none yet) or, behind that, with the
        # list.  Both texts begin with the EVENT_END of this event.
        last = unread.text.rfind(BOUNDARY)
        list_end = _LIST_END.search(unread.text, max(last, 0))
        if list_end:
            last = list_end.start()
        if last >= 0:
            length = last + len(EVENT_END)
            yield _decoded(unread.text[:length], unread.position)
            unread.drop(length + 1)  # with the comma, or white space, behind the last event
        if list_end:
            break
        unread.read_more()
    unread.read_rest()


def _events_of_any_layout(unread: _Text) -> Iterator[Sequence[Event]]:
    """Yield the events of a trace in any layout of JSON, or of a bare list of events, in groups: one
    for each piece of the file.  Raises Broken.

    unread: the file, of which its first piece is read."""
    begin = _ANY_LIST_BEGIN.search(unread.text)
    if begin is None:
        raise Broken(f"within {len(unread.text):,} characters no list of events begins")
    at = begin.end()  # where the next event begins in the text
    events: list[Event] = []
    while True:
        gap = _ANY_GAP.match(unread.text, at)
        at = gap.end() if gap else at
        if unread.text.startswith("]", at):
            break
        try:
            value, at = _JSON.raw_decode(unread.text, at)
        except (RecursionError, ValueError) as error:
            yield events
            events = []
            unread.drop(at)
            at = 0
            # Where the text ends, or an event begins, the next piece of the file may have the rest.
            may_go_on = unread.text[:1] in ("", "{") and not isinstance(error, RecursionError)
            if not may_go_on:
                raise Broken(f"an event after character {unread.position:,} is not JSON") from None
            unread.read_more()  # raises Broken at the end of the file
            continue
        with suppress(msgspec.ValidationError):  # an event of another program may have other types
            events.append(msgspec.convert(value, Event))
    yield events
    is_bare_list = begin.group().lstrip() == "["
    if not is_bare_list:  # the object around the list has an end too
        unread.drop(at)
        unread.read_rest()


def _decoded(block: str, position: int) -> Sequence[Event]:
    """Return the events in a block.  Raises Broken.

    block: events as JSON, with commas between them; position: where the block begins in the file,
    for the message of Broken."""
    try:
        return _DECODER.decode(f"[{block}]")
    except (msgspec.DecodeError, RecursionError):
        return [
            event for text in _BOUNDARY_COMMA.split(block) for event in _salvaged(text, position)
        ]


def _salvaged(text: str, position: int) -> Sequence[Event]:
    """Return a list of the one event in a text.  If the event is invalid JSON, it is read field by
    field, and the escapes in its name stay.  Raises Broken if that fails too.

    position: where the block with this text begins in the file, for the message."""
    with suppress(msgspec.DecodeError, RecursionError):
        return _DECODER.decode(f"[{text}]")
    head, _, args = text.partition('\n    "args": {')
    match = _EVENT_HEAD.match(head) if len(head) < LONGEST_HEAD else None
    if match is None:
        raise Broken(f"an event after character {position:,} is not JSON")
    counters = []
    for pattern in _COUNTERS:
        values = pattern.findall(args)
        # Only the last is the counter's: torch 1.13 writes the stack before it, which may hold
        # the same text.
        counters.append(int(values[-1]) if values else None)
    event = Event(
        ph=match["ph"],
        cat=match["cat"],
        name=match["name"],
        ts=float(match["ts"]),
        dur=float(match["dur"]) if match["dur"] else None,
        args=Counters(*counters),
        salvaged=True,
    )
    return [event]


def is_number(value: _Number) -> TypeGuard[int | float]:
    """Return whether the value is a number between -1e18 and 1e18, not None, infinite or NaN."""
    return value is not None and -1e18 < value < 1e18


# Traces.

CPU, CUDA = 0, 1  # "Device Type" of the memory events, c10::DeviceType
LONGEST_LABEL = 1000  # characters of a name that are kept
_STEP = re.compile(r"ProfilerStep#(\d{1,18})$")


class Device(NamedTuple):
    """Name a device as memory events do.  type: CPU or CUDA; id: -1 for a CPU."""

    type: int
    id: int


class TraceError(UserError):
    """The file is not a complete trace, or has no steps; the message names the file and the
    position in it."""


class Step(NamedTuple):
    """Hold one step of the profiled loop, in microseconds."""

    begin: float
    duration: float
    number: int

    @property
    def end(self) -> float:
        return self.begin + self.duration


class Span(NamedTuple):
    """Hold a span of record_function, a labelled stage of a step, in microseconds."""

    begin: float
    end: float
    name: str


class Counts(NamedTuple):
    """Hold the bytes that a device had allocated after each memory event, in the order of the
    file.  moments: the times of the events in microseconds."""

    moments: array[float]
    totals: array[int]


@dataclass
class Trace:
    """Hold one trace file, which is one window of the profiler's schedule; times are microseconds.

    Attributes:
        spans: the labelled stages, not the steps
        operators: when each operator began, sorted
        on_cuda: whether it has a kernel, or the memory of a GPU
        salvaged: number of events that were invalid JSON
    """

    path: Path
    steps: list[Step] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    memory: dict[Device, Counts] = field(default_factory=dict)
    operators: array[float] = field(default_factory=lambda: array("d"))
    on_cuda: bool = False
    salvaged: int = 0

    def label_us(self, until: float = math.inf) -> dict[str, float]:
        """Return the total duration of the spans by name, of those that begin before `until`."""
        totals: dict[str, float] = {}
        for begin, end, name in self.spans:
            if begin < until:
                totals[name] = totals.get(name, 0.0) + end - begin
        return totals

    def operators_in(self, step: Step) -> int:
        """Return the number of operators that began within a step."""
        return bisect_left(self.operators, step.end) - bisect_left(self.operators, step.begin)

    def fullest(self, device_type: int | None = None) -> Device | None:
        """Return the GPU with the highest count of bytes, or the CPU if no GPU has counts; None if
        no device has counts.

        device_type: CPU or CUDA, to choose from the devices of this type alone; None for all."""
        devices = [device for device in self.memory if device_type in (None, device.type)]
        gpus = [device for device in devices if device.type == CUDA]
        return max(
            gpus or devices, key=lambda device: max(self.memory[device].totals), default=None
        )

    def add(self, event: Event) -> None:
        """Take in an event of memory, a span or a kernel; leave out any other."""
        if event.name == "[memory]":
            self._add_memory(event)
        elif event.cat == "user_annotation" and event.ph == "X" and event.name:
            self._add_span(event.name, event.ts, event.dur)
        elif event.cat == "kernel":
            self.on_cuda = True

    def _add_memory(self, event: Event) -> None:
        """Take in a memory event; leave it out if one of its numbers fails `is_number`."""
        counters = event.args or Counters()
        if (
            is_number(event.ts)
            and is_number(counters.total)
            and is_number(counters.device_type)
            and is_number(counters.device_id)
        ):
            device = Device(int(counters.device_type), int(counters.device_id))
            counts = self.memory.setdefault(device, Counts(array("d"), array("q")))
            counts.moments.append(event.ts)
            counts.totals.append(int(counters.total))

    def _add_span(self, name: str, begin: _Number, duration: _Number) -> None:
        """Take in a step, or a span of another name; leave it out if a number fails `is_number`."""
        if is_number(begin) and is_number(duration):
            step = _STEP.match(name)
            if step:
                self.steps.append(Step(begin, float(duration), int(step[1])))
            else:
                self.spans.append(Span(begin, begin + duration, name[:LONGEST_LABEL]))


def read(path: Path) -> Trace:
    """Read one trace (.json or .json.gz), with steps or without.  Raises TraceError."""
    trace = Trace(path)
    try:
        with unpacked(path) as stream:
            for events in read_events(stream):
                for event in events:
                    trace.salvaged += event.salvaged
                    if event.cat == "python_function":
                        continue  # not used; most events of a trace with stacks
                    if event.cat == "cpu_op" and is_number(event.ts):
                        trace.operators.append(event.ts)
                    else:
                        trace.add(event)
    except (Broken, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise TraceError(f"{path}: not a whole trace: {error}; profile again") from error
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror or error}") from error
    trace.steps.sort()
    trace.operators = array("d", sorted(trace.operators))
    trace.on_cuda = trace.on_cuda or any(device.type == CUDA for device in trace.memory)
    return trace
