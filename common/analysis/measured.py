"""One row from the records of one run: status, timing, memory, correctness, batches, configuration, notes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

from common.analysis import roofline
from common.analysis.parts import Sample
from common.analysis.row import COUNTERS, SCOPES, Row, batches_of, newest
from common.core import settings, statistics
from common.core.text import UNBOUNDED, count, gathered, gathered_twice
from common.core.units import MB
from common.records import schema, store
from common.records.schema import (
    FILE_NAME,
    AtSize,
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
BUSY_TRACE = "the profiled steps ran beside other load: they may be too long, also next to those without the profiler"


def row(records: Sequence[Line], folder: Path, file: str = FILE_NAME, traces: bool = True) -> Row:
    """The row of a run, of which `records` begin with the header.  traces: read them too."""
    header = records[0]
    assert isinstance(header, Header)
    jobs = store.latest_jobs(records)
    environment = newest(jobs, Environment) or Environment(job="")
    well = [line for lines in jobs.values() if _outcome(lines) == "ok" for line in lines]
    timed = [line for line in well if isinstance(line, schema.Sample)]
    samples = [line for line in timed if not line.warmup]
    peaks_mb = _peaks([line for line in well if isinstance(line, Memory)])
    correctness = newest(jobs, Correctness)
    trace = newest(jobs, Trace)
    traced = newest({trace.job: jobs[trace.job]}, Environment) if trace else None
    numbers = _profiled(trace, folder) if traces else Profiled()
    node_of = {job: line.node for job, lines in jobs.items() for line in lines if isinstance(line, Environment)}
    batches = batches_of([line for lines in jobs.values() for line in lines if isinstance(line, Environment)])
    at_size = correctness.at_size if correctness else None
    alike, limits = _of_one_device(samples, [line for line in records if isinstance(line, Limits)], node_of)
    least, remarks = roofline.of_run(limits, str(header.kind), batches, header.settings, alike, at_size)
    status, reason = _status(jobs, header, correctness, numbers)
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
        options={name: {"ours": one.ours, "default": one.default} for name, one in environment.options.items()},
        exact=header.kind == "exact",
        windows=numbers.windows,
        average_step_time_us=numbers.average_step_time_us,
        peak_memory_mb=numbers.peak_memory_mb,
        profiled_stages_us=numbers.label_us,
        profiler_inflation=_inflation(numbers, trace, traced, samples),
        **_times(samples, "step"),
        **_times(samples, "loss"),
        stages={scope: stages for scope in SCOPES if (stages := _stages(samples, scope))},
        **_rates(samples, batches),
        stopped=_stopped([line for line in well if isinstance(line, schema.Stop)]),
        round_medians_ms={scope: _round_medians(samples, scope, node_of) for scope in SCOPES},
        samples=len(samples),
        flagged_samples=flagged,
        loaded_samples=sum(sample.beside_load for sample in samples),
        others_cpu=_others_cpu(samples),
        loaded_rounds={scope: names for scope in SCOPES if (names := _loaded_rounds(samples, scope, node_of))},
        rounds=len({sample.round for sample in samples}),
        **_errors(correctness),
        memory={scope: _highest(of_scope) for scope, of_scope in peaks_mb.items()},
        **_cells(batches),
        **least,
        configuration=_configuration(header, environment),
        suffix=header.suffix,
        run_id=header.run_id,
        started=header.started,
        notes=[*notes, *remarks, *_about_errors(header, correctness), *_about_traces(numbers, trace)],
        header=header,
        environment=environment,
        jobs=jobs,
        timed=list(_in_order(timed)),
        peaks_mb=peaks_mb,
        file=file,
    )


def device_of(header: Header, environment: Environment) -> Optional[str]:
    """ "cpu" or "cuda"."""
    return environment.device or header.settings.get("device", "").split(":")[0] or None


def _outcome(lines: Sequence[JobLine]) -> Optional[str]:
    end = store.status_of(lines)
    return end.status if end else None


def _configuration(header: Header, environment: Environment) -> Dict[str, Any]:
    """The settings that make rows comparable; None where they are not known or do not apply."""
    device = device_of(header, environment)
    found = settings.in_rows(header.settings, device, header.kind)
    found["device"] = device
    found["device_name"] = environment.device_name
    found["cores"] = header.machine.cores if device == "cpu" else None
    for key in ("threads", "denormals", "allocator"):
        if key == "threads" or device == "cpu":
            found[key] = getattr(environment, key) or header.settings.get(key)
    found["shape_file_sha256"] = environment.shape_file_sha256
    return found


def _status(jobs: Jobs, header: Header, correctness: Optional[Correctness], numbers: Profiled) -> Tuple[str, str]:
    """The worst status of the jobs and its reason; else what else went wrong."""
    status, reason = _of_jobs(jobs, header.settings)
    if status == "ok" and correctness and correctness.ok is False:
        return "error", f"loss or gradient is further from the oracle than {correctness.tolerance}"
    if status == "ok" and numbers.error:
        return "error", numbers.error
    return status, reason


def _of_jobs(jobs: Jobs, settings: Mapping[str, Any]) -> Tuple[str, str]:
    """ "interrupted" too when planned jobs are not there."""
    worst, reason = "ok", ""
    done: Dict[str, int] = {}
    for job, lines in jobs.items():
        end = store.status_of(lines)
        status = "interrupted" if end is None else end.status if end.status in SEVERITY else "error"
        pass_name = (end and end.pass_name) or job
        done[pass_name] = done.get(pass_name, 0) + 1
        if SEVERITY.index(status) > SEVERITY.index(worst):
            said = (end.reason or "no reason was recorded") if end else "stopped before its end"
            worst, reason = status, said if status in ("missing", "unsupported") else f"{job}: {said}"
    if worst == "ok":
        planned = {name: settings.get("rounds", 1) if name == "timing" else 1 for name in settings.get("passes", ())}
        absent = [
            name if count == 1 else f"{count - done.get(name, 0)} of {count} {name} rounds"
            for name, count in planned.items()
            if done.get(name, 0) < count
        ]
        if absent or not jobs:
            return "interrupted", "stopped before: " + (", ".join(absent) or "its first pass")
    return worst, reason


# Times.


def _in_order(timed: Sequence[schema.Sample]) -> Iterator[Sample]:
    elapsed = 0.0
    for line in timed:
        elapsed += line.ranked_ns / 1e9
        if not line.warmup:
            place = line.scope, str(line.round), str(line.batch)
            yield Sample(*place, elapsed, line.ranked_ns / 1e6, bool(line.flags), line.foreign_cpu, line.beside_load)


def _times(samples: Sequence[schema.Sample], scope: str) -> Dict[str, Any]:
    mine = [sample for sample in samples if sample.scope == scope]
    times_of = ((sample.round, sample.batch, sample.ranked_ns / 1e6) for sample in mine)
    interval = statistics.interval_of_rounds(gathered_twice(times_of))

    def described(key: str) -> Optional[statistics.Summary]:
        times = ((sample.batch, getattr(sample, key)) for sample in mine)
        return statistics.describe(gathered((batch, time / 1e6) for batch, time in times if time is not None))

    events = described("total_event_ns")
    return {
        f"{scope}_ms": described("ranked_ns"),
        f"{scope}_ms_interval": list(interval) if interval else None,
        f"{scope}_event_ms": events,
        f"{scope}_wall_ms": described("total_wall_ns") if events else None,
        # On CUDA the host runs ahead of forward, so only the events know when it ended.
        f"{scope}_forward_ms": described("forward_wall_ns") or described("forward_event_ns"),
    }


def _stages(samples: Sequence[schema.Sample], scope: str) -> Dict[str, float]:
    """Milliseconds of each: the mean over batches of their medians."""
    stages = gathered_twice(
        (stage, sample.batch, duration / 1e6)
        for sample in samples
        if sample.scope == scope
        for stage, duration in (sample.stages or {}).items()
    )
    return {stage: summary.median for stage, batches in stages.items() if (summary := statistics.describe(batches))}


def _rates(samples: Sequence[schema.Sample], batches: Sequence[schema.Batch]) -> Dict[str, Any]:
    """Utterances and frames of the measured batches over the sum of the medians of their steps."""
    times = gathered((sample.batch, sample.ranked_ns / 1e9) for sample in samples if sample.scope == "step")
    known = [batch for batch in batches if batch.index in times]
    if not known:
        return {}
    seconds = sum(statistics.median(times[batch.index]) for batch in known)
    frames = [batch.frames for batch in known if batch.frames is not None]
    return {
        "utterances_per_second": sum(batch.N for batch in known) / seconds,
        "frames_per_second": sum(frames) / seconds if len(frames) == len(known) else None,
    }


def _stopped(ends: Sequence[schema.Stop]) -> Dict[str, Dict[str, int]]:
    found = gathered((one.scope, one.why) for one in ends)
    return {scope: {why: reasons.count(why) for why in dict.fromkeys(reasons)} for scope, reasons in found.items()}


def _of_one_device(
    samples: Sequence[schema.Sample], limits: Sequence[Limits], node_of: Mapping[str, Optional[str]]
) -> Tuple[List[schema.Sample], List[Limits]]:
    """Those of the device that has the most samples: its limits divide no other device's times."""
    count = Counter(node_of.get(sample.job) for sample in samples)
    if len(count) < 2 and not any(count):
        return list(samples), list(limits)
    node = max(count, key=lambda one: count[one])
    alike = [sample for sample in samples if node_of.get(sample.job) == node]
    return alike, [line for line in limits if line.node == node]


def _round_name(sample: schema.Sample, node_of: Mapping[str, Optional[str]]) -> str:
    """As text, as JSON keeps keys.  Of several devices a round is named with its own, so that it is paired with none of
    another device."""
    return " on ".join(filter(None, [str(sample.round), node_of.get(sample.job)]))


def _round_medians(
    samples: Sequence[schema.Sample], scope: str, node_of: Mapping[str, Optional[str]]
) -> Dict[str, Dict[str, float]]:
    """round -> batch -> median."""
    mine = (sample for sample in samples if sample.scope == scope)
    rounds = gathered_twice((_round_name(one, node_of), str(one.batch), one.ranked_ns / 1e6) for one in mine)
    return {
        name: {batch: statistics.median(times) for batch, times in batches.items()} for name, batches in rounds.items()
    }


# Load.


def _loaded_rounds(samples: Sequence[schema.Sample], scope: str, node_of: Mapping[str, Optional[str]]) -> List[str]:
    """Return the names of the rounds of a scope that ran beside other load for more than half of their time."""
    rounds = gathered((_round_name(sample, node_of), sample) for sample in samples if sample.scope == scope)
    return [name for name, of_round in rounds.items() if store.is_loaded(of_round)]


def _others_cpu(samples: Sequence[schema.Sample]) -> Optional[float]:
    """Return the share that others took of the CPUs, the mean over the time of the samples that know it."""
    known = [(sample.total_wall_ns, sample.foreign_cpu) for sample in samples if sample.foreign_cpu is not None]
    total = sum(time for time, _ in known)
    return sum(time * share for time, share in known) / total if total else None


# Batches, memory, errors.


def _cells(batches: Sequence[schema.Batch]) -> Dict[str, Any]:
    if not batches:
        return {}
    padded = sum(batch.padded_cells for batch in batches)
    useful = sum(batch.useful_cells for batch in batches)
    return {
        "measured_batches": len(batches),
        "padded_cells": padded,
        "useful_cells": useful,
        "useful_fraction": useful / padded,
    }


def _peaks(lines: Sequence[Memory]) -> Dict[str, Dict[str, Dict[str, float]]]:
    """scope -> counter -> batch -> the highest."""
    found: Dict[str, Dict[str, Dict[str, float]]] = {}
    for line in lines:
        of_scope = found.setdefault(line.scope, {counter: {} for counter in COUNTERS})
        for counter in COUNTERS:
            value = getattr(line, f"{counter}_bytes")
            if value is not None:
                batch = str(line.batch)
                of_scope[counter][batch] = max(of_scope[counter].get(batch, 0.0), value / MB)
    return found


def _highest(of_scope: Mapping[str, Mapping[str, float]]) -> Dict[str, Optional[float]]:
    return {f"{counter}_mb": max(peaks.values(), default=None) for counter, peaks in of_scope.items()}


def _errors(line: Optional[Correctness]) -> Dict[str, Any]:
    if line is None:
        return {}
    at_size = line.at_size and {
        key: getattr(line.at_size, key) for key in AtSize.__struct_fields__ if key not in ("ok", "imprecise")
    }
    return {
        "loss_error": line.loss_error,
        "grad_error": line.grad_error,
        "approximation_gap": line.approximation_gap,
        "at_size": at_size,
        "imprecise": line.at_size and line.at_size.imprecise,
        "approximation_gaps": _gaps(line),
        "gap_ranges": {kind: schema.as_written(found) for kind, found in line.gap_ranges.items()},
    }


def _gaps(line: Correctness) -> Dict[str, float]:
    return {kind: gap for kind, gap in (line.approximation_gaps or {}).items() if gap is not None}


def _about_errors(header: Header, line: Optional[Correctness]) -> List[str]:
    notes = []
    if line and line.at_size and line.at_size.imprecise:
        notes.append(f"imprecise: on a measured batch it is off by {line.at_size.imprecise:.1e}, by rounding alone")
    if line and line.differing:
        notes.append(
            f"not deterministic: a second step of the same inputs has other bits in {', '.join(line.differing)}"
        )
    if line and line.reached_by_padding:
        reached = ["loss" if name == "loss" else f"gradient of {name}" for name in line.reached_by_padding]
        notes.append(f"NaN in the padding reaches the {' and the '.join(reached)}: pad with finite numbers")
    if line and line.largest_score is not None and line.largest_score < UNBOUNDED:
        notes.append(f"by its method right for logits up to {line.largest_score:g} only; see conformance.py")
    if line and header.kind == "pruned":
        said = "approximate by design: its errors are those with the range widened to all of U"
        notes.append(said + _gaps_in_words(line))
    return notes


def _gaps_in_words(line: Correctness) -> str:
    """How far off an approximate loss is; results from before peaky logits know one gap, on random ones."""
    gaps = _gaps(line)
    if not gaps and line.approximation_gap is None:
        return ""
    said = "; as timed, its loss is {:.1e} off the exact one"
    if not gaps:
        return said.format(line.approximation_gap)
    words: List[str] = []
    for kind, gap in gaps.items():
        words.append(f"{abs(gap):.1e}" + (" off the exact one" if not words else ""))
        words[-1] += f" on {kind} {'ones' if len(words) > 1 else 'logits'}"
        found = line.gap_ranges.get(kind)
        if found:
            words[-1] += f" ({found.lowest:.1e} to {found.highest:.1e} over {count(found.utterances, 'utterance')})"
    return "; as timed, its loss is " + ", ".join(words)


# Traces.


def _profiled(line: Optional[Trace], folder: Path) -> Profiled:
    """The numbers of the run's traces.  A broken trace costs these, never the others."""
    files = [perhaps_packed(folder / Path(name).name) for name in line.files] if line else trace_files(folder)
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
    """Mean profiled step / mean unprofiled step, over the steps of the windows and the same batches."""
    if line is None or line.schedule is None or environment is None or not environment.batches or numbers.error:
        return None
    by_batch = gathered((sample.batch, sample.total_wall_ns / 1e3) for sample in samples if sample.scope == "step")
    with_profiler, without = [], []
    schedule = line.schedule
    lead = schedule.wait + schedule.warmup
    for window, durations in enumerate(numbers.step_us):
        for place, duration in enumerate(durations):
            step = window * (lead + schedule.active) + lead + place
            batch = environment.batches[step % len(environment.batches)].index
            if batch in by_batch:
                with_profiler.append(duration)
                without.append(statistics.mean(by_batch[batch]))
    return statistics.mean(with_profiler) / statistics.mean(without) if without else None
