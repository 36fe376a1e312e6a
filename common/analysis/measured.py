"""Make a row from the records of one run: status, timing, memory, correctness, batches, configuration, notes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from common.analysis import roofline, times
from common.analysis.row import COUNTERS, SCOPES, Configuration, Row, batches_of, newest
from common.core import settings, statistics
from common.core.settings import FEWEST_ROUNDS
from common.core.text import UNBOUNDED, count, gathered
from common.core.units import MB
from common.records import schema, store
from common.records.schema import (
    FILE_NAME,
    Correctness,
    Environment,
    Header,
    JobLine,
    Limits,
    Line,
    Memory,
    Trace,
)
from common.traces.files import perhaps_packed, trace_files
from common.traces.windows import Profiled, profiled, read_windows

Jobs = Mapping[str, Sequence[JobLine]]

#: From harmless to serious; the worst of the jobs is the row's status.
SEVERITY = ("ok", "interrupted", "missing", "unsupported", "oom", "timeout", "error")
NO_TRACES = "stopped before its traces, which --resume writes"
BUSY_TRACE = "the profiled steps ran beside other load, so they may be too long"


def row(records: Sequence[Line], folder: Path, file: str = FILE_NAME, traces: bool = True) -> Row:
    """Return the row of a run.  records: the header first; traces: whether to read the run's traces too."""
    header = records[0]
    assert isinstance(header, Header)
    jobs = store.latest_jobs(records)
    environment = newest(jobs, Environment) or Environment(job="")
    well = [line for lines in jobs.values() if _outcome(lines) == "ok" for line in lines]
    timed = [line for line in well if isinstance(line, schema.Sample)]
    samples = [line for line in timed if not line.warmup]
    step, loss = (times.times(samples, scope) for scope in ("step", "loss"))
    peaks_mb = _peaks([line for line in well if isinstance(line, Memory)])
    correctness = newest(jobs, Correctness)
    checked = correctness or Correctness(job="")
    trace = newest(jobs, Trace)
    traced = newest({trace.job: jobs[trace.job]}, Environment) if trace else None
    numbers = _profiled(trace, folder) if traces else Profiled()
    node_of = {job: line.node for job, lines in jobs.items() for line in lines if isinstance(line, Environment)}
    batches = batches_of([line for lines in jobs.values() for line in lines if isinstance(line, Environment)])
    padded, useful = sum(batch.padded_cells for batch in batches), sum(batch.useful_cells for batch in batches)
    utterances_per_second, frames_per_second = times.rates(samples, batches)
    alike, limits = times.of_one_device(samples, [line for line in records if isinstance(line, Limits)], node_of)
    bound, remarks = roofline.of_run(limits, header.kind, batches, header.settings, alike, checked.at_size)
    lacks_traces = trace is None and "trace" in header.settings.get("passes", ())
    status, reason = _status(jobs, header, correctness, Profiled() if lacks_traces else numbers)
    flagged = sum(bool(sample.flags) for sample in samples)
    notes = [f"{flagged} of {len(samples)} samples ran beside other load"] if flagged else []
    return Row(
        name=header.name,
        log_dir=str(folder),
        status=status,
        reason=reason,
        device=device_of(header, environment),
        device_name=environment.device_name,
        torch_version=environment.torch,
        implementation_version=environment.implementation_version,
        kind=header.kind,
        options=environment.options,
        exact=header.kind == "exact",
        windows=numbers.windows,
        average_step_time_us=numbers.average_step_time_us,
        peak_memory_mb=numbers.peak_memory_mb,
        profiled_stages_us=numbers.label_us,
        profiler_inflation=_inflation(numbers, trace, traced, samples),
        step_ms=step.ms,
        loss_ms=loss.ms,
        step_ms_interval=step.interval,
        loss_ms_interval=loss.interval,
        step_event_ms=step.event,
        loss_event_ms=loss.event,
        step_wall_ms=step.wall,
        loss_wall_ms=loss.wall,
        step_forward_ms=step.forward,
        loss_forward_ms=loss.forward,
        stages={scope: stages for scope in SCOPES if (stages := times.stages(samples, scope))},
        utterances_per_second=utterances_per_second,
        frames_per_second=frames_per_second,
        stopped=times.stopped([line for line in well if isinstance(line, schema.Stop)]),
        round_medians_ms={scope: times.round_medians(samples, scope, node_of) for scope in SCOPES},
        samples=len(samples),
        flagged_samples=flagged,
        loaded_samples=sum(sample.beside_load for sample in samples),
        others_cpu=times.others_cpu(samples),
        loaded_rounds={scope: names for scope in SCOPES if (names := times.loaded_rounds(samples, scope, node_of))},
        rounds=len({sample.round for sample in samples}),
        loss_error=checked.loss_error,
        grad_error=checked.grad_error,
        at_size=checked.at_size,
        imprecise=checked.at_size.imprecise if checked.at_size else None,
        approximation_gap=checked.approximation_gap,
        approximation_gaps=_gaps(checked),
        gap_ranges=checked.gap_ranges,
        memory={scope: _highest(of_scope) for scope, of_scope in peaks_mb.items()},
        measured_batches=len(batches) if batches else None,
        padded_cells=padded if batches else None,
        useful_cells=useful if batches else None,
        useful_fraction=useful / padded if batches else None,
        bytes_per_second=bound.bytes_per_second,
        flops_per_second=bound.flops_per_second,
        exps_per_second=bound.exps_per_second,
        limit_ranges=bound.ranges,
        needed_share=bound.needed_share,
        floor=bound.floor,
        limit_percent=bound.percent,
        configuration=_configuration(header, environment),
        suffix=header.suffix,
        run_id=header.run_id,
        started=header.started,
        notes=[
            *notes,
            *remarks,
            *_about_errors(header, correctness),
            *_about_traces(numbers, trace),
            *([NO_TRACES] if lacks_traces and status == "ok" else []),
        ],
        header=header,
        environment=environment,
        jobs=jobs,
        timed=list(times.in_order(timed)),
        peaks_mb=peaks_mb,
        file=file,
    )


def device_of(header: Header, environment: Environment) -> Optional[str]:
    """Return "cpu" or "cuda"."""
    return environment.device or header.settings.get("device", "").split(":")[0] or None


def _outcome(lines: Sequence[JobLine]) -> Optional[str]:
    end = store.status_of(lines)
    return end.status if end else None


def _configuration(header: Header, environment: Environment) -> Configuration:
    """Return what makes rows comparable: settings, device, machine and shape file."""
    device = device_of(header, environment)
    known = settings.in_rows(header.settings, device, header.kind)
    known["device"] = device
    known["device_name"] = environment.device_name
    known["cores"] = header.machine.cores if device == "cpu" else None
    for key in ("threads", "denormals", "allocator"):
        if key == "threads" or device == "cpu":
            known[key] = getattr(environment, key) or header.settings.get(key)
    known["shape_file_sha256"] = environment.shape_file_sha256
    return known


def _status(jobs: Jobs, header: Header, correctness: Optional[Correctness], numbers: Profiled) -> Tuple[str, str]:
    """Return (status, reason): the worst status of the jobs, or, where all are ok, the mistake that the run shows
    otherwise."""
    status, reason = _of_jobs(jobs, header.settings, "@" in header.name)
    if status == "ok" and correctness and correctness.ok is False:
        return "error", f"loss or gradient is further from the oracle than {correctness.tolerance}"
    if status == "ok" and numbers.error:
        return "error", numbers.error
    return status, reason


def _of_jobs(jobs: Jobs, settings: Mapping[str, Any], is_control: bool) -> Tuple[str, str]:
    """Return the worst (status, reason) of the jobs; "interrupted" also where planned jobs are missing.

    is_control: whether the loss is there for its times.  A run that was stopped at its traces is whole: they come last,
    and no table needs them.  So is a control without its memory."""
    needless = {"trace", "memory"} if is_control else {"trace"}
    worst, reason = "ok", ""
    done: Dict[str, int] = {}
    first_round = settings.get("rounds", 1)
    for job, lines in jobs.items():
        end = store.status_of(lines)
        if end and end.pass_name == "timing":
            first_round = min(first_round, end.round or 1)
        status = "interrupted" if end is None else end.status if end.status in SEVERITY else "error"
        pass_name = (end and end.pass_name) or job
        if pass_name in needless and status == "interrupted":
            continue
        done[pass_name] = done.get(pass_name, 0) + 1
        if SEVERITY.index(status) > SEVERITY.index(worst):
            why = (end.reason or "no reason was recorded") if end else "stopped before its end"
            worst, reason = status, why if status in ("missing", "unsupported") else f"{job}: {why}"
    if worst == "ok":
        rounds = settings.get("rounds", 1)
        if done.get("timing"):  # a row that joined has no earlier ones
            rounds -= first_round - 1
        if settings.get("budget"):
            rounds = min(rounds, FEWEST_ROUNDS)
        planned = {name: rounds if name == "timing" else 1 for name in settings.get("passes", ())}
        absent = [
            name if count == 1 else f"{count - done.get(name, 0)} of {count} {name} rounds"
            for name, count in planned.items()
            if done.get(name, 0) < count
        ]
        if not jobs or (absent and not (needless.issuperset(absent) and done.get("timing"))):
            return "interrupted", "stopped before: " + (", ".join(absent) or "its first pass")
    return worst, reason


# Batches, memory, errors.


def _peaks(lines: Sequence[Memory]) -> Dict[str, Dict[str, Dict[str, float]]]:
    """Return the highest peak by scope, counter and batch."""
    highest: Dict[str, Dict[str, Dict[str, float]]] = {}
    for line in lines:
        of_scope = highest.setdefault(line.scope, {counter: {} for counter in COUNTERS})
        for counter in COUNTERS:
            value = getattr(line, f"{counter}_bytes")
            if value is not None:
                batch = str(line.batch)
                of_scope[counter][batch] = max(of_scope[counter].get(batch, 0.0), value / MB)
    return highest


def _highest(of_scope: Mapping[str, Mapping[str, float]]) -> Dict[str, Optional[float]]:
    return {f"{counter}_mb": max(peaks.values(), default=None) for counter, peaks in of_scope.items()}


def _gaps(line: Correctness) -> Dict[str, float]:
    return {kind: gap for kind, gap in (line.approximation_gaps or {}).items() if gap is not None}


def _about_errors(header: Header, line: Optional[Correctness]) -> List[str]:
    notes = []
    if line and line.at_size and line.at_size.imprecise:
        notes.append(f"imprecise: rounding alone puts it off by {line.at_size.imprecise:.1e} on a measured batch")
    if line and line.differing:
        notes.append(
            f"not deterministic: a second step on the same inputs gives other bits in {', '.join(line.differing)}"
        )
    if line and line.reached_by_padding:
        reached = ["loss" if name == "loss" else f"gradient of {name}" for name in line.reached_by_padding]
        notes.append(f"NaN in the padding reaches the {' and the '.join(reached)}: pad with finite numbers")
    if line and line.largest_score is not None and line.largest_score < UNBOUNDED:
        notes.append(f"its method is only right for logits up to {line.largest_score:g} (`rnnt-bench check` shows why)")
    if line and header.kind == "pruned":
        note = "approximate by design: its errors were measured with the range widened to all of U"
        notes.append(note + _gaps_in_words(line))
    return notes


def _gaps_in_words(line: Correctness) -> str:
    """Say how far off an approximate loss is; results from before peaky logits have one gap, on random logits."""
    gaps = _gaps(line)
    if not gaps and line.approximation_gap is None:
        return ""
    begin = "; as timed, its loss is {:.1e} off the exact one"
    if not gaps:
        return begin.format(line.approximation_gap)
    parts: List[str] = []
    for kind, gap in gaps.items():
        part = f"{abs(gap):.1e} on {kind} ones" if parts else f"{abs(gap):.1e} off the exact one on {kind} logits"
        ends = line.gap_ranges.get(kind)
        if ends:
            part += f" ({ends.lowest:.1e} to {ends.highest:.1e} over {count(ends.utterances, 'utterance')})"
        parts.append(part)
    return "; as timed, its loss is " + ", ".join(parts)


# Traces.


def _profiled(line: Optional[Trace], folder: Path) -> Profiled:
    """Return the numbers of the run's traces; none where all were left out of the folder, as those of results/ may be.
    A trace that is broken costs these numbers alone."""
    files = [perhaps_packed(folder / Path(name).name) for name in line.files] if line else trace_files(folder)
    if files and not any(map(os.path.lexists, files)):
        return Profiled(notes=["its traces were left out of the folder"])
    # The record is only written when the loop has run all its steps.
    return profiled(read_windows(files), to_the_end=line is not None)


def _about_traces(numbers: Profiled, line: Optional[Trace]) -> List[str]:
    notes = list(numbers.notes)
    if line and line.note:
        notes.append(line.note)
    if line and line.flags:
        notes.append(BUSY_TRACE)
    return notes


def _inflation(
    numbers: Profiled, line: Optional[Trace], environment: Optional[Environment], samples: Sequence[schema.Sample]
) -> Optional[float]:
    """Return the mean profiled step over the mean unprofiled step of the same batches."""
    if line is None or line.schedule is None or environment is None or not environment.batches or numbers.error:
        return None
    by_batch = gathered((sample.batch, sample.total_wall_ns / 1e3) for sample in samples if sample.scope == "step")
    with_profiler, without = [], []
    schedule = line.schedule
    lead = schedule.wait + schedule.warmup
    for window, durations in enumerate(numbers.step_us):
        for index, duration in enumerate(durations):
            step = window * (lead + schedule.active) + lead + index
            batch = environment.batches[step % len(environment.batches)].index
            if batch in by_batch:
                with_profiler.append(duration)
                without.append(statistics.mean(by_batch[batch]))
    return statistics.mean(with_profiler) / statistics.mean(without) if without else None
