#!/usr/bin/env python3
"""The table of docs/fused.md: time and memory of a step of `fused` over those of the best exact loss of the same run.

    .venv/main/bin/python benchmarks/fused_table.py

Three workloads, each with random and with peaky logits; benchmark_all.py measures each of the six, with one round and
few samples, in at most ten minutes on two cores.  The best exact loss is the fastest for times and the smallest for
memory.  Ratios are geometric means over the batches.  Prints Markdown; the runs stay in --log-dir.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Dict, List, NamedTuple, Optional, Tuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from common.analysis import logs  # noqa: E402
from common.analysis.row import Row  # noqa: E402
from common.cli import flag_types  # noqa: E402
from common.cli.parser import Parser  # noqa: E402
from common.core.errors import EXIT_OK, EXIT_USAGE, UserError  # noqa: E402
from common.core.guard import guarded  # noqa: E402
from common.core.settings import LOGITS  # noqa: E402
from common.core.statistics import geometric_mean, median  # noqa: E402
from common.core.table import Cell, tabulated  # noqa: E402
from common.core.text import error, gathered, number  # noqa: E402
from common.tables.text import markdown  # noqa: E402

FEW = ("--rounds", "1", "--max-seconds", "0.2", "--scope", "step", "--passes", "correctness,timing,memory")


class Workload(NamedTuple):
    """flags: of benchmark_all.py; rows: beside fused; time: what its ratio must not pass, by kind of logits; memory:
    likewise."""

    title: str
    flags: Tuple[str, ...]
    rows: Tuple[str, ...]
    time: Dict[str, float]
    memory: float


WORKLOADS = {
    "bpe500": Workload(
        "V = 500, the default batches",
        ("--preset", "{size}", "--num-batches", "4"),
        ("optimized_transducer", "torchaudio", "fast_rnnt", "fast_rnnt-pruned"),
        {"random": 0.45, "peaky": 0.22},
        0.02,
    ),
    "bpe4096-x8": Workload(
        "V = 4096, a batch of 8",
        ("--preset", "{size},bpe4096-x8", "--batch-size", "8", "--num-batches", "1"),
        ("optimized_transducer",),
        {"random": 0.65, "peaky": 0.35},
        0.02,
    ),
    "long-form": Workload(
        "long form, T 1500, U 300",
        ("--preset", "{size},long-form", "--frames", "1500", "--tokens", "300", "--num-batches", "1"),
        ("optimized_transducer",),
        {"random": 0.4, "peaky": 0.2},
        0.004,
    ),
}


def measure(workload: Workload, logits: str, folder: Path, arguments: argparse.Namespace) -> List[Row]:
    """The rows of one run."""
    rows = ("fused", *(arguments.peers or workload.rows))
    flags = [word.format(size=arguments.size) for word in workload.flags]
    command = [sys.executable, str(ROOT / "benchmark_all.py"), *flags, *FEW, "--only", ",".join(rows)]
    command += ["--logits", logits, "--device", arguments.device, "--log-dir", str(folder)]
    if subprocess.run([*command, *arguments.flags], stdout=sys.stderr).returncode == EXIT_USAGE:
        raise UserError(f"{workload.title}, {logits} logits: benchmark_all.py refused its flags; its line is above")
    return logs.rows([folder])


def times(row: Row) -> Dict[str, float]:
    """Median milliseconds of each batch."""
    samples = gathered((sample.batch, sample.ms) for sample in row.of_scope("step"))
    return {batch: median(values) for batch, values in samples.items()}


class Ratio(NamedTuple):
    """fused over the best exact loss: of the two, and of one to the other."""

    fused: float
    peer: float
    name: str

    @property
    def value(self) -> float:
        return self.fused / self.peer


def best(fused: Dict[str, float], peers: Dict[str, Dict[str, float]]) -> Optional[Ratio]:
    """By batch -> what was measured; over the batches that all have."""
    shared = set(fused).intersection(*peers.values()) if peers else set()
    if not shared:
        return None
    means = {name: geometric_mean([values[batch] for batch in shared]) for name, values in peers.items()}
    name = min(means, key=lambda one: means[one])
    return Ratio(geometric_mean([fused[batch] for batch in shared]), means[name], name)


def cells(ratio: Optional[Ratio], kind: str, unit: str, wanted: float) -> Dict[str, Cell]:
    shown = ["-", "-", "-"]
    if ratio:
        verdict = "" if ratio.value <= wanted else " (missed)"
        shown = [number(ratio.fused), f"{number(ratio.peer)} ({ratio.name})", f"{number(ratio.value, 2)}{verdict}"]
    heads = f"fused {unit}", f"best exact {unit}", f"{kind}, of it"
    return {**{head: Cell(text, 0) for head, text in zip(heads, shown)}, f"at most ({kind})": Cell(f"{wanted:g}", 0)}


def line(workload: Workload, logits: str, rows: List[Row]) -> Dict[str, Cell]:
    """One line of the table.  Raises UserError where fused has no numbers."""
    of = {row.name: row for row in rows}
    fused = of.get("fused")
    if fused is None or fused.status != "ok":
        reason = fused.reason if fused else "it was not measured"
        raise UserError(f"{workload.title}, {logits} logits: fused: {reason}")
    exact = {name: row for name, row in of.items() if row.kind == "exact" and row is not fused and row.status == "ok"}
    time = best(times(fused), {name: times(row) for name, row in exact.items()})
    memory = best(fused.peaks, {name: row.peaks for name, row in exact.items()})
    pruned = [row.peak_mb for row in rows if row.kind == "pruned" and row.peak_mb]
    limit = fused.limit_percent.get("step", {}).get("packed")
    return {
        "workload": Cell(workload.title),
        "logits": Cell(logits),
        **cells(time, "time", "ms", workload.time[logits]),
        **cells(memory, "memory", "MB", workload.memory),
        "pruned MB": Cell(number(min(pruned)) if pruned else "-", 0),
        "% of limit": Cell(number(limit, 2), 0),
        "gradient error": Cell(error((fused.at_size or {}).get("grad_error")), 0),
    }


def main(arguments: argparse.Namespace) -> int:
    lines, rows = [], []
    for key in arguments.workloads:
        for logits in arguments.logits:
            rows = measure(WORKLOADS[key], logits, arguments.log_dir / f"{key}-{logits}", arguments)
            lines.append(line(WORKLOADS[key], logits, rows))
            print(f"{WORKLOADS[key].title}, {logits} logits: measured", file=sys.stderr)
    about = next(row for row in rows if row.name == "fused")
    threads = f", {about.environment.threads} threads" if about.device == "cpu" else ""
    print(f"`benchmarks/fused_table.py`, {(about.started or '')[:10]}, {about.device_name}{threads}, ", end="")
    print(f"torch {about.torch_version}, one round: a step from encoder and decoder outputs to all gradients.\n")
    print(markdown(tabulated("fused", "", lines)))
    return EXIT_OK


def parser() -> Parser:
    result = Parser(prog=Path(sys.argv[0]).name, description=(__doc__ or "").partition("\n\n")[0])
    add = result.add_argument
    add("--workloads", type=flag_types.some_of(tuple(WORKLOADS)), default=tuple(WORKLOADS), metavar="A,B")
    add("--logits", type=flag_types.some_of(LOGITS), default=LOGITS, metavar="A,B", help="Default: random,peaky")
    add("--peers", type=lambda text: tuple(text.split(",")), metavar="A,B", help="the rows beside fused in all runs")
    add("--size", choices=("cpu", "seed", "quick"), default="cpu", help="preset of benchmark_all.py. Default: cpu")
    add("--device", type=flag_types.device, default="auto", help="auto, cpu, cuda or cuda:N. Default: auto")
    add("--log-dir", type=flag_types.path, default=ROOT / "log" / "fused-table", metavar="DIR")
    add("flags", nargs="*", help="more flags of benchmark_all.py, after --")
    return result


if __name__ == "__main__":
    given = parser().parse_args()
    raise SystemExit(guarded("fused_table.py", lambda: main(given)))
