"""Stream the events of a chrome trace of any JSON layout in bounded memory.

ijson is no alternative: traces hold NaN, control characters in names and invalid UTF-8, all of which it rejects.  Nor
can it continue after an event that is not valid JSON (see kineto.py).
"""

from __future__ import annotations

import codecs
import json
import math
import re
from typing import Any, BinaryIO, Callable, Iterator, Optional, Sequence

from common.traces import kineto
from common.traces.kineto import BOUNDARY, COUNTERS, OPERATORS, STACKS, Counters, Event

CHUNK = 64 << 10  # bytes read at once; glibc maps blocks from 128 kB on anew each time, at the cost of page faults
LONGEST = 64 << 20  # characters: a file with a longer event counts as broken
SINGLY = 100  # events read one by one where the layout is not Kineto's, before batch decoding is tried again
TAIL = 1 << 20  # characters after the events that are searched for keys
HEADER_KEYS = ("distributedInfo", "deviceProperties")

_DECODER = json.JSONDecoder(strict=False)  # control characters in names are common
_SPACE = re.compile(r"[ \t\r\n]*")
_STRUCTURE = re.compile(r'["{}\[\]]')


class Broken(Exception):
    """The file is not a complete trace; the message says what is wrong and where."""


class Enough(Exception):
    """Raised by a collector that needs no further events."""


class Collector:
    """Receives the events of a trace from `read_events`; subclasses override the methods for what they need."""

    wants_operators = False

    def header(self, key: str, value: Any) -> None:
        """Receive the value of one of HEADER_KEYS."""

    def event(self, event: Event) -> None:
        """Receive an event of any category but STACKS and OPERATORS."""

    def operator(self, ts: Any) -> None:
        """Receive the start time of an operator in microseconds; a garbled event may give a value of any type."""


def read_events(stream: BinaryIO, collector: Collector, fast: bool = True) -> int:
    """Hand the events of a trace to `collector`; return how many were not valid JSON and were read field by field.

    The trace is an object with the key "traceEvents", or the bare list of events.  Raises Broken for any other file.

    Args:
        stream: the uncompressed trace.
        collector: receives the events; it may raise Enough.
        fast: decode many events at once if they have Kineto's layout; the collector receives the same events.
    """
    window = _Window(stream, fast and kineto.msgspec is not None)
    window.peek()
    if window.text.startswith("\ufeff", window.at):
        window.at += 1
    if not window.peek():
        raise Broken("it is empty")
    if window.expect("{[") == "[":
        _hand_over(window, collector)
        return window.salvaged
    while window.peek() != "}":
        if window.peek() != '"':
            window.expect('"')
        key = window.value()
        window.expect(":")
        if key == "traceEvents":
            window.expect("[")
            _hand_over(window, collector)
            _tail(window, collector)
            return window.salvaged
        if key in HEADER_KEYS:
            collector.header(key, window.value())
        else:
            window.skip()
        if window.peek() != "}":
            window.expect(",}")
    raise Broken('it has no "traceEvents": not a chrome trace')


def _hand_over(window: _Window, collector: Collector) -> None:
    """Hand all events of the window's list to the collector."""
    for events in window.events():
        for event in events:
            if event.cat == OPERATORS:
                if collector.wants_operators:
                    collector.operator(event.ts)
            elif event.cat != STACKS:
                collector.event(event)


def _tail(window: _Window, collector: Collector) -> None:
    """Read from the end of the events to the end of the file, and hand over the header keys found there.

    Raises Broken if the file is cut short.  Keys that cannot be parsed are skipped: Kineto copies logged messages
    there without escaping them.
    """
    while len(window.text) - window.at < TAIL and window.read_chunk():
        pass
    tail = window.text[window.at :]
    last = ""
    while True:
        last = window.text[window.at :].rstrip()[-1:] or last
        window.at = len(window.text)
        if not window.read_chunk():
            break
    if last != "}":
        raise window.cut_short()
    try:
        keys = _DECODER.decode("{" + tail.strip().lstrip(","))
    except (ValueError, RecursionError):
        return
    for key in HEADER_KEYS:
        if key in keys:
            collector.header(key, keys[key])


class _Window:
    """A part of the file's text that slides towards its end; ``text[at]`` is the next character to read."""

    def __init__(self, stream: BinaryIO, fast: bool):
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.text = ""
        self.at = 0
        self.salvaged = 0
        self._singly = 0 if fast else math.inf  # number of events to read one by one before the next batch
        self._before = 0  # characters already dropped
        self._ended = False

    @property
    def position(self) -> str:
        """Return the position of the next character in the file, for an error message."""
        return f"character {self._before + self.at:,}"

    def cut_short(self) -> Broken:
        """Return the error for a file that ends too early."""
        return Broken(f"it ends too early, after {self.position}: the file was cut short")

    def read_chunk(self) -> bool:
        """Drop the text that was read and append the next chunk; return False at the end of the file."""
        if self._ended:
            return False
        data = self._stream.read(max(CHUNK, len(self.text) - self.at))  # a long value is not begun again for each chunk
        self._ended = not data
        self._before += self.at
        self.text = self.text[self.at :] + self._decoder.decode(data, final=self._ended)
        self.at = 0
        return not self._ended

    def peek(self) -> str:
        """Skip white space and return the next character without stepping over it; "" at the end of the file."""
        while True:
            space = _SPACE.match(self.text, self.at)
            self.at = space.end() if space else self.at
            if self.at < len(self.text):
                return self.text[self.at]
            if not self.read_chunk():
                return ""

    def expect(self, wanted: str) -> str:
        """Step over the next character and return it; raise Broken if it is not one of those in `wanted`."""
        character = self.peek()
        if not character:
            raise self.cut_short()
        if character not in wanted:
            raise Broken(f"{self.position}: expected {' or '.join(wanted)}, found {character!r}")
        self.at += 1
        return character

    def value(self, on_broken: Optional[Callable[[], Any]] = None) -> Any:
        """Return the next JSON value and step over it.

        If the text read so far is not JSON, `on_broken` may return a value in its place, or None to read further.
        Raises Broken if there is no value.
        """
        self.peek()
        while True:
            try:
                value, end = _DECODER.raw_decode(self.text, self.at)
                # A number at the end of the window may continue in the next chunk.
                if end == len(self.text) and not isinstance(value, (dict, list, str)) and self.read_chunk():
                    continue
                self.at = end
                return value
            except RecursionError:
                raise Broken(f"{self.position}: nested too deeply") from None
            except ValueError as error:
                reason = str(error).split(":")[0]
            substitute = on_broken() if on_broken else None
            if substitute is not None:
                return substitute
            if len(self.text) - self.at > LONGEST:
                raise Broken(f"{self.position}: not JSON ({reason})")
            if not self.read_chunk():
                raise Broken(f"{self.position}: cut short or not JSON ({reason})")

    def skip(self) -> None:
        """Step over a value of any size without keeping it; raise Broken if it does not end."""
        if self.peek() not in '{["':
            self.value()
            return
        depth = 0
        while True:
            match = _STRUCTURE.search(self.text, self.at)
            if match is None:
                self.at = len(self.text)
                if not self.read_chunk():
                    raise self.cut_short()
                continue
            self.at = match.start()
            if match.group() == '"':
                self.value()
            else:
                self.at += 1
                depth += 1 if match.group() in "{[" else -1
            if depth == 0:
                return

    def events(self) -> Iterator[Sequence[Event]]:
        """Yield the events up to the end of their list, in groups of one or more; raise Broken if it does not end."""
        if self.peek() == "]":
            self.expect("]")
            return
        while True:
            yield self._next_events() or self._next_event()
            if self.expect(",]") == "]":
                return

    def _next_events(self) -> Sequence[Event]:
        """Return all complete events of the window; empty if the next event has to be read alone."""
        self._singly -= 1
        if self._singly >= 0:
            return ()
        if len(self.text) - self.at < CHUNK:
            self.read_chunk()
        last = self.text.rfind(BOUNDARY, self.at)
        if last < 0:
            self._singly = SINGLY
            return ()
        end = last + BOUNDARY.index(",")
        events = kineto.decode(self.text[self.at : end])
        if events is None:
            self._singly = self.text.count(BOUNDARY, self.at) - 1
            return ()
        self.at = end
        return events

    def _next_event(self) -> Sequence[Event]:
        """Return a tuple of the next event; empty if the next item of the list is no JSON object."""
        value = self.value(on_broken=self._salvage)
        if isinstance(value, Event):
            return (value,)
        if not isinstance(value, dict):
            return ()
        args = value.get("args")
        counters = Counters(*map(args.get, COUNTERS)) if isinstance(args, dict) else None
        ph, cat, name, ts, dur = map(value.get, ("ph", "cat", "name", "ts", "dur"))
        return (Event(ph, cat, name, ts, dur, counters),)

    def _salvage(self) -> Optional[Event]:
        """Read the next event field by field; return None if Kineto's layout does not show where it ends."""
        end = kineto.end(self.text, self.at)
        event = kineto.salvage(self.text[self.at : end]) if end else None
        if end and event:
            self.at = end
            self.salvaged += 1
        return event
