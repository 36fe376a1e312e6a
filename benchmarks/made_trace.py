"""Write a trace of any size in Kineto's own layout: the events of a small real trace, repeated with later times.

The mix of events, their names, arguments and lengths are those of the real trace; 20 steps span all of it.  Two things
are not real: every repetition has the same durations, and the memory counter comes back to its start.
"""

from __future__ import annotations

import gzip
import re
from pathlib import Path
from typing import Callable, List, Tuple, Union

STEPS = 20
MB = 2**20
_HEAD_END = '"traceEvents": [\n'
_TAIL_START = "\n  ],"
_BOUNDARY = ",\n  {"
_REPEATED = re.compile(r'"cat": "(cpu_op|user_annotation|python_function|cpu_instant_event|fwdbwd)"')
_STEP = re.compile(r'"name": "ProfilerStep#\d+"')
_MOVED = re.compile(r'("(?:ts|id|External id|Ev Idx|Python id|Python parent id|Sequence number)": )(-?\d+(?:\.\d+)?)')
_TIMES = re.compile(r'"ts": (\d+(?:\.\d+)?), "dur": (\d+(?:\.\d+)?)')

#: Text, or a number that moves on with each repetition: its value and how far.
Piece = Union[str, Tuple[float, float, Callable[[float], str]]]


def write(path: Path, megabytes: float, source: Path) -> int:
    """Write the trace of about `megabytes` (2**20 bytes) from the real trace `source` (.json.gz); returns its bytes.

    ValueError when `source` is not laid out as Kineto does.
    """
    text = gzip.decompress(source.read_bytes()).decode("utf-8")
    head, boundary, rest = text.partition(_HEAD_END)
    body, end, tail = rest.partition(_TAIL_START)
    if not boundary or not end:
        raise ValueError(f"{source}: not a trace in Kineto's layout")
    events = ["  {" + event.lstrip(" {") for event in body.split(_BOUNDARY)]
    cycle = [event for event in events if _REPEATED.search(event) and not _STEP.search(event)]
    once = [event for event in events if not _REPEATED.search(event)]
    step = next(event for event in events if _STEP.search(event))
    times = [(float(start), float(length)) for start, length in _TIMES.findall("".join(cycle))]
    first = min(start for start, _ in times)
    period = max(start + length for start, length in times) - first + 1
    pieces = _pieces(",\n".join(cycle) + ",\n", period, len(cycle))
    repetitions = max(STEPS, round(megabytes * MB / len("".join(cycle))))
    repetitions -= repetitions % STEPS
    with path.open("w", encoding="utf-8") as stream:
        stream.write(head + boundary)
        for number in range(repetitions):
            if number % (repetitions // STEPS) == 0:
                length = period * (repetitions // STEPS)
                stream.write(_step(step, number // (repetitions // STEPS), first, length) + ",\n")
            stream.write(
                "".join(piece if isinstance(piece, str) else piece[2](piece[0] + number * piece[1]) for piece in pieces)
            )
        stream.write(",\n".join(once) + end + tail)
    return path.stat().st_size


def _pieces(text: str, period: float, count: int) -> List[Piece]:
    result: List[Piece] = []
    at = 0
    for match in _MOVED.finditer(text):
        result.append(text[at : match.end(1)])
        value = match[2]
        if "." in value:
            result.append((float(value), period, "{:.3f}".format))
        elif '"ts"' in match[1]:
            result.append((int(value), round(period), str))
        else:
            result.append((int(value), 10 * count, str))
        at = match.end()
    return [*result, text[at:]]


def _step(event: str, number: int, first: float, length: float) -> str:
    """The ProfilerStep event `event` as number 1, 2, ...; one after the other, `length` microseconds each."""
    event = _STEP.sub(f'"name": "ProfilerStep#{number + 1}"', event)
    whole = "." not in _TIMES.search(event)[1]
    start, duration = first + number * length, length - 1
    shown = f"{start:.0f}", f"{duration:.0f}" if whole else f"{duration:.3f}"
    if not whole:
        shown = f"{start:.3f}", f"{duration:.3f}"
    return _TIMES.sub(f'"ts": {shown[0]}, "dur": {shown[1]}', event)
