"""common.analysis.ratios: two designs, the regression on padding, and how often its interval holds a known truth."""

from __future__ import annotations

import importlib
import math
import random
from pathlib import Path

import pytest

from common.analysis import ratios
from common.analysis.ratios import Padding
from common.analysis.row import Row
from common.analysis.standing import Standing
from common.core.statistics import student_t

ROOT = Path(__file__).resolve().parents[1]


def sides(logs):
    """Baseline and new side of a run whose log ratios are logs[round][batch]; the baseline takes 10 everywhere."""
    baseline = {at: {batch: [10.0] for batch in each} for at, each in logs.items()}
    new = {at: {batch: [10.0 * math.exp(y)] for batch, y in each.items()} for at, each in logs.items()}
    return baseline, new


def test_rounds_with_batches_of_their_own_are_recognised():
    assert ratios.own_batches({1: {"a": [1]}, 2: {"b": [1]}})
    assert not ratios.own_batches({1: {"a": [1]}, 2: {"a": [1]}})
    assert not ratios.own_batches({1: {"a": [1], "b": [1]}})  # one round is no design


def test_the_ratio_is_that_of_the_file_at_its_mean_padding():
    """Without noise the line is found exactly: log ratio 0.1 + 0.8 x, at the file's mean of 0.3."""
    x = {f"{at}-{number}": 0.05 * at + 0.1 * number for at in range(4) for number in range(3)}
    logs = {at: {f"{at}-{number}": 0.1 + 0.8 * x[f"{at}-{number}"] for number in range(3)} for at in range(4)}
    estimate, paired = ratios.ratio(*sides(logs), together=False, padding=Padding(x, 0.3))
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
    center = sum(x.values()) / len(x)
    estimate, _ = ratios.ratio(*sides(logs), together=True, padding=Padding(x, center))
    cells = [(x[batch], y) for cells_of_round in logs.values() for batch, y in cells_of_round.items()]
    slope = sum((a - center) * y for a, y in cells) / sum((a - center) ** 2 for a, _ in cells)
    squares, error = sum((value - center) ** 2 for value in x.values()), 0.0
    for (
        cells_of_round
    ) in logs.values():  # all weights are 1/12; the line owes a third of its level and some slope to each round
        residual = sum(y - slope * (x[batch] - center) for batch, y in cells_of_round.items()) / 12
        along = sum((x[batch] - center) / 12 for batch in cells_of_round) ** 2 / squares
        error += residual**2 * (4 / 144) / (4 / 144 - (4 / 12) ** 2 / 12 - along)
    error = math.sqrt(error)
    assert estimate.error == pytest.approx(error)
    assert math.log(estimate.high / estimate.ratio) == pytest.approx(student_t(0.95, 2) * error)


def test_with_one_batch_a_round_the_line_takes_a_degree_of_freedom_more():
    logs = {at: {at: 0.1 + 0.01 * (at % 3)} for at in range(10)}
    estimate, _ = ratios.ratio(*sides(logs), together=True, padding=Padding({at: 0.05 * at for at in range(10)}, 0.2))
    assert estimate.of_file and estimate.freedom == 8
    assert math.log(estimate.high / estimate.ratio) == pytest.approx(student_t(0.95, 8) * estimate.error)


@pytest.mark.parametrize("rounds, batches", [(2, 6), (3, 3)])
def test_with_few_rounds_or_batches_it_is_of_the_measured_batches_alone(rounds, batches):
    logs = {at: {(at, index): 0.1 * at for index in range(batches)} for at in range(rounds)}
    x = {batch: 0.01 * number for number, batch in enumerate(batch for each in logs.values() for batch in each)}
    estimate, _ = ratios.ratio(*sides(logs), together=True, padding=Padding(x, 5.0))
    assert not estimate.of_file and estimate.ratio == pytest.approx(math.exp(0.05 * (rounds - 1)))
    assert estimate.low < estimate.ratio < estimate.high


def test_batches_that_one_side_has_not_are_left_out():
    logs = {at: {(at, number): 0.1 for number in range(4)} for at in range(3)}
    baseline, new = sides(logs)
    del new[0][0, 0], new[1]
    estimate, _ = ratios.ratio(baseline, new, together=True)
    assert estimate.batches == 7 and len(estimate.new) == 2
    assert ratios.ratio(baseline, {5: {"other": [1.0]}, 6: {"another": [1.0]}}, together=True)[0] is None


def test_rounds_that_share_some_of_few_batches_are_compared_round_by_round():
    """A short shape file: the fourth round has the first one's batch again, and none is in all rounds."""
    baseline = {at: {batch: [10.0**batch]} for at, batch in enumerate([3, 1, 2, 3])}
    new = {at: {batch: [1.1 * times[0]] for batch, times in times_of.items()} for at, times_of in baseline.items()}
    for together in (True, False):
        estimate, _ = ratios.ratio(baseline, new, together)
        assert (estimate.ratio, estimate.low, estimate.high) == pytest.approx((1.1, 1.1, 1.1)) and estimate.batches == 4


def test_two_runs_with_the_same_batches_in_a_round_are_compared_batch_by_batch():
    """Heavy and light batches differ by a factor of ten; the ratio does not."""
    random.seed(1)
    baseline = {at: {(at, number): [10.0 ** random.random()] for number in range(4)} for at in range(5)}
    new = {
        at: {batch: [1.1 * time for time in times] for batch, times in times_of.items()}
        for at, times_of in baseline.items()
    }
    estimate, paired = ratios.ratio(baseline, new, together=False)
    assert (estimate.ratio, estimate.low, estimate.high) == pytest.approx((1.1, 1.1, 1.1))
    doubts = [
        Standing(Row(), Row("b"), "step", ratio=estimate, paired=paired, busy=(0.0, busy)).doubt for busy in (0.5, 0)
    ]
    assert not paired and "beside other load" in doubts[0] and not doubts[1]
    assert ratios.ratio(baseline, new, together=True)[1]


@pytest.fixture(scope="module")
def simulation():
    pytest.importorskip("torch")  # shape_info.pt
    return importlib.import_module("benchmarks.interval_coverage")


@pytest.fixture(scope="module")
def planted(simulation):
    return importlib.import_module("benchmarks.compare_power")


def test_compare_finds_a_planted_10_percent_at_the_default_settings(simulation, planted):
    """Two runs of one loss; --rev of nine; and no false alarm."""
    x = simulation.padding(2, ROOT / "shape_info.pt")
    two, *_, revisions = planted.designs()
    assert (two.losses, revisions.losses, revisions.paired) == (1, 9, True)
    assert planted.power(two, 0.1, x, runs=150, seed=3) >= 0.75
    assert planted.power(revisions, 0.1, x, runs=150, seed=3) >= 0.8
    assert planted.power(two, 0.0, x, runs=150, seed=3) <= 0.02


def test_rev_finds_a_planted_10_percent_on_a_noisy_machine_too(simulation, planted):
    """Processes that differ by 10% need more than its 10 rounds, which it measures; and no false alarm."""
    x, noisy = simulation.padding(2, ROOT / "shape_info.pt"), planted.WORLD._replace(process=0.1)
    revisions = next(design for design in planted.designs() if design.paired and design.losses == 1)
    powers = {slower: planted.power(revisions, slower, x, runs=150, seed=4, world=noisy) for slower in (0.0, 0.1)}
    assert powers[0.1] >= 0.75 and powers[0.0] <= 0.02
    assert planted.power(revisions._replace(most=revisions.rounds), 0.1, x, runs=150, seed=4, world=noisy) < 0.5


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
    from common.core import settings
    from common.losses.passes import timing

    designs = {design.title.partition("(")[2]: design for design in simulation.DESIGNS if "(" in design.title}
    for name, device in (("the CPU preset)", "cpu"), ("the full preset)", "cuda")):
        chosen = settings.resolve({}, device)
        assert (designs[name].rounds, designs[name].batches) == (chosen.rounds, chosen.num_batches)
    alone = designs["scope loss in the CPU preset)"]
    cpu = settings.resolve({}, "cpu")
    assert (alone.rounds, alone.batches) == (cpu.rounds, max(1, cpu.num_batches // timing.BATCHES_FOR_A_LOSS))
