"""Streams the events of a chrome trace of any JSON layout in bounded memory.  trace_kineto.py is the fast way.

Kineto writes names and stacks without escaping (1.13: always, later: in places), so an event may be no JSON at all:
https://github.com/pytorch/kineto/pull/1459.  Such an event is read field by field (``salvage``) where Kineto's layout
says where it ends.  The keys after the events may be broken too (logged messages are copied there); they are optional
here.
"""

from __future__ import annotations

import codecs
import json
import re
from typing import Any, BinaryIO, Callable, Dict, Optional, Tuple

CHUNK = 4 << 20  # bytes read at once; several chunks of decoded events stay well under 150 MB
LONGEST = 64 << 20  # characters: one event longer than this is taken for a broken file
LONGEST_HEAD = 16 << 10  # characters: the name of one event is shorter
TAIL = 1 << 20  # characters of what follows the events that are looked at for keys

DECODER = json.JSONDecoder(strict=False)  # control characters in names are common
_EVENT_END = re.compile(r"\n  \}(?=,\n  \{|\n  ?\])")
_SPACE = re.compile(r"[ \t\r\n]*")
_STRUCTURE = re.compile(r'["{}\[\]]')
_SALVAGED = re.compile(
    r'\{\s*"ph": "(?P<ph>\w)", "cat": "(?P<cat>[\w ]*)",(?: "s": "\w",)? "name": "(?P<name>.*)",\s+"pid": .*?'
    r'\n    "ts": (?P<ts>-?[\d.]+)(?:, "dur": (?P<dur>-?[\d.]+))?',
    re.DOTALL,
)
_SALVAGED_ARGS = {key: re.compile(f'"{key}": (-?\\d+)') for key in ("Total Allocated", "Device Type", "Device Id")}

Event = Dict[str, Any]
Counters = Optional[Tuple[Any, Any, Any]]  # Total Allocated, Device Type, Device Id
OnEvent = Callable[[Any, Any, Any, Any, Any, Counters], None]  # ph, cat, name, ts, dur, counters: of any type
OnHeader = Callable[[str, Any], None]
OnOperator = Optional[Callable[[Any], None]]  # ts; None: nobody asks
HEADER_KEYS = ("distributedInfo", "deviceProperties")
STACKS = "python_function"  # the category of most events of a trace with stacks: nobody asks for these
OPERATORS = "cpu_op"  # of these only `ts` is asked for, if anything
SALVAGED = "read field by field"  # a key no event has


class Broken(Exception):
    """The file is not a whole trace.  The message says what and where."""


def salvage(text: str) -> Optional[Event]:
    """The fields of one event of Kineto's layout that is no valid JSON; None when it is not even that layout.

    The name is as written, escapes included.  Of the arguments only the memory counters are kept.
    """
    head, _, args = text.partition('\n    "args": {')
    found = _SALVAGED.match(head) if len(head) < LONGEST_HEAD else None
    if found is None or "\n  ]" in text:
        return None
    event: Event = {**found.groupdict(), SALVAGED: True}
    for key in ("ts", "dur"):
        try:
            event[key] = float(event[key]) if event[key] is not None else None
        except ValueError:
            return None
    # The counters stand after the stack in 1.13: the last match is theirs.
    counters = {key: pattern.findall(args) for key, pattern in _SALVAGED_ARGS.items()}
    event["args"] = {key: int(values[-1]) for key, values in counters.items() if values and len(values[-1]) < 20}
    return event


def deliver(event: Event, on_event: OnEvent, on_operator: OnOperator = None) -> bool:
    """Hand over what matters of an event, if it does; True when it was salvaged."""
    cat = event.get("cat")
    if cat == OPERATORS:
        if on_operator is not None:
            on_operator(event.get("ts"))
    elif cat != STACKS:
        args = event.get("args")
        counters = None
        if isinstance(args, dict):
            counters = (args.get("Total Allocated"), args.get("Device Type"), args.get("Device Id"))
        on_event(event.get("ph"), cat, event.get("name"), event.get("ts"), event.get("dur"), counters)
    return SALVAGED in event


class Window:
    """A piece of text that slides over the file; ``at`` is the place in it that is read next."""

    def __init__(self, stream: BinaryIO):
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.text = ""
        self.at = 0
        self._before = 0  # characters already dropped
        self._ended = False

    @property
    def place(self) -> str:
        return f"character {self._before + self.at:,}"

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
            self.at = _SPACE.match(self.text, self.at).end()
            if self.at < len(self.text):
                return self.text[self.at]
            if not self.more():
                return ""

    def expect(self, wanted: str) -> str:
        """Step over one of the characters in `wanted`; Broken when something else, or nothing, is there."""
        character = self.peek()
        if not character:
            raise Broken(f"it ends too early, after {self.place}: the file was cut short")
        if character not in wanted:
            raise Broken(f"{self.place}: expected {' or '.join(wanted)}, found {character!r}")
        self.at += 1
        return character

    def value(self, on_broken: Optional[Callable[[], Optional[Any]]] = None) -> Any:
        """The next JSON value.  `on_broken` is asked for one when the text is not JSON so far."""
        self.peek()
        while True:
            try:
                found, end = DECODER.raw_decode(self.text, self.at)
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
                    raise Broken(f"it ends too early, after {self.place}: the file was cut short")
                continue
            self.at = found.start()
            if found.group() == '"':
                self.value()
            else:
                self.at += 1
                depth += 1 if found.group() in "{[" else -1
            if depth == 0:
                return

    def event(self) -> Any:
        """The next event; one that is not JSON is salvaged when Kineto's layout shows where it ends."""

        def broken() -> Optional[Event]:
            end = _EVENT_END.search(self.text, self.at)
            event = salvage(self.text[self.at : end.end()]) if end else None
            if event is not None:
                self.at = end.end()
            return event

        return self.value(broken)


def any_events(stream: BinaryIO, on_event: OnEvent, on_header: OnHeader, on_operator: OnOperator = None) -> int:
    """Read a trace of any layout: an object with the key "traceEvents", or the bare list of events.

    on_header gets the small keys beside the events, on_operator the starts of operators, which on_event does not get.
    Returns how many events were salvaged; raises Broken.
    """
    window = Window(stream)
    window.peek()
    if window.text.startswith("\ufeff", window.at):
        window.at += 1
    if not window.peek():
        raise Broken("it is empty")
    if window.expect("{[") == "[":
        return rest_of_events(window, on_event, on_header, on_operator, closing="]")
    while window.peek() != "}":
        if window.peek() != '"':
            window.expect('"')
        key = window.value()
        window.expect(":")
        if key == "traceEvents":
            window.expect("[")
            return rest_of_events(window, on_event, on_header, on_operator, closing="}")
        if key in HEADER_KEYS:
            on_header(key, window.value())
        else:
            window.skip()
        if window.peek() != "}":
            window.expect(",}")
    raise Broken('it has no "traceEvents": not a chrome trace')


def rest_of_events(
    window: Window, on_event: OnEvent, on_header: OnHeader, on_operator: OnOperator, closing: str
) -> int:
    """The events up to the end of their list, then the tail of the file, which must end with `closing`."""
    salvaged = 0
    if window.peek() == "]":
        window.expect("]")
    else:
        while True:
            event = window.event()
            if isinstance(event, dict):
                salvaged += deliver(event, on_event, on_operator)
            if window.expect(",]") == "]":
                break
    if closing == "]":
        return salvaged
    while len(window.text) - window.at < TAIL and window.more():
        pass
    tail = window.text[window.at :]
    last = ""
    while True:  # to the end, so that a cut or corrupt archive is noticed
        last = window.text[window.at :].rstrip()[-1:] or last
        window.at = len(window.text)
        if not window.more():
            break
    if last != closing:
        raise Broken(f"it ends too early, after {window.place}: the file was cut short")
    try:
        keys = DECODER.decode("{" + tail.strip().lstrip(","))
    except (ValueError, RecursionError):
        return salvaged
    for key in HEADER_KEYS:
        if key in keys:
            on_header(key, keys[key])
    return salvaged
