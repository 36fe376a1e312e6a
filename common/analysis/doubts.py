"""Find the doubts about numbers: about those of a row, about the ratio of two rows, and about the
two sides of a comparison.

A doubt changes no number. Tables mark the number, notes print the doubt's sentence, and no verdict
rests on a number with a doubt that withholds it.
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
#: A ratio of two separate runs above this, or below its inverse, is too large for the machine's day
#: (clock, memory) to explain.
SEPARATE = 1.3
#: Errors of gradients above this are marked: small batches must be within it in float32.
MARKED_ERROR = 1e-4
#: Gradients whose error is more than this many times that of float32 sums are computed in less than
#: float32.
COARSE = 10
#: Python and torch themselves keep a few kilobytes of a step; a loss that keeps more than this
#: leaks.
LEAK_MB = 0.05
#: Advice where samples ran beside other load.
CALM = "end what else runs and repeat"
#: Printed in place of a winner that other load may have made the winner.
WITHHELD = "withheld: samples ran beside other load; measure again when the machine is quiet"


class Doubt(NamedTuple):
    """Hold why a number may be off.

    Attributes:
        kind: by which tables choose a mark and verdicts their form, such as "beside load", "coarse"
        words: a sentence, without its full stop
        withholds: whether no verdict may rest on the number
    """

    kind: str
    words: str
    withholds: bool = False


def doubts(row: Row) -> list[Doubt]:
    """Return the doubts about the numbers of a row: its times, errors, memory and traces."""
    return [
        *_about_times(row),
        *_about_limits(row),
        *_about_errors(row),
        *_about_memory(row),
        *_about_process(row),
        *_about_traces(row),
    ]


def kinds(row: Row) -> set[str]:
    """Return the kinds of the doubts about a row."""
    return {doubt.kind for doubt in doubts(row)}


def with_mark(words: str, row: Row, kind: str) -> str:
    """Return `words`, with a "!" behind them where the row has a doubt of this kind."""
    return f"{words} !" if kind in kinds(row) else words


def _about_times(row: Row) -> Iterator[Doubt]:
    """Yield a doubt if samples ran beside other load. Its kind is "beside load" if in some round
    they took more than half of the time, else "busy". It withholds a verdict if too few
    other rounds of a scope are left."""
    flagged = sum(sample.is_flagged for sample in row.timed)
    if flagged:
        loaded = row.loaded_rounds
        kind = "beside load" if loaded else "busy"
        words = f"{flagged} of {len(row.timed)} samples ran beside other load"
        withholds = any(row.is_beside_load(scope) for scope in loaded)
        yield Doubt(kind, words, withholds)


def _about_limits(row: Row) -> Iterator[Doubt]:
    """Yield a doubt about the limit, the least time in which the device could do the work by its
    measured rates.

    There is one if the row is faster than that.  Else there is one if all these rates were measured
    beside other load."""
    # Only records with streams, those of all threads, give a limit; `flags` tell of other load.
    limits_beside_load = all(line.flags for line in row.limits if line.streams)
    above = [scope for scope, percent in row.limit_percent.items() if percent > 100]
    if above:
        cause = "it was measured beside other load" if limits_beside_load else "please report it"
        # A step multiplies matrices.  Without `loop`, the rate of the suite's own products, its
        # limit is made from that of torch's products, which are slow on some processors.
        if "step" in above and row.device == "cpu" and row.rates.loop is None:
            cause = "for products torch's rate alone was measured, which may be low here"
        words = f"above 100% of the device's limit, so its time or the limit is wrong ({cause})"
        # tables mark the time of the scope that they show
        yield Doubt("above limit" if row.scope in above else "limit", words)
    elif limits_beside_load and row.limit_percent:
        words = "the device's limits were measured beside other load: % of limit may be too high"
        yield Doubt("limit", words)


def _about_errors(row: Row) -> Iterator[Doubt]:
    """Yield the doubts that the correctness pass raises: low precision, repeats that differ, NaN
    from the padding, utterances that are too short, and an approximate loss."""
    checked = row.checked
    at_size = checked.at_size
    if row.imprecise:
        words = f"rounding alone puts it off by {row.imprecise:.1e} on a measured batch"
        yield Doubt("imprecise", f"imprecise: {words}")
    if (
        at_size
        and at_size.reference_error
        and at_size.grad_error > COARSE * at_size.reference_error
    ):
        words = f"its gradients are off by {at_size.grad_error:.1e} at size"
        yield Doubt("coarse", f"computes in less than float32: {words}")
    if checked.differing:
        results = _results(checked.differing)
        words = f"a second step on the same inputs gives other bits in {results}"
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
    """Return "the loss and the gradient of encoder" for ["loss", "encoder"].

    names: "loss", or tensors that get a gradient; "given" is the tensor that a loss takes
    """
    words = {"loss": "the loss", "given": "the gradient of its input"}
    return " and ".join(words.get(name, f"the gradient of {name}") for name in names)


def is_far_off(row: Row) -> bool:
    """Tell whether tables mark the error of a row's gradients."""
    return (row.errors.gradient or 0.0) > MARKED_ERROR


def _about_memory(row: Row) -> Iterator[Doubt]:
    """Yield a doubt if the peak is far above what torch's allocator counts."""
    if any(peak.beyond for peak in row.peaks_of(row.memory_scope).values()):
        words = (
            "it takes far more memory than torch's allocator counts: the peak shown is the process's"
            " (on a GPU, the device's)"
        )
        yield Doubt("beyond", words)


def _about_process(row: Row) -> Iterator[Doubt]:
    """Yield the doubts about what a loss does to its process: settings that it changes, memory that
    it keeps."""
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


def _about_traces(row: Row) -> Iterator[Doubt]:
    """Yield the doubts about the profiled numbers; where the run should have traces but has none,
    yield one that says so."""
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
    """Return by how many MB the memory of a loss grows with each step; 0 if that was not measured.

    In some rounds other code keeps memory too, so the round with the least growth counts.  Of two
    scopes, the one with the larger growth counts."""
    by_scope = text.gathered(
        (line.scope, line.leaked_bytes / text.MB)
        for line in row.lines_of(schema.Stop)
        if line.leaked_bytes is not None
    )
    return max(map(min, by_scope.values()), default=0.0)


def beside_load(rows: Sequence[Row]) -> str:
    """Return a line on the rows with rounds that ran beside other load, and what to do; "" where
    there are none: "18 of 18 samples ran beside other load: a; their times are too long ..."."""
    loaded = [row for row in rows if row.loaded_rounds]
    if not loaded:
        return ""
    samples = [sample for row in loaded for sample in row.timed if sample.beside_load]
    share = others_cpu(samples)
    used = "" if share is None else f" (others used {share:.0%} of the CPU)"
    advice = "ratios leave these rounds out"
    if any(doubt.withholds for row in loaded for doubt in doubts(row)):
        # Without --wait, quick runs and the cells of a sweep measure no round again.
        waits = all(settings.waits(row.header.settings.preset, row.header.values) for row in loaded)
        again = "--resume" if waits else "--resume --wait 60"
        advice = f"their times are too long; when the machine is quiet, {again} measures these rounds again"
    total = sum(len(row.timed) for row in rows)
    names = ", ".join(dict.fromkeys(row.name for row in loaded))
    return f"{len(samples)} of {total} samples ran beside other load{used}: {names}; {advice}"


# The ratio of two rows.


def about_ratio(evidence: Evidence) -> list[Doubt]:
    """Return the reasons not to believe the difference of two rows, however narrow its interval is.
    Messages print only the first of these doubts."""
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
    # The doubts below are not about paired rounds: what disturbs these either slows both sides
    # alike or widens the interval.
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
    """Yield a doubt if a run drifts by at least as much as the two runs differ."""
    ratio = evidence.ratio
    judged = evidence.judged
    assert ratio and judged
    # Where each round measures batches of its own, the times of the rounds differ anyway.  So a
    # drift is looked for in the ratio of each round instead.
    series = [evidence.by_round] if ratio.has_own_batches else [ratio.baseline, ratio.new]
    drift = max(map(_drift, series))  # a difference of logarithms
    if drift >= abs(math.log(judged.ratio)):
        words = (
            f"from its first to its last half one of the runs drifts by {math.expm1(drift):.1%}, as much as the two "
            "differ: repeat with more rounds, or measure both in one run"
        )
        yield Doubt("drift", words)


def _drift(rounds: Sequence[float]) -> float:
    """Return by how much the mean logarithm differs between the first and the last half of rounds.

    If the number of rounds is odd, the middle one is in neither half.

    rounds: time, or ratio, of each round; two or more, so that each half has a round
    """
    logarithms = statistics.log_values(rounds)
    half = len(rounds) // 2
    return abs(fmean(logarithms[-half:]) - fmean(logarithms[:half]))


def load_of(evidence: Evidence) -> str:
    """Return a sentence on the share of each side's samples that ran beside other load."""
    baseline, new = evidence.busy
    return f"{baseline:.0%} of the baseline's samples and {new:.0%} of the new ones ran beside other load"


def is_busy(evidence: Evidence) -> bool:
    """Tell whether on one side the share of samples beside other load is above BUSY_LIMIT."""
    return max(evidence.busy) > BUSY_LIMIT


# The two sides of a comparison.


def about_sides(baseline: Row, new: Row) -> Iterator[Doubt]:
    """Yield a doubt for each side that did not end well; of two different losses, also for each
    that is not exact."""
    for side, row in (("baseline", baseline), ("new", new)):
        if row.status != "ok":
            yield Doubt("status", f"the {side} run is {row.status}: {row.reason}")
        if baseline.name == new.name:
            continue
        if row.kind in implementations.LATTICES:
            yield Doubt("lattice", f"{row.name} computes the loss on another lattice")
        if row.kind == "pruned":
            yield Doubt("approximate", f"{row.name} is approximate by design")
