"""Made runs and traces for tests: folders as the runner writes them, and summarize.py run on them."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from rnnt_bench.records import schema, store

from commands import run

REAL = Path(__file__).parent / "data" / "traces"
REAL_FILES = sorted(REAL.glob("*/*.gz"))
MIB = 2**20

Event = dict[str, Any]
PLACE = {"pid": 1, "tid": 1}


def span(name: str, ts: float, dur: float, cat: str = "user_annotation") -> Event:
    return {"ph": "X", "cat": cat, "name": name, **PLACE, "ts": ts, "dur": dur, "args": {"External id": 1}}


def allocation(ts: float, total: int, change: int = 0, device_type: int = 0, device_id: int = -1) -> Event:
    args = {"Total Allocated": total, "Bytes": change, "Device Id": device_id, "Device Type": device_type}
    return {"ph": "i", "cat": "cpu_instant_event", "s": "t", "name": "[memory]", **PLACE, "ts": ts, "args": args}


def steps(durations: Sequence[float], first: int = 1, operators: int = 6) -> list[Event]:
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
    of_events = ",\n".join(map(_event, events))
    return f'{{\n  "schemaVersion": 1,\n{lines}  "traceEvents": [\n{of_events}\n  ],\n  {tail}\n}}\n'


def _event(event: Any) -> str:
    if isinstance(event, str):
        return event
    keys = (("ph", "cat", "s", "name"), ("pid", "tid"), ("ts", "dur"))
    parts = (", ".join(f'"{key}": {json.dumps(event[key])}' for key in of if key in event) for of in keys)
    head, ids, times = parts
    return (
        f'  {{\n    {head}, {ids},\n    {times},\n    "args": {{\n      {json.dumps(event["args"])[1:-1]}\n    }}\n  }}'
    )


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


FORMATS = ("table", "markdown", "csv", "json")
COMMAND = Path(__file__).parents[1] / "summarize.py"
SETTINGS: dict[str, Any] = {
    **{"shape_file": "shape_info.pt", "device": "cpu", "dtype": "float32", "batch_size": 30, "max_frames": 10000},
    **{"sort_utterance": False, "batches": "first", "num_batches": 2, "vocab_size": 500, "encoder_dim": 512},
    **{"preset": "cpu", "schedule": {"wait": 0, "warmup": 1, "active": 2, "repeat": 2}, "rounds": 2, "threads": None},
    **{"passes": ["correctness", "timing", "memory", "trace"], "scopes": ["loss", "step"], "seed": 1},
    **{"denormals": "flush", "allocator": "system", "prune_range": 5},
}

Record = dict[str, Any]


def header(
    name: str, exact: bool = True, started: str = "2026-01-01T00:00:00+00:00", run_id: str = "", **settings: Any
) -> Record:
    return {
        **{"record": "run", "schema": 1, "run_id": run_id or f"{name} {started}", "name": name, "suffix": "30"},
        **{"package": name, "kind": "exact" if exact else "pruned", "exact": exact, "started": started},
        **{"settings": {**SETTINGS, **settings}, "command": [], "git_revision": "", "git_dirty": False, "machine": {}},
    }


def environment(job: str, **fields: Any) -> Record:
    batches = [
        {"index": 4, "N": 2, "T_max": 10, "U_max": 4, "useful_cells": 60, "padded_cells": 100},
        {"index": 9, "N": 2, "T_max": 20, "U_max": 4, "useful_cells": 90, "padded_cells": 200},
    ]
    return {
        **{
            "record": "environment",
            "job": job,
            "python": "3.11",
            "torch": "2.11.0+cpu",
            "implementation_version": "1.4",
        },
        **{"device": "cpu", "device_name": "Some CPU", "cuda": None, "threads": 2, "denormals": "flush"},
        **{"shape_file": "shape_info.pt", "shape_file_sha256": "abc", "batches": batches},
        **fields,
    }


def status(job: str, value: str = "ok", reason: str = "") -> Record:
    kind, _, number = job.partition("-")
    place = {"job": job, "pass": kind, "round": int(number) if number else None}
    return {"record": "status", **place, "status": value, "reason": reason, "wall_ns": 1}


def sample(
    job: str, scope: str, batch: int, ms: float, warmup: bool = False, flags: Sequence[str] = (), **fields: Any
) -> Record:
    return {
        **{
            "record": "sample",
            "job": job,
            "scope": scope,
            "round": int(job.split("-")[1]),
            "batch": batch,
            "repeat": 0,
        },
        **{"warmup": warmup, "forward_wall_ns": int(ms * 4e5), "total_wall_ns": int(ms * 1e6)},
        **{"forward_event_ns": None, "total_event_ns": None, "foreign_cpu": 0.0, "flags": list(flags)},
        "stages": {"joiner": int(ms * 1e5), "backward": int(ms * 6e5)},
        **fields,
    }


def timing(job: str, step_ms: Sequence[float], loss_ms: Sequence[float], **fields: Any) -> list[Record]:
    """One warm-up sample, which must not count, then the samples, on the batches in turn."""
    lines = [environment(job), sample(job, "step", 4, 99999, warmup=True)]
    for scope, values in (("step", step_ms), ("loss", loss_ms)):
        lines += [sample(job, scope, (4, 9)[number % 2], value, **fields) for number, value in enumerate(values)]
    return [*lines, status(job)]


def correctness(**fields: Any) -> list[Record]:
    judged = {"loss_error": 1e-7, "grad_error": 2e-6, "tolerance": 1e-4, "ok": True, "approximation_gap": None}
    line = {"record": "correctness", "job": "correctness", **judged, "note": "", **fields}
    return [environment("correctness"), line, status("correctness")]


def memory(*peaks: float) -> list[Record]:
    unknown = {"device_allocated_bytes": None, "device_reserved_bytes": None}
    line = {"record": "memory", "job": "memory", "scope": "step", **unknown}
    known = [dict.fromkeys(("torch_allocated_bytes", "process_bytes"), int(peak * MIB)) for peak in peaks]
    lines = [{**line, "batch": number, **of_batch} for number, of_batch in enumerate(known)]
    return [environment("memory"), *lines, status("memory")]


def trace(files: Sequence[str]) -> list[Record]:
    line = {"record": "trace", "job": "trace", "steps": 6, "schedule": SETTINGS["schedule"], "profiler": {}}
    return [environment("trace"), {**line, "files": list(files)}, status("trace")]


def records_of(path: Path) -> list[Record]:
    """Return the records of a file, or of that in a folder, as they are written."""
    file = path / schema.FILE_NAME if path.is_dir() else path
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def write_records(folder: Path, records: Iterable[Record]) -> Path:
    """A results.jsonl of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / schema.FILE_NAME
    path.unlink(missing_ok=True)
    store.append(path, records)
    return path


def change(folder: Path, kind: str, /, **fields: Any) -> None:
    """Give all records of a kind in a folder these fields; NaN stays NaN."""
    lines = [{**line, **(fields if line["record"] == kind else {})} for line in records_of(folder)]
    (folder / schema.FILE_NAME).write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def write_run(folder: Path, name: str = "torchaudio", jobs: Sequence[list[Record]] | None = None, **head: Any) -> Path:
    """A whole run of two rounds; step samples 10, 20 and 30, 40 ms, loss samples 1, 2 and 3, 4 ms."""
    if jobs is None:
        rounds = [timing("timing-1", [10, 20], [1, 2]), timing("timing-2", [30, 40], [3, 4])]
        jobs = [correctness(), *rounds, memory(8, 32, 16), [environment("trace"), status("trace")]]
    write_records(folder, [header(name, **head), *(line for job in jobs for line in job)])
    return folder


def timed(folder, name, step_ms, exact=True, peak=8, **head):
    """A run of three rounds, the step's samples of each at `step_ms`[round] on both batches."""
    rounds = [timing(f"timing-{at}", [ms, ms], [ms, ms]) for at, ms in enumerate(step_ms, start=1)]
    jobs = [correctness(), *rounds, memory(peak), [status("trace")]]
    write_run(folder / name, name=name, jobs=jobs, exact=exact, rounds=len(step_ms))
    change(folder / name, "run", **{"run_id": "one run", **head})


def three(step_ms: float, peak_mb: float = 8) -> list[list[Record]]:
    """Jobs with three samples 10% apart and one peak."""
    samples = [0.9 * step_ms, step_ms, 1.1 * step_ms]
    return [correctness(), timing("timing-1", samples, samples), memory(peak_mb)]


def write_sweep(folder, grid, names=("torchaudio",), jobs_of=lambda name, values: three(10), **head):
    """Write the runs of a sweep over `grid`, whose jobs `jobs_of` makes of a name and a cell's values."""
    for cell, combined in enumerate(product(*grid.values())):
        values = dict(zip(grid, combined))
        for number, name in enumerate(names):
            first = header(name, "pruned" not in name, passes=["correctness", "timing", "memory"], rounds=1, **values)
            lines = [line for job in jobs_of(name, values) for line in job]
            first.update(run_id=folder.name, values=values, **head)
            write_records(folder / f"{cell}-{number}", [first, *lines])
    return folder


def traced_run(folder, *texts, name="torchaudio", **head):
    files = [f"w.{number}.pt.trace.json" for number, _ in enumerate(texts, start=9)]
    for file, text in zip(files, texts):
        write(folder / file, text)
    rounds = [timing("timing-1", [0.1, 0.2], [1, 2]), timing("timing-2", [0.1, 0.2], [3, 4])]
    return write_run(folder, name=name, jobs=[correctness(), *rounds, memory(8), trace(files)], **head)


def summarize(*arguments, code=0, cwd=None, environment=None, details=True):
    """Return what summarize.py prints: all of it, or with details=False what fits a screen."""
    options = {"cwd": cwd or Path.cwd(), **({"env": environment} if environment else {})}
    done = run(COMMAND, *arguments, *(["--details"] if details else []), **options)
    assert done.returncode == code and "Traceback" not in done.stderr, done.stdout + done.stderr
    return done.stdout if code != 2 else done.stderr


def read_rows(*arguments, code=0):
    return json.loads(summarize(*arguments, "--format", "json", code=code))


def one_row(*arguments, code=0):
    (row,) = read_rows(*arguments, code=code)
    return row
