"""Count how often the intervals of a ratio hold the truth, in simulated runs over the real shapes; a Markdown table.

    .venv/main/bin/python benchmarks/interval_coverage.py --runs 2000 --noise-of FOLDER

Each simulated run draws batches from the shape file, and times of two losses: log(time) = level + slope x + deviation
of the batch + level of the process + noise.  The truth is the mean of log(ratio) over all batches of the file.  Each
cell has the share of runs whose 95% interval contains it (within 1% for 2,000 runs), and the mean half-width.  The
worlds' figures (slope 0.8, r2 0.7, processes 2%, samples 3%) are those of real runs on an idle CPU; --noise-of adds a
world with those of one run.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.analysis import logs, ranking, ratios
from common.analysis.groups import groups
from common.analysis.row import Row
from common.core import statistics
from common.core.settings import SLOW_ROUNDS
from common.data import batching, shapes
from common.jobs import budget
from common.present.table import Column
from common.present.text import markdown_of

Interval = Optional[Tuple[float, float]]


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


def noise_of(folder: Path) -> World:
    """Return the world with the noise of a run, from pairs of its exact losses of one torch."""
    (rows,) = groups(logs.read([folder]).rows)
    rows = ranking.of_one_torch([row for row in rows if row.status == "ok" and row.is_exact])
    runs = []
    for first, second in itertools.combinations([row for row in rows if row.rounds > 2], 2):  # a loop in Python has one
        before, after = first.round_medians_ms["step"], second.round_medians_ms["step"]
        x = [[first.padding.of_batch[batch] for batch in batches] for batches in before.values()]
        y = [[math.log(after[at][batch] / time) for batch, time in batches.items()] for at, batches in before.items()]
        runs.append(Run(np.array(x), np.array(y)))
    return fitted(runs)


def fitted(runs: Sequence[Run]) -> World:
    """Return the world of such runs.

    A line over x is fitted to log(ratio) of each run.  Residuals vary within a round by deviation and noise, which are
    told apart by World's usual deviation.  From round to round they vary by the processes too.
    """
    fits = []
    for x, y in runs:
        slope, level = np.polyfit(x.ravel(), y.ravel(), 1)
        rest = y - slope * x - level
        within = rest.var(axis=1, ddof=1).mean()
        fits.append((abs(slope), within, rest.mean(axis=1).var(ddof=1) - within / rest.shape[1]))
    slope, within, between = np.mean(fits, axis=0)
    deviation = min(World().deviation ** 2, within)
    parts = {"deviation": deviation, "noise": (within - deviation) / 2, "process": max(between, 0) / 2}
    return World(slope=float(slope), **{name: math.sqrt(part) for name, part in parts.items()})


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


def sides(run: Run) -> Tuple[ratios.Rounds, ratios.Rounds, Dict[Any, float]]:
    """Return the baseline, of time 1, the other loss, and x of each batch."""
    baseline = {name: {(name, at): [1.0] for at in range(len(ys))} for name, ys in enumerate(run.y)}
    new = {name: {(name, at): [math.exp(y)] for at, y in enumerate(ys)} for name, ys in enumerate(run.y.tolist())}
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


def bootstrap(run: Run, x_mean: float, draws: int = 300) -> Interval:
    """Return percentiles of the regression's estimate over resampled rounds and batches."""
    rng = np.random.default_rng(3)
    rounds, batches = run.y.shape
    estimates = []
    for _ in range(draws):
        picked = np.ix_(rng.integers(0, rounds, rounds), rng.integers(0, batches, batches))
        xs, ys = run.x[picked].ravel(), run.y[picked].ravel()
        deviations = xs - xs.mean()
        squares = (deviations**2).sum()
        if squares:
            estimates.append(ys.mean() + (deviations * ys).sum() / squares * (x_mean - xs.mean()))
    return tuple(np.percentile(estimates, [2.5, 97.5])) if estimates else None


class Design(NamedTuple):
    """A way to measure and a way to conclude."""

    title: str
    rounds: int
    batches: int
    own_batches: bool
    method: Callable[[Run, float], Interval]


DESIGNS = (
    Design("2 batches, the same in 3 rounds; t over rounds", 3, 2, False, over_rounds),
    Design("20 batches, the same in 3 rounds; bootstrap", 3, 20, False, bootstrap),
    Design("5 rounds of 4 own batches; regression", 5, 4, True, regression),
    Design("10 rounds of 2 own batches; t over rounds", 10, 2, True, over_rounds),
    Design("10 rounds of 2 own batches; regression (the CPU preset)", 10, 2, True, regression),
    Design("10 rounds of 1 own batch; regression (scope loss in the CPU preset)", 10, 1, True, regression),
    Design("6 rounds of 14 own batches; regression (the full preset)", 6, 14, True, regression),
)


def coverage(world: World, design: Design, x: np.ndarray, runs: int, seed: int) -> Tuple[float, float]:
    """Return (share of intervals that hold the truth, mean half-width of log(ratio)) over `runs` simulated runs."""
    rng = np.random.default_rng(seed)
    truth = 0.2 + world.slope * x + world.curve * x**2 + rng.normal(0, world.deviation, len(x))
    x_mean, whole = float(x.mean()), float(truth.mean())
    if design.method is bootstrap:
        runs = max(runs // 10, 1)
    results: List[Tuple[float, float]] = []
    for _ in range(runs):
        interval = design.method(
            simulate(world, x, truth, design.rounds, design.batches, design.own_batches, rng), x_mean
        )
        assert interval is not None
        results.append((interval[0] <= whole <= interval[1], (interval[1] - interval[0]) / 2))
    held, width = np.mean(results, axis=0)
    return float(held), float(width)


def stopped(run: Run, level: float) -> Run:
    """Return the rounds that a run with --budget has of the other loss: as many as fit into the usual time of seven,
    and five where it is far behind in each of the first three.

    Five at least: with fewer an interval is of the measured batches alone, and no rule has chosen among them.
    level: how many times the fastest's time the other loss takes.
    """
    usual = run.y.shape[1] * (1 + level)
    number = int((np.cumsum((1 + np.exp(run.y)).sum(axis=1)) <= 7 * usual).sum())
    if budget.is_far_behind(np.exp(run.y.mean(axis=1)).tolist()):
        number = SLOW_ROUNDS
    number = max(number, SLOW_ROUNDS)
    return Run(run.x[:number], run.y[:number])


def stopped_coverage(world: World, level: float, x: np.ndarray, runs: int, seed: int) -> Tuple[float, float]:
    """Return the same as ``coverage``, of the CPU preset with --budget.

    level: how many times the fastest's time the other loss takes; at budget.FAR_BEHIND it is left to chance whether it
    counts as far behind, which is where stopping could do most harm.
    """
    rng = np.random.default_rng(seed)
    truth = math.log(level) + world.slope * (x - x.mean()) + rng.normal(0, world.deviation, len(x))
    x_mean, whole = float(x.mean()), float(truth.mean())
    intervals: List[Tuple[bool, float]] = []
    for _ in range(runs):
        interval = regression(stopped(simulate(world, x, truth, 10, 2, True, rng), level), x_mean)
        assert interval is not None
        intervals.append((interval[0] <= whole <= interval[1], (interval[1] - interval[0]) / 2))
    held, width = np.mean(intervals, axis=0)
    return float(held), float(width)


#: Of four losses, the first of them the fastest: level and slope of log(time), the latter times the world's.
FOUR = {"fused": (1.0, 0.0), "ours": (2.17, 1.0), "ours@old": (4.5, 1.0), "other": (4.57, 1.0)}
ASSUMPTIONS = ("through_control", "surplus_kept")


def same_torch_coverage(
    world: World, rounds: int, batches: int, x: np.ndarray, runs: int, seed: int
) -> Dict[str, Tuple[float, float]]:
    """Return the same as ``coverage``, of what a row of another torch would take under the fastest's, by each of the
    two assumptions of common.analysis.ranking.  "ours" was measured under both torches."""
    rng = np.random.default_rng(seed)
    deviation = world.deviation / math.sqrt(2)  # two losses make a ratio
    truth = {
        name: math.log(level) + slope * world.slope * x + rng.normal(0, deviation, len(x))
        for name, (level, slope) in FOUR.items()
    }
    fused, ours, old, other = (math.exp((truth[name] - truth["fused"]).mean()) for name in FOUR)
    whole = dict(zip(ASSUMPTIONS, (other / old * ours, (other - old + ours) / fused)))
    intervals: Dict[str, List[Tuple[bool, float]]] = {name: [] for name in ASSUMPTIONS}
    for _ in range(runs):
        chosen = rng.choice(len(x), rounds * batches, replace=False).reshape(rounds, batches)
        rows = [_row(name, world, of[chosen], chosen, x, rng) for name, of in truth.items()]
        standing = next(
            each for each in ranking.standings(rows, "step", statistics.CONFIDENCE) if each.row.name == "other"
        )
        for name in ASSUMPTIONS:
            ratio = getattr(standing, name)
            held = ratio.low <= whole[name] <= ratio.high
            intervals[name].append((held, math.log(ratio.high / ratio.low) / 2))
    means = {name: np.mean(held_and_width, axis=0) for name, held_and_width in intervals.items()}
    return {name: (float(held), float(width)) for name, (held, width) in means.items()}


def _row(name: str, world: World, truth: np.ndarray, chosen: np.ndarray, x: np.ndarray, rng) -> Row:
    """One of FOUR, measured on the `chosen` (rounds, batches); truth: log(time) of each."""
    rounds, _ = chosen.shape
    process = rng.normal(0, world.process, (rounds, 1))
    process += (rng.random((rounds, 1)) < world.outlier) * rng.exponential(0.2, (rounds, 1))
    times = np.exp(truth + process + rng.normal(0, world.noise, chosen.shape))
    medians = {str(at): dict(zip(map(str, chosen[at]), map(float, times[at]))) for at in range(rounds)}
    torch = "1.13.1" if name in ("ours@old", "other") else "2.11.0"
    row = Row(name, kind="exact", run_id="one", torch_version=torch, round_medians_ms={"step": medians})
    row.padding = ratios.Padding({str(batch): float(x[batch]) for batch in chosen.ravel()}, float(x.mean()))
    return row


def in_words(world: World) -> str:
    shares = ("deviation", world.deviation), ("processes", world.process), ("samples", world.noise)
    return ", ".join([f"slope {world.slope:.2f}", *(f"{name} {share:.1%}" for name, share in shares)])


def padding(batch_size: int, shape_file: Path) -> np.ndarray:
    """-log(useful / padded cells) of every batch of the shape file."""
    useful, padded = batching.fixed_size(shapes.load(shape_file), batch_size).all_cells()
    return -np.log(useful / padded)


def table(
    runs: int, seed: int, x: np.ndarray, designs: Sequence[Design] = DESIGNS, worlds: Mapping[str, World] = WORLDS
) -> str:
    """Return a Markdown table with a row for each world and a column for each design."""
    lines = []
    for name, world in worlds.items():
        lines.append([name, *percents(coverage(world, design, x, runs, seed) for design in designs)])
        print(f"{name}: done", file=sys.stderr)
    return markdown_of(["world", *(Column(design.title) for design in designs)], lines)


def percents(cells: Iterable[Tuple[float, float]]) -> List[str]:
    """Return each (share of intervals that hold the truth, relative half-width) in words."""
    return [f"{100 * held:.1f}%, ±{100 * width:.1f}%" for held, width in cells]


def main(argv: Optional[Sequence[str]] = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=2000, help="Simulated runs of each cell. Default: 2000")
    parser.add_argument("--batch-size", type=int, default=2, help="Utterances in a batch. Default: 2")
    parser.add_argument("--seed", type=int, default=1, help="Seed of the simulation. Default: 1")
    parser.add_argument("--noise-of", type=Path, metavar="FOLDER", help="Add a world with the noise of this run.")
    arguments = parser.parse_args(argv)
    x = padding(arguments.batch_size, Path(__file__).resolve().parents[1] / "shape_info.pt")
    worlds = dict(WORLDS)
    if arguments.noise_of:
        world = noise_of(arguments.noise_of)
        worlds[f"{arguments.noise_of.name}: {in_words(world)}"] = world
    print(table(arguments.runs, arguments.seed, x, worlds=worlds))
    heads = ["if the other torch slows all of it alike", "if the surplus stays in ms"]
    lines = []
    for name, world in worlds.items():
        covered = same_torch_coverage(world, 10, 2, x, max(arguments.runs // 2, 1), arguments.seed)
        lines.append([name, *percents(covered.values())])
    print(f"\n{markdown_of(['world', *map(Column, heads)], lines)}")
    levels = [1.2, budget.FAR_BEHIND, 10.0]
    lines = []
    for name, world in worlds.items():
        stopped = [stopped_coverage(world, level, x, arguments.runs, arguments.seed) for level in levels]
        lines.append([name, *percents(stopped)])
    columns = [Column(f"--budget, {level:g} times the fastest's time") for level in levels]
    print(f"\n{markdown_of(['world', *columns], lines)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
