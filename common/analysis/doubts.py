"""Say every doubt about a number: of a row, of the ratio of two rows, of the two sides of a
comparison.

A doubt changes no number.  Tables mark the number, notes say the words, and no verdict rests on a
number whose doubt withholds it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import NamedTuple

from rnnt_bench.analysis.ratios import FEWEST_CONTROLS, Evidence
from rnnt_bench.analysis.row import Row
from rnnt_bench.analysis.times import others_cpu
from rnnt_bench.core import implementations, settings, statistics, text
from rnnt_bench.records import schema

#: Share of samples beside other load from which on two separate runs cannot be compared.
BUSY_LIMIT = 0.1
#: A ratio of two separate runs that the machine's day is not taken to explain.
SEPARATE = 1.3
#: Errors of gradients above this are marked: small batches must be within it in float32.
MARKED_ERROR = 1e-4
#: Gradients further off than so many times float32's rounding are computed in less than float32.
COARSE = 10
#: More than what Python and torch keep of a step of their own, which is a few kilobytes.
LEAK_MB = 0.05
CALM = "end what else runs and repeat"
#: Stands in the place of a winner, where other load may have made it one.
WITHHELD = "withheld: samples ran beside other load; measure again when the machine is quiet"


class Doubt(NamedTuple):
    """Hold why a number may be off.

    Attributes:
        kind: word by which tables choose a mark and a verdict its form, such as "beside load" or
          "coarse"
        words: a sentence, without its full stop
        withholds: whether no verdict may rest on the number
    """

    kind: str
    words: str
    withholds: bool = False


def doubts(row: Row) -> list[Doubt]:
    """Return the doubts about the numbers of a row: its times, its errors, its memory, its
    traces."""
    return [*_about_times(row), *_about_errors(row), *_about_memory(row), *_about_traces(row)]


def kinds(row: Row) -> set[str]:
    return {doubt.kind for doubt in doubts(row)}


def with_mark(words: str, row: Row, kind: str) -> str:
    """Return the words of a number, marked where the row has a doubt of this kind."""
    return f"{words} !" if kind in kinds(row) else words


def _about_times(row: Row) -> Iterator[Doubt]:
    """Yield the doubts about the times of a row, and about the limits that they are a share of."""
    flagged = sum(sample.is_flagged for sample in row.timed)
    if flagged:
        scopes = row.loaded_rounds
        words = f"{flagged} of {len(row.timed)} samples ran beside other load"
        withholds = any(row.is_beside_load(scope) for scope in scopes)
        yield Doubt("beside load" if scopes else "busy", words, withholds)
    limits_beside_load = all(line.flags for line in row.limits)
    above = [scope for scope, percent in row.limit_percent.items() if percent > 100]
    if above:
        why = "it was measured beside other load" if limits_beside_load else "please report it"
        if "step" in above and row.device == "cpu" and row.rates.loop is None:
            why = "of products torch's rate alone was measured, which may be slow here"
        words = f"above 100% of the device's limit, so its time or the limit is wrong ({why})"
        # tables mark the time of the scope that they show
        yield Doubt("above limit" if row.scope in above else "limit", words)
    elif limits_beside_load and row.limit_percent:
        words = "the device's limits were measured beside other load: % of limit may be too high"
        yield Doubt("limit", words)


def _about_errors(row: Row) -> Iterator[Doubt]:
    checked = row.checked
    size = checked.at_size
    if row.imprecise:
        words = f"rounding alone puts it off by {row.imprecise:.1e} on a measured batch"
        yield Doubt("imprecise", f"imprecise: {words}")
    if size and size.reference_error and size.grad_error > COARSE * size.reference_error:
        words = f"its gradients are off by {size.grad_error:.1e} at size"
        yield Doubt("coarse", f"computes in less than float32: {words}")
    if checked.differing:
        words = (
            f"a second step on the same inputs gives other bits in {_results(checked.differing)}"
        )
        yield Doubt("not deterministic", f"not deterministic: {words}")
    if checked.reached_by_padding:
        reached = _results(checked.reached_by_padding)
        yield Doubt("padding", f"NaN in the padding reaches {reached}: pad with finite numbers")
    if checked.fewest_frames > 1:
        frames = text.count(checked.fewest_frames, "frame")
        tokens = text.count(checked.fewest_targets, "token")
        words = f"wrong, without an error, for utterances of fewer than {frames} or {tokens}: leave them out"
        yield Doubt("short", words)
    if row.kind == "pruned" and row.newest(schema.Correctness):
        words = "approximate by design: its errors were measured with the range widened to all of U"
        yield Doubt("approximate", words)


def _results(names: Sequence[str]) -> str:
    """Word what a step returns: "loss", and tensors that get a gradient; "given" is what a loss
    takes."""
    words = {"loss": "the loss", "given": "the gradient of its input"}
    return " and ".join(words.get(name, f"the gradient of {name}") for name in names)


def is_far_off(row: Row) -> bool:
    """Return whether tables mark the error of its gradients."""
    return (row.errors[1] or 0.0) > MARKED_ERROR


def _about_memory(row: Row) -> Iterator[Doubt]:
    if any(peak.beyond for peak in row.peaks_of(row.memory_scope).values()):
        words = "it takes far more memory than torch's allocator has, so the process's peak (the device's) counts"
        yield Doubt("beyond", words)


def _about_traces(row: Row) -> Iterator[Doubt]:
    changed = sorted({name for line in row.lines_of(schema.Stop) for name in line.changed})
    if changed:
        words = f"changes {', '.join(changed)} of its process: its times are of other settings"
        yield Doubt("other settings", words)
    kept_mb = _kept_mb(row)
    if kept_mb > LEAK_MB:
        words = (
            f"keeps {text.number(kept_mb)} MB more after each step: a training runs out of memory"
        )
        yield Doubt("leak", words)
    for words in row.profile.notes:
        yield Doubt("trace", words)
    trace = row.newest(schema.Trace)
    if trace and trace.note:
        yield Doubt("trace", trace.note)
    if trace and trace.flags:
        yield Doubt("trace", "the profiled steps ran beside other load, so they may be too long")
    # Controls and losses by utterance have no traces, see jobs.job.plan.
    is_untraced = "@" in row.name or row.kind == implementations.BY_UTTERANCE
    was_asked = "trace" in (row.header.settings.passes or ())
    if trace is None and was_asked and row.status == "ok" and not is_untraced:
        yield Doubt("trace", "stopped before its traces, which --resume writes")


def _kept_mb(row: Row) -> float:
    """Return how much more memory a scope keeps after each step, in the round in which it is
    least."""
    stops = [line for line in row.lines_of(schema.Stop) if line.leaked_bytes is not None]
    rounds = text.gathered((line.scope, (line.leaked_bytes or 0) / text.MB) for line in stops)
    return max(map(min, rounds.values()), default=0.0)


def beside_load(rows: Sequence[Row]) -> str:
    """Return a line on the rows of a table that ran beside other load, "" where none did:
    "18 of 18 samples ran beside other load: a; their times are too long ..."."""
    loaded = [row for row in rows if row.loaded_rounds]
    if not loaded:
        return ""
    beside = [sample for row in loaded for sample in row.timed if sample.beside_load]
    share = others_cpu(beside)
    used = "" if share is None else f" (others used {share:.0%} of the CPU)"
    advice = "ratios leave these rounds out"
    if any(doubt.withholds for row in loaded for doubt in doubts(row)):
        waits = all(settings.waits(row.header.settings.preset, row.header.values) for row in loaded)
        again = "--resume" if waits else "--resume --wait 60"
        advice = f"their times are too long; when the machine is quiet, {again} measures these rounds again"
    every = sum(len(row.timed) for row in rows)
    names = ", ".join(dict.fromkeys(row.name for row in loaded))
    return f"{len(beside)} of {every} samples ran beside other load{used}: {names}; {advice}"


# The ratio of two rows.


def about_ratio(evidence: Evidence) -> list[Doubt]:
    """Return why a difference cannot be believed, whatever its interval is: the first is told."""
    ratio = evidence.ratio
    result = []
    if evidence.beside_load:
        result.append(Doubt("beside load", f"{load_of(evidence)}: {CALM}", withholds=True))
    if ratio is None:
        return result
    if min(evidence.rounds) < settings.FEWEST_ROUNDS:
        rounds = text.count(min(evidence.rounds), "round")
        advice = f"take at least {settings.FEWEST_ROUNDS}, better --rounds 10"
        words = f"{rounds} on a side cannot tell a change from chance: {advice}"
        result.append(Doubt("few rounds", words, withholds=True))
    # A disturbance of a round met both of its sides, or is in the interval.
    if evidence.paired:
        return result
    if is_busy(evidence):
        words = f"{load_of(evidence)}: {CALM}, or measure both in one run"
        result.append(Doubt("busy", words, withholds=True))
    if evidence.control is None and abs(math.log(ratio.ratio)) < math.log(SEPARATE):
        words = (
            f"separate runs: below {SEPARATE:g} times, the machine's day may explain all of it where fewer than "
            f"{FEWEST_CONTROLS} rows did not change: measure both in one run"
        )
        result.append(Doubt("uncontrolled", words, withholds=True))
    if not result:
        result += _about_drift(evidence)
    return result


def _about_drift(evidence: Evidence) -> Iterator[Doubt]:
    ratio = evidence.ratio
    judged = evidence.judged
    assert ratio and judged
    # Rounds with batches of their own differ in length, so only their ratio can be seen to drift.
    sides = [ratio.baseline, ratio.new] if ratio.least is None else [evidence.by_round]
    drift = max(map(_drift, sides))
    if drift >= abs(math.log(judged.ratio)):
        words = (
            f"from its first to its last half one of the runs drifts by {math.expm1(drift):.1%}, as much as the two "
            "differ: repeat with more rounds, or measure both in one run"
        )
        yield Doubt("drift", words)


def _drift(rounds: Sequence[float]) -> float:
    """Return by how much the mean logarithm of a run's times differs between its halves."""
    logarithms = statistics.log_values(rounds)
    half = len(rounds) // 2
    return abs(fmean(logarithms[-half:]) - fmean(logarithms[:half]))


def load_of(evidence: Evidence) -> str:
    baseline, new = evidence.busy
    return f"{baseline:.0%} of the baseline's samples and {new:.0%} of the new ones ran beside other load"


def is_busy(evidence: Evidence) -> bool:
    """Return whether more samples of a side ran beside other load than separate runs may have."""
    return max(evidence.busy) > BUSY_LIMIT


# The two sides of a comparison.


def about_sides(baseline: Row, new: Row) -> Iterator[Doubt]:
    """Yield which side did not end well, and which is no exact loss where the two are of two
    losses."""
    for side, row in (("baseline", baseline), ("new", new)):
        if row.status != "ok":
            yield Doubt("status", f"the {side} run is {row.status}: {row.reason}")
        if baseline.name == new.name:
            continue
        if row.kind in implementations.LATTICES:
            yield Doubt("lattice", f"{row.name} computes the loss on another lattice")
        if row.kind == "pruned":
            yield Doubt("approximate", f"{row.name} is approximate by design")
