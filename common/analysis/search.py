"""Make rows of --find-largest: the largest batch that fits, what limits it, and the throughput there.

Everything follows from the jobs of the run: the status of each probe says whether a size fits, the samples of the
throughput pass how fast it is.  Nothing that can be derived is kept on disk.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from common.analysis import measured
from common.analysis.parts import Largest
from common.analysis.row import Row, batches_of
from common.core import statistics
from common.core.text import gathered
from common.core.units import MB
from common.records import store
from common.records.schema import Environment, Fit, Header, JobLine, Line, MemoryLimit, Probe, Sample, Status, Totals
from common.records.search import OUTCOMES, TOO_LARGE, Jobs, answers, bounds, ends

LIMITS = {"oom": "memory", "timeout": "time"}


def is_search(header: Header) -> bool:
    return bool(header.settings.get("find_largest"))


def relevant(records: Sequence[Line]) -> List[Line]:
    """Return the records behind the row's times: without throughput at sizes, or over utterances, that the search gave
    up."""
    size, _ = bounds(answers(store.latest_jobs(records)))
    timed = [line for line in records if isinstance(line, Status) and line.pass_name == "throughput"]
    pool = next((line.pool for line in reversed(timed) if line.size == size), None)
    kept = {line.job for line in timed if line.size == size and line.pool == pool}
    given_up = {line.job for line in timed} - kept
    return [line for line in records if not (isinstance(line, JobLine) and line.job in given_up)]


def row(records: Sequence[Line], folder: Path) -> Row:
    """Return the row of a search."""
    result = measured.row(relevant(records), folder)
    settings, jobs = result.header.settings, store.latest_jobs(records)
    limit = result.header.memory_limit or MemoryLimit()
    size, too_large = bounds(answers(jobs))
    heaviest = _probe(jobs, size)
    totals = _totals(jobs)
    timed = _at(result.jobs, size, "throughput")
    result.status, result.reason = _status(jobs, timed, settings, size, too_large, totals)
    utterances, frames, timed_over = _throughput(timed)
    result.utterances_per_second, result.frames_per_second = utterances.median, frames.median
    result.largest = Largest(
        of=settings["find_largest"],
        scope=settings["scopes"][0],
        size=size,
        too_large=too_large,
        at_least=size is not None and result.status in ("interrupted", "error"),
        limited_by=_limited_by(jobs, settings, size, too_large, totals),
        limit_bytes=heaviest.limit_bytes or limit.bytes,
        limit_kind=heaviest.limit_kind,
        limit_source=limit.source,
        probes=len(ends(jobs, "probe")),
        peak_mb=_peak_mb(jobs, size),
        N=heaviest.N,
        T_max=heaviest.T_max,
        U_max=heaviest.U_max,
        frames=heaviest.frames,
        padded_cells=heaviest.padded_cells,
        useful_cells=heaviest.useful_cells,
        utterances_per_second=utterances.median,
        frames_per_second=frames.median,
        utterances_per_second_interval=utterances.interval,
        frames_per_second_interval=frames.interval,
        utterances_per_second_rounds=utterances.rounds,
        timed_over=timed_over,
    )
    result.configuration.update(
        batch_size=None,
        max_frames=None,
        find_largest=settings["find_largest"],
        memory_limit=settings.get("memory_limit"),
        largest_cap=settings.get("largest_cap"),
    )
    if result.largest.limited_by == "time":
        result.notes.append(f"limited by --timeout, not by memory: {_reason(jobs, too_large)}")
    return result


def _totals(jobs: Jobs) -> Optional[Totals]:
    totals = (line.shape_file_totals for lines in jobs.values() for line in lines if isinstance(line, Environment))
    return next(filter(None, totals), None)


def _at(jobs: Jobs, size: Optional[int], pass_name: str) -> List[Sequence[JobLine]]:
    """Return the jobs of a pass at a size."""
    ended = [(lines, store.status_of(lines)) for lines in jobs.values()]
    return [lines for lines, end in ended if end and end.pass_name == pass_name and end.size == size]


def _reason(jobs: Jobs, size: Optional[int]) -> str:
    every = [end for name in ("throughput", "probe") for end in ends(jobs, name) if end.size == size]
    return next((end.reason or "" for end in every if end.status != "ok"), "")


def _status(
    jobs: Jobs,
    timed: Sequence[Sequence[JobLine]],
    settings: Mapping[str, Any],
    size: Optional[int],
    too_large: Optional[int],
    totals: Optional[Totals],
) -> Tuple[str, str]:
    what = settings["find_largest"]
    smallest = totals.T_max if totals and settings["sort_utterance"] else 1
    probes, rounds = ends(jobs, "probe"), [end for lines in timed if (end := store.status_of(lines))]
    for end in ends(jobs, "correctness"):
        if end.status != "ok":
            return end.status, str(end.reason)
    for end in (*probes, *rounds):
        if end.status not in (*OUTCOMES, "interrupted"):
            return "error", f"{what} {end.size}: {end.reason}"
    if size is None and too_large is not None and too_large <= smallest:
        status = next((end.status for end in probes if end.size == too_large and end.status in TOO_LARGE), "oom")
        return status, f"not even {what} {too_large} fits: {_reason(jobs, too_large)}"
    if size is None or sum(end.status == "ok" for end in rounds) < settings["rounds"]:
        return "interrupted", "stopped before the largest was found and timed; --resume goes on"
    return "ok", ""


def _limited_by(
    jobs: Jobs, settings: Mapping[str, Any], size: Optional[int], too_large: Optional[int], totals: Optional[Totals]
) -> Optional[str]:
    """Return what limits the size: "memory", "time", "error", "all" (no more utterances), "cap" (--largest-cap), or
    None where it is not known."""
    if any(end.status not in (*OUTCOMES, "interrupted") for end in ends(jobs, "probe")):
        return "error"
    if too_large is not None:
        at = [end for name in ("probe", "throughput") for end in ends(jobs, name) if end.size == too_large]
        return next((LIMITS[end.status] for end in at if end.status in LIMITS), None)
    if size is None or not totals:
        return None
    if size >= (totals.frames if settings["sort_utterance"] else totals.utterances):
        return "all"
    return "cap" if size == settings.get("largest_cap") else None


def _probe(jobs: Jobs, size: Optional[int]) -> Probe:
    """Return the first ``probe`` record of a size, that of the batch with the most padded cells."""
    probes = (line for lines in _at(jobs, size, "probe") for line in lines if isinstance(line, Probe))
    return next(probes, Probe(job=""))


def _peak_mb(jobs: Jobs, size: Optional[int]) -> Optional[float]:
    lines = [line for lines in _at(jobs, size, "probe") for line in lines if isinstance(line, Fit)]
    peaks = [line.peak_bytes for line in lines if line.peak_bytes is not None]
    return max(peaks) / MB if peaks else None


def peaks_mb(row: Row) -> Dict[int, float]:
    """Return the highest peak of a step in MB at each size that fitted."""
    fitted = sorted(size for size, fits in answers(row.jobs).items() if fits)
    peaks = {size: _peak_mb(row.jobs, size) for size in fitted}
    return {size: peak for size, peak in peaks.items() if peak}


class Rates(NamedTuple):
    """Hold an amount per second: of each round, with the median over rounds and its 95% interval."""

    rounds: Dict[str, float]

    @property
    def median(self) -> Optional[float]:
        return statistics.median(list(self.rounds.values())) if self.rounds else None

    @property
    def interval(self) -> Optional[Tuple[float, float]]:
        return statistics.interval(list(self.rounds.values()))


def _throughput(timed: Sequence[Sequence[JobLine]]) -> Tuple[Rates, Rates, Optional[Dict[str, int]]]:
    """Return (rates of utterances, rates of frames, {utterances, frames} of all timed batches or None).

    The rate of a round that ended well is the content of its batches over the sum of their medians.
    """
    rates: Dict[str, Dict[str, float]] = {"utterances": {}, "frames": {}}
    counts: Optional[Dict[str, int]] = None
    for lines in timed:
        end = store.status_of(lines)
        environments = [line for line in lines if isinstance(line, Environment)]
        batches = {batch.index: batch for batch in batches_of(environments)}
        samples = [line for line in lines if isinstance(line, Sample) and not line.warmup and line.batch in batches]
        times = gathered((sample.batch, sample.ranked_ns / 1e9) for sample in samples)
        if times and end and end.status == "ok":
            seconds = sum(statistics.median(values) for values in times.values())
            measured_batches = [batches[index] for index in times]
            counts = {
                "utterances": sum(batch.N for batch in measured_batches),
                "frames": sum(batch.frames or 0 for batch in measured_batches),
            }
            for key, count in counts.items():
                rates[key][str(end.round)] = count / seconds
    return Rates(rates["utterances"]), Rates(rates["frames"]), counts
