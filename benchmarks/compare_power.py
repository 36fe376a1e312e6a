"""Print how large a slowdown must be for `compare` to see it, from simulated pairs of runs, as a Markdown table.

    .venv/main/bin/python benchmarks/compare_power.py --runs 2000

Each simulated pair is one loss measured twice; the second time is slower by a planted share.  Batches, processes and
samples vary as in benchmarks/interval_coverage.py ("as measured": processes by 2%, samples by 3%; or --noise-of a run).
Both sides have the same batches, as runs of one seed have.  Each cell is the share of pairs whose verdict is "slower".
The intervals of all rows of a comparison hold together: two (step and loss) for each loss.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import NamedTuple, Sequence

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.interval_coverage import WORLDS, World, padding, sides, simulate
from common.analysis import ratios
from common.analysis.row import Row
from common.analysis.standing import Margins, Standing
from common.core import settings, statistics
from common.core.text import count
from common.present.parts import Column
from common.present.text import markdown_of

SLOWER = (0.0, 0.05, 0.10, 0.15, 0.20)
WORLD = WORLDS["as measured"]


class Design(NamedTuple):
    """A comparison.  losses: how many implementations."""

    title: str
    rounds: int
    batches: int
    losses: int
    paired: bool


def designs() -> Sequence[Design]:
    cpu = settings.resolve({"preset": "cpu"}, "cpu")
    two = f"two runs, {cpu.rounds} rounds of {cpu.num_batches} batches (the CPU preset)"
    one = f"one run of both, {cpu.rounds} rounds of {cpu.num_batches} batches (the CPU preset)"
    return [
        Design(f"{title}, {count(losses, 'implementation')}", rounds, cpu.num_batches, losses, paired)
        for title, rounds, paired in (
            (two, cpu.rounds, False),
            ("two runs, `--rounds 20`", 20, False),
            (one, cpu.rounds, True),
        )
        for losses in (1, 9)
    ]


def power(design: Design, slower: float, x: np.ndarray, runs: int, seed: int, world: World = WORLD) -> float:
    """Return the share of pairs that are called slower."""
    rng, world = np.random.default_rng(seed), world._replace(slope=0.0, deviation=0.0)
    truth, x_mean = np.full(len(x), math.log1p(slower)), float(x.mean())
    confidence, called_slower = statistics.confidence_of_each(2 * design.losses), 0
    for _ in range(runs):
        baseline, new, of_batch = sides(simulate(world, x, truth, design.rounds, design.batches, True, rng))
        ratio, paired = ratios.ratio(baseline, new, design.paired, confidence, ratios.Padding(of_batch, x_mean))
        standing = Standing(Row(), Row(), "step", Margins(confidence=confidence), ratio, paired)
        called_slower += standing.verdict == "slower"
    return called_slower / runs


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=2000, help="Simulated pairs of each cell. Default: 2000")
    runs = parser.parse_args().runs
    x = padding(2, Path(__file__).resolve().parents[1] / "shape_info.pt")
    lines = []
    for design in designs():
        cells = (power(design, slower, x, runs, seed=1) for slower in SLOWER)
        lines.append([design.title, *(f"{100 * cell:.1f}%" for cell in cells)])
        print(f"{design.title}: done", file=sys.stderr)
    print(markdown_of(["comparison", *(Column(f"{slower:.0%} slower") for slower in SLOWER)], lines))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
