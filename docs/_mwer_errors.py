#!/usr/bin/env python3
"""Measure what examples/mwer.py does to the errors of checkpoints of examples/train.py, for docs/fused.md.

    .venv/main/bin/python docs/_mwer_errors.py

Each seed has trainings of its own.  Intervals are of means over the seeds, by Student's t.  Output is Markdown; on two
cores this takes some five minutes.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import geometric_mean, mean, stdev
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from rnnt_bench.core.statistics import interval, student_t  # noqa: E402

SEEDS = 5
#: Steps of a training: one that ends while errors are left to learn, and one that ends after.
STEPS = (90, 200)
#: Symbols: with so few a model errs little after so few steps.
VOCAB = 15
COLUMNS = ("before", "mwer", "transducer loss")


def run(script: str, *flags: Any) -> dict[str, Any]:
    """Return the line of JSON that an example prints."""
    command = [sys.executable, str(ROOT / "examples" / script), *map(str, flags)]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)


def of_mean(values: Sequence[float]) -> str:
    """Return the mean and its 95% interval in words."""
    half = student_t(0.95, len(values) - 1) * stdev(values) / len(values) ** 0.5
    return f"{mean(values):.1f} ({mean(values) - half:.1f} to {mean(values) + half:.1f})"


def of_ratio(news: Sequence[float], olds: Sequence[float]) -> str:
    """Return the geometric mean of ratios and its 95% interval in words."""
    ratios = [new / old for new, old in zip(news, olds)]
    low, high = interval(ratios) or (math.nan, math.nan)
    return f"{geometric_mean(ratios):.2f} ({low:.2f} to {high:.2f})"


def main() -> None:
    print("| steps of the training | % of symbols wrong then | after MWER | after the transducer loss | MWER over it |")
    print("| ---: | ---: | ---: | ---: | ---: |")
    for steps in STEPS:
        rows: list[list[float]] = []
        for seed in range(SEEDS):
            with tempfile.TemporaryDirectory() as folder:
                run("train.py", "--steps", steps, "--vocab", VOCAB, "--seed", seed, "--save", folder)
                result = run("mwer.py", Path(folder) / f"{steps}.pt")
            rows.append([100 * result[column] for column in COLUMNS])
            print(f"{steps} steps, seed {seed}: {result}", file=sys.stderr)
        before, after, without = zip(*rows)
        print(f"| {steps} | " + " | ".join([*map(of_mean, (before, after, without)), of_ratio(after, without)]) + " |")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    main()
