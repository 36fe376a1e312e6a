"""One row from the records of one run: status, timing, memory, correctness, batches, configuration, notes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

from common import workloads
from common.results import floor, records, statistics
from common.results.profiled import MB, Profiled, profiled, read_windows, trace_files

Row = Dict[str, Any]
Record = Dict[str, Any]

#: From harmless to serious; the worst of the jobs is the row's status.
SEVERITY = ("ok", "interrupted", "missing", "unsupported", "oom", "timeout", "error")
_SETTINGS = (
    "dtype",
    "batch_size",
    "max_frames",
    "sort_utterance",
    "batches",
    "num_batches",
    "vocab_size",
    "encoder_dim",
    "seed",
    "scopes",
    "pruned_recipe",
    "prune_range",
)
BUSY_TRACE = "the profiled steps ran beside other load: they may be too long, also next to those without the profiler"
_MEMORY = ("device_allocated", "device_reserved", "torch_allocated", "process")


def fill(row: Row, found: List[Record], folder: Path) -> None:
    """Complete a fresh row.  KeyError, TypeError, ValueError or AttributeError when a record is not as
    records.py says."""
    header = records.run_header(found)
    settings = header.get("settings") or {}
    jobs = records.latest_jobs(found)
    environment = _last(jobs, "environment") or {}
    row.update(
        name=str(header["name"]),
        suffix=_text(header.get("suffix")),
        run_id=str(header.get("run_id")),
        kind=records.kind_of(header),
        exact=records.kind_of(header) == "exact",
        started=str(header.get("started") or ""),
        torch_version=_text(environment.get("torch")),
        implementation_version=_text(environment.get("implementation_version")),
        options=_options(environment),
        device=_device(settings, environment),
        device_name=_text(environment.get("device_name")),
        configuration=_configuration(header, settings, environment),
    )
    row["status"], row["reason"] = _status(jobs, settings)
    ended_well = {job: lines for job, lines in jobs.items() if _outcome(lines) == "ok"}
    samples = [
        line for lines in ended_well.values() for line in lines if line["record"] == "sample" and not line["warmup"]
    ]
    _timing(row, samples)
    _batches(row, environment)
    floor.fill(row, [line for line in found if line["record"] == "limits"], environment, settings, samples)
    _memory(row, [line for lines in ended_well.values() for line in lines if line["record"] == "memory"])
    _correctness(row, _last(jobs, "correctness"))
    numbers = _traces(row, _last(jobs, "trace"), folder)
    row["profiler_inflation"] = _inflation(numbers, jobs, samples)


def _text(value: Any) -> Optional[str]:
    return None if value is None else str(value)


def _options(environment: Record) -> Dict[str, Dict[str, Any]]:
    found = environment.get("options") or {}
    return {str(name): {"ours": values["ours"], "default": values["default"]} for name, values in found.items()}


def _device(settings: Record, environment: Record) -> Optional[str]:
    """ "cpu" or "cuda"."""
    return _text(environment.get("device")) or (settings.get("device") or "").split(":")[0] or None


def _outcome(lines: Sequence[Record]) -> Optional[str]:
    return lines[-1]["status"] if lines and lines[-1]["record"] == "status" else None


def _last(jobs: Dict[str, List[Record]], kind: str) -> Optional[Record]:
    return next(
        (line for lines in reversed(list(jobs.values())) for line in reversed(lines) if line["record"] == kind), None
    )


def _configuration(header: Record, settings: Record, environment: Record) -> Dict[str, Any]:
    """The settings that make rows comparable; None where they are not known or do not apply."""
    found = {key: settings.get(key) for key in _SETTINGS}
    if settings:
        found.update(workloads.comparable(settings))
    found["max_frames" if not settings.get("sort_utterance") else "batch_size"] = None
    if records.kind_of(header) != "pruned":
        found["pruned_recipe"] = found["prune_range"] = None
    found["device"] = _device(settings, environment)
    found["device_name"] = environment.get("device_name")
    about = header.get("machine") or {}
    found["cores"] = about.get("cores") if found["device"] == "cpu" else None
    found["threads"] = environment.get("threads") or settings.get("threads")
    found["denormals"] = environment.get("denormals") or settings.get("denormals")
    found["shape_file_sha256"] = environment.get("shape_file_sha256")
    return found


def _status(jobs: Dict[str, List[Record]], settings: Record) -> Tuple[str, str]:
    """The worst status of the jobs and its reason; "interrupted" too when planned jobs are not there."""
    worst, reason = "ok", ""
    done: Dict[str, int] = {}
    for job, lines in jobs.items():
        end = lines[-1]
        if end["record"] != "status":
            end = {"status": "interrupted", "reason": "stopped before its end", "pass": job}
        status = end["status"] if end["status"] in SEVERITY else "error"
        done[end.get("pass") or job] = done.get(end.get("pass") or job, 0) + 1
        if SEVERITY.index(status) > SEVERITY.index(worst):
            said = str(end.get("reason") or "no reason was recorded")
            worst, reason = status, said if status in ("missing", "unsupported") else f"{job}: {said}"
    if worst == "ok":
        planned = {
            name: settings.get("rounds") or 1 if name == "timing" else 1 for name in settings.get("passes") or ()
        }
        absent = [
            name if count == 1 else f"{count - done.get(name, 0)} of {count} {name} rounds"
            for name, count in planned.items()
            if done.get(name, 0) < count
        ]
        if absent or not jobs:
            return "interrupted", "stopped before: " + (", ".join(absent) or "its first pass")
    return worst, reason


def _timing(row: Row, samples: List[Record]) -> None:
    stages: Dict[str, Dict[str, List[float]]] = {}
    for scope in ("step", "loss"):
        mine = [sample for sample in samples if sample["scope"] == scope]
        by_round: Dict[Any, List[float]] = {}
        for sample in mine:
            by_round.setdefault(sample["round"], []).append(sample["total_wall_ns"] / 1e6)
            for stage, duration in (sample.get("stages") or {}).items():
                stages.setdefault(scope, {}).setdefault(str(stage), []).append(duration / 1e6)
        row["round_medians_ms"][scope] = _round_medians(mine)
        row[f"{scope}_ms"] = statistics.describe([value for values in by_round.values() for value in values])
        interval = statistics.interval_of_rounds(by_round)
        row[f"{scope}_ms_interval"] = list(interval) if interval else None
        row[f"{scope}_event_ms"] = statistics.describe(_milliseconds(mine, "total_event_ns"))
        # On CUDA the host runs ahead of forward, so only the events know when it ended.
        forward = _milliseconds(mine, "forward_wall_ns") or _milliseconds(mine, "forward_event_ns")
        row[f"{scope}_forward_ms"] = statistics.describe(forward)
    row["stages"] = {
        scope: {stage: statistics.median(values) for stage, values in parts.items()} for scope, parts in stages.items()
    }
    row["rounds"] = len({sample["round"] for sample in samples})
    row["samples"] = len(samples)
    row["flagged_samples"] = sum(bool(sample.get("flags")) for sample in samples)
    if row["flagged_samples"]:
        row["notes"].append(f"{row['flagged_samples']} of {row['samples']} samples ran beside other load")


def _round_medians(samples: List[Record]) -> Dict[str, Dict[str, float]]:
    """round -> batch -> median; text, as JSON keeps keys.  Times that no clock gave are left out."""
    found: Dict[str, Dict[str, List[float]]] = {}
    for sample in samples:
        if sample["total_wall_ns"] > 0:
            batches = found.setdefault(str(sample["round"]), {})
            batches.setdefault(str(sample["batch"]), []).append(sample["total_wall_ns"] / 1e6)
    return {
        name: {batch: statistics.median(times) for batch, times in batches.items()} for name, batches in found.items()
    }


def _milliseconds(samples: List[Record], key: str) -> List[float]:
    return [sample[key] / 1e6 for sample in samples if sample.get(key) is not None]


def _batches(row: Row, environment: Record) -> None:
    batches = environment.get("batches")
    if batches:
        row["measured_batches"] = len(batches)
        row["padded_cells"] = sum(batch["padded_cells"] for batch in batches)
        row["useful_cells"] = sum(batch["useful_cells"] for batch in batches)
        row["useful_fraction"] = row["useful_cells"] / row["padded_cells"] if row["padded_cells"] else None


def _memory(row: Row, lines: List[Record]) -> None:
    for line in lines:
        peaks = row["memory"].setdefault(str(line["scope"]), {f"{key}_mb": None for key in _MEMORY})
        for key in _MEMORY:
            value = line.get(f"{key}_bytes")
            if value is not None:
                peaks[f"{key}_mb"] = max(peaks[f"{key}_mb"] or 0.0, value / MB)


def _correctness(row: Row, line: Optional[Record]) -> None:
    if line is None:
        return
    for key in ("loss_error", "grad_error", "approximation_gap"):
        row[key] = float(line[key]) if line.get(key) is not None else None
    if line.get("at_size"):
        counts = {key: int(line["at_size"][key]) for key in ("batch", "N", "T_max", "U_max")}
        errors = {key: float(line["at_size"][key]) for key in ("loss_error", "grad_error", "grad_tolerance")}
        row["at_size"] = {**counts, **errors}
    gaps = line.get("approximation_gaps") or {}
    row["approximation_gaps"] = {str(kind): float(gap) for kind, gap in gaps.items() if gap is not None}
    if row["kind"] == "pruned":
        row["notes"].append(
            "approximate by design: its errors are those with the range widened to all of U" + _gaps_in_words(row)
        )
    if line.get("ok") is False and row["status"] == "ok":
        row["status"] = "error"
        row["reason"] = f"loss or gradient is further from the reference than {line.get('tolerance')}"


def _gaps_in_words(row: Row) -> str:
    """How far off an approximate loss is; results from before peaky logits know one gap, on random ones."""
    gaps = row["approximation_gaps"]
    if not gaps and row["approximation_gap"] is None:
        return ""
    said = "; as timed, its loss is {:.1e} off the exact one"
    if not gaps:
        return said.format(row["approximation_gap"])
    (kind, gap), *others = ((kind, abs(gap)) for kind, gap in gaps.items())
    return f"{said.format(gap)} on {kind} logits" + "".join(f", {gap:.1e} on {kind} ones" for kind, gap in others)


def _perhaps_packed(path: Path) -> Path:
    """The trace itself, or what gzip made of it since."""
    packed = path.with_name(f"{path.name}.gz")
    return packed if packed.exists() and not path.exists() else path


def _traces(row: Row, line: Optional[Record], folder: Path) -> Profiled:
    """Add the profiled numbers.  A broken trace costs these, never the others."""
    files = [_perhaps_packed(folder / Path(str(name)).name) for name in line["files"]] if line else trace_files(folder)
    # The record is only written when the loop has run all its steps.
    numbers = profiled(read_windows(files), to_the_end=line is not None)
    row.update(
        windows=numbers.windows,
        average_step_time_us=numbers.average_step_time_us,
        peak_memory_mb=numbers.peak_memory_mb,
        profiled_stages_us=numbers.label_us,
    )
    row["notes"] += numbers.notes + ([line["note"]] if line and line.get("note") else [])
    if line and line.get("flags"):
        row["notes"].append(BUSY_TRACE)
    if numbers.error and row["status"] == "ok":
        row["status"], row["reason"] = "error", numbers.error
    return numbers


def _inflation(numbers: Profiled, jobs: Dict[str, List[Record]], samples: List[Record]) -> Optional[float]:
    """Mean profiled step / mean unprofiled step, over the steps of the windows and the same batches."""
    lines = next((lines for lines in jobs.values() if any(line["record"] == "trace" for line in lines)), [])
    trace = next((line for line in lines if line["record"] == "trace"), {})
    batches = next((line["batches"] for line in lines if line["record"] == "environment"), None)
    schedule = trace.get("schedule")
    if not batches or not schedule or numbers.error:
        return None
    by_batch: Dict[Any, List[float]] = {}
    for sample in samples:
        if sample["scope"] == "step":
            by_batch.setdefault(sample["batch"], []).append(sample["total_wall_ns"] / 1e3)
    with_profiler, without = [], []
    lead = schedule["wait"] + schedule["warmup"]
    for window, durations in enumerate(numbers.step_us):
        for place, duration in enumerate(durations):
            step = window * (lead + schedule["active"]) + lead + place
            batch = batches[step % len(batches)]["index"]
            if batch in by_batch:
                with_profiler.append(duration)
                without.append(statistics.mean(by_batch[batch]))
    return statistics.mean(with_profiler) / statistics.mean(without) if without else None
