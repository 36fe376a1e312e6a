"""Count how often the intervals of a ratio hold the truth, in simulated runs over the real shapes; a Markdown table.

    .venv/main/bin/python docs/_interval_coverage.py --runs 2000

Each simulated run draws batches from the shape file, and times of two losses: log(time) = level + slope x + deviation
of the batch + level of the process + noise.  The truth is the mean of log(ratio) over all batches of the file.  Each
cell has the share of runs whose 95% interval contains it (within 1% for 2,000 runs), and the mean half-width.  The
worlds' figures (slope 0.8, r2 0.7, processes 2%, samples 3%) are those of real runs on an idle CPU.

A second table is of two separate runs of unchanged rows, each of which a day slows by an effect of its own: the share
of comparisons with a false verdict, without the control of common/analysis/control.py and with it, and how often a row
is found that did become slower.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rnnt_bench.analysis import ratios
from rnnt_bench.core import statistics
from rnnt_bench.data import batching, shapes
from rnnt_bench.present.parts import Column
from rnnt_bench.present.text import markdown_of

Interval = tuple[float, float] | None


class World(NamedTuple):
    """A simulated machine and two losses.

    slope, curve: linear and quadratic coefficients of log(ratio) over x
    deviation: spread of the batches around that line
    process, noise: spread of log(time) between processes, and between samples
    outlier: share of processes that are slower, by 20% on average
    common: spread of an effect that all processes of a run share
    """

    slope: float = 0.8
    curve: float = 0.0
    deviation: float = 0.09
    process: float = 0.02
    noise: float = 0.03
    outlier: float = 0.0
    common: float = 0.0


WORLDS = {
    "as measured": World(),
    "one process in ten is an outlier": World(outlier=0.1),
    "an effect common to a run": World(common=0.2),
    "quiet processes": World(process=0.005, noise=0.01),
    "noisy processes": World(process=0.05),
    "noisy samples": World(noise=0.15),
    "a curve instead of a line": World(curve=0.5),
    "no effect of padding": World(slope=0.0, deviation=0.1),
    "all batches alike": World(slope=0.0, deviation=0.0),
}


class Run(NamedTuple):
    """x and log(ratio) of each round's batches, (rounds, batches)."""

    x: np.ndarray
    y: np.ndarray


def simulate(world: World, x: np.ndarray, truth: np.ndarray, rounds: int, batches: int, own_batches: bool, rng) -> Run:
    """Return one simulated run.  own_batches: each round has batches of its own; else all rounds have the same."""
    chosen = rng.choice(len(x), rounds * batches if own_batches else batches, replace=False)
    chosen = chosen.reshape(rounds, batches) if own_batches else np.tile(chosen, (rounds, 1))
    sides = []
    for _ in range(2):
        outlier = (rng.random((rounds, 1)) < world.outlier) * rng.exponential(0.2, (rounds, 1))
        noise = rng.normal(0, world.noise, (rounds, batches))
        sides.append(rng.normal(0, world.process, (rounds, 1)) + outlier + noise)
    common = rng.normal(0, world.common) if world.common else 0.0
    return Run(x[chosen], truth[chosen] + (sides[1] + common) - (sides[0] + common))


def sides(run: Run) -> tuple[ratios.Rounds, ratios.Rounds, dict[Any, float]]:
    """Return the baseline, of time 1, the other loss, and x of each batch."""
    baseline = {name: {(name, at): 1.0 for at in range(len(ys))} for name, ys in enumerate(run.y)}
    new = {name: {(name, at): math.exp(y) for at, y in enumerate(ys)} for name, ys in enumerate(run.y.tolist())}
    return baseline, new, {(name, at): x for name, xs in enumerate(run.x.tolist()) for at, x in enumerate(xs)}


def regression(run: Run, x_mean: float) -> Interval:
    """Return the interval that the suite gives."""
    baseline, new, x = sides(run)
    ratio = ratios.own_batches_ratio(baseline, new, padding=ratios.Padding(x, x_mean))
    return (math.log(ratio.low), math.log(ratio.high)) if ratio and ratio.of_file else None


def over_rounds(run: Run, x_mean: float) -> Interval:
    """Return Student's t over the means of the rounds, without regard to padding."""
    interval = statistics.interval([math.exp(value) for value in run.y.mean(axis=1)])
    return (math.log(interval[0]), math.log(interval[1])) if interval else None


class Design(NamedTuple):
    """A way to measure and a way to conclude."""

    title: str
    rounds: int
    batches: int
    own_batches: bool
    method: Callable[[Run, float], Interval]


DESIGNS = (
    Design("2 batches, the same in 3 rounds; t over rounds", 3, 2, False, over_rounds),
    Design("5 rounds of 4 own batches; regression", 5, 4, True, regression),
    Design("10 rounds of 2 own batches; t over rounds", 10, 2, True, over_rounds),
    Design("10 rounds of 2 own batches; regression (the CPU preset)", 10, 2, True, regression),
    Design("10 rounds of 1 own batch; regression (scope loss in the CPU preset)", 10, 1, True, regression),
    Design("6 rounds of 14 own batches; regression (the full preset)", 6, 14, True, regression),
)


def coverage(world: World, design: Design, x: np.ndarray, runs: int, seed: int) -> tuple[float, float]:
    """Return (share of intervals that hold the truth, mean half-width of log(ratio)) over `runs` simulated runs."""
    rng = np.random.default_rng(seed)
    truth = 0.2 + world.slope * x + world.curve * x**2 + rng.normal(0, world.deviation, len(x))
    x_mean, whole = float(x.mean()), float(truth.mean())

    def interval() -> Interval:
        run = simulate(world, x, truth, design.rounds, design.batches, design.own_batches, rng)
        return design.method(run, x_mean)

    return _held([interval() for _ in range(runs)], whole)


def _held(intervals: Sequence[Interval], whole: float) -> tuple[float, float]:
    """Return the share of intervals that hold the truth `whole`, and their mean half-width."""
    ends = np.array(intervals, dtype=float)
    inside = (ends[:, 0] <= whole) & (whole <= ends[:, 1])
    return float(inside.mean()), float((ends[:, 1] - ends[:, 0]).mean() / 2)


def stopped(run: Run, level: float) -> Run:
    """Return the rounds that a run with --budget has of the other loss: as many as fit into the usual time of seven.

    Five at least: with fewer an interval is of the measured batches alone, and no rule has chosen among them.
    level: how many times the fastest's time the other loss takes.
    """
    usual = run.y.shape[1] * (1 + level)
    number = int((np.cumsum((1 + np.exp(run.y)).sum(axis=1)) <= 7 * usual).sum())
    number = max(number, 5)
    return Run(run.x[:number], run.y[:number])


def stopped_coverage(world: World, level: float, x: np.ndarray, runs: int, seed: int) -> tuple[float, float]:
    """Return the same as ``coverage``, of the CPU preset with --budget.

    level: how many times the fastest's time the other loss takes.
    """
    rng = np.random.default_rng(seed)
    truth = math.log(level) + world.slope * (x - x.mean()) + rng.normal(0, world.deviation, len(x))
    x_mean, whole = float(x.mean()), float(truth.mean())
    runs_of = (stopped(simulate(world, x, truth, 10, 2, True, rng), level) for _ in range(runs))
    return _held([regression(run, x_mean) for run in runs_of], whole)


class Days(NamedTuple):
    """Two separate runs of some rows.

    rows: of which all but the first did not change
    machine: by what the second day slows all rows (0.1: by 10%)
    day: spread of what it does to each row alone
    change: by what the first row was made slower
    """

    rows: int = 19
    machine: float = 0.1
    day: float = 0.05
    change: float = 0.0


DAYS = {
    "19 rows, no run effect": Days(machine=0.0, day=0.0),
    "19 rows, run effect 5%": Days(machine=0.0),
    "19 rows, run effect 5%, the machine 10% slower": Days(),
    "19 rows, the machine alone 10% slower": Days(day=0.0),
    "5 rows, run effect 5%, the machine 10% slower": Days(rows=5),
    "19 rows, run effect 5%, the first 50% slower": Days(change=0.5),
    "19 rows, run effect 1%, the first 20% slower": Days(day=0.01, change=0.2),
}


def two_days(days: Days, x: np.ndarray, rng) -> list[ratios.Ratio]:
    """Return each row's ratio of the second day to the first, in the CPU preset, as the suite estimates it."""
    moved = math.log1p(days.machine) + rng.normal(0, days.day, days.rows)
    moved[0] += math.log1p(days.change)
    confidence = statistics.confidence_of_each(days.rows)
    result = []
    for effect in moved:
        baseline, new, of_batch = sides(simulate(World(), x, np.full(len(x), effect), 10, 2, True, rng))
        padded = ratios.Padding(of_batch, float(x.mean()))
        result.append(ratios.own_batches_ratio(baseline, new, confidence, padded))
    return [ratio for ratio in result if ratio]


def verdicts(every: Sequence[ratios.Ratio], controlled: bool) -> list[str]:
    """Return the verdict on each row, with 95% for all together; controlled: over the other rows but for the first."""
    words = []
    for at, ratio in enumerate(every):
        control = ratios.control([each for other, each in enumerate(every) if other not in (0, at)])
        if controlled and control:
            ratio = ratios.over_control(ratio, control, statistics.confidence_of_each(len(every)))
        words.append(statistics.verdict(ratio.low, ratio.high, statistics.TOLERANCE))
    return words


class Judged(NamedTuple):
    """Shares of comparisons: with a verdict on a row that did not change, and in which the first row is "slower"."""

    wrong: float
    slower: float


def judged(days: Days, x: np.ndarray, runs: int, seed: int = 1) -> tuple[Judged, Judged]:
    """Return the shares over `runs` simulated comparisons, without the control and with it."""
    rng = np.random.default_rng(seed)
    every = [two_days(days, x, rng) for _ in range(runs)]
    unchanged = slice(bool(days.change), None)

    def shares(controlled: bool) -> Judged:
        words = [verdicts(rows, controlled) for rows in every]
        wrong = [bool({"faster", "slower"}.intersection(of[unchanged])) for of in words]
        return Judged(sum(wrong) / runs, sum(of[0] == "slower" for of in words) / runs)

    return shares(False), shares(True)


def padding(batch_size: int, shape_file: Path) -> np.ndarray:
    """-log(useful / padded cells) of every batch of the shape file."""
    useful, padded = batching.fixed_size(shapes.load(shape_file), batch_size).all_cells()
    return -np.log(useful / padded)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=2000, help="Simulated runs of each cell. Default: 2000")
    runs = parser.parse_args().runs
    x = padding(2, Path(__file__).resolve().parents[1] / "shape_info.pt")
    levels = (1.2, 3.0, 10.0)
    lines = []
    for name, world in WORLDS.items():
        cells = [coverage(world, design, x, runs, seed=1) for design in DESIGNS]
        cells += [stopped_coverage(world, level, x, runs, seed=1) for level in levels]
        lines.append([name, *(f"{100 * held:.1f}%, ±{100 * width:.1f}%" for held, width in cells)])
        print(f"{name}: done", file=sys.stderr)
    heads = [design.title for design in DESIGNS]
    heads += [f"--budget, {level:g} times the fastest's time" for level in levels]
    print(markdown_of(["world", *map(Column, heads)], lines))
    lines = []
    for name, days in DAYS.items():
        both = judged(days, x, runs // 5)
        slower = [f"{100 * of.slower:.0f}%" if days.change else "-" for of in both]
        lines.append([name, *(f"{100 * of.wrong:.1f}%" for of in both), *slower])
        print(f"{name}: done", file=sys.stderr)
    heads = ["false verdict", "false verdict over the control", "found slower", "found slower over the control"]
    print(markdown_of(["two separate runs", *map(Column, heads)], lines))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
