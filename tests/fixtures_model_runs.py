"""Runs of models for tests: jobs within this process, and records made by hand."""

from __future__ import annotations

import gc
import json
from unittest import mock

from common.jobs import worker
from common.jobs.executor import Executor
from common.records import schema
from common.tools.inference import grid

MACHINE = {"cpu": "made up", "cores": 2, "memory_bytes": 2**33, "os": "Linux", "python": "3.11"}

WHOLE = {"process_peak_bytes": 2**28}


class InProcess(Executor):
    """Run jobs as a worker does, without the start of a process.  names: of the jobs that ran."""

    def __init__(self):
        self.names = []

    def execute(self, job, python, folder, settings, timeout, note):
        self.names.append(job.name)
        lines = []
        with mock.patch.object(gc, "unfreeze"):  # else each collection scans what the tests have imported, for a second
            status, reason = worker.run(job.to_json(settings, folder), lines.append)
        records = [{**json.loads(json.dumps(schema.as_written(line))), "job": job.name} for line in lines]
        return [*records, job.status(status, reason, 1)]


def write_lines(folder, name, lines):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return folder / name


def status(job, word="ok", reason=""):
    return {"record": "status", "job": job, "status": word, "pass": "inference", "reason": reason, "wall_ns": 1}


def environment(job):
    head = {"torch": "2.11.0", "device": "cpu", "device_name": "made up", "threads": 2}
    return {"record": "environment", "job": job, "python": "3.11", **head}


def write_inference(log, name="made", milliseconds=100.0, peaks=None, profiled=()):
    """Write a grid of 1 and 2 s by batches of 1 and 4; the last cell ran out of memory.

    peaks: of a device, instead of the process; profiled: of `profiled_calls`, instead of those of a CPU."""
    axes = {key: [value] for key, value in grid.VARIANTS.items()}
    axes.update({grid.SECONDS: [1, 2], grid.BATCH: [1, 4]})
    config = {
        "pretrained_model": {"source": "x:Y", "type": "factory"},
        "profiling_dimensions": {"triangle_only": False, "example_audio": None, "export_logs": False},
    }
    head = {"schema": schema.SCHEMA, "started": "2026-11-22T10:00:00+00:00", "machine": MACHINE, "command": []}
    lines = [{"record": "inference", "name": name, "config": config, "grid": axes, **head}]
    for number, position in enumerate(grid.positions(axes)):
        job = position.job
        lines.append(environment(job))
        if number == 3:
            lines.append(status(job, "oom", "too large"))
            continue
        for repeat in range(3):
            ns = (milliseconds + repeat) * 1e6 * (1 + number)
            lines.append({"record": "call", "job": job, "repeat": repeat, "total_wall_ns": ns})
        lines.append({"record": "call_memory", "job": job, **(peaks or {"process_bytes": 2**20}), **WHOLE})
        times = {"batches": 2, "cpu_us": 1e5, "cuda_us": 0.0, "cpu_peak_bytes": 2**22 * (1 + number), **dict(profiled)}
        lines += [{"record": "profiled_calls", "job": job, **times}, status(job)]
    return write_lines(log / f"inference-{name}", schema.INFERENCE_FILE_NAME, lines)


def write_pipeline(log, name, stages, examples, started="2026-11-22T10:00:00+00:00"):
    """examples: {name: {stage: (seconds of each call, bytes, FLOPs)}}."""
    head = {"schema": schema.SCHEMA, "started": started, "machine": MACHINE, "command": []}
    lines = [{"record": "pipeline", "name": name, "config": {}, "stages": stages, "examples": [*examples], **head}]
    for example, of in examples.items():
        lines.append(environment(example))
        for stage, (seconds, peak, flops) in of.items():
            head = {"job": example, "stage": stage}
            lines.append({"record": "call", **head, "warmup": True, "total_wall_ns": 9e9})
            lines += [{"record": "call", **head, "total_wall_ns": duration * 1e9} for duration in seconds]
            lines.append({"record": "call_memory", **head, "process_bytes": peak, "process_peak_bytes": 10 * peak})
            counts = {"macs": flops // 2, "flops": flops, "instructions": 20 * flops}
            lines.append({"record": "operations", **head, **counts})
        lines.append(status(example))
    return write_lines(log / f"pipeline-{name}", schema.PIPELINE_FILE_NAME, lines)


def write_profile(log):
    """Write a profile of two sizes; the second did not run."""
    spans = [
        {"chain": chain, "phase": phase, "calls": 4, "host_ns": [time, 1.1 * time], "device_ns": [None, None]}
        for chain, time in ((["encoder"], 5e6), (["encoder", "layers"], 3e6), (["rnnt_loss"], 1e6))
        for phase in ("forward", "backward")
    ]
    names = ["", *(each["chain"][-1] + (".backward" if each["phase"] == "backward" else "") for each in spans)]
    document = {
        **{"size": "batch-size 2", "reason": "", "implementation": "torchaudio", "model": "", "compiled": None},
        **{"device": "cpu", "device_name": "made up", "threads": 2, "torch": "2.11.0", "limits": None},
        "steps": {"host_ns": [2e7, 2.1e7], "device_ns": [None, None], "bare_ns": [1.9e7, 2e7]},
        "spans": spans,
        "memory": [{"name": name, "peak_bytes": 2**22, "rise_bytes": 2**21, "left_bytes": 2**20} for name in names],
        "flops": [{"chain": each["chain"], "phase": each["phase"], "macs": 1000, "flops": 2000} for each in spans],
        "parameters": {"model": 1000},
        "batches": [{"N": 2, "frames": 300, "frames_max": 200, "tokens": 40}],
        "options": {"dropout": True},
        "not_counted": ["aten::sort"],
    }
    failed = {"size": "batch-size 4", "reason": "out of memory in encoder"}
    (log / "profile-2").mkdir(parents=True, exist_ok=True)
    (log / "profile-2" / "profile.json").write_text(json.dumps([document, failed]), encoding="utf-8")
