"""Traces for tests: the real ones under data/traces, and made ones in Kineto's layout."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any, Dict, List, Sequence

REAL = Path(__file__).parent / "data" / "traces"
REAL_FILES = sorted(REAL.glob("*/*.gz"))
MIB = 2**20

Event = Dict[str, Any]


def span(name: str, ts: float, dur: float, cat: str = "user_annotation") -> Event:
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": 1, "ts": ts, "dur": dur, "args": {"External id": 1}}


def memory(ts: float, total: int, change: int = 0, device_type: int = 0, device_id: int = -1) -> Event:
    args = {"Total Allocated": total, "Bytes": change, "Device Id": device_id, "Device Type": device_type}
    return {
        "ph": "i",
        "cat": "cpu_instant_event",
        "s": "t",
        "name": "[memory]",
        "pid": 1,
        "tid": 1,
        "ts": ts,
        "args": args,
    }


def steps(durations: Sequence[float], first: int = 1, operators: int = 6) -> List[Event]:
    """ProfilerStep spans one after the other, each with operators in it."""
    events, now = [], 1000.0
    for number, duration in enumerate(durations, start=first):
        events.append(span(f"ProfilerStep#{number}", now, duration))
        events += [
            span("aten::add", now + duration * (index + 0.5) / operators, 0.1, "cpu_op") for index in range(operators)
        ]
        now += duration + 10
    return events


def kineto(events: Sequence[Event], tail: str = '"traceName": "trace.json"', **header: Any) -> str:
    """The text of a trace as Kineto lays it out; an event given as text is put in as it is."""
    lines = "".join(f'  "{key}": {json.dumps(value)},\n' for key, value in header.items())
    return (
        '{\n  "schemaVersion": 1,\n'
        + lines
        + '  "traceEvents": [\n'
        + ",\n".join(map(_event, events))
        + f"\n  ],\n  {tail}\n}}\n"
    )


def _event(event: Any) -> str:
    if isinstance(event, str):
        return event
    head = ", ".join(f'"{key}": {json.dumps(event[key])}' for key in ("ph", "cat", "s", "name") if key in event)
    ids = ", ".join(f'"{key}": {json.dumps(event[key])}' for key in ("pid", "tid"))
    times = ", ".join(f'"{key}": {json.dumps(event[key])}' for key in ("ts", "dur") if key in event)
    return (
        f'  {{\n    {head}, {ids},\n    {times},\n    "args": {{\n      {json.dumps(event["args"])[1:-1]}\n    }}\n  }}'
    )


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text, encoding="utf-8")
    return path
