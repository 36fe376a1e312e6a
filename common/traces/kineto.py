"""Events in Kineto's (torch.profiler's) layout: many decoded at once with msgspec, one that is not JSON field by field.

msgspec skips the fields that no reader needs, by the category of the event.  Kineto writes names and stacks without
escaping (1.13: always, later: in places), so an event may not be JSON: https://github.com/pytorch/kineto/pull/1459.
"""

from __future__ import annotations

import re
from typing import Any, Callable, ClassVar, List, NamedTuple, Optional, Sequence, Union

try:
    import msgspec
except ImportError:  # only slower without it
    msgspec = None  # type: ignore[assignment]

BOUNDARY = "\n  },\n  {"  # between two events
STACKS = "python_function"  # the category of most events of a trace with stacks; these are not used
OPERATORS = "cpu_op"  # of these only `ts` is used, if anything
#: Other categories of torch 1.13 to 2.11; events with a category that is not here are decoded twice.
OTHERS = (
    *("user_annotation", "gpu_user_annotation", "cpu_instant_event", "kernel", "gpu_memcpy", "gpu_memset"),
    *("cuda_runtime", "cuda_driver", "cuda_sync", "overhead", "fwdbwd", "ac2g", "Trace"),
)
COUNTERS = ("Total Allocated", "Device Type", "Device Id")  # arguments of a memory event

LONGEST_HEAD = 16 << 10  # characters; the fields before "args", with the name, are shorter
_END = re.compile(r"\n  \}(?=,\n  \{|\n  ?\])")
_HEAD = re.compile(
    r'\{\s*"ph": "(?P<ph>\w)", "cat": "(?P<cat>[\w ]*)",(?: "s": "\w",)? "name": "(?P<name>.*)",\s+"pid": .*?'
    r'\n    "ts": (?P<ts>-?[\d.]+)(?:, "dur": (?P<dur>-?[\d.]+))?',
    re.DOTALL,
)
_COUNTERS = [re.compile(f'"{key}": (-?\\d+)') for key in COUNTERS]


class Counters(NamedTuple):
    """The values of COUNTERS, of any type."""

    total: Any = None
    device_type: Any = None
    device_id: Any = None


class Event(NamedTuple):
    """The fields that are used, of any type.  args: None where the event has no arguments."""

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
    """The events of a text, separated by commas; None where one of them is not JSON or has a field of an odd type.
    They have the attributes of Event; those of STACKS only `cat`, those of OPERATORS only `cat` and `ts`."""
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
    """Where the event that begins at `at` ends, by its layout alone."""
    found = _END.search(text, at)
    return found.end() if found else None


def salvage(text: str) -> Optional[Event]:
    """The fields of one event that is not valid JSON; None when it has not even Kineto's layout.  The name is as
    written, escapes included."""
    head, _, args = text.partition('\n    "args": {')
    found = _HEAD.match(head) if len(head) < LONGEST_HEAD else None
    if found is None or "\n  ]" in text:
        return None
    try:
        ts, dur = (None if found[key] is None else float(found[key]) for key in ("ts", "dur"))
    except ValueError:
        return None
    # The counters come after the stack in 1.13: the last match is theirs.
    last = [(pattern.findall(args) or [""])[-1] for pattern in _COUNTERS]
    counters = Counters(*(int(value) if 0 < len(value) < 20 else None for value in last))
    return Event(found["ph"], found["cat"], found["name"], ts, dur, counters)
