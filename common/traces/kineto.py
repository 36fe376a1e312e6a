"""Decode events in the layout of Kineto, which writes the traces of torch.profiler.

msgspec decodes many events at once and skips the fields that no reader needs, by the category of the event.  Kineto
writes names and stacks without escaping (torch 1.13 always, later ones in places), so an event may be invalid JSON; it
is read field by field: https://github.com/pytorch/kineto/pull/1459.
"""

from __future__ import annotations

import re
from typing import Any, Callable, ClassVar, List, NamedTuple, Optional, Sequence, Union

try:
    import msgspec
except ImportError:  # only slower without it
    msgspec = None  # type: ignore[assignment]

BOUNDARY = "\n  },\n  {"  # the text between two events
STACKS = "python_function"  # the category of most events of a trace with stacks; no field of them is used
OPERATORS = "cpu_op"  # the category of operators; only their `ts` is used
#: Other categories of torch 1.13 to 2.11; events with a category that is not here are decoded twice.
OTHERS = (
    *("user_annotation", "gpu_user_annotation", "cpu_instant_event", "kernel", "gpu_memcpy", "gpu_memset"),
    *("cuda_runtime", "cuda_driver", "cuda_sync", "overhead", "fwdbwd", "ac2g", "Trace"),
)
COUNTERS = ("Total Allocated", "Device Type", "Device Id")  # arguments of a memory event

LONGEST_HEAD = 16 << 10  # characters of the fields before "args", the name included; a longer head is not salvaged
_END = re.compile(r"\n  \}(?=,\n  \{|\n  ?\])")
_HEAD = re.compile(
    r'\{\s*"ph": "(?P<ph>\w)", "cat": "(?P<cat>[\w ]*)",(?: "s": "\w",)? "name": "(?P<name>.*)",\s+"pid": .*?'
    r'\n    "ts": (?P<ts>-?[\d.]+)(?:, "dur": (?P<dur>-?[\d.]+))?',
    re.DOTALL,
)
_COUNTERS = [re.compile(f'"{key}": (-?\\d+)') for key in COUNTERS]


class Counters(NamedTuple):
    """The values of COUNTERS in a memory event; those of a garbled event may be of any type."""

    total: Any = None
    device_type: Any = None
    device_id: Any = None


class Event(NamedTuple):
    """The fields of an event that are used; those of a garbled event may be of any type.

    ts and dur are in microseconds; args is None if the event has no arguments.
    """

    ph: Any
    cat: Any
    name: Any
    ts: Any
    dur: Any
    args: Optional[Counters]


if msgspec is not None:
    _Number = Union[int, float, None]

    class _Args(msgspec.Struct, gc=False):
        total: _Number = msgspec.field(default=None, name=COUNTERS[0])
        device_type: _Number = msgspec.field(default=None, name=COUNTERS[1])
        device_id: _Number = msgspec.field(default=None, name=COUNTERS[2])

    class _Stack(msgspec.Struct, tag_field="cat", tag=STACKS, gc=False):
        cat: ClassVar[str] = STACKS

    class _Operator(msgspec.Struct, tag_field="cat", tag=OPERATORS, gc=False):
        cat: ClassVar[str] = OPERATORS
        ts: _Number = None

    class _Other(msgspec.Struct, gc=False):
        ph: Optional[str] = None
        name: Optional[str] = None
        ts: _Number = None
        dur: _Number = None
        args: Optional[_Args] = None

    class _Any(_Other, gc=False):
        cat: Optional[str] = None

    _others = [
        msgspec.defstruct("_Of", [], bases=(_Other,), namespace={"cat": cat}, tag_field="cat", tag=cat, gc=False)
        for cat in OTHERS
    ]
    _kinds: Any = (_Stack, _Operator, *_others)
    _decode_known: Callable[[str], Any] = msgspec.json.Decoder(List[Union[_kinds]]).decode
    _decode_any: Callable[[str], Any] = msgspec.json.Decoder(List[_Any]).decode


def decode(text: str) -> Optional[Sequence[Event]]:
    """Decode events separated by commas; return None if one is not JSON or has a field of an unexpected type.

    The objects returned have the attributes of Event, except that those of category STACKS have only `cat` and those
    of category OPERATORS only `cat` and `ts`.
    """
    text = f"[{text}]"
    events: Sequence[Event]
    try:
        try:
            events = _decode_known(text)
        except msgspec.ValidationError:  # another category, or none
            events = _decode_any(text)
        return events
    except (msgspec.DecodeError, RecursionError):
        return None


def end(text: str, at: int) -> Optional[int]:
    """Return the index in `text` after the event that begins at `at`, by Kineto's layout; None if it does not end."""
    match = _END.search(text, at)
    return match.end() if match else None


def salvage(text: str) -> Optional[Event]:
    """Read one event that is not valid JSON field by field; return None if it does not have Kineto's layout either.

    Escapes in the name are not resolved.
    """
    head, _, args = text.partition('\n    "args": {')
    match = _HEAD.match(head) if len(head) < LONGEST_HEAD else None
    if match is None or "\n  ]" in text:
        return None
    try:
        ts, dur = (None if match[key] is None else float(match[key]) for key in ("ts", "dur"))
    except ValueError:
        return None
    # The counters come after the stack in 1.13: the last match is theirs.
    last = [(pattern.findall(args) or [""])[-1] for pattern in _COUNTERS]
    counters = Counters(*(int(value) if 0 < len(value) < 20 else None for value in last))
    return Event(match["ph"], match["cat"], match["name"], ts, dur, counters)
