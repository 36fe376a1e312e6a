"""Quantiles, intervals, ratios, verdicts, limits: against answers by hand, printed tables and planted truths."""

from __future__ import annotations

import ctypes
import importlib
import math
import random
from dataclasses import astuple, replace

import pytest
import torch
from rnnt_bench.analysis import doubts, logs, ratios, times
from rnnt_bench.analysis.row import Row
from rnnt_bench.analysis.standing import Standing
from rnnt_bench.core import settings, statistics
from rnnt_bench.instruments import rates
from rnnt_bench.losses import oracle
from rnnt_bench.losses.passes import timing
from rnnt_bench.records import schema
from rnnt_bench.setup import libraries
from rnnt_bench.system import machine, memory

from commands import ROOT
from fixtures_runs import (
    change,
    correctness,
    environment,
    one_row,
    records_of,
    sample,
    status,
    summarize,
    write_records,
    write_run,
)


@pytest.mark.parametrize(
    "values, fraction, expected",
    [
        ([40, 10, 20, 30], 0.5, 25),
        ([10, 20, 30, 40], 0.8, 34),  # place 2.4: 30 + 0.4 * 10
        ([5], 0.2, 5),
        ([5, 7], 1, 7),
    ],
)
def test_quantile_is_linear_between_samples(values, fraction, expected):
    assert statistics.quantile(values, fraction) == expected


@pytest.mark.parametrize(
    "ask",
    [
        lambda: statistics.quantile([], 0.5),
        lambda: statistics.interval([1.0, -2.0]),
    ],
)
def test_what_has_no_answer_is_refused(ask):
    with pytest.raises(ValueError):
        ask()


def test_describe():
    """A batch ten times as long is no spread, and one with a single sample tells of none."""
    samples = {0: [1, 2, 3, 4, 5, 6], 1: [10, 20, 30, 40, 50, 60]}
    assert astuple(statistics.describe(samples)) == pytest.approx((19.25, 11, 27.5, 12))
    assert astuple(statistics.describe({0: [1, 2, 3], 1: [16]})) == pytest.approx((9, 6.3, 11.7, 4))
    assert astuple(statistics.describe({0: [2], 1: [4]})) == (3, None, None, 2) and statistics.describe({}) is None


@pytest.mark.parametrize(
    "confidence, freedom, expected",  # from printed tables; 1 and 2 degrees also by tan and by algebra
    [
        (0.95, 1, 12.706),
        (0.95, 9, 2.262),
        (0.95, 1e6, 1.960),
        (0.9, 1, math.tan(0.9 * math.pi / 2)),
        (0.9875, 2, 0.9875 * math.sqrt(2 / (1 - 0.9875**2))),
        (1 - 5.325332608e-7, 50342, 5.0149),  # far out, close to the normal distribution's 5.0143
    ],
)
def test_student_t(confidence, freedom, expected):
    assert statistics.student_t(confidence, freedom) == pytest.approx(expected, abs=1e-3)
    assert statistics.student_t(confidence, freedom) > statistics.student_t(confidence, freedom + 0.5)


@pytest.mark.parametrize(
    "logs, confidence, center, half",
    [
        ([0, 2], 0.95, 1, 12.706),  # deviation sqrt(2), standard error 1, t(1) = 12.706
        ([-1, 0, 1], 0.95, 0, 4.303 / math.sqrt(3)),  # variance 1, t(2) = 4.303
        ([-1, 1] * 20, 0.95, 0, 2.0227 * math.sqrt(40 / 39 / 40)),  # 39 degrees of freedom
        ([3, 3, 3], 0.95, 3, 0),
    ],
)
def test_interval_by_hand(logs, confidence, center, half):
    low, high = statistics.interval(list(map(math.exp, logs)), confidence)
    assert (math.log(low), math.log(high)) == pytest.approx((center - half, center + half), abs=1e-3)


def test_interval_is_over_rounds_not_over_samples_and_needs_two():
    assert statistics.interval([]) is None and statistics.interval([5.0]) is None
    drawn = [(1, 0, 1.0)] * 1000 + [(2, 0, math.e**2 - 1)] * 1000 + [(2, 1, math.e**2 + 1)]
    samples = [schema.Sample(scope="step", round=n, batch=k, total_wall_ns=round(1e6 * ms)) for n, k, ms in drawn]
    assert times.summarize(samples, "step").interval == pytest.approx(statistics.interval([1.0, math.e**2]), rel=1e-5)


def test_paired_ratio_by_hand():
    baseline = {1: {0: 10, 1: 100}, 2: {0: 20, 1: 100}}
    new = {1: {0: 20, 1: 200}, 2: {0: 40, 1: 200}}
    estimate = ratios.paired_ratio(baseline, new)
    assert (estimate.ratio, estimate.low, estimate.high) == pytest.approx((2, 2, 2))
    assert estimate.batches == 2 and estimate.error == pytest.approx(0, abs=1e-9)
    assert estimate.baseline == pytest.approx((math.sqrt(1000), math.sqrt(2000)))
    assert estimate.new == pytest.approx((math.sqrt(4000), math.sqrt(8000)))


def test_paired_ratio_has_the_interval_of_the_rounds_ratios():
    baseline = {round: {0: time} for round, time in enumerate([1, 10, 100])}  # a drift that both sides share
    new = {round: {0: time} for round, time in enumerate([math.exp(-1), 10, 100 * math.e])}
    estimate = ratios.paired_ratio(baseline, new)
    assert (estimate.low, estimate.high) == pytest.approx(statistics.interval([math.exp(-1), 1, math.e]))
    assert estimate.error == pytest.approx(1 / math.sqrt(3))


def test_paired_ratio_uses_only_what_both_have():
    baseline = {1: {0: 10, 1: 1}, 2: {0: 10, 1: 1}, 3: {0: 1}}
    new = {1: {0: 10}, 2: {0: 10, 1: 1000}}  # died on batch 1 in round 1
    estimate = ratios.paired_ratio(baseline, new)
    assert (estimate.ratio, len(estimate.baseline), estimate.batches) == (pytest.approx(1), 2, 1)
    assert (
        ratios.paired_ratio({1: {0: 1}}, {2: {0: 1}}) is None and ratios.paired_ratio({1: {0: 1}}, {1: {1: 1}}) is None
    )
    assert ratios.paired_ratio({1: {0: 1}}, {1: {0: 3}}).low is None


def test_independent_ratio_by_hand():
    # logs -1, 0, 1 (variance 1) and 2, 2 + 3 / 2, 2 + 3 (variance 9/4): difference 3.5, parts 1/3 and 3/4;
    # Welch: (13/12)^2 / ((1/9 + 9/16) / 2) = 3.485 degrees of freedom.
    baseline = {round: {0: math.exp(log)} for round, log in enumerate([-1, 0, 1])}
    new = {round: {0: math.exp(log)} for round, log in enumerate([2, 3.5, 5])}
    estimate = ratios.independent_ratio(baseline, new)
    assert math.log(estimate.ratio) == pytest.approx(3.5) and estimate.error == pytest.approx(math.sqrt(13 / 12))
    half = statistics.student_t(0.95, (13 / 12) ** 2 / ((1 / 9 + 9 / 16) / 2)) * estimate.error
    assert (math.log(estimate.low), math.log(estimate.high)) == pytest.approx((3.5 - half, 3.5 + half))


def test_independent_ratio_of_different_rounds_and_of_too_few():
    estimate = ratios.independent_ratio({1: {0: 2.0}, 2: {0: 2.0, 1: 9}}, {7: {0: 4.0}, 8: {0: 4.0}, 9: {0: 4.0}})
    assert (estimate.ratio, estimate.low, estimate.high) == pytest.approx((2, 2, 2))
    assert (len(estimate.baseline), len(estimate.new), estimate.batches) == (2, 3, 1)
    assert ratios.independent_ratio({1: {0: 1}}, {1: {0: 3}, 2: {0: 3}}).low is None
    alike = ratios.independent_ratio({1: {0: 1}, 2: {0: 1}}, {1: {0: 3}, 2: {0: 3}})
    assert [ratios.Evidence(ratio=alike, paired=paired).by_round for paired in (True, False)] == [
        [pytest.approx(3)] * 2,
        [],
    ]
    assert ratios.independent_ratio({}, {1: {0: 3}}) is None


@pytest.mark.parametrize(
    "low, high, tolerance, expected",
    [
        (0.90, 0.95, 0.02, "faster"),
        (1.05, 1.10, 0.02, "slower"),
        (0.99, 1.01, 0.02, "same"),
        (1.01, 1.05, 0.02, "unclear"),
        (0.98, 0.999, 0.0, "faster"),
        (0.98, 1.0, 0.0, "unclear"),
        (1.0, 1.0, 0.0, "same"),
        (None, None, 0.02, "unclear"),
    ],
)
def test_verdict(low, high, tolerance, expected):
    assert statistics.verdict(low, high, tolerance) == expected


def sides(logs):
    """Baseline and new side of a run whose log ratios are logs[round][batch]; the baseline takes 10 everywhere."""
    baseline = {at: {batch: 10.0 for batch in each} for at, each in logs.items()}
    new = {at: {batch: 10.0 * math.exp(y) for batch, y in each.items()} for at, each in logs.items()}
    return baseline, new


def test_the_ratio_is_that_of_the_file_at_its_mean_padding():
    """Without noise the line is found exactly: log ratio 0.1 + 0.8 x, at the file's mean of 0.3."""
    x = {f"{at}-{number}": 0.05 * at + 0.1 * number for at in range(4) for number in range(3)}
    logs = {at: {f"{at}-{number}": 0.1 + 0.8 * x[f"{at}-{number}"] for number in range(3)} for at in range(4)}
    estimate, paired = ratios.ratio(*sides(logs), together=False, padding=ratios.Padding(x, 0.3))
    assert not paired and estimate.of_file and estimate.batches == 12
    assert estimate.ratio == pytest.approx(math.exp(0.34))
    assert (estimate.low, estimate.high) == pytest.approx((estimate.ratio, estimate.ratio))
    assert estimate.least == pytest.approx(math.exp(0.1)) and estimate.most == pytest.approx(math.exp(0.1 + 0.8 * 0.35))


def test_the_interval_is_over_rounds_as_clusters():
    """No effect of x, rounds at -d, 0 and d: the variance is that of three independent means, by hand."""
    x = {f"{at}-{index}": float(index) for at in range(3) for index in range(4)}
    x = {batch: value + 0.01 * number for number, (batch, value) in enumerate(x.items())}
    d = 0.02
    logs = {at: {f"{at}-{index}": (at - 1) * d for index in range(4)} for at in range(3)}
    center, error = sum(x.values()) / len(x), 0.0
    estimate, _ = ratios.ratio(*sides(logs), together=True, padding=ratios.Padding(x, center))
    cells = [(x[batch], y) for cells_of_round in logs.values() for batch, y in cells_of_round.items()]
    slope = sum((a - center) * y for a, y in cells) / sum((a - center) ** 2 for a, _ in cells)
    squares = sum((value - center) ** 2 for value in x.values())
    for cells_of_round in logs.values():  # weights are 1/12; the line owes a third of its level to each round
        residual = sum(y - slope * (x[batch] - center) for batch, y in cells_of_round.items()) / 12
        along = sum((x[batch] - center) / 12 for batch in cells_of_round) ** 2 / squares
        error += residual**2 * (4 / 144) / (4 / 144 - (4 / 12) ** 2 / 12 - along)
    assert estimate.error == pytest.approx(math.sqrt(error))
    assert math.log(estimate.high / estimate.ratio) == pytest.approx(statistics.student_t(0.95, 2) * math.sqrt(error))


def test_with_one_batch_a_round_the_line_takes_a_degree_of_freedom_more():
    logs = {at: {at: 0.1 + 0.01 * (at % 3)} for at in range(10)}
    estimate, _ = ratios.ratio(
        *sides(logs), together=True, padding=ratios.Padding({at: 0.05 * at for at in range(10)}, 0.2)
    )
    assert estimate.of_file and estimate.freedom == 8
    assert math.log(estimate.high / estimate.ratio) == pytest.approx(statistics.student_t(0.95, 8) * estimate.error)


@pytest.mark.parametrize("rounds, batches", [(2, 6), (3, 3)])
def test_with_few_rounds_or_batches_it_is_of_the_measured_batches_alone(rounds, batches):
    logs = {at: {(at, index): 0.1 * at for index in range(batches)} for at in range(rounds)}
    x = {batch: 0.01 * number for number, batch in enumerate(batch for each in logs.values() for batch in each)}
    estimate, _ = ratios.ratio(*sides(logs), together=True, padding=ratios.Padding(x, 5.0))
    assert not estimate.of_file and estimate.ratio == pytest.approx(math.exp(0.05 * (rounds - 1)))
    assert estimate.low < estimate.ratio < estimate.high


def test_batches_that_one_side_has_not_are_left_out():
    logs = {at: {(at, number): 0.1 for number in range(4)} for at in range(3)}
    baseline, new = sides(logs)
    del new[0][0, 0], new[1]
    estimate, _ = ratios.ratio(baseline, new, together=True)
    assert estimate.batches == 7 and len(estimate.new) == 2
    assert ratios.ratio(baseline, {5: {"other": 1.0}, 6: {"another": 1.0}}, together=True)[0] is None


def test_rounds_that_share_some_of_few_batches_are_compared_round_by_round():
    """A short shape file: the fourth round has the first one's batch again, and none is in all rounds."""
    baseline = {at: {batch: 10.0**batch} for at, batch in enumerate([3, 1, 2, 3])}
    new = {at: {batch: 1.1 * time for batch, time in batches.items()} for at, batches in baseline.items()}
    for together in (True, False):
        estimate, _ = ratios.ratio(baseline, new, together)
        assert (estimate.ratio, estimate.low, estimate.high) == pytest.approx((1.1, 1.1, 1.1)) and estimate.batches == 4


def test_two_runs_with_the_same_batches_in_a_round_are_compared_batch_by_batch():
    """Heavy and light batches differ by a factor of ten; the ratio does not."""
    random.seed(1)
    baseline = {at: {(at, number): 10.0 ** random.random() for number in range(4)} for at in range(5)}
    new = {at: {batch: 1.1 * time for batch, time in batches.items()} for at, batches in baseline.items()}
    estimate, paired = ratios.ratio(baseline, new, together=False)
    assert (estimate.ratio, estimate.low, estimate.high) == pytest.approx((1.1, 1.1, 1.1))
    judged = Standing(Row(), Row("b"), "step", ratio=estimate, paired=paired, rounds=(5, 5))
    reasons = [replace(judged, busy=(0.0, busy)).doubt for busy in (0.5, 0)]
    assert not paired and "beside other load" in reasons[0] and "separate runs" in reasons[1]
    assert judged.by_round == pytest.approx([1.1] * 5)
    assert not replace(judged, control=ratios.control([estimate._replace(ratio=1.0)] * 3)).doubt
    assert ratios.ratio(baseline, new, together=True)[1]


@pytest.fixture(scope="module")
def simulation():
    pytest.importorskip("torch")  # shape_info.pt
    return importlib.import_module("docs._interval_coverage")


@pytest.mark.parametrize("scope", ["(the CPU preset)", "(scope loss in the CPU preset)"])
@pytest.mark.parametrize("world", ["as measured", "one process in ten is an outlier", "an effect common to a run"])
def test_the_interval_of_the_cpu_preset_holds_the_truth_in_95_of_100_runs(simulation, world, scope):
    """1,500 simulated runs with a fixed seed: chance alone is within 1.7%."""
    design = next(each for each in simulation.DESIGNS if each.title.endswith(scope))
    x = simulation.padding(2, ROOT / "shape_info.pt")
    held, width = simulation.coverage(simulation.WORLDS[world], design, x, runs=1500, seed=7)
    assert 0.93 <= held <= 0.975, held
    naive = next(each for each in simulation.DESIGNS if each.title.startswith("2 batches"))
    assert simulation.coverage(simulation.WORLDS[world], naive, x, runs=200, seed=7)[0] < 0.8


def test_the_presets_of_the_simulation_are_those_of_the_suite(simulation):

    designs = {of.title.partition("(")[2]: (of.rounds, of.batches) for of in simulation.DESIGNS}
    cpu, full = (settings.resolve({}, device) for device in ("cpu", "cuda"))
    for name, chosen in (("the CPU preset)", cpu), ("the full preset)", full)):
        assert designs[name] == (chosen.rounds, chosen.num_batches)
    batches = max(1, cpu.num_batches // timing.BATCHES_FOR_A_LOSS)
    assert designs["scope loss in the CPU preset)"] == (cpu.rounds, batches)


SETTINGS = {"dtype": "float32", "vocab_size": 10, "encoder_dim": 3, "prune_range": 5}
#: Two utterances, of T 5 and U 2, and of T 1 and U 1: 16 rows and 17 cells, of which 12 are met by one symbol a frame.
BATCH = {"index": 7, "N": 2, "T_max": 5, "U_max": 2, "useful_cells": 17, "padded_cells": 30}
BATCH.update(frames=6, tokens=8, one_symbol_cells=12, pruned_cells=6)
AT_SIZE = {"batch": 7, "N": 2, "T_max": 5, "U_max": 2, "loss_error": 0, "grad_error": 0, "grad_tolerance": 1}


@pytest.mark.parametrize(
    "scope, kind, settings, expected",
    [
        ("loss", "exact", {}, (4 * 10 * (2 * 8.5 + 17), 0)),
        ("loss", "exact", {"dtype": "bfloat16"}, (2 * 10 * (2 * 8.5 + 17), 0)),
        ("loss", "modified", {}, (4 * 10 * (2 * 8.5 + 17), 0)),
        ("loss", "pruned", {}, (4 * 10 * (2 * 6 + 6), 0)),
        ("loss", "tdt", {"durations": "0,1,2,4,8"}, (4 * 15 * (2 * 8.5 + 17), 0)),
        ("step", "exact", {}, (8 * (16 * 3 + 3 * 10), 180 * 8.5)),
        ("step", "pruned", {}, (8 * (16 * 3 + 3 * 3 * 10), 180 * 6 + 180 * 16 + 2 * 17 * 10)),
    ],
)
def test_a_loss_reads_needed_logits_twice_and_a_step_multiplies_three_times(scope, kind, settings, expected):
    """A loss writes all gradients, a step stores no logits."""
    recorded = schema.RecordedSettings(**{**SETTINGS, **settings})
    assert times.least_work(scope, kind, schema.Batch(**BATCH), recorded, 0.5) == expected


def test_the_oracle_counts_the_cells_that_float32_can_tell_from_zero():
    of_cells = torch.tensor([[1.0, 7e-8, 4e-8], [0.25, 1e-17, 0.0]], dtype=torch.float64)
    counted = [oracle.needed_cells(of_cells, dtype) for dtype in (torch.float32, torch.bfloat16)]
    assert counted == [3, 3] and oracle.needed_cells(of_cells, torch.float64) == 4


def limits(stream_seconds=1.0, product_seconds=2.0, **fields):
    """Best rates of 1000 bytes (of the larger buffer) and 1000 operations a second, by default."""
    stream = {"kernel": "update", "moved_bytes": 1000, "ns": [2 * stream_seconds * 1e9, stream_seconds * 1e9]}
    streams = [{**stream, "buffer_bytes": 666}, {**stream, "buffer_bytes": 66, "ns": [1.0]}]
    products = [{"n": 10, "ns": [9 * product_seconds * 1e9, product_seconds * 1e9]}]
    return {"record": "limits", "streams": streams, "products": products, **fields}


def write_limited(folder, *lines, **checked):
    """One batch, of which all cells are needed; a step takes 10, 20 and 30 s, a loss 5 s."""
    checked = {"at_size": {**AT_SIZE, "useful_cells": 17, "needed_cells": 17}, **checked}
    samples = [sample("timing-1", "step", 7, seconds * 1e3) for seconds in (10, 20, 30)]
    samples += [sample("timing-1", "loss", 7, 5e3), sample("timing-1", "loss", 7, 1, warmup=True)]
    timed = [environment("timing-1", batches=[BATCH]), *samples, status("timing-1")]
    write_run(folder, jobs=[correctness(**checked), timed], passes=["correctness", "timing"], rounds=1, **SETTINGS)
    change(folder, "environment", batches=[BATCH])
    first, *others = records_of(folder)
    write_records(folder, [first, *lines, *others])
    return folder


def test_a_row_has_its_share_of_the_limit(tmp_path):
    row = one_row(write_limited(tmp_path / "a", limits(2, 4, flags=["busy"]), limits()))
    assert row["bytes_per_second"] == 750  # the median of processes, each of the largest buffer
    assert (row["rates"]["memory_low"], row["rates"]["memory_high"]) == (500, 1000)
    assert row["limit_percent"] == pytest.approx({"step": 3.06 / 20 * 100, "loss": 2.04 / 0.75 / 5 * 100})
    assert " 15 / 54 " in summarize(tmp_path) and not any("beside other load" in note for note in row["notes"])
    half = one_row(write_limited(tmp_path / "b", limits(), at_size={**AT_SIZE, "useful_cells": 40, "needed_cells": 20}))
    assert half["limit_percent"]["step"] == pytest.approx(1.53 / 20 * 100)
    for name, lines, checked in (("c", [limits()], {"at_size": None}), ("d", [limits(streams=[])], {}), ("e", [], {})):
        assert one_row(write_limited(tmp_path / name, *lines, **checked))["limit_percent"] == {}


def test_the_limit_of_products_is_the_larger_rate_of_two(tmp_path):
    """torch.mm may not use what the processor has; what a preloaded library changes is torch's rate there alone."""
    loop = {"n": 10, "ns": [0.5e9], "by": "loop"}  # four times torch's
    here = limits(mkl_as_intel=False)
    both, preloaded = here["products"] + [loop], limits(product_seconds=0.8, mkl_as_intel=True)
    row = one_row(write_limited(tmp_path, {**here, "products": both}, preloaded))
    assert row["limit_percent"]["step"] == pytest.approx(3.06 / 4 / 20 * 100)
    rates = row["torch_operations_per_second"], row["loop_operations_per_second"]
    assert rates == (2500, 4000)  # of a run whose records do not tell its condition
    change(tmp_path, "environment", mkl_as_intel=False)
    assert one_row(tmp_path)["torch_operations_per_second"] == 1000
    probe = limits(product_seconds=1e-3, mkl_as_intel=False, streams=[])  # of one thread, which decides on controls
    assert one_row(write_limited(tmp_path, here, probe))["torch_operations_per_second"] == 1000


def test_a_row_above_its_limit_is_first_with_a_mark_alone(tmp_path):
    folder = write_limited(tmp_path / "a", limits())
    assert "1.00 !" not in summarize(folder)
    folder = write_limited(tmp_path / "b", limits(1000, 1000))
    screen = summarize(folder, details=False)
    assert "1.00 !" in summarize(folder) and "fastest !" in screen and "beware:" in screen
    assert "Use torchaudio !" in screen
    assert one_row(folder)["verdict"] == "fastest"


@pytest.mark.parametrize(
    "flags, loop, why",
    [
        ([], True, "please report it"),
        ([], False, "torch's rate alone"),
        (["busy", "loaded"], True, "beside other load"),
    ],
)
def test_a_row_over_the_limit_says_that_the_limit_is_wrong(tmp_path, flags, loop, why):
    line = limits(1000, 1000, flags=flags)
    line["products"] += [{"n": 10, "ns": [1e12], "by": "loop"}] if loop else []
    text = summarize(write_limited(tmp_path / "a", line))
    assert "the limit is wrong" in text and why in text and " >100 " in text


def test_no_exact_row_of_the_recorded_results_is_over_its_limit():
    log = logs.read([ROOT / "results"], all_runs=True)
    rows = [row for row in [*log.rows, *log.swept] if row.kind == "exact"]
    shares = [(row, scope, share) for row in rows for scope, share in row.limit_percent.items()]
    over = [(row, scope) for row, scope, share in shares if not 0 < share <= 100]
    marked = [row for row, scope in over if scope == "step" and "above limit" in doubts.kinds(row)]
    assert len(shares) >= 10  # a step's, where torch's products alone were measured on a CPU, may be: it is marked
    assert [row.folder for row, _ in over if row.rates.loop or row not in marked] == []


# The best that a device does, measured with a fake clock.

CPU = torch.device("cpu")
MS = 1_000_000


class FakeClock:
    """Every span it is asked for lasts as long as the next of `durations`, in ns, and the last one from then on."""

    def __init__(self, *durations):
        self.durations = list(durations)

    def synchronize(self):
        pass

    def mark(self):
        return None

    def between(self, begin, end):
        return self.durations.pop(0) if len(self.durations) > 1 else self.durations[0]


def test_repeats_fill_their_time_and_the_first_does_not_count():
    done = []
    assert rates.repeated(lambda: done.append(0), FakeClock(100 * MS), 0.35) == [100 * MS] * 4
    assert len(done) == 5
    assert rates.repeated(lambda: None, FakeClock(9000 * MS), 0.35) == [9000 * MS] * rates.FEWEST
    assert rates.repeated(lambda: None, FakeClock(1), 0.35) == [1] * rates.MOST


@pytest.fixture
def small_products(monkeypatch):
    """Multiply small matrices; the clock is made up anyway."""
    monkeypatch.setattr(rates, "SIZES", tuple(2**power for power in range(1, 8)))


def test_the_loop_of_the_suite_multiplies():
    """It computes the product that it is timed for."""
    for dtype in ("float32", "float64"):
        library = ctypes.CDLL(str(libraries.multiplication(dtype)))
        rows, columns = library.rows_of_block(), library.columns_of_block()
        n = math.lcm(rows, columns) * 3  # more than the terms of a sum at once
        left, right = (torch.rand(n, n, dtype=getattr(torch, dtype)) for _ in range(2))
        groups = left.view(n // rows, rows, n).transpose(1, 2).contiguous()
        panels = right.view(n, n // columns, columns).transpose(0, 1).contiguous()
        blocks = torch.zeros(n // rows, n // columns, rows, columns, dtype=left.dtype)
        library.multiply.argtypes = [ctypes.c_int64, *[ctypes.c_void_p] * 3]
        library.multiply(n, groups.data_ptr(), panels.data_ptr(), blocks.data_ptr())
        torch.testing.assert_close(blocks.transpose(1, 2).reshape(n, n), left @ right)
    products = rates.products_of_loop(
        str(libraries.multiplication("float32")), torch.float32, 2, FakeClock(32 * MS), 1e-3
    )
    assert (products.by, products.ns) == ("loop", [MS / 4] * 10)  # 64 by each of 2 threads


def test_products_grow_until_the_next_would_take_too_long(small_products):
    many = rates.MOST
    fast_then_slow = FakeClock(*[MS] * 3 * many, 60 * MS)
    products = list(rates.products(CPU, torch.float32, fast_then_slow, 0.4))
    assert [line.n for line in products] == [2, 4, 8, 16]  # the next: 8 x 60 ms
    assert products[0].ns == [MS] * many and products[3].ns == [60 * MS] * 7


def test_the_buffer_is_far_above_caches_and_leaves_memory_to_others():
    lines = list(rates.streams(CPU, FakeClock(MS), 0.001))
    (size,) = {line.buffer_bytes for line in lines}
    assert 2 * size <= memory.available_memory()
    assert size >= 8 * (machine.cache_bytes() or 0) or 8 * size >= 0.8 * memory.available_memory()
    moved = {line.kernel: line.moved_bytes / line.buffer_bytes for line in lines}
    assert moved == {"update": 1.5, "read": 1, "write": 1}


def test_what_torch_cannot_do_here_is_said_and_costs_nothing_else(monkeypatch):
    monkeypatch.setattr(rates, "SIZES", (-1,))
    chosen = settings.resolve({"preset": "quick", "max_seconds": 0.001}, "cpu")
    record = rates.measure(chosen, CPU)
    assert record.products == [] and record.reason.startswith("products: ")
    assert len(record.streams) == 3 and record.threads == torch.get_num_threads()
