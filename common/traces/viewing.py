"""Rewrite a trace so that Perfetto shows all of it: labelled spans move to a track of their own.

In a trace with stacks, the call that opens a label is a span too, which begins before the label and ends within it.
Perfetto takes that overlap for a loss of data and drops the label, the very span that a user looks for.
"""

from __future__ import annotations

import gzip
import re
from typing import Any, BinaryIO, Iterator, Set, Tuple

#: Added to the number of a thread to get the number of the track of its labels.
OF_LABELS = 10**9
TRACK = "steps and stages"
#: The line of a labelled span as Kineto writes it; the line before it opens the event.
_LABEL = re.compile(rb'(\s*"ph": "X", "cat": "user_annotation", .*"pid": (\d+), "tid": )(\d{1,9})(,\s*)', re.DOTALL)
#: Bytes read at once at most: a trace of another program may be a single line.
_MOST = 2**20


def lines(stream: Any) -> Iterator[bytes]:
    """Yield the lines of an uncompressed trace with its labels on tracks of their own.

    A line that does not have Kineto's layout is yielded unchanged.
    """
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
    """Return an event that names a track, followed by the start of the event that the line before had opened."""
    where = b'"pid": %s, "tid": %s' % (process, track)
    name = b'    "name": "thread_name", "ph": "M", "ts": 0, %s, "args": {"name": "%s"}\n  },\n  {\n'
    return name % (where, TRACK.encode())


def copy(source: BinaryIO, target: Any) -> None:
    """Copy a trace from `source` to `target` with its labels on tracks of their own; a gzip file stays one.

    Raises EOFError, gzip.BadGzipFile or zlib.error for a damaged gzip file, and OSError.
    """
    packed = source.read(2) == b"\x1f\x8b"
    source.seek(0)
    if not packed:
        target.writelines(lines(source))
        return
    with gzip.open(source) as plain, gzip.GzipFile(fileobj=target, mode="wb", compresslevel=1) as packing:
        packing.writelines(lines(plain))
