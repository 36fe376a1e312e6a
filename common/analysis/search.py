"""The rows of --find-largest: the largest batch that fits, what it is limited by, and the throughput there.

Everything follows from the jobs of the run: each probe's status says whether a size fits, the samples of the
throughput pass how fast it is.  Nothing that could be worked out again is kept on disk.
"""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from common.results import records, statistics
from common.results.profiled import MB
from common.results.records import Record

Jobs = Mapping[str, List[Record]]

#: Does a size fit, by the status of its probe?  Any other status is no answer.
OUTCOMES = {"ok": True, "oom": False, "timeout": False}
TOO_LARGE = ("oom", "timeout")
LIMITS = {"oom": "memory", "timeout": "time"}
#: What a rate counts -> the key of a batch.
COUNTS = {"utterances": "N", "frames": "frames"}


def is_search(header: Record) -> bool:
    settings = header.get("settings")
    return isinstance(settings, dict) and bool(settings.get("find_largest"))


def _ends(jobs: Jobs, pass_name: str) -> List[Record]:
    """Status records of the jobs of a pass."""
    ends = [lines[-1] for lines in jobs.values() if lines[-1]["record"] == "status"]
    return [end for end in ends if end["pass"] == pass_name]


def answers(jobs: Jobs) -> Dict[int, bool]:
    """Does a size fit?  A size at which the throughput pass ran out of memory or time does not."""
    found = {end["size"]: OUTCOMES[end["status"]] for end in _ends(jobs, "probe") if end["status"] in OUTCOMES}
    found.update({end["size"]: False for end in _ends(jobs, "throughput") if end["status"] in TOO_LARGE})
    return found


def bounds(known: Mapping[int, bool]) -> Tuple[Optional[int], Optional[int]]:
    """(largest size that fits and is below every one that does not, smallest that does not), None where there is
    none."""
    fails = min((size for size, fits in known.items() if not fits), default=None)
    fits = max((size for size, fits in known.items() if fits and (fails is None or size < fails)), default=None)
    return fits, fails


def relevant(found: List[Record]) -> List[Record]:
    """The records without the throughput at sizes, or over utterances, that were given up: what the times of the row
    are to be from."""
    size, _ = bounds(answers(records.latest_jobs(found)))
    timed = [line for line in found if line["record"] == "status" and line["pass"] == "throughput"]
    pool = next((line.get("pool") for line in reversed(timed) if line["size"] == size), None)
    own = {line["job"] for line in timed if line["size"] == size and line.get("pool") == pool}
    given_up = {line["job"] for line in timed} - own
    return [line for line in found if line.get("job") not in given_up]


def fill(row: Dict[str, Any], found: List[Record]) -> None:
    """Turn the row that measured.py made of the `relevant` records into that of a search: its status, and "largest",
    whose keys are those below.  found: all records."""
    header, jobs = records.run_header(found), records.latest_jobs(found)
    settings, limit = header["settings"], header.get("memory_limit") or {}
    size, too_large = bounds(answers(jobs))
    own = _probe(jobs, size)
    totals = next((line["shape_file_totals"] for lines in jobs.values() for line in lines if _has_totals(line)), {})
    timed = _at(records.latest_jobs(relevant(found)), size, "throughput")
    row["status"], row["reason"] = _status(jobs, timed, settings, size, too_large, totals)
    row["largest"] = {
        "of": settings["find_largest"],
        "scope": settings["scopes"][0],
        "size": size,
        "too_large": too_large,
        "at_least": size is not None and row["status"] in ("interrupted", "error"),
        "limited_by": _limited_by(jobs, settings, size, too_large, totals),
        "limit_bytes": own.get("limit_bytes") or limit.get("bytes"),
        "limit_kind": own.get("limit_kind"),
        "limit_source": limit.get("source"),
        "probes": len(_ends(jobs, "probe")),
        "peak_mb": _peak_mb(jobs, size),
        **{key: own.get(key) for key in ("N", "T_max", "U_max", "frames", "padded_cells", "useful_cells")},
        **_throughput(timed),
    }
    row["configuration"].update(
        batch_size=None,
        max_frames=None,
        find_largest=settings["find_largest"],
        memory_limit=settings.get("memory_limit"),
        largest_cap=settings.get("largest_cap"),
    )
    if row["largest"]["limited_by"] == "time":
        row["notes"].append(f"limited by --timeout, not by memory: {_reason(jobs, too_large)}")


def _has_totals(line: Record) -> bool:
    return line["record"] == "environment" and "shape_file_totals" in line


def _at(jobs: Jobs, size: Optional[int], pass_name: str) -> List[List[Record]]:
    """The jobs of a pass at a size."""
    ended = (lines for lines in jobs.values() if lines[-1]["record"] == "status" and lines[-1]["pass"] == pass_name)
    return [lines for lines in ended if lines[-1].get("size") == size]


def _reason(jobs: Jobs, size: Optional[int]) -> str:
    for pass_name in ("throughput", "probe"):
        for lines in _at(jobs, size, pass_name):
            if lines[-1]["status"] != "ok":
                return str(lines[-1]["reason"])
    return ""


def _status(
    jobs: Jobs,
    timed: Sequence[List[Record]],
    settings: Record,
    size: Optional[int],
    too_large: Optional[int],
    totals: Record,
) -> Tuple[str, str]:
    what = settings["find_largest"]
    smallest = totals.get("T_max", 1) if settings["sort_utterance"] else 1
    for end in _ends(jobs, "correctness"):
        if end["status"] != "ok":
            return end["status"], str(end["reason"])
    for end in (*_ends(jobs, "probe"), *(lines[-1] for lines in timed)):
        if end["status"] not in (*OUTCOMES, "interrupted"):
            return "error", f"{what} {end['size']}: {end['reason']}"
    if size is None and too_large is not None and too_large <= smallest:
        status = next(
            (end["status"] for end in _ends(jobs, "probe") if end["size"] == too_large and end["status"] in TOO_LARGE),
            "oom",
        )
        return status, f"not even {what} {too_large} fits: {_reason(jobs, too_large)}"
    if size is None or sum(lines[-1]["status"] == "ok" for lines in timed) < settings["rounds"]:
        return "interrupted", "stopped before the largest was found and timed; --resume goes on"
    return "ok", ""


def _limited_by(
    jobs: Jobs, settings: Record, size: Optional[int], too_large: Optional[int], totals: Record
) -> Optional[str]:
    """ "memory", "time", "error", "all" (there are no more utterances), "cap" (--largest-cap), or None: not known."""
    if any(end["status"] not in (*OUTCOMES, "interrupted") for end in _ends(jobs, "probe")):
        return "error"
    if too_large is not None:
        at = [*_at(jobs, too_large, "probe"), *_at(jobs, too_large, "throughput")]
        return next((LIMITS[lines[-1]["status"]] for lines in at if lines[-1]["status"] in LIMITS), None)
    if size is None or not totals:
        return None
    if size >= totals["frames" if settings["sort_utterance"] else "utterances"]:
        return "all"
    return "cap" if size == settings.get("largest_cap") else None


def _probe(jobs: Jobs, size: Optional[int]) -> Record:
    """The first ``probe`` record of a size: of the batch with the most padded cells."""
    lines = [line for lines in _at(jobs, size, "probe") for line in lines if line["record"] == "probe"]
    return lines[0] if lines else {}


def _peak_mb(jobs: Jobs, size: Optional[int]) -> Optional[float]:
    lines = [line for lines in _at(jobs, size, "probe") for line in lines if line["record"] == "fit"]
    peaks = [line["peak_bytes"] for line in lines if line["peak_bytes"] is not None]
    return max(peaks) / MB if peaks else None


def _throughput(timed: Sequence[List[Record]]) -> Dict[str, Any]:
    """Rates of each round that ended well (utterances and frames of its batches over the sum of their medians), the
    rounds' median, and what was timed: {utterances, frames} of all batches together, None where nothing was."""
    rates: Dict[str, Dict[str, float]] = {"utterances": {}, "frames": {}}
    over: Optional[Dict[str, int]] = None
    for lines in timed:
        batches = {batch["index"]: batch for line in lines for batch in line.get("batches") or ()}
        times: Dict[Any, List[float]] = {}
        for line in lines:
            if line["record"] == "sample" and not line["warmup"] and lines[-1]["status"] == "ok":
                times.setdefault(line["batch"], []).append(line["total_wall_ns"] / 1e9)
        if times:
            seconds = sum(statistics.median(values) for values in times.values())
            over = {what: sum(batches[index][key] for index in times) for what, key in COUNTS.items()}
            for what, count in over.items():
                rates[what][str(lines[-1]["round"])] = count / seconds
    return {
        **{f"{what}_per_second": statistics.median(list(of.values())) if of else None for what, of in rates.items()},
        "utterances_per_second_rounds": rates["utterances"],
        "timed_over": over,
    }
