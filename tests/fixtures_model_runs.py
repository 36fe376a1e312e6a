"""Runs of models and of check for tests: jobs within this process, and records made by hand."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from unittest import mock

from rnnt_bench.conformance import show
from rnnt_bench.conformance.outcomes import Outcome, Row
from rnnt_bench.core.errors import guarded
from rnnt_bench.core.questions import TABLE
from rnnt_bench.jobs import job as process
from rnnt_bench.jobs.session import Executor
from rnnt_bench.records import schema
from rnnt_bench.tools.inference import rows as grid
from rnnt_bench.tools.pipelines import rows as stages
from rnnt_bench.tools.profile import rows as choice

MACHINE = {"cpu": "made up", "cores": 2, "memory_bytes": 2**33, "os": "Linux", "python": "3.11"}


class InProcess(Executor):
    """Run jobs as a worker does, without the start of a process.  names: of the jobs that ran."""

    def __init__(self):
        self.names = []

    def execute(self, job, python, folder, settings, timeout, note):
        self.names.append(job.name)
        lines = []
        with mock.patch.object(gc, "unfreeze"):  # else each collection scans what the tests have imported, for a second
            status, reason = process.run(job.spec(settings, folder), lines.append)
        records = [{**json.loads(json.dumps(schema.as_written(line))), "job": job.name} for line in lines]
        return [*map(schema.typed, records), job.status(status, reason, 1)]


def command(module, *words, executor=None):
    """Run `rnnt-bench` of a module with these words, with its jobs in this process; return the exit code."""
    arguments = module.parser().parse_args(list(map(str, words)))
    return guarded("x", lambda: module.main(arguments, executor or InProcess()))


def write_tool(log, tool, name, config, jobs, started="2026-11-22T10:00:00+00:00"):
    """Write a run.  jobs: {name: what it measured, or (status, reason)}."""
    head = {"schema": schema.SCHEMA, "started": started, "machine": MACHINE, "command": []}
    lines = [{"record": "tool", "tool": tool, "name": name, "config": schema.as_written(config), **head}]
    for job, result in jobs.items():
        known = {"python": "3.11", "torch": "2.11.0", "device": "cpu", "device_name": "made up", "threads": 2}
        lines.append({"record": "environment", "job": job, **known})
        status, reason = result if isinstance(result, tuple) else ("ok", "")
        if status == "ok":
            lines.append({"record": "measured", "job": job, "value": schema.as_written(result)})
        lines.append({"record": "status", "job": job, "status": status, "pass": tool, "reason": reason, "wall_ns": 1})
    folder = log / f"{tool}-{name}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tool.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return folder / "tool.jsonl"


def cell(seconds=(0.1,), **numbers):
    """Return the measurements of a cell of an inference profile."""
    known = {"busy": 0, "process_peak_bytes": 2**28, "cpu_us": 2e5, "profiled": 2, "cpu_peak_bytes": 2**20, **numbers}
    return grid.Cell(wall_ns=[round(1e9 * each) for each in seconds], first_ns=[None] * len(seconds), **known)


def write_inference(log, name="made", **numbers):
    """Write a grid of 1 and 2 s by batches of 1 and 4; the last cell ran out of memory."""
    dimensions = grid.Dimensions(audio_mockup_secs=[1, 2], batch_sizes=[1, 4], triangle_only=False)
    config = grid.Profile(pretrained_model=grid.Model(source="x:Y"), profiling_dimensions=dimensions)
    jobs = dict.fromkeys(("1s-x1", "1s-x4", "2s-x1"), cell(**numbers))
    return write_tool(log, "inference", name, config, {**jobs, "2s-x4": ("oom", "out of memory")})


def costs(times, peak=100, flops=400, **more):
    """Return the costs of a stage of a pipeline on an example."""
    known = {"busy": 0, "memory_bytes": peak, "process_bytes": 10 * peak, "not_counted": [], **more}
    return stages.Costs(wall_ns=[round(1e9 * each) for each in times], macs=flops // 2, flops=flops, **known)


def write_pipeline(log, name, names, jobs, **more):
    """Write a pipeline.  names: of the stages; jobs: {(example, stage): costs or (status, reason)}."""
    of = [stages.Stage(name=each, factory="x:Y", warmup=0, repeats=1) for each in names]
    examples = list(dict.fromkeys(example for example, _ in jobs))
    config = stages.Pipeline(general=stages.General(), stages=of, examples=examples)
    return write_tool(log, "pipeline", name, config, {" ".join(key): result for key, result in jobs.items()}, **more)


def write_profile(log, **changes):
    """Write a profile of two sizes; the second did not run."""
    times = ((["encoder"], 5e6), (["encoder", "layers"], 3e6), (["rnnt_loss"], 1e6))
    of = {"calls": 4, "device_ns": [None, None], "macs": 1000, "flops": 2000}
    spans = [
        choice.Span(chain=chain, phase=phase, host_ns=[time, 1.1 * time], **of)
        for chain, time in times
        for phase in ("forward", "backward")
    ]
    names = ["", *(each.chain[-1] + (".backward" if each.phase == "backward" else "") for each in spans)]
    numbers = {"host_ns": [2e7, 2.1e7], "device_ns": [None, None], "bare_ns": [1.9e7, 2e7], **changes}
    found = choice.Measured(
        parameters={"model": 1000},
        batches=[choice.Batch(N=2, frames=300, frames_max=200, tokens=40)],
        spans=spans,
        memory=[choice.Memory(name=name, peak=2**22, rise=2**21, left=2**20) for name in names],
        **{"macs": 6000, "flops": 12000, "not_counted": ["aten::sort"], **numbers},
    )
    config = choice.Profile(choice=choice.Choice(loss="torchaudio"), sizes={"batch-size 2": {}, "batch-size 4": {}})
    jobs = {"batch-size 2": found, "batch-size 4": ("oom", "out of memory in encoder")}
    return write_tool(log, "profile", "2", config, jobs)


GONE = "gone is not installed: pip install <gone>"


def made(name: str = "a", **cells: Outcome) -> show.Matrix:
    """Return the matrix of the row `name` with these outcomes."""
    rows = [Row(name, "exact", version="1", torch="2", cells=cells), Row("gone", "exact", "missing", GONE)]
    return show.Matrix("cpu: x; 2020-01-01; suite abc", rows, [case for case in TABLE if case.name in cells])


def write_check(log: Path, name: str = "a", day: int = 1, **cells: Outcome) -> Path:
    """Write a run of `check` in a log, whose matrix `made` returns, of that day of 2099; return its file."""
    matrix = made(name, **cells)
    config = show.Config(cases=[case.name for case in matrix.cases], device="cpu", missing={"gone": GONE})
    started = f"2099-01-{day:02d}T00:00:00+00:00"
    return write_tool(log, show.TOOL, f"day-{day}", config, {name: matrix.rows[0]}, started)
