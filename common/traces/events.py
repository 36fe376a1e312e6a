"""Streams the events of a chrome trace of any JSON layout in bounded memory.

Not done with ijson: it reads no NaN, no control character in a name and no invalid UTF-8, all of which traces hold, and
cannot go on after an event that is not JSON (see kineto.py).
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
LONGEST = 64 << 20  # characters: one event longer than this is taken for a broken file
SINGLY = 100  # events read one by one where the layout is not Kineto's, before it is looked for again
TAIL = 1 << 20  # characters of what follows the events that are looked at for keys
HEADER_KEYS = ("distributedInfo", "deviceProperties")

_DECODER = json.JSONDecoder(strict=False)  # control characters in names are common
_SPACE = re.compile(r"[ \t\r\n]*")
_STRUCTURE = re.compile(r'["{}\[\]]')


class Broken(Exception):
    """The file is not a whole trace.  The message says what and where."""


class Enough(Exception):
    """A collector wants no more events."""


class Collector:
    """What wants the events of a trace."""

    wants_operators = False

    def header(self, key: str, value: Any) -> None:
        """One of HEADER_KEYS."""

    def event(self, event: Event) -> None:
        """Neither of STACKS nor of OPERATORS."""

    def operator(self, ts: Any) -> None:
        """The start of an operator, of any type."""


def read_events(stream: BinaryIO, collector: Collector, fast: bool = True) -> int:
    """Read a trace of any layout: an object with the key "traceEvents", or the bare list of events.  fast: decode many
    events at once where they have Kineto's layout; the collector gets the same.  Returns how many events were not valid
    JSON and were read field by field; raises Broken."""
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
    for events in window.events():
        for event in events:
            if event.cat == OPERATORS:
                if collector.wants_operators:
                    collector.operator(event.ts)
            elif event.cat != STACKS:
                collector.event(event)


def _tail(window: _Window, collector: Collector) -> None:
    """Read what follows the events to the end of the file, so that a cut or corrupt archive is noticed.  The keys there
    may be broken (logged messages are copied there): they are optional."""
    while len(window.text) - window.at < TAIL and window.more():
        pass
    tail = window.text[window.at :]
    last = ""
    while True:
        last = window.text[window.at :].rstrip()[-1:] or last
        window.at = len(window.text)
        if not window.more():
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
    """A piece of text that slides over the file; ``at`` is the place in it that is read next."""

    def __init__(self, stream: BinaryIO, fast: bool):
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.text = ""
        self.at = 0
        self.salvaged = 0
        self._singly = 0 if fast else math.inf  # so many events are read one by one next
        self._before = 0  # characters already dropped
        self._ended = False

    @property
    def place(self) -> str:
        return f"character {self._before + self.at:,}"

    def cut_short(self) -> Broken:
        return Broken(f"it ends too early, after {self.place}: the file was cut short")

    def more(self) -> bool:
        """Drop what was read and append the next chunk; False at the end of the file."""
        if self._ended:
            return False
        data = self._stream.read(max(CHUNK, len(self.text) - self.at))  # a long value is not begun again for each chunk
        self._ended = not data
        self._before += self.at
        self.text = self.text[self.at :] + self._decoder.decode(data, final=self._ended)
        self.at = 0
        return not self._ended

    def peek(self) -> str:
        """The next character that is no white space, "" at the end of the file."""
        while True:
            space = _SPACE.match(self.text, self.at)
            self.at = space.end() if space else self.at
            if self.at < len(self.text):
                return self.text[self.at]
            if not self.more():
                return ""

    def expect(self, wanted: str) -> str:
        """Step over one of the characters in `wanted`; Broken when something else, or nothing, is there."""
        character = self.peek()
        if not character:
            raise self.cut_short()
        if character not in wanted:
            raise Broken(f"{self.place}: expected {' or '.join(wanted)}, found {character!r}")
        self.at += 1
        return character

    def value(self, on_broken: Optional[Callable[[], Any]] = None) -> Any:
        """The next JSON value.  `on_broken` is asked for one when the text is not JSON so far."""
        self.peek()
        while True:
            try:
                found, end = _DECODER.raw_decode(self.text, self.at)
                # A number at the end of the window may go on in the next chunk.
                if end == len(self.text) and not isinstance(found, (dict, list, str)) and self.more():
                    continue
                self.at = end
                return found
            except RecursionError:
                raise Broken(f"{self.place}: nested too deeply") from None
            except ValueError as error:
                reason = str(error).split(":")[0]
            found = on_broken() if on_broken else None
            if found is not None:
                return found
            if len(self.text) - self.at > LONGEST:
                raise Broken(f"{self.place}: not JSON ({reason})")
            if not self.more():
                raise Broken(f"{self.place}: cut short or not JSON ({reason})")

    def skip(self) -> None:
        """Step over a value of any size without keeping it."""
        if self.peek() not in '{["':
            self.value()
            return
        depth = 0
        while True:
            found = _STRUCTURE.search(self.text, self.at)
            if found is None:
                self.at = len(self.text)
                if not self.more():
                    raise self.cut_short()
                continue
            self.at = found.start()
            if found.group() == '"':
                self.value()
            else:
                self.at += 1
                depth += 1 if found.group() in "{[" else -1
            if depth == 0:
                return

    def events(self) -> Iterator[Sequence[Event]]:
        """The events up to the end of their list, several at once or one by one."""
        if self.peek() == "]":
            self.expect("]")
            return
        while True:
            yield self._several() or self._one()
            if self.expect(",]") == "]":
                return

    def _several(self) -> Sequence[Event]:
        """The whole events in the window; none where the next event is to be read alone."""
        self._singly -= 1
        if self._singly >= 0:
            return ()
        if len(self.text) - self.at < CHUNK:
            self.more()
        last = self.text.rfind(BOUNDARY, self.at)
        if last < 0:
            self._singly = SINGLY
            return ()
        end = last + BOUNDARY.index(",")
        found = kineto.decode(self.text[self.at : end])
        if found is None:
            self._singly = self.text.count(BOUNDARY, self.at) - 1
            return ()
        self.at = end
        return found

    def _one(self) -> Sequence[Event]:
        """The next event; none where it is a JSON value of another kind."""
        found = self.value(on_broken=self._salvage)
        if isinstance(found, Event):
            return (found,)
        if not isinstance(found, dict):
            return ()
        args = found.get("args")
        counters = Counters(*map(args.get, COUNTERS)) if isinstance(args, dict) else None
        ph, cat, name, ts, dur = map(found.get, ("ph", "cat", "name", "ts", "dur"))
        return (Event(ph, cat, name, ts, dur, counters),)

    def _salvage(self) -> Optional[Event]:
        """The next event, read field by field, where Kineto's layout shows its end."""
        end = kineto.end(self.text, self.at)
        event = kineto.salvage(self.text[self.at : end]) if end else None
        if end and event:
            self.at = end
            self.salvaged += 1
        return event
