#!/usr/bin/env python3
"""Train with each loss from several seeds (examples/train.py), for the table of docs/fused.md.

    .venv/main/bin/python benchmarks/train_table.py

Five seeds of three losses, one process after another, take some 10 minutes on two cores; then --rounds short trainings
of each loss in turn, for its time and memory, take four more, on a machine that does nothing else (--rounds 0 leaves
them for later).  Output is Markdown: error rate on held-out utterances, time of a step, memory, and how far the curve
is from torchaudio's.  The numbers are kept in --output, a line a training; what is there is not repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, List, Sequence

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from common.cli.parser import Parser  # noqa: E402
from common.core import flag_types  # noqa: E402
from common.core.errors import EXIT_OK, NotRunnable, UserError  # noqa: E402
from common.core.guard import guarded  # noqa: E402
from common.core.statistics import mean, student_t, variance  # noqa: E402
from common.core.text import count, number  # noqa: E402
from common.present.table import Cell, tabulated  # noqa: E402
from common.present.text import markdown  # noqa: E402
from common.setup import extensions  # noqa: E402

SCRIPT = ROOT / "examples" / "train.py"
#: The first is what the curves of the others are compared with.
LOSSES = ("torchaudio", "fused", "fast_rnnt-pruned")
#: Steps of the curves that are compared: later ones show how rounding grows in training.
COMPARED = 30
#: Flags of the short trainings.
SHORT = ("--steps", "150", "--utterances", "300")
Results = List[Dict[str, Any]]


def measure(arguments: argparse.Namespace) -> None:
    """Train with each loss and seed that --output does not have, and add a line each.

    Raises UserError if a training fails."""
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    for timed, seeds, flags in ((False, arguments.seeds, ()), (True, arguments.rounds, SHORT)):
        done = {(run["loss"], run["seed"]) for runs in known(arguments.output, timed).values() for run in runs}
        for seed in range(seeds):
            for loss in [loss for loss in arguments.losses if (loss, seed) not in done]:
                result = {**train(loss, seed, [*flags, *arguments.flags], arguments.losses), "timed": timed}
                with arguments.output.open("a", encoding="utf-8") as stream:
                    stream.write(json.dumps(result) + "\n")


def train(loss: str, seed: int, flags: Sequence[str], losses: Sequence[str]) -> Dict[str, Any]:
    """Return what examples/train.py prints, of its curve the first steps.  Raises UserError if it fails.

    losses: that are measured beside this one."""
    command = [sys.executable, str(SCRIPT), "--loss", loss, "--seed", str(seed), *flags]
    run = subprocess.run(command, env=environment(losses), stdout=subprocess.PIPE, text=True)
    if run.returncode:
        raise UserError(f"{loss}, seed {seed}: examples/train.py failed; its error is above")
    result = json.loads(run.stdout)
    print(f"{loss}, seed {seed}: {100 * result['error_rate']:.1f}% errors", file=sys.stderr)
    return {**result, "curve": result["curve"][:COMPARED]}


def environment(losses: Sequence[str]) -> Dict[str, str]:
    """Return the environment in which examples/train.py finds fused_transducer, and fast_rnnt where it is among the
    losses.  Raises UserError if that cannot be built."""
    paths = [str(ROOT)]
    if "fast_rnnt-pruned" in losses:
        import torch  # noqa: F401  # whose libraries fast_rnnt needs

        try:
            paths.append(str(Path(str(extensions.load("fast_rnnt", "cpu").__file__)).parents[1]))
        except NotRunnable as error:
            raise UserError(f"{error}; or leave it out: --losses torchaudio,fused") from error
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def known(path: Path, timed: bool = False) -> Dict[str, Results]:
    """Return the results in a file by loss, in the order of LOSSES; none without a file.

    timed: of the short trainings."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    results = [result for result in map(json.loads, lines) if result.get("timed", False) == timed]
    by_loss = {loss: [result for result in results if result["loss"] == loss] for loss in LOSSES}
    return {loss: of for loss, of in by_loss.items() if of}


def with_interval(values: Sequence[float], digits: int = 2) -> str:
    """Return the mean of independent values and the half of its 95% interval, in words."""
    half = student_t(0.95, len(values) - 1) * (variance(values) / len(values)) ** 0.5 if len(values) > 1 else None
    return f"{mean(values):.{digits}f}" + (f" ± {half:.{digits}f}" if half is not None else "")


def largest_difference(results: Results, others: Results) -> float:
    """Return the largest relative difference of two losses over the first steps of the seeds that both have."""
    curves = {result["seed"]: result["curve"] for result in others}
    return max(
        abs(a - b) / abs(b)
        for result in results
        if result["seed"] in curves
        for a, b in zip(result["curve"][:COMPARED], curves[result["seed"]])
    )


def line(loss: str, results: Results, others: Results, timed: Results) -> Dict[str, Cell]:
    """Return a line of the table.  timed: the short trainings; none where they were not measured."""
    ms = [1e3 * result["seconds"] / result["steps"] for result in timed]
    exact = loss in LOSSES[:2] and results is not others
    difference = f"{largest_difference(results, others):.1e}" if exact else "-"
    return {
        "loss": Cell(loss),
        "errors, %": Cell(with_interval([100 * result["error_rate"] for result in results]), 0),
        "held out, nats a symbol": Cell(with_interval([result["nats"] for result in results], 3), 0),
        "ms a step": Cell(with_interval(ms, 1) if timed else "-", 0),
        "MB of training": Cell(number(mean([result["mb"] for result in timed]) if timed else None, 3), 0),
        "largest difference": Cell(difference, 0),
    }


def render(path: Path) -> str:
    """Return Markdown of the results in a file: what was trained, and the table.  Raises UserError without results."""
    results = known(path)
    if not results:
        raise UserError(f"{path}: has no result of this script")
    first = results.get(LOSSES[0], next(iter(results.values())))
    trained = (
        f"{count(len(first), 'seed')}, {first[0]['steps']} steps with {first[0]['vocab'] - 1} syllables; means with "
        f"95% intervals over the seeds; difference: of the first {COMPARED} losses to torchaudio's, relative.  "
        "Time and memory are of short trainings, in turn, with nothing beside them."
    )
    timed = known(path, timed=True)
    lines = [line(loss, of, results.get(LOSSES[0], of), timed.get(loss, [])) for loss, of in results.items()]
    return f"{trained}\n\n{markdown(tabulated('training', '', lines))}"


def main(arguments: argparse.Namespace) -> int:
    measure(arguments)
    print(render(arguments.output))
    return EXIT_OK


def parser() -> Parser:
    result = Parser(prog=Path(sys.argv[0]).name, description=(__doc__ or "").partition("\n\n")[0])
    add = result.add_argument
    add(
        "--losses",
        type=flag_types.some_of(LOSSES),
        default=LOSSES,
        metavar="A,B",
        help="Losses to train with. Default: all",
    )
    add("--seeds", type=flag_types.whole(1), default=5, metavar="N", help="Number of seeds. Default: 5")
    rounds = "Short trainings of each loss, for its time and memory. Default: 5"
    add("--rounds", type=flag_types.whole(0), default=5, metavar="N", help=rounds)
    output = ROOT / "log" / "training.jsonl"
    add("--output", type=flag_types.path, default=output, metavar="FILE", help="File. Default: log/training.jsonl")
    add("flags", nargs="*", help="Further flags of examples/train.py, after --.")
    return result


if __name__ == "__main__":
    given = parser().parse_args()
    raise SystemExit(guarded("train_table.py", lambda: main(given)))
