"""A trace as a viewer shows it whole: labelled spans on a track of their own.

Where stacks are recorded, the call that opens a label is a span too, which begins before the label and ends within it.
Perfetto calls that a loss of data, and drops the label: of all spans the one that is looked for.
"""

from __future__ import annotations

import gzip
import re
from typing import Any, BinaryIO, Iterator, Set, Tuple

#: Added to the number of a thread: its labels' track.
OF_LABELS = 10**9
TRACK = "steps and stages"
#: A labelled span as Kineto writes it: a line, after one that opens the event.
_LABEL = re.compile(rb'(\s*"ph": "X", "cat": "user_annotation", .*"pid": (\d+), "tid": )(\d{1,9})(,\s*)', re.DOTALL)
#: Bytes that are looked at together: a trace of another program may be a single line.
_MOST = 2**20


def lines(stream: Any) -> Iterator[bytes]:
    """Yield the lines of a trace as JSON, its labels on tracks of their own.  What is not as Kineto writes it is handed
    on as it is."""
    named: Set[Tuple[bytes, bytes]] = set()
    for line in iter(lambda: stream.readline(_MOST), b""):
        match = _LABEL.fullmatch(line)
        if match is None:
            yield line
            continue
        begin, process, thread, end = match.groups()
        track = b"%d" % (OF_LABELS + int(thread))
        if (process, thread) not in named:
            named.add((process, thread))
            yield _named(process, track)
        yield begin + track + end


def _named(process: bytes, track: bytes) -> bytes:
    """Return an event that names a track, in the place of one that was just opened, and open that again."""
    where = b'"pid": %s, "tid": %s' % (process, track)
    name = b'    "name": "thread_name", "ph": "M", "ts": 0, %s, "args": {"name": "%s"}\n  },\n  {\n'
    return name % (where, TRACK.encode())


def copy(source: BinaryIO, target: Any) -> None:
    """Write a trace to `target`, its labels on tracks of their own; packed where it is packed.  Raises what gzip does
    for a damaged one, and OSError."""
    packed = source.read(2) == b"\x1f\x8b"
    source.seek(0)
    if not packed:
        target.writelines(lines(source))
        return
    with gzip.open(source) as plain, gzip.GzipFile(fileobj=target, mode="wb", compresslevel=1) as packing:
        packing.writelines(lines(plain))
