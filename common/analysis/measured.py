"""Make a row from the records of one run: status, numbers, configuration."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from rnnt_bench.analysis import machines, times
from rnnt_bench.analysis.row import COUNTERS, Configuration, Row
from rnnt_bench.core import settings, text
from rnnt_bench.records import schema, store
from rnnt_bench.traces import reader, windows

Jobs = Mapping[str, Sequence[schema.JobLine]]

#: From harmless to serious; the worst of the jobs is the row's status.
SEVERITY = ("ok", "interrupted", "missing", "unsupported", "oom", "timeout", "error")


def row(records: Sequence[schema.Line], folder: Path, traces: bool = True) -> Row:
    """Return the row of a run. records: the header first."""
    header = records[0]
    assert isinstance(header, schema.Header)
    jobs = store.latest_jobs(records)
    made = Row(name=header.name, folder=folder, kind=header.kind, header=header, jobs=jobs)
    made.environment = made.newest(schema.Environment) or made.environment
    made.checked = made.newest(schema.Correctness) or made.checked
    if traces:
        made.profile = _profiled(made.newest(schema.Trace), folder)
    made.status, made.reason = _status(made)
    made.timed = samples = [line for line in made.lines_of(schema.Sample) if not line.warmup]
    made.step = times.summarize(samples, "step")
    made.loss_alone = times.summarize(samples, "loss")
    steps = [sample for sample in samples if sample.scope == "step"]
    made.utterances_per_second, made.frames_per_second = times.rates(steps, made.batches)
    made.others_cpu = times.others_cpu(samples)
    made.repeated = store.repeated(records)
    made.peaks_mb = _peaks(made.lines_of(schema.Memory))
    made.limits = [line for line in records if isinstance(line, schema.Limits)]
    with_all_threads = [line for line in made.limits if line.streams]
    made.rates = times.device_rates(with_all_threads, made.environment.mkl_as_intel)
    made.limit_percent = times.limit_percent(
        made.rates, header.kind, made.batches, header.settings, samples, made.checked.at_size
    )
    made.configuration = _configuration(made)
    return made


def _configuration(row: Row) -> Configuration:
    """Return what a row measured: its settings, and what else its numbers depend on."""
    header, environment = row.header, row.environment
    result = settings.in_rows(schema.as_written(header.settings), row.device, header.kind)
    on_cpu = row.device == "cpu"
    result["device"] = row.device
    result["device_name"] = row.device_name
    result["processor"] = (machines.processor(header.machine) or None) if on_cpu else None
    result["cores"] = header.machine.cores if on_cpu else None
    for key in ("threads", "denormals", "allocator") if on_cpu else ("threads",):
        result[key] = getattr(environment, key) or getattr(header.settings, key)
    result["shape_file_sha256"] = environment.shape_file_sha256
    return result


def _status(row: Row) -> tuple[str, str]:
    """Return the (status, reason) of the jobs, or else an error that the records show."""
    status, reason = _of_jobs(row.jobs, row.header)
    if status != "ok":
        return status, reason
    if not _is_right(row.checked):
        return "error", "loss or gradient is further from the oracle than its record allowed"
    is_untraced = row.newest(schema.Trace) is None and "trace" in (row.header.settings.passes or ())
    if row.profile.error and not is_untraced:
        return "error", row.profile.error
    return "ok", ""


def _is_right(line: schema.Correctness) -> bool:
    """Return whether a loss was judged right, and each error is within what its record says was
    allowed."""
    judged = [
        (line.loss_error, line.loss_tolerance),
        (line.grad_error, line.grad_tolerance),
        (line.slope_error, line.slope_tolerance),
    ]
    if line.at_size:
        judged.append((line.at_size.loss_error, line.at_size.loss_tolerance))
        judged.append((line.at_size.grad_error, line.at_size.grad_tolerance))
    return line.ok is not False and all(
        error <= allowed for error, allowed in judged if error and allowed
    )


def _of_jobs(jobs: Jobs, header: schema.Header) -> tuple[str, str]:
    """Return the worst (status, reason) of the jobs; "interrupted" also where planned jobs are
    missing. A run that was stopped at its traces is whole, since no table needs them; so is a
    control, which is there for its times, without its memory."""
    needless = {"trace", "memory"} if "@" in header.name else {"trace"}
    stopped = schema.Status(status="interrupted", reason="stopped before its end")
    worst, worst_reason = "ok", ""
    done: Counter[str] = Counter()
    for job, lines in jobs.items():
        end = store.status_of(lines) or stopped
        status = end.status if end.status in SEVERITY else "error"
        pass_name = end.pass_name or job
        if pass_name in needless and status == "interrupted":
            continue
        done[pass_name] += 1
        if SEVERITY.index(status) > SEVERITY.index(worst):
            reason = end.reason or status
            worst = status
            worst_reason = reason if status in ("missing", "unsupported") else f"{job}: {reason}"
    if worst != "ok":
        return worst, worst_reason
    rounds = settings.rounds_of(header.kind, header.settings.rounds or 1)
    if header.settings.budget:
        rounds = min(rounds, settings.FEWEST_IN_BUDGET)
    absent = {}  # pass -> in words
    for name in header.settings.passes or ():
        planned = rounds if name == "timing" else 1
        if done[name] < planned:
            absent[name] = (
                name if planned == 1 else f"{planned - done[name]} of {planned} {name} rounds"
            )
    if not jobs or (absent and not (needless.issuperset(absent) and done["timing"])):
        return "interrupted", "stopped before: " + (", ".join(absent.values()) or "its first pass")
    return "ok", ""


def _peaks(lines: Sequence[schema.Memory]) -> dict[str, dict[str, dict[str, float]]]:
    """Return the highest peak by scope, counter and batch."""
    highest: dict[str, dict[str, dict[str, float]]] = {}
    for line in lines:
        by_counter = highest.setdefault(line.scope, {counter: {} for counter in COUNTERS})
        batch = str(line.batch)
        for counter, peaks in by_counter.items():
            peak_bytes = getattr(line, f"{counter}_bytes")
            if peak_bytes is not None:
                peaks[batch] = max(peaks.get(batch, 0.0), peak_bytes / text.MB)
    return highest


# Traces.


def _profiled(line: schema.Trace | None, folder: Path) -> windows.Profiled:
    """Return the numbers of the run's traces; none where all were left out of the folder, as those
    of results/ may be."""
    if line:
        files = [reader.perhaps_packed(folder / Path(name).name) for name in line.files]
    else:
        files = reader.trace_files(folder)
    if files and not any(map(os.path.lexists, files)):
        return windows.Profiled(notes=["its traces were left out of the folder"])
    # The record is only written when the loop has run all its steps.
    return windows.profiled(windows.read_windows(files), to_the_end=line is not None)
