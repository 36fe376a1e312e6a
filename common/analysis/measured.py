"""Make a row from the records of one run: its status, its numbers, its configuration."""

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

Jobs = Mapping[str, Sequence[schema.JobLine]]  # name of a job -> records of its last attempt

#: From harmless to serious; the worst of the jobs is the row's status.
SEVERITY = ("ok", "interrupted", "missing", "unsupported", "oom", "timeout", "error")


def row_of(records: Sequence[schema.Line], folder: Path, traces: bool = True) -> Row:
    """Return the row of a run.

    Args:
        records: the records of the run, the header first
        folder: the folder that holds the records, and the traces if there are any
        traces: whether to read the traces too
    """
    header = records[0]
    assert isinstance(header, schema.Header)
    jobs = store.latest_jobs(records)
    row = Row(name=header.name, folder=folder, kind=header.kind, header=header, jobs=jobs)
    row.environment = row.newest(schema.Environment) or row.environment
    row.checked = row.newest(schema.Correctness) or row.checked
    if traces:
        row.profile = _profiled(row.newest(schema.Trace), folder)
    row.status, row.reason = _status(row)
    row.timed = [line for line in row.lines_of(schema.Sample) if not line.warmup]
    row.step = times.summarize(row.timed, "step")
    row.loss_alone = times.summarize(row.timed, "loss")
    rates = times.rates(row.samples_of("step"), row.batches)
    row.utterances_per_second, row.frames_per_second = rates
    row.others_cpu = times.others_cpu(row.timed)
    row.repeated = store.repeated(records)
    row.peaks_mb = _peaks(row.lines_of(schema.Memory))
    row.limits = [line for line in records if isinstance(line, schema.Limits)]
    # Records without streams are of products on one thread. They serve only to tell whether torch's
    # products are slow.
    with_all_threads = [line for line in row.limits if line.streams]
    row.rates = times.device_rates(with_all_threads, row.environment.mkl_as_intel)
    row.limit_percent = times.limit_percent(
        row.rates, header.kind, row.batches, header.settings, row.timed, row.checked.at_size
    )
    row.configuration = _configuration(row)
    return row


def _configuration(row: Row) -> Configuration:
    """Return what a row was measured with: settings, device, machine, environment, shape file."""
    header, environment = row.header, row.environment
    result = settings.in_rows(schema.as_written(header.settings), row.device, header.kind)
    on_cpu = row.device == "cpu"
    result["device"] = row.device
    result["device_name"] = row.device_name
    result["processor"] = (machines.processor(header.machine) or None) if on_cpu else None
    result["cores"] = header.machine.cores if on_cpu else None
    # On CUDA the other two have no effect, and stay None.
    for key in ("threads", "denormals", "allocator") if on_cpu else ("threads",):
        # What the job found, or else what it was asked for.
        result[key] = getattr(environment, key) or getattr(header.settings, key)
    result["shape_file_sha256"] = environment.shape_file_sha256
    return result


def _status(row: Row) -> tuple[str, str]:
    """Return (status, reason) of a row: those of its jobs. If all jobs are ok, the status is still
    "error" if the loss or its gradient was wrong, or if a trace cannot be read."""
    status, reason = _status_of_jobs(row.jobs, row.header)
    if status != "ok":
        return status, reason
    if not _is_right(row.checked):
        return "error", "loss or gradient is further from the oracle than its record allowed"
    # A run that was stopped before the end of its trace pass is whole without traces. So it is no
    # error if the traces that it left cannot be read.
    is_untraced = row.newest(schema.Trace) is None and "trace" in (row.header.settings.passes or ())
    if row.profile.error and not is_untraced:
        return "error", row.profile.error
    return "ok", ""


def _is_right(line: schema.Correctness) -> bool:
    """Tell whether a loss was not judged wrong, and each recorded error is within the tolerance
    that is recorded beside it."""
    judged = [
        (line.loss_error, line.loss_tolerance),
        (line.grad_error, line.grad_tolerance),
        (line.slope_error, line.slope_tolerance),
    ]
    if line.at_size:
        judged.append((line.at_size.loss_error, line.at_size.loss_tolerance))
        judged.append((line.at_size.grad_error, line.at_size.grad_tolerance))
    # `ok` is None where nothing was judged.  A record may lack an error or its tolerance, and an
    # error of 0 is within any tolerance.
    return line.ok is not False and all(
        error <= allowed for error, allowed in judged if error and allowed
    )


def _status_of_jobs(jobs: Jobs, header: schema.Header) -> tuple[str, str]:
    """Return (status, reason) of the worst job. If all are ok, but planned ones are missing, the
    status is "interrupted".

    A run that was timed may lack its traces, which no table needs. A control is there for its times
    alone, so it may lack its memory too."""
    is_control = "@" in header.name  # a loss that runs again under a condition: "name@condition"
    dispensable = {"trace", "memory"} if is_control else {"trace"}
    stopped = schema.Status(status="interrupted", reason="stopped before its end")
    worst, worst_reason = "ok", ""
    done: Counter[str] = Counter()
    for job, lines in jobs.items():
        end = store.status_of(lines) or stopped
        pass_name = end.pass_name or job
        if end.status == "interrupted" and pass_name in dispensable:
            continue
        done[pass_name] += 1
        status = end.status if end.status in SEVERITY else "error"
        if SEVERITY.index(status) > SEVERITY.index(worst):
            reason = end.reason or status
            worst = status
            worst_reason = reason if status in ("missing", "unsupported") else f"{job}: {reason}"
    if worst != "ok":
        return worst, worst_reason
    absent = _absent_passes(header, done)
    may_be_absent = dispensable if done["timing"] else set()
    if not jobs or absent.keys() - may_be_absent:
        return "interrupted", "stopped before: " + (", ".join(absent.values()) or "its first pass")
    return "ok", ""


def _absent_passes(header: schema.Header, done: Mapping[str, int]) -> dict[str, str]:
    """Return {name: what is missing} of the passes with fewer jobs than planned, such as {"timing":
    "2 of 5 timing rounds", "memory": "memory"}: of a pass with one job its name.

    done: pass -> number of its jobs that ended, a Counter: 0 for a pass without any
    """
    rounds = settings.rounds_of(header.kind, header.settings.rounds or 1)
    if header.settings.budget:  # --budget may end the timing after this many rounds
        rounds = min(rounds, settings.FEWEST_IN_BUDGET)
    absent = {}
    for name in header.settings.passes or ():
        planned = rounds if name == "timing" else 1
        if done[name] >= planned:
            continue
        absent[name] = name
        if planned > 1:
            absent[name] = f"{planned - done[name]} of {planned} {name} rounds"
    return absent


def _peaks(lines: Sequence[schema.Memory]) -> dict[str, dict[str, dict[str, float]]]:
    """Return scope -> counter -> batch -> highest peak in MB; each scope has all COUNTERS."""
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
    """Return the numbers of a run's traces. If all of their files are missing from the folder, as
    in results/, return a note and no numbers.

    line: the record of the trace pass; None where the pass did not end or the record is not known
    """
    if line:
        # The record names .json files, which may have been packed as .gz since.
        files = [reader.perhaps_packed(folder / Path(name).name) for name in line.files]
    else:
        files = reader.trace_files(folder)
    # A broken link is not missing: reading it tells that it is broken.
    if files and not any(map(os.path.lexists, files)):
        return windows.Profiled(notes=["its traces were left out of the folder"])
    # The record is only written when the loop has run all its steps.
    return windows.profiled(windows.read_windows(files), to_the_end=line is not None)
