"""Decode the events of a chrome trace as torch.profiler's Kineto writes it, piece by piece, in bounded memory.

Kineto writes names and stacks without escaping (torch 1.13 always, later ones in places), so an event may be invalid
JSON; it is read field by field: https://github.com/pytorch/kineto/pull/1459.  A trace that another program has laid out
anew is read as a whole.
"""

from __future__ import annotations

import codecs
import json
import re
from contextlib import suppress
from typing import BinaryIO, Iterator, List, Optional, Sequence, Union

import msgspec

CHUNK = 1 << 18  # bytes read at once
LARGEST = 1 << 30  # bytes of a trace that is not laid out as Kineto does, and of one event
BOUNDARY = "\n  },\n  {"  # the text between two events
LONGEST_HEAD = 16 << 10  # characters of the fields before "args", the name included; a longer head is not salvaged
_BETWEEN = re.compile(r"(?<=\n  \}),(?=\n  \{)")
_BEGIN = re.compile(r'"traceEvents": \[(?=\s*\n  \{\n)')
_END = re.compile(r"\n  \}(?=\s*\n  ?\])")
_HEAD = re.compile(
    r'\s*\{\s*"ph": "(?P<ph>\w)", "cat": "(?P<cat>[\w ]*)",(?: "s": "\w",)? "name": "(?P<name>.*)",\s+"pid": .*?'
    r'\n    "ts": (?P<ts>-?\d{1,18}(?:\.\d+)?)(?:, "dur": (?P<dur>-?\d{1,18}(?:\.\d+)?))?',
    re.DOTALL,
)
_Number = Union[int, float, None]


class Counters(msgspec.Struct, gc=False):
    """Hold the arguments of a memory event."""

    total: _Number = msgspec.field(default=None, name="Total Allocated")
    device_type: _Number = msgspec.field(default=None, name="Device Type")
    device_id: _Number = msgspec.field(default=None, name="Device Id")


class Event(msgspec.Struct, gc=False):
    """Hold the fields of an event that are used.

    Attributes:
        ts, dur: in microseconds.
        salvaged: it was no valid JSON.
    """

    ph: Optional[str] = None
    cat: Optional[str] = None
    name: Optional[str] = None
    ts: _Number = None
    dur: _Number = None
    args: Optional[Counters] = None
    salvaged: bool = False


_DECODER = msgspec.json.Decoder(List[Event])
_COUNTERS = [re.compile(f'"{field.encode_name}": (-?\\d{{1,18}})\\b') for field in msgspec.structs.fields(Counters)]


class Broken(Exception):
    """The file is not a complete trace; the message says what is wrong and where."""


def read_events(stream: BinaryIO) -> Iterator[Sequence[Event]]:
    """Yield the events of an uncompressed trace in groups.  Raises Broken for any other file, and one that is cut."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    text = decoder.decode(stream.read(CHUNK))
    begin = _BEGIN.search(text)
    if begin is None:
        data = stream.read(LARGEST)
        if len(data) == LARGEST:
            raise Broken("it is too large for a trace of another layout than Kineto's")
        yield _all_of(text + decoder.decode(data, final=True))
        return
    text, position = text[begin.end() :], begin.end()
    while True:
        last = text.rfind(BOUNDARY)
        end = _END.search(text, max(last, 0))
        last = end.start() if end else last
        if last >= 0:
            yield _decoded(text[: last + 4], position)
            position, text = position + last + 5, text[last + 5 :]
        if end:
            break
        data = stream.read(max(CHUNK, len(text)))  # a long event is not searched again for each chunk
        if not data or len(text) > LARGEST:
            raise Broken(f"it ends too early, after character {position + len(text):,}: the file was cut short")
        text += decoder.decode(data)
    while data := stream.read(CHUNK):
        text = text[-1:] + decoder.decode(data)
    if not text.rstrip().endswith("}"):
        raise Broken(f"it ends too early, after the events that end at character {position:,}: the file was cut short")


def _decoded(block: str, position: int) -> Sequence[Event]:
    """Return the events of a text, with commas between them.  position: of the text in the file."""
    try:
        return _DECODER.decode(f"[{block}]")
    except (msgspec.DecodeError, RecursionError):
        return [event for text in _BETWEEN.split(block) for event in _salvaged(text, position)]


def _salvaged(text: str, position: int) -> Sequence[Event]:
    """Return an event; field by field where it is no valid JSON, without resolving the escapes in its name."""
    with suppress(msgspec.DecodeError, RecursionError):
        return _DECODER.decode(f"[{text}]")
    head, _, args = text.partition('\n    "args": {')
    match = _HEAD.match(head) if len(head) < LONGEST_HEAD else None
    if match is None:
        raise Broken(f"an event after character {position:,} is not JSON")
    counters = []
    for pattern in _COUNTERS:
        values = pattern.findall(args)
        counters.append(int(values[-1]) if values else None)  # the last is the counter's: 1.13 has the stack before it
    dur = float(match["dur"]) if match["dur"] else None
    return [Event(match["ph"], match["cat"], match["name"], float(match["ts"]), dur, Counters(*counters), True)]


def _all_of(text: str) -> Sequence[Event]:
    """Return the events of a trace of any layout; those with fields of odd types are left out."""
    if not text.strip():
        raise Broken("it is empty")
    try:
        document = json.loads(text.lstrip("\ufeff"), strict=False)  # control characters in names are common
    except RecursionError:
        raise Broken("nested too deeply") from None
    except ValueError as error:
        raise Broken(f"cut short or not JSON: {error}") from None
    items = document.get("traceEvents") if isinstance(document, dict) else document
    if not isinstance(items, list):
        raise Broken('it has no list of "traceEvents": not a chrome trace')
    events = []
    for item in items:
        with suppress(msgspec.ValidationError):
            events.append(msgspec.convert(item, Event))
    return events


def is_number(value: _Number) -> bool:
    """Return whether the value is a finite number of usual size."""
    return value is not None and -1e18 < value < 1e18
