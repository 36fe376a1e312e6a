"""Find the chrome traces of torch.profiler (torch 1.13 to 2.11) in a folder, and read their steps,
spans and memory.

Steps are the host's ``ProfilerStep#N`` spans (category "user_annotation"); their
"gpu_user_annotation" copies are shorter and do not count.  Memory is "Total Allocated" of the
"[memory]" events of each device.  No torch.

Events are decoded piece by piece, in bounded memory.  Kineto writes names and stacks without
escaping (torch 1.13 always, later ones in places), so an event may be invalid JSON; it is read
field by field: https://github.com/pytorch/kineto/pull/1459.  A trace in another layout (json.dump,
jq, a merge) is JSON, and decoded event by event, which takes ten times as long.
"""

from __future__ import annotations

import codecs
import gzip
import json
import re
import zlib
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec

from rnnt_bench.core.errors import UserError
from rnnt_bench.core.files import open_file

HEAD = 1 << 16  # bytes of a file that are searched for the list of events
_NAME = re.compile(r"(?P<worker>.*?)(?:\.(?P<time>\d+))?\.pt\.trace\.json(\.gz)?$", re.DOTALL)


def is_trace(path: Path) -> bool:
    """Return whether a file is a chrome trace, packed or not: by its name, or by how it begins."""
    if not path.name.endswith((".json", ".json.gz")) or not path.is_file():
        return False
    if _NAME.match(path.name):
        return True
    with suppress(OSError, EOFError, zlib.error), unpacked(path) as stream:
        head = stream.read(HEAD)
        return b'"traceEvents"' in head or (head.lstrip().startswith(b"[") and b'"ph"' in head)
    return False


@contextmanager
def unpacked(path: Path) -> Iterator[Any]:
    """Yield the content of a file, gzipped or not, told apart by content."""
    with open_file(path) as stream:
        packed = stream.read(2) == b"\x1f\x8b"
        stream.seek(0)
        yield gzip.open(stream) if packed else stream


def trace_files(folder: Path) -> list[Path]:
    """Return the trace files directly in a folder, sorted by the time in their names."""

    def order(path: Path) -> tuple[int, int, str]:
        match = _NAME.match(path.name)
        time = (match["time"] if match else None) or ""
        # The unit depends on the version of torch: a number of more digits is later.
        return len(time), int(time or 0), path.name

    return sorted(filter(is_trace, folder.iterdir()), key=order)


def worker(path: Path) -> str:
    """Return the part of the file name before its time: by default host and process, which differ
    for each rank."""
    match = _NAME.match(path.name)
    return match["worker"] if match else path.name


def perhaps_packed(path: Path) -> Path:
    """Return the path of the trace, or of the .gz file that has replaced it."""
    packed = path.with_name(f"{path.name}.gz")
    return packed if packed.exists() and not path.exists() else path


def remove(folder: Path) -> None:
    """Delete all files, complete or not, that an earlier attempt of the trace pass left in a
    folder."""
    for path in [*folder.glob("*.pt.trace.json*"), folder / f"{folder.name}.txt"]:
        path.unlink(missing_ok=True)


# Events.

CHUNK = 1 << 18  # bytes read at once
# characters of an event: a trace with a longer one is refused, so that no other row lacks memory
LARGEST = 64 << 20
BOUNDARY = "\n  },\n  {"  # the text between two events
# characters of the fields before "args", the name included; a longer head is not salvaged
LONGEST_HEAD = 16 << 10
_BETWEEN = re.compile(r"(?<=\n  \}),(?=\n  \{)")
_BEGIN = re.compile(r'"traceEvents": \[(?=\s*\n  \{\n)')
_BEGIN_ANYWHERE = re.compile(r'"traceEvents"\s*:\s*\[|\A\s*\[')
_GAP = re.compile(r"[\s,]*")
_END = re.compile(r"\n  \}(?=\s*\n  ?\])")
_HEAD = re.compile(
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
    """Hold the fields of an event that are used; ts, dur: in microseconds; salvaged: it was no
    valid JSON."""

    ph: str | None = None
    cat: str | None = None
    name: str | None = None
    ts: _Number = None
    dur: _Number = None
    args: Counters | None = None
    salvaged: bool = False


_DECODER = msgspec.json.Decoder(list[Event])
_JSON = json.JSONDecoder(strict=False)  # control characters in names are common
_COUNTERS = [
    re.compile(f'"{field.encode_name}": (-?\\d{{1,18}})\\b')
    for field in msgspec.structs.fields(Counters)
]


class Broken(Exception):
    """The file is not a complete trace; the message says what is wrong and where."""


def read_events(stream: BinaryIO) -> Iterator[Sequence[Event]]:
    """Yield the events of an uncompressed trace in groups.  Raises Broken for any other file, and
    one that is cut."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    text = decoder.decode(stream.read(CHUNK))
    begin = _BEGIN.search(text)
    if begin is None:
        yield from _events_of_any_layout(stream, decoder, text)
        return
    position = begin.end()  # where `text` begins in the file
    text = text[position:]
    while True:
        last = text.rfind(BOUNDARY)
        end = _END.search(text, max(last, 0))
        last = end.start() if end else last
        if last >= 0:
            yield _decoded(text[: last + 4], position)
            position += last + 5
            text = text[last + 5 :]
        if end:
            break
        text += _next_text(stream, decoder, text, position)
    _to_the_end(stream, decoder, text, position)


def _to_the_end(
    stream: BinaryIO, decoder: codecs.IncrementalDecoder, text: str, position: int
) -> None:
    """Read what follows the events.  text: its begin, at `position`.  Raises Broken where the file
    has no end."""
    while data := stream.read(CHUNK):
        text = text[-1:] + decoder.decode(data)
    if not text.rstrip().endswith("}"):
        raise Broken(
            f"it ends too early, after the events that end at character {position:,}: the file was cut short"
        )


def _next_text(
    stream: BinaryIO, decoder: codecs.IncrementalDecoder, text: str, position: int
) -> str:
    """Return the text that comes next.  text: the begin of an event, at `position`.  Raises Broken
    at the end."""
    if len(text) > LARGEST:
        raise Broken(f"an event after character {position:,} has more than {LARGEST:,} characters")
    data = stream.read(max(CHUNK, len(text)))  # a long event is not searched again for each chunk
    if not data:
        raise Broken(
            f"it ends too early, after character {position + len(text):,}: the file was cut short"
        )
    return decoder.decode(data)


def _events_of_any_layout(
    stream: BinaryIO, decoder: codecs.IncrementalDecoder, text: str
) -> Iterator[Sequence[Event]]:
    """Yield the events of a trace that is JSON, or of a bare list of events, in groups: one for each
    piece of text that is read.  text: how it begins.  Raises Broken."""
    begin = _BEGIN_ANYWHERE.search(text)
    if begin is None:
        raise Broken(f"within {len(text):,} characters no list of events begins")
    position = 0  # where `text` begins in the file
    at = begin.end()  # where the next event begins in `text`
    events: list[Event] = []
    while True:
        gap = _GAP.match(text, at)
        at = gap.end() if gap else at
        if text.startswith("]", at):
            break
        try:
            value, at = _JSON.raw_decode(text, at)
        except (RecursionError, ValueError) as error:
            yield events
            events = []
            text = text[at:]
            position += at
            # An object that does not end, or no text, may go on in the next piece of the file.
            may_go_on = not text or text.startswith("{")
            if isinstance(error, RecursionError) or not may_go_on:
                raise Broken(f"an event after character {position:,} is not JSON") from None
            text += _next_text(stream, decoder, text, position)
            at = 0
            continue
        with suppress(msgspec.ValidationError):  # an event of another program may have other types
            events.append(msgspec.convert(value, Event))
    yield events
    is_bare_list = begin.group().lstrip() == "["
    if not is_bare_list:  # the object around the list has an end too
        _to_the_end(stream, decoder, text[at + 1 :], position + at)


def _decoded(block: str, position: int) -> Sequence[Event]:
    """Return the events of a text, with commas between them.  position: of the text in the file."""
    try:
        return _DECODER.decode(f"[{block}]")
    except (msgspec.DecodeError, RecursionError):
        return [event for text in _BETWEEN.split(block) for event in _salvaged(text, position)]


def _salvaged(text: str, position: int) -> Sequence[Event]:
    """Return an event; field by field where it is no valid JSON, without resolving the escapes in
    its name."""
    with suppress(msgspec.DecodeError, RecursionError):
        return _DECODER.decode(f"[{text}]")
    head, _, args = text.partition('\n    "args": {')
    match = _HEAD.match(head) if len(head) < LONGEST_HEAD else None
    if match is None:
        raise Broken(f"an event after character {position:,} is not JSON")
    counters = []
    for pattern in _COUNTERS:
        values = pattern.findall(args)
        # the last is the counter's: 1.13 has the stack before it
        counters.append(int(values[-1]) if values else None)
    dur = float(match["dur"]) if match["dur"] else None
    return [
        Event(
            match["ph"],
            match["cat"],
            match["name"],
            float(match["ts"]),
            dur,
            Counters(*counters),
            True,
        )
    ]


def is_number(value: _Number) -> bool:
    """Return whether the value is a finite number of usual size."""
    return value is not None and -1e18 < value < 1e18


# Traces.

CPU, CUDA = 0, 1  # "Device Type" of the memory events, c10::DeviceType
LONGEST_LABEL = 1000  # characters kept of a name
_STEP = re.compile(r"ProfilerStep#(\d{1,18})$")

Device = tuple[int, int]  # type, id


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


@dataclass
class Trace:
    """Hold one trace file, which is one window of the profiler's schedule; times are microseconds.

    spans: (begin, end, name) of each other span of record_function; memory: by device, (times,
    bytes allocated) in the order of the file; operators: when each began, sorted; salvaged: number
    of events that were not valid JSON."""

    path: Path
    steps: list[Step] = field(default_factory=list)
    spans: list[tuple[float, float, str]] = field(default_factory=list)
    memory: dict[Device, tuple[array[float], array[int]]] = field(default_factory=dict)
    operators: array[float] = field(default_factory=lambda: array("d"))
    on_cuda: bool = False
    salvaged: int = 0

    @property
    def label_us(self) -> dict[str, float]:
        """Return the total duration of the spans by name."""
        totals: dict[str, float] = {}
        for begin, end, name in self.spans:
            totals[name] = totals.get(name, 0.0) + end - begin
        return totals

    def operators_in(self, step: Step) -> int:
        """Return the number of operators that began within a step."""
        return bisect_left(self.operators, step.end) - bisect_left(self.operators, step.begin)

    def fullest(self, kind: int | None = None) -> Device | None:
        """Return the GPU with the highest count, or the CPU if no GPU allocated; None where none
        did, of this kind."""
        devices = [device for device in self.memory if kind in (None, device[0])]
        on_cuda = [device for device in devices if device[0] == CUDA]
        return max(on_cuda or devices, key=lambda device: max(self.memory[device][1]), default=None)

    def add(self, event: Event) -> None:
        """Keep what is used of an event, but for operators."""
        if event.name == "[memory]":
            counters = event.args
            if counters and all(
                map(is_number, (event.ts, counters.total, counters.device_type, counters.device_id))
            ):
                device = int(counters.device_type or 0), int(counters.device_id or 0)
                moments, totals = self.memory.setdefault(device, (array("d"), array("q")))
                moments.append(event.ts or 0.0)
                totals.append(int(counters.total or 0))
        elif event.cat == "user_annotation" and event.ph == "X" and event.name:
            if (
                event.ts is not None
                and event.dur is not None
                and all(map(is_number, (event.ts, event.dur)))
            ):
                step = _STEP.match(event.name)
                if step:
                    self.steps.append(Step(event.ts, float(event.dur), int(step[1])))
                else:
                    self.spans.append((event.ts, event.ts + event.dur, event.name[:LONGEST_LABEL]))
        elif event.cat == "kernel":
            self.on_cuda = True


def read(path: Path) -> Trace:
    """Read one trace (.json or .json.gz), with steps or without.  Raises TraceError."""
    trace = Trace(path)
    try:
        with unpacked(path) as stream:
            for events in read_events(stream):
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
