"""Make a row from the records of one run: status, numbers, configuration."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Dict, Mapping, Optional, Sequence, Tuple, Type, TypeVar

from rnnt_bench.analysis import machines, times
from rnnt_bench.analysis.row import COUNTERS, Row
from rnnt_bench.core import settings, text
from rnnt_bench.records import schema, store
from rnnt_bench.traces import reader, windows

T = TypeVar("T", bound=schema.JobLine)
Jobs = Mapping[str, Sequence[schema.JobLine]]

#: From harmless to serious; the worst of the jobs is the row's status.
SEVERITY = ("ok", "interrupted", "missing", "unsupported", "oom", "timeout", "error")


def row(records: Sequence[schema.Line], folder: Path, traces: bool = True) -> Row:
    """Return the row of a run. records: the header first."""
    header = records[0]
    assert isinstance(header, schema.Header)
    jobs = store.latest_jobs(records)
    lines = [line for job in jobs.values() for line in job]
    well = [line for job in jobs.values() if store.ended_well(job) for line in job]
    timed = [line for line in well if isinstance(line, schema.Sample)]
    samples = [line for line in timed if not line.warmup]
    judged = _newest(lines, schema.Correctness)
    trace = _newest(lines, schema.Trace)
    checked = judged or schema.Correctness()
    numbers = _profiled(trace, folder) if traces else windows.Profiled()
    limits = [line for line in records if isinstance(line, schema.Limits)]
    lacks_traces = trace is None and "trace" in (header.settings.passes or ())
    status, reason = _of_jobs(jobs, header)
    if status == "ok" and judged and not _is_right(judged):
        status, reason = "error", "loss or gradient is further from the oracle than its record allowed"
    if status == "ok" and numbers.error and not lacks_traces:
        status, reason = "error", numbers.error
    made = Row(
        name=header.name,
        folder=folder,
        status=status,
        reason=reason,
        kind=header.kind,
        header=header,
        environment=_newest(lines, schema.Environment) or schema.Environment(),
        checked=checked,
        jobs=jobs,
        profile=numbers,
        step=times.summarize(samples, "step"),
        loss_alone=times.summarize(samples, "loss"),
        timed=times.in_order(timed),
        others_cpu=times.others_cpu(samples),
        repeated=store.repeated(records),
        peaks_mb=_peaks([line for line in well if isinstance(line, schema.Memory)]),
        limits=limits,
    )
    of_all_threads = [line for line in limits if line.streams]
    made.rates = times.device_rates(of_all_threads, made.environment.mkl_as_intel)
    percent = times.limit_percent(made.rates, header.kind, made.batches, header.settings, samples, checked.at_size)
    made.limit_percent = percent
    on_cpu = made.device == "cpu"
    made.configuration = {
        **settings.in_rows(schema.as_written(header.settings), made.device, header.kind),
        **{"device": made.device, "device_name": made.environment.device_name},
        "processor": (machines.processor(header.machine) or None) if on_cpu else None,
        "cores": header.machine.cores if on_cpu else None,
        **{
            key: getattr(made.environment, key) or getattr(header.settings, key)
            for key in ("threads", *(("denormals", "allocator") if on_cpu else ()))
        },
        "shape_file_sha256": made.environment.shape_file_sha256,
    }
    steps = [sample for sample in samples if sample.scope == "step"]
    made.utterances_per_second, made.frames_per_second = times.rates(steps, made.batches)
    return made


def _newest(lines: Sequence[schema.JobLine], kind: Type[T]) -> Optional[T]:
    return next((line for line in reversed(lines) if isinstance(line, kind)), None)


def _is_right(line: schema.Correctness) -> bool:
    """Return whether a loss was judged right, and each error is within what its record says was allowed."""
    judged = [
        (line.loss_error, line.loss_tolerance),
        (line.grad_error, line.grad_tolerance),
        (line.slope_error, line.slope_tolerance),
    ]
    if line.at_size:
        judged.append((line.at_size.loss_error, line.at_size.loss_tolerance))
        judged.append((line.at_size.grad_error, line.at_size.grad_tolerance))
    return line.ok is not False and all(error <= allowed for error, allowed in judged if error and allowed)


def _of_jobs(jobs: Jobs, header: schema.Header) -> Tuple[str, str]:
    """Return the worst (status, reason) of the jobs; "interrupted" also where planned jobs are missing. A run that was
    stopped at its traces is whole, since no table needs them; so is a control, which is there for its times, without
    its memory."""
    needless = {"trace", "memory"} if "@" in header.name else {"trace"}
    worst, reason = "ok", ""
    done: Dict[str, int] = {}
    for job, lines in jobs.items():
        end = store.status_of(lines)
        status = "interrupted" if end is None else end.status if end.status in SEVERITY else "error"
        pass_name = (end and end.pass_name) or job
        if pass_name in needless and status == "interrupted":
            continue
        done[pass_name] = done.get(pass_name, 0) + 1
        if SEVERITY.index(status) > SEVERITY.index(worst):
            why = (end.reason or status) if end else "stopped before its end"
            worst, reason = status, why if status in ("missing", "unsupported") else f"{job}: {why}"
    if worst == "ok":
        rounds = settings.rounds_of(header.kind, header.settings.rounds or 1)
        if header.settings.budget:
            rounds = min(rounds, settings.FEWEST_IN_BUDGET)
        planned = {name: rounds if name == "timing" else 1 for name in header.settings.passes or ()}
        absent = [
            name if number == 1 else f"{number - done.get(name, 0)} of {number} {name} rounds"
            for name, number in planned.items()
            if done.get(name, 0) < number
        ]
        if not jobs or (absent and not (needless.issuperset(absent) and done.get("timing"))):
            return "interrupted", "stopped before: " + (", ".join(absent) or "its first pass")
    return worst, reason


def _peaks(lines: Sequence[schema.Memory]) -> Dict[str, Dict[str, Dict[str, float]]]:
    """Return the highest peak by scope, counter and batch."""
    highest: Dict[str, Dict[str, Dict[str, float]]] = {}
    for line in lines:
        by_counter = highest.setdefault(line.scope, {counter: {} for counter in COUNTERS})
        for counter in COUNTERS:
            peak_bytes = getattr(line, f"{counter}_bytes")
            if peak_bytes is not None:
                peaks, batch = by_counter[counter], str(line.batch)
                peaks[batch] = max(peaks.get(batch, 0.0), peak_bytes / text.MB)
    return highest


# Traces.


def _profiled(line: Optional[schema.Trace], folder: Path) -> windows.Profiled:
    """Return the numbers of the run's traces; none where all were left out of the folder, as those of results/ may
    be."""
    files = (
        [reader.perhaps_packed(folder / Path(name).name) for name in line.files] if line else reader.trace_files(folder)
    )
    if files and not any(map(os.path.lexists, files)):
        return windows.Profiled(notes=["its traces were left out of the folder"])
    # The record is only written when the loop has run all its steps.
    return windows.profiled(windows.read_windows(files), to_the_end=line is not None)
