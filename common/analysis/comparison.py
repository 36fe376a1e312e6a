"""Pairs of runs -> what changed between them, as plain data: time, memory and errors, each with a verdict and a reason.

Time is judged over rounds: paired where both sides' rounds ran beside each other, else as two independent groups.
All intervals of one comparison hold together with 95% (Bonferroni), so that a comparison of many rows cries wolf no
oftener than one of a single row.  What the rounds of two separate runs cannot tell, a change of the machine between
them, is guarded against by the tolerance, by the drift within each run and by the load recorded beside each sample.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Dict, Iterator, List, Sequence, Tuple

from common.errors import UserError
from common.results import change_verdicts, records, statistics
from common.results.profiled import MB
from common.results.run_pairs import MeasuredRun, Pair, Sides
from common.results.statistics import TOLERANCE

SCOPES = ("step", "loss")
CONFIDENCE = 0.95  # of all intervals of a comparison together
_COUNTERS = ("device_allocated_bytes", "torch_allocated_bytes", "process_bytes")  # the first that both sides have

Row = Dict[str, Any]


def compare(pairs: Sequence[Pair], scopes: Sequence[str] = SCOPES, tolerance: float = TOLERANCE) -> List[Row]:
    """A row for each pair; its keys are those of `_row`.  tolerance: the change that does not matter, 0.02 for 2%.

    Raises UserError for records that are not as this suite writes them.
    """
    rounds = {(pair, scope): _both(pair, scope) for pair in pairs for scope in scopes}
    judged = sum(all(both) for both in rounds.values())
    confidence = 1 - (1 - CONFIDENCE) / max(judged, 1)
    return [_row(pair, {scope: rounds[pair, scope] for scope in scopes}, tolerance, confidence) for pair in pairs]


def regressions(rows: Sequence[Row], limit: float) -> List[str]:
    """Why a change is to be refused: each row whose time grew by more than `limit` (0.02 for 2%) for sure, and each
    that could be measured at the baseline but not any more; see ``gone`` too."""
    found = []
    for row in rows:
        if row["new"]["status"] != "ok" and row["baseline"]["status"] == "ok":
            found.append(f"{row['name']}: was measured at the baseline, now {row['new']['status']}")
        for scope, time in row["time"].items():
            if time["low"] is not None and not time["doubt"] and time["low"] > 1 + limit:
                found.append(f"{row['name']} {scope}: slower by at least {100 * (time['low'] - 1):.1f}%")
    return found


def gone(sides: Sides) -> List[str]:
    """Likewise: what was measured at the baseline and is not on the new side at all."""
    runs = [run for run in sides.gone if run.failure is None]
    compared = list(dict.fromkeys(pair.baseline.name for pair in sides.pairs))
    whole = list(dict.fromkeys(run.name for run in runs if run.name not in compared))
    found = []
    if whole:
        found.append(
            f"{', '.join(whole)}: measured at the baseline, not there any more; where that is meant, compare with "
            f"--only {','.join(compared)}"
        )
    found += [
        f"{sides.label(run)}: measured at the baseline, {run.name} has no run with its settings any more; where that "
        "is meant, compare the run folders that both have"
        for run in runs
        if run.name in compared
    ]
    return found


Rounds = Dict[Any, Dict[Any, List[float]]]


def _both(pair: Pair, scope: str) -> Tuple[Rounds, Rounds]:
    with _reading(pair):
        return _rounds(pair.baseline, scope), _rounds(pair.new, scope)


@contextmanager
def _reading(pair: Pair) -> Iterator[None]:
    """UserError for records of its runs that are not as this suite writes them."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise UserError(
            f"{pair.baseline.path} or {pair.new.path}: a record is not as this suite writes it "
            f"({type(error).__name__}: {error}); run again"
        ) from error


def _rounds(run: MeasuredRun, scope: str) -> Rounds:
    """round -> batch -> milliseconds, of the timing jobs that ended well."""
    found: Rounds = {}
    for sample in _timed(run, scope):
        found.setdefault(sample["round"], {}).setdefault(sample["batch"], []).append(sample["total_wall_ns"] / 1e6)
    return found


def _timed(run: MeasuredRun, scope: str) -> List[Dict[str, Any]]:
    return [line for line in run.lines("sample") if line["scope"] == scope and not line["warmup"]]


def _row(pair: Pair, rounds: Dict[str, Tuple[Rounds, Rounds]], tolerance: float, confidence: float) -> Row:
    with _reading(pair):
        return {
            "name": pair.name,
            "baseline": _side(pair.baseline),
            "new": _side(pair.new),
            "paired_rounds": pair.together,
            "confidence": confidence,
            "tolerance": tolerance,
            "time": {scope: _time(pair, scope, *both, tolerance, confidence) for scope, both in rounds.items()},
            "memory": {scope: _memory(pair, scope, tolerance) for scope in rounds},
            "errors": _errors(pair),
            "changed": _changed(pair),
        }


def _side(run: MeasuredRun) -> Dict[str, Any]:
    status, reason = run.failure or ("ok", "")
    about = {key: run.header.get(key) for key in ("name", "run_id", "started", "git_revision", "git_dirty")}
    about["kind"] = records.kind_of(run.header)
    environment = {key: run.environment.get(key) for key in ("torch", "implementation_version", "python")}
    outcome = {"status": status, "reason": reason, "measured": run.measured}
    return {"file": str(run.path), **about, **environment, **outcome}


def _time(pair: Pair, scope: str, before: Rounds, after: Rounds, tolerance: float, confidence: float) -> Row:
    ratio, paired = statistics.ratio(before, after, pair.together, confidence)
    busy = [_busy(run, scope) for run in (pair.baseline, pair.new)]
    found: Row = {
        "verdict": "unclear",
        "reason": _nothing_timed(pair, scope, before, after),
        "doubt": "",
        "paired": paired,
        **{key: None for key in ("ratio", "low", "high", "baseline_ms", "new_ms")},
        "batches": 0,
        "baseline_rounds": len(before),
        "new_rounds": len(after),
        "baseline_busy": busy[0],
        "new_busy": busy[1],
    }
    if ratio is None:
        return found
    found.update(
        ratio=ratio.ratio,
        low=ratio.low,
        high=ratio.high,
        batches=ratio.batches,
        baseline_ms=statistics.geometric_mean(ratio.baseline),
        new_ms=statistics.geometric_mean(ratio.new),
        baseline_rounds=len(ratio.baseline),
        new_rounds=len(ratio.new),
        doubt=change_verdicts.time_doubt(ratio, paired, busy),
    )
    found["verdict"], found["reason"] = change_verdicts.time(ratio, paired, tolerance, confidence, found["doubt"], busy)
    return found


def _nothing_timed(pair: Pair, scope: str, before: Rounds, after: Rounds) -> str:
    for run, side, rounds in ((pair.baseline, "the baseline", before), (pair.new, "the new side", after)):
        if not rounds:
            status, reason = run.failure or ("", "")
            return f"{side} has no {scope} times" + (f": {status}: {reason}" if status else "; they were not asked for")
    return "no batch was timed on both sides in every round"


def _busy(run: MeasuredRun, scope: str) -> float:
    """Share of the samples that ran beside other load."""
    samples = _timed(run, scope)
    return sum("busy" in (sample.get("flags") or ()) for sample in samples) / max(len(samples), 1)


def _memory(pair: Pair, scope: str, tolerance: float) -> Row:
    """The highest peak over the batches that both sides have, in MB (2**20 bytes), which decides what fits."""
    sides = [_peaks(run, scope) for run in (pair.baseline, pair.new)]
    for counter in _COUNTERS:
        before, after = (side.get(counter, {}) for side in sides)
        batches = set(before) & set(after)
        peaks = [max((side[batch] for batch in batches), default=0) / MB for side in (before, after)]
        if min(peaks) > 0:
            verdict, reason = change_verdicts.memory(peaks[1] / peaks[0], counter, tolerance)
            ratio, baseline, new = peaks[1] / peaks[0], *peaks
            break
    else:
        absent = [side for side, found in zip(("the baseline", "the new side"), sides) if not found]
        verdict, reason = "unclear", f"no peaks of the memory pass for {' and '.join(absent) or 'a batch of both'}"
        ratio = baseline = new = counter = None
        batches = set()
    return {
        "verdict": verdict,
        "reason": reason,
        "ratio": ratio,
        "baseline_mb": baseline,
        "new_mb": new,
        "counter": counter,
        "batches": len(batches),
    }


def _peaks(run: MeasuredRun, scope: str) -> Dict[str, Dict[Any, float]]:
    """counter -> batch -> bytes."""
    found: Dict[str, Dict[Any, float]] = {}
    for line in run.lines("memory"):
        for counter in _COUNTERS:
            if line["scope"] == scope and line.get(counter) is not None:
                peaks = found.setdefault(counter, {})
                peaks[line["batch"]] = max(peaks.get(line["batch"], 0), line[counter])
    return found


def _errors(pair: Pair) -> Row:
    sides = [run.correctness for run in (pair.baseline, pair.new)]
    verdict, reason = change_verdicts.errors(*sides)
    values = {
        f"{side}_{key}": record and record.get(key)
        for side, record in zip(("baseline", "new"), sides)
        for key in ("loss_error", "grad_error", "approximation_gap")
    }
    return {"verdict": verdict, "reason": reason, **values}


def _changed(pair: Pair) -> List[str]:
    """What is recorded of the code and its environment and differs, as "torch 2.10.0 -> 2.11.0"."""
    one, other = _side(pair.baseline), _side(pair.new)
    labels = {"git_revision": "revision", "torch": "torch", "implementation_version": "version", "python": "Python"}
    if not pair.one_loss:
        labels = {"torch": "torch"}
    found = [
        f"{label} {str(one[key])[:20]} -> {str(other[key])[:20]}"
        for key, label in labels.items()
        if one[key] != other[key]
    ]
    if pair.one_loss and (one["git_dirty"] or other["git_dirty"]):
        dirty = [word for word, side in (("baseline", one), ("new side", other)) if side["git_dirty"]]
        found.append(f"uncommitted changes in the {' and the '.join(dirty)}")
    return found
