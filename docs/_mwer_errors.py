#!/usr/bin/env python3
"""Measure what examples/mwer.py does to the errors of checkpoints of examples/train.py, for docs/fused.md.

    .venv/main/bin/python docs/_mwer_errors.py

Each seed has a training of its own.  Intervals are of means over the seeds, by Student's t.  Output is Markdown; on two
cores this takes some twelve minutes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean, stdev
from typing import Any, Dict, List, Sequence

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from rnnt_bench.core.statistics import student_t  # noqa: E402

SEEDS, STEPS = 5, 200
#: Flags of the training: with 14 syllables a model errs little after so few steps.
TRAINING = ("--steps", STEPS, "--vocab", 15)
COLUMNS = ("before", "mwer", "transducer loss")


def run(script: str, *flags: Any) -> Dict[str, Any]:
    """Return the line of JSON that an example prints."""
    command = [sys.executable, str(ROOT / "examples" / script), *map(str, flags)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return json.loads(subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True).stdout)


def of_mean(values: Sequence[float]) -> str:
    """Return the mean and its 95% interval in words."""
    half = student_t(0.95, len(values) - 1) * stdev(values) / len(values) ** 0.5
    return f"{mean(values):.1f} ({mean(values) - half:.1f} to {mean(values) + half:.1f})"


def main() -> None:
    rows: List[List[float]] = []
    for seed in range(SEEDS):
        with tempfile.TemporaryDirectory() as folder:
            run("train.py", *TRAINING, "--seed", seed, "--save", folder)
            result = run("mwer.py", Path(folder) / f"{STEPS}.pt")
        rows.append([100 * result[column] for column in COLUMNS])
        print(f"seed {seed}: {result}", file=sys.stderr)
    before, after, without = zip(*rows)
    differences = [a - b for a, b in zip(after, without)]
    print("| % of symbols wrong | before | after MWER | after as many steps of the transducer loss | difference |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for seed, values in enumerate(zip(*zip(*rows), differences)):
        print(f"| seed {seed} | " + " | ".join(f"{value:.1f}" for value in values) + " |")
    print("| mean | " + " | ".join(map(of_mean, (before, after, without, differences))) + " |")


if __name__ == "__main__":
    main()
