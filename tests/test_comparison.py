"""Verdicts on real samples: the same code against itself, a planted slowdown, another load.

tests/data/compare/README.md tells where the samples are from.

A seed draws rounds of one run into two groups.  Whatever is drawn, nothing changed between them.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
from msgspec.structs import replace

from common.analysis import comparison, measured
from common.analysis.comparison import Pair
from common.analysis.row import Row
from common.core import statistics
from common.records import schema

DATA = Path(__file__).parent / "data" / "compare"
NAMES = ("torchaudio", "optimized_transducer")


@pytest.fixture
def seeds(thorough):
    return range(200 if thorough else 40)


@cache
def real(load, name):
    (run,) = comparison.read_runs(DATA / load / f"{name}.jsonl")
    return run


def timing_jobs(run):
    return [lines for job, lines in run.jobs.items() if job.startswith("timing-")]


def drawn(run, rounds, run_id, factor=1.0, calm=False):
    """A run of these rounds of `run`, counted anew, its times multiplied.  calm: without what is known of the load."""

    def copy(line, number):
        changed = {"job": f"timing-{number}"}
        if isinstance(line, schema.Sample):
            changed.update(round=number, total_wall_ns=line.total_wall_ns * factor, flags=[] if calm else line.flags)
        return replace(line, **changed)

    lines = [copy(line, number) for number, lines in enumerate(rounds, start=1) for line in lines]
    return measured.row([replace(run.header, run_id=run_id), *lines], run.folder, traces=False)


def separate_runs(run, seed, rounds, **options):
    """Two groups of rounds that have nothing to do with each other."""
    chosen = random.Random(seed).sample(timing_jobs(run), 2 * rounds)
    return Pair(
        drawn(run, chosen[:rounds], "one", calm=True), drawn(run, chosen[rounds:], "other", calm=True, **options)
    )


def in_alternation(run, seed, rounds, **options):
    """Neighbouring rounds as pairs, either of them the baseline's, as --rev measures them."""
    luck, jobs = random.Random(seed), timing_jobs(run)
    pairs = luck.sample([jobs[start : start + 2] for start in range(0, len(jobs) - 1, 2)], rounds)
    for pair in pairs:
        luck.shuffle(pair)
    return Pair(drawn(run, [first for first, _ in pairs], "x"), drawn(run, [two for _, two in pairs], "x", **options))


def verdicts(pairs, **options):
    """Count each verdict, over both scopes."""
    rows = [row for pair in pairs for row in comparison.compare([pair], **options)]
    return Counter(time.verdict for row in rows for time in row.time.values())


def changes(verdict):
    """Share of the verdicts that claim a change."""
    return (verdict["faster"] + verdict["slower"]) / sum(verdict.values())


@pytest.mark.parametrize("draw", [separate_runs, in_alternation])
@pytest.mark.parametrize("rounds", [3, 10])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("load", ["one-thread", "two-threads"])
def test_the_same_code_is_not_found_changed(load, name, rounds, draw, seeds):
    """False alarms: at most 5%, with the default tolerance and with none that would help."""
    pairs = [draw(real(load, name), seed, rounds) for seed in seeds]
    assert changes(verdicts(pairs)) <= 0.05
    assert changes(verdicts(pairs, tolerance=1e-9)) <= 0.05


@pytest.mark.parametrize("name", NAMES)
def test_the_same_code_under_another_load_is_not_found_changed(name):
    """The rounds that ran alone against those beside other load: what is recorded of it forbids a verdict, however
    clear the times look."""
    run = real("two-threads", name)
    flagged = [any(getattr(line, "flags", None) for line in lines) for lines in timing_jobs(run)]
    alone, beside = (
        [lines for lines, busy in zip(timing_jobs(run), flagged) if busy is side] for side in (False, True)
    )
    looks_changed = 0
    for seed in range(50):
        luck = random.Random(seed)
        left, other = drawn(run, luck.sample(alone, 4), "one"), drawn(run, luck.sample(beside, 4), "other")
        assert set(verdicts([Pair(left, other), Pair(other, left)])) <= {"same", "unclear"}
        calm = (drawn(run, timing_jobs(side), side.run_id, calm=True) for side in (left, other))
        looks_changed += verdicts([Pair(*calm)])["slower"]
    assert looks_changed > 0


def quieter(run, spread):
    """The run with all deviations from a batch's median shrunk alike, so that rounds deviate by `spread` (0.01 for 1%).

    The real samples' shape, their drift and their outliers stay; their size is that of a machine of one's own.
    """
    samples = [line for lines in timing_jobs(run) for line in lines if isinstance(line, schema.Sample)]
    centers = {key: statistics.median([line.total_wall_ns for line in mine]) for key, mine in by_batch(samples).items()}
    rounds = by_batch(samples, "round")
    deviations = []
    for (*key, _), mine in rounds.items():
        deviations.append(math.log(statistics.median([line.total_wall_ns for line in mine]) / centers[tuple(key)]))
    power = spread / math.sqrt(statistics.mean([deviation**2 for deviation in deviations]))

    def shrunk(line):
        if not isinstance(line, schema.Sample):
            return line
        center = centers[line.scope, line.batch]
        return replace(line, total_wall_ns=center * (line.total_wall_ns / center) ** power)

    lines = [shrunk(line) for lines in run.jobs.values() for line in lines]
    return measured.row([run.header, *lines], run.folder, traces=False)


def by_batch(samples, *batches):
    medians = {}
    for line in samples:
        medians.setdefault(tuple(getattr(line, key) for key in ("scope", "batch", *batches)), []).append(line)
    return medians


@pytest.mark.parametrize("draw, rounds", [(separate_runs, 12), (in_alternation, 10)])
@pytest.mark.parametrize("name", NAMES)
def test_a_planted_slowdown_of_3_percent_is_found_when_the_spread_allows_it(name, draw, rounds, seeds):
    """Rounds that deviate by 1% and a tolerance of 1%: the spread allows it where the interval is within +-1%."""
    run, counts, narrow = quieter(real("one-thread", name), 0.01), Counter(), 0
    for seed in seeds:
        (row,) = comparison.compare([draw(run, seed, rounds, factor=1.03)], tolerance=0.01)
        for time in row.time.values():
            if math.log(time.high / time.low) <= 0.02:
                narrow += 1
                counts[time.verdict] += 1
    assert narrow >= len(seeds) / 4 and counts["slower"] >= 0.9 * narrow and counts["faster"] == counts["same"] == 0


def test_a_planted_slowdown_below_the_spread_is_not_guessed(seeds):
    """3% cannot be seen beside all that load; nothing is claimed, least of all that it is faster."""
    run = real("two-threads", "torchaudio")
    counts = verdicts([in_alternation(run, seed, 10, factor=1.03) for seed in seeds])
    assert changes(counts) <= 0.05 and counts["faster"] <= 0.025 * sum(counts.values())


def test_intervals_are_wider_the_more_of_them_there_are():
    pairs = [separate_runs(real("one-thread", name), 1, 8) for name in NAMES]
    alone, both = comparison.compare(pairs[:1], ["step"]), comparison.compare(pairs)
    assert (alone[0].margins.confidence, both[0].margins.confidence) == pytest.approx((0.95, 0.9875))
    assert both[0].time["step"].high > alone[0].time["step"].high


@pytest.mark.parametrize(
    "ratio, exact, verdict",
    [(1.0, True, "same"), (1.05, True, "more"), (0.9, True, "less"), (1.05, False, "same"), (1.2, False, "more")],
)
def test_memory(ratio, exact, verdict):
    """The process's peak is not exact."""

    def side(peak):
        counters = {"device_allocated": {}, "torch_allocated": {"0": peak} if exact else {}, "process": {"0": peak}}
        return Row("a", peaks_mb={"step": counters})

    (change,) = comparison.compare([Pair(side(100.0), side(100 * ratio))], ["step"])
    assert change.memory["step"].verdict == verdict


@pytest.mark.parametrize(
    "baseline, new, expected",
    [
        ((1e-7, 2e-6), (2e-7, 3e-6), "same"),
        ((1e-9, 2e-6), (9e-7, 2e-6), "same"),  # rounding
        ((1e-7, 2e-6), (1e-7, 5e-5), "worse"),
        ((1e-7, 5e-5), (1e-7, 2e-6), "better"),
        ((2e-5, 2e-6), (1e-7, 5e-5), "unclear"),
        ((1e-7, 2e-6), (1e-7, 5e-3), "wrong"),
        ((1e-7, 5e-3), (1e-7, 2e-6), "better"),
        ((1e-7, 5e-3), (1e-7, 5e-3), "wrong"),
        (None, (1e-7, 2e-6), "unclear"),
    ],
)
def test_errors(baseline, new, expected):
    def side(errors):
        of = errors and {"loss_error": errors[0], "grad_error": errors[1], "tolerance": 1e-4, "ok": max(errors) < 1e-4}
        return Row("a", checked=schema.Correctness(**(of or {})))

    (change,) = comparison.compare([Pair(side(baseline), side(new))])
    assert change.errors.verdict == expected
