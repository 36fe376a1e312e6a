"""The fast way through a trace that looks as Kineto (torch.profiler) writes it, for files of gigabytes.

Pieces are cut at the boundary between two events and decoded with msgspec, which skips what nobody asked for, by the
category of the event.  Anything this is not sure of is left to trace_events.py, so both always give the same answer.
"""

from __future__ import annotations

import io
import json
import re
from typing import BinaryIO, ClassVar, List, Optional, Union

try:
    import msgspec
except ImportError:  # only slower without it
    msgspec = None

from common.results.trace_events import (
    CHUNK,
    DECODER,
    HEADER_KEYS,
    LONGEST,
    OPERATORS,
    STACKS,
    Broken,
    OnEvent,
    OnHeader,
    OnOperator,
    Window,
    deliver,
    rest_of_events,
    salvage,
)

PIECE = 64 << 10  # bytes decoded at once: glibc maps blocks from 128 kB on anew each time, at the cost of page faults
_BOUNDARY = b"\n  },\n  {"
#: Categories of torch 1.13 to 2.11 whose events are read whole; a piece with one that is not here is decoded twice.
OTHERS = (
    *("user_annotation", "gpu_user_annotation", "cpu_instant_event", "kernel", "gpu_memcpy", "gpu_memset"),
    *("cuda_runtime", "cuda_driver", "cuda_sync", "overhead", "fwdbwd", "ac2g", "Trace"),
)
_EVENTS_START = re.compile(rb'"traceEvents":\s*\[\s*\n  \{')

if msgspec is not None:
    _Number = Union[int, float, None]

    class _Args(msgspec.Struct, gc=False):
        total: _Number = msgspec.field(default=None, name="Total Allocated")
        device_type: _Number = msgspec.field(default=None, name="Device Type")
        device_id: _Number = msgspec.field(default=None, name="Device Id")

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
    _decode_known = msgspec.json.Decoder(List[Union[(_Stack, _Operator, *_others)]]).decode
    _decode_any = msgspec.json.Decoder(List[_Any]).decode
    _DECODE_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def fast_events(
    stream: BinaryIO, on_event: OnEvent, on_header: OnHeader, on_operator: OnOperator = None
) -> Optional[int]:
    """Read a trace as Kineto lays it out.  Returns how many events were salvaged, or None when it is not sure of the
    file: what was delivered so far is then to be thrown away and the file read again with ``any_events``."""
    if msgspec is None:
        return None
    head = stream.read(CHUNK)
    start = _EVENTS_START.search(head)
    if start is None:
        return None
    try:  # the keys before it tell that it is a key of the top level
        keys = json.loads(head[: start.start()] + b'"traceEvents":0}', strict=False)
    except (ValueError, RecursionError):
        return None
    for key in HEADER_KEYS:
        if key in keys:
            on_header(key, keys[key])
    salvaged = 0
    pending = head[start.end() - 1 :]
    while True:
        cut = pending.rfind(_BOUNDARY)
        if cut >= 0:
            found = _decode_chunk(pending[: cut + 4], on_event, on_operator)
            if found is None:
                return None
            salvaged += found
            pending = pending[cut + len(_BOUNDARY) - 1 :]
        elif len(pending) > LONGEST:
            return None
        chunk = stream.read(max(min(PIECE, CHUNK), len(pending)))  # a long event is not copied again for each piece
        if not chunk:
            break
        pending += chunk
    try:  # the last event and the tail
        window = Window(io.BytesIO(pending))
        return salvaged + rest_of_events(window, on_event, on_header, on_operator, closing="}")
    except Broken:
        return None


def _decode_chunk(data: bytes, on_event: OnEvent, on_operator: OnOperator) -> Optional[int]:
    """Deliver the events of a chunk, as ``deliver`` does; one by one, as ``any_events`` reads them, when one of them is
    no JSON."""
    data_as_list = b"[" + data + b"]"
    try:
        try:
            events = _decode_known(data_as_list)
        except msgspec.ValidationError:  # another category, or none
            events = _decode_any(data_as_list)
    except _DECODE_ERRORS:
        return _decode_singly(data, on_event, on_operator)
    for event in events:
        cat = event.cat
        if cat == STACKS:
            continue
        if cat == OPERATORS:
            if on_operator is not None:
                on_operator(event.ts)
            continue
        args = event.args
        counters = (args.total, args.device_type, args.device_id) if args is not None else None
        on_event(event.ph, cat, event.name, event.ts, event.dur, counters)
    return 0


def _decode_singly(data: bytes, on_event: OnEvent, on_operator: OnOperator) -> Optional[int]:
    salvaged = 0
    text = data.decode("utf-8", errors="replace")
    for piece in text[1:-4].split(_BOUNDARY.decode()):  # without the first { and the last line, "  }"
        piece = "{" + piece + "\n  }"
        try:
            event, end = DECODER.raw_decode(piece)
        except RecursionError:
            return None
        except ValueError:
            event, end = salvage(piece), len(piece)
        if event is None or end < len(piece):
            return None
        if isinstance(event, dict):
            salvaged += deliver(event, on_event, on_operator)
    return salvaged
