#!/usr/bin/env python3
"""Measure how fast, and in how much memory, traces are read: this suite beside others, on the same file.

A trace of any size is made (made_trace.py), plain and gzipped, and given to each reader in a fresh process, in turn.
Seconds are from opening the file to average step time and peak memory, without interpreter start and imports; the file
comes from the page cache.  Peak memory is the resident peak of the process, imports included, or of its largest child.
Output is a Markdown table.
"""

from __future__ import annotations

import argparse
import gzip
import importlib.metadata
import json
import multiprocessing
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from datetime import datetime, timezone
from pathlib import Path
from statistics import mean, median
from typing import Callable, Dict, List, NamedTuple, Optional

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

CHUNK = 64 << 10  # larger ones are slower here: each is mapped anew
SOURCE = ROOT / "tests/data/traces/torch-2.11.0/w.1795233214818539219.pt.trace.json.gz"
Answer = Dict[str, Optional[float]]  # step_us, peak_bytes


def ours(path: Path, fast: bool = True) -> Answer:
    from common.traces.reader import read

    trace = read(path, fast)
    return {"step_us": trace.average_step_us, "peak_bytes": max(trace.peak_bytes.values())}


def ours_any_layout(path: Path) -> Answer:
    return ours(path, fast=False)


def unpack(path: Path) -> Answer:
    """Read and decompress, as the usual command does it."""
    command = ["gzip", "-dc"] if path.suffix == ".gz" else ["cat"]
    subprocess.run([*command, str(path)], stdout=subprocess.DEVNULL, check=True)
    return {"step_us": None, "peak_bytes": None}


def cut(path: Path) -> Answer:
    """Read, decompress and cut at the ends of events, without looking into one."""
    events, left = 0, b""
    with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as stream:
        for chunk in iter(lambda: stream.read(CHUNK), b""):
            parts = (left + chunk).split(b"\n  },\n  {")
            left = parts.pop()
            events += len(parts)
    return {"step_us": None, "peak_bytes": None}


def json_load(path: Path) -> Answer:
    """json.load, and the same two numbers from what it gives."""
    with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as stream:
        events = json.load(stream)["traceEvents"]
    steps = [
        event["dur"]
        for event in events
        if event.get("cat") == "user_annotation" and event["name"].startswith("ProfilerStep#")
    ]
    return {
        "step_us": mean(steps),
        "peak_bytes": max(event["args"]["Total Allocated"] for event in events if event["name"] == "[memory]"),
    }


def plugin(path: Path) -> Answer:
    """TensorBoard's profiler plugin, through the loader its server uses (which starts a process for each file)."""
    from torch_tb_profiler import io
    from torch_tb_profiler.profiler import RunLoader

    with tempfile.TemporaryDirectory() as scratch:
        run = RunLoader("run", str(path.parent), io.Cache(scratch)).load()
    (profile,) = run.profiles.values()
    for child in multiprocessing.active_children():
        child.join()
    curve = profile.get_memory_curve(memory_metric="B")["metadata"]["peaks"]["CPU"]
    return {
        "step_us": profile.overview["performance"][0]["value"],
        "peak_bytes": float(re.search(r"([\d.]+)B$", curve)[1]),
    }


class Reader(NamedTuple):
    title: str
    read: Callable[[Path], Answer]
    environment: str  # whose Python runs it
    package: Optional[str] = None  # whose version is shown


READERS = {
    "ours": Reader("this suite", ours, "main", "msgspec"),
    "any-layout": Reader("this suite, any layout", ours_any_layout, "main"),
    "unpack": Reader("gzip -dc, or cat", unpack, "main"),
    "cut": Reader("read, decompress, cut into events", cut, "main"),
    "json": Reader("json.load", json_load, "main"),
    "plugin": Reader("torch-tb-profiler", plugin, "viewer", "torch-tb-profiler"),
}


class Run(NamedTuple):
    """One reading of a file.  peak: resident bytes; version: of the reader's package, if that is shown."""

    seconds: float
    peak: int
    version: Optional[str]
    step_us: Optional[float]
    peak_bytes: Optional[float]


def run_reader(name: str, path: Path) -> Run:
    """Read a trace in this process."""
    reader = READERS[name]
    if name.startswith(("ours", "any")):
        import common.traces.reader  # noqa: F401  imports are not what is timed
    elif name == "plugin":
        import torch_tb_profiler.profiler  # noqa: F401
    begin = time.perf_counter()
    answer = reader.read(path)
    seconds = time.perf_counter() - begin
    resident = int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1])
    child = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    version = importlib.metadata.version(reader.package) if reader.package else None
    return Run(seconds, max(resident, child) * 1024, version, **answer)


def python_of(environment: str) -> Optional[str]:
    """Return the Python of an environment; for "main" the running one if `make setup` made none."""
    from common.setup import environments

    managed = environments.interpreter(environment)
    return str(managed) if managed else sys.executable if environment == "main" else None


def measure(name: str, path: Path) -> Run:
    """Read a trace in a fresh process.  Raises UserError where it ends with an error."""
    from common.core.errors import UserError

    python = python_of(READERS[name].environment)
    if python is None:
        raise UserError(f"no {READERS[name].environment} environment: run `make setup`")
    done = subprocess.run([python, __file__, "--reader", name, str(path)], stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise UserError(f"exit code {done.returncode}")
    return Run(**json.loads(done.stdout.splitlines()[-1]))


def line(title: str, file: str, runs: List[Run], reference: Optional[float]) -> List[str]:
    """Return the cells of a reader and file.  runs: its measurements; reference: seconds of our reader."""
    seconds = [run.seconds for run in runs]
    times = f"{median(seconds) / reference:.1f}" if reference else "-"
    step, peak = runs[0].step_us, runs[0].peak_bytes
    return [
        title,
        file,
        f"{median(seconds):.2f} [{min(seconds):.2f}-{max(seconds):.2f}]",
        f"{max(run.peak for run in runs) / 1e6:.0f}",
        times,
        "-" if step is None else f"{step:.0f}",
        "-" if peak is None else f"{peak:.0f}",
    ]


def disagreements(runs_of: Dict[str, List[Run]]) -> List[str]:
    """Return a line for each reader whose answer is not ours.  The plugin rounds to microseconds."""
    expected = runs_of["ours"][0] if runs_of.get("ours") else None
    return [
        f"{READERS[name].title} answers {run.step_us} us, {run.peak_bytes} bytes; this suite "
        f"{expected.step_us} us, {expected.peak_bytes} bytes"
        for name, runs in runs_of.items()
        for run in runs[:1]
        if expected and run.step_us is not None
        if abs(run.step_us - expected.step_us) > 1 or run.peak_bytes != expected.peak_bytes
    ]


def cpu_model() -> str:
    match = re.search(r"model name\s*:\s*(.*)", Path("/proc/cpuinfo").read_text())
    return f"{match[1] if match else platform.machine()}, {len(os.sched_getaffinity(0))} CPUs"


def compare(names: List[str], repeats: int, path: Path) -> None:
    """Measure every reader on the plain and the gzipped file and print the table."""
    from made_trace import MB

    from common.core.errors import UserError
    from common.present.table import Column
    from common.present.text import markdown_of

    packed = path.parent / "gz" / (path.name + ".gz")
    packed.parent.mkdir()
    with path.open("rb") as plain, gzip.open(packed, "wb", compresslevel=6) as stream:
        shutil.copyfileobj(plain, stream, CHUNK)
    size, size_packed = path.stat().st_size / MB, packed.stat().st_size / MB
    lines, notes, versions = [], [], {"python": platform.python_version()}
    for file, kind in ((path, f".json, {size:.0f} MB"), (packed, f".json.gz, {size_packed:.0f} MB")):
        runs_of: Dict[str, List[Run]] = {name: [] for name in names}
        for _ in range(repeats):
            for name in list(runs_of):
                print(f"{name} on {kind}", file=sys.stderr, flush=True)
                try:
                    run = measure(name, file)
                except UserError as error:
                    notes.append(f"{READERS[name].title}, {kind}: {error}")
                    del runs_of[name]
                    continue
                runs_of[name].append(run)
                if run.version:
                    versions[READERS[name].package] = run.version
        reference = median(run.seconds for run in runs_of["ours"]) if runs_of.get("ours") else None
        lines += [line(READERS[name].title, kind, runs, reference) for name, runs in runs_of.items()]
        notes += disagreements(runs_of)
    heads = ["seconds, median [min-max]", "peak MB", "times ours", "step us", "peak bytes"]
    print(markdown_of(["reader", "file", *map(Column, heads)], lines))
    shown = ", ".join(f"{name} {version}" for name, version in versions.items())
    processes = "1 fresh process each" if repeats == 1 else f"{repeats} fresh processes each"
    print(f"\n{cpu_model()}; {shown}; {datetime.now(timezone.utc):%Y-%m-%d}; {processes}.")
    for note in notes:
        print(f"note: {note}")


def chosen_readers(text: str) -> List[str]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    unknown = [word for word in words if word not in READERS]
    if unknown or not words:
        raise argparse.ArgumentTypeError(f"give some of {', '.join(READERS)}, not {text!r}")
    return list(dict.fromkeys(["ours", *words]))


def parser() -> argparse.ArgumentParser:
    from common.cli.parser import Parser
    from common.core.flag_types import positive, whole

    result = Parser(description=__doc__.splitlines()[0])
    result.add_argument(
        "--megabytes", type=positive, default=450.0, metavar="MB", help="Size of the trace in MB. Default: 450"
    )
    result.add_argument(
        "--compare",
        type=chosen_readers,
        default=list(READERS),
        metavar="A,B",
        help=f"Readers beside this suite's: {', '.join(READERS)}. The plugin takes 3 GB on 450 MB. Default: all",
    )
    result.add_argument("--repeats", type=whole(1), default=3, metavar="K", help="Runs of each. Default: 3")
    result.add_argument(
        "--source",
        type=Path,
        default=SOURCE,
        metavar="TRACE",
        help="The .json.gz whose events are repeated. Default: one of tests/data",
    )
    return result


def main() -> int:
    if sys.argv[1:2] == ["--reader"]:
        print(json.dumps(run_reader(sys.argv[2], Path(sys.argv[3]))._asdict()))
        return 0
    import made_trace

    options = parser().parse_args()
    with tempfile.TemporaryDirectory(prefix="summarize-speed-") as scratch:
        path = Path(scratch) / "plain" / "made.1.pt.trace.json"
        path.parent.mkdir()
        print("making the trace", file=sys.stderr, flush=True)
        made_trace.write(path, options.megabytes, options.source)
        compare(options.compare, options.repeats, path)
    return 0


if __name__ == "__main__":
    from common.core.guard import guarded

    sys.exit(guarded("summarize_speed.py", main))
