"""The rows of --find-largest: the largest batch that fits, what it is limited by, and the throughput there.

Everything follows from the jobs of the run: each probe's status says whether a size fits, the samples of the
throughput pass how fast it is.  Nothing that could be worked out again is kept on disk.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from common.analysis import measured
from common.analysis.row import Row
from common.core import statistics
from common.core.text import gathered
from common.core.units import MB
from common.records import store
from common.records.schema import Environment, Fit, Header, JobLine, Line, MemoryLimit, Probe, Sample, Status, Totals
from common.records.search import OUTCOMES, TOO_LARGE, Jobs, answers, bounds, ends

LIMITS = {"oom": "memory", "timeout": "time"}
#: What a rate counts -> the field of a batch.
COUNTS = {"utterances": "N", "frames": "frames"}
#: Of the batch with the most padded cells, in "largest".
HEAVIEST = ("N", "T_max", "U_max", "frames", "padded_cells", "useful_cells")


def is_search(header: Header) -> bool:
    return bool(header.settings.get("find_largest"))


def relevant(records: Sequence[Line]) -> List[Line]:
    """The records without the throughput at sizes, or over utterances, that were given up: what the times of the row
    are to be from."""
    size, _ = bounds(answers(store.latest_jobs(records)))
    timed = [line for line in records if isinstance(line, Status) and line.pass_name == "throughput"]
    pool = next((line.pool for line in reversed(timed) if line.size == size), None)
    own = {line.job for line in timed if line.size == size and line.pool == pool}
    given_up = {line.job for line in timed} - own
    return [line for line in records if not (isinstance(line, JobLine) and line.job in given_up)]


def row(records: Sequence[Line], folder: Path) -> Row:
    """The row of a search, with "largest", whose keys are those below."""
    found = measured.row(relevant(records), folder)
    settings, jobs = found.header.settings, store.latest_jobs(records)
    limit = found.header.memory_limit or MemoryLimit()
    size, too_large = bounds(answers(jobs))
    own = _probe(jobs, size)
    totals = _totals(jobs)
    timed = _at(found.jobs, size, "throughput")
    found.status, found.reason = _status(jobs, timed, settings, size, too_large, totals)
    found.largest = {
        "of": settings["find_largest"],
        "scope": settings["scopes"][0],
        "size": size,
        "too_large": too_large,
        "at_least": size is not None and found.status in ("interrupted", "error"),
        "limited_by": _limited_by(jobs, settings, size, too_large, totals),
        "limit_bytes": own.limit_bytes or limit.bytes,
        "limit_kind": own.limit_kind,
        "limit_source": limit.source,
        "probes": len(ends(jobs, "probe")),
        "peak_mb": _peak_mb(jobs, size),
        **{key: getattr(own, key) for key in HEAVIEST},
        **_throughput(timed),
    }
    found.utterances_per_second = found.largest["utterances_per_second"]
    found.frames_per_second = found.largest["frames_per_second"]
    found.configuration.update(
        batch_size=None,
        max_frames=None,
        find_largest=settings["find_largest"],
        memory_limit=settings.get("memory_limit"),
        largest_cap=settings.get("largest_cap"),
    )
    if found.largest["limited_by"] == "time":
        found.notes.append(f"limited by --timeout, not by memory: {_reason(jobs, too_large)}")
    return found


def _totals(jobs: Jobs) -> Optional[Totals]:
    totals = (line.shape_file_totals for lines in jobs.values() for line in lines if isinstance(line, Environment))
    return next(filter(None, totals), None)


def _at(jobs: Jobs, size: Optional[int], pass_name: str) -> List[Sequence[JobLine]]:
    """The jobs of a pass at a size."""
    ended = [(lines, store.status_of(lines)) for lines in jobs.values()]
    return [lines for lines, end in ended if end and end.pass_name == pass_name and end.size == size]


def _reason(jobs: Jobs, size: Optional[int]) -> str:
    found = [end for name in ("throughput", "probe") for end in ends(jobs, name) if end.size == size]
    return next((end.reason or "" for end in found if end.status != "ok"), "")


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
    """ "memory", "time", "error", "all" (there are no more utterances), "cap" (--largest-cap), or None: not known."""
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
    """The first ``probe`` record of a size: of the batch with the most padded cells."""
    found = (line for lines in _at(jobs, size, "probe") for line in lines if isinstance(line, Probe))
    return next(found, Probe(job=""))


def _peak_mb(jobs: Jobs, size: Optional[int]) -> Optional[float]:
    lines = [line for lines in _at(jobs, size, "probe") for line in lines if isinstance(line, Fit)]
    peaks = [line.peak_bytes for line in lines if line.peak_bytes is not None]
    return max(peaks) / MB if peaks else None


def peaks_mb(row: Row) -> Dict[int, float]:
    """The most that a step took at each size that fitted."""
    fitted = sorted(size for size, fits in answers(row.jobs).items() if fits)
    peaks = {size: _peak_mb(row.jobs, size) for size in fitted}
    return {size: peak for size, peak in peaks.items() if peak}


def _throughput(timed: Sequence[Sequence[JobLine]]) -> Dict[str, Any]:
    """Rates of each round that ended well (utterances and frames of its batches over the sum of their medians), the
    rounds' median, their 95% interval, and what was timed: {utterances, frames} of all batches together, None
    where nothing was."""
    rates: Dict[str, Dict[str, float]] = {"utterances": {}, "frames": {}}
    over: Optional[Dict[str, int]] = None
    for lines in timed:
        end = store.status_of(lines)
        environments = [line for line in lines if isinstance(line, Environment)]
        batches = {batch.index: batch for line in environments for batch in line.batches or ()}
        samples = [line for line in lines if isinstance(line, Sample) and not line.warmup and line.batch in batches]
        times = gathered((sample.batch, sample.ranked_ns / 1e9) for sample in samples)
        if times and end and end.status == "ok":
            seconds = sum(statistics.median(values) for values in times.values())
            over = {what: sum(getattr(batches[index], key) or 0 for index in times) for what, key in COUNTS.items()}
            for what, count in over.items():
                rates[what][str(end.round)] = count / seconds
    return {
        **{f"{what}_per_second": statistics.median(list(of.values())) if of else None for what, of in rates.items()},
        **{f"{what}_per_second_interval": statistics.interval(list(of.values())) for what, of in rates.items()},
        "utterances_per_second_rounds": rates["utterances"],
        "timed_over": over,
    }
