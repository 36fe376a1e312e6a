#!/usr/bin/env python3
"""Measure `fused` beside the best other exact loss, for the tables of docs/fused.md.

    .venv/main/bin/python docs/_fused_table.py

benchmark_all.py measures three workloads, each with the kinds of --logits, in three rounds with few samples.  On
two cores this takes some 27 minutes.  The best loss is the fastest for times and the smallest for memory.  Memory does
not depend on the logits, so it is measured once for each workload; it is the highest over the batches.  Losses whose
steps take several times as long are measured for memory alone.  Times are geometric means over the batches, their
ratios have 95% intervals over the rounds.  Output is Markdown; the runs stay in --log-dir.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import geometric_mean, median
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from rnnt_bench.analysis import logs, machines  # noqa: E402
from rnnt_bench.analysis.row import PEAKS, Row  # noqa: E402
from rnnt_bench.analysis.standing import stand  # noqa: E402
from rnnt_bench.core import flag_types  # noqa: E402
from rnnt_bench.core.arguments import Parser  # noqa: E402
from rnnt_bench.core.errors import (  # noqa: E402
    EXIT_OK,
    EXIT_USAGE,
    UserError,
    guarded,
)
from rnnt_bench.core.settings import LOGITS  # noqa: E402
from rnnt_bench.core.text import count, error, escaped, gathered, interval, number, without_folders  # noqa: E402
from rnnt_bench.present.parts import Cell, tabulated  # noqa: E402
from rnnt_bench.present.text import markdown  # noqa: E402

FEW = ("--rounds", "3", "--max-seconds", "0.2", "--scope", "step")
#: Counters of memory, as a head of the table names them.
COUNTERS = {
    "device_allocated": "torch's peak on the GPU",
    "torch_allocated": "peak of torch's allocations",
    "process": "peak of the process",
}


class Workload(NamedTuple):
    """A table row's measurement.

    flags: for benchmark_all.py, "{size}" stands for --size; rows: losses measured beside fused; small: losses measured
    for memory alone.
    """

    title: str
    flags: tuple[str, ...]
    rows: tuple[str, ...]
    small: tuple[str, ...]


FAST = ("optimized_transducer", "fast_rnnt")
WORKLOADS = {
    "bpe500": Workload(
        "V = 500, the default batches",
        ("--preset", "{size}", "--num-batches", "2"),
        FAST,
        ("torchaudio", "fast_rnnt-pruned", "k2-pruned"),
    ),
    "bpe4096-x8": Workload(
        "V = 4096, a batch of 8",
        ("--preset", "{size},bpe4096-x8", "--batch-size", "8", "--num-batches", "1"),
        FAST,
        ("torchaudio",),
    ),
    "long-form": Workload(
        "long form, T 1500, U 300",
        ("--preset", "{size},long-form", "--frames", "1500", "--tokens", "300", "--num-batches", "1"),
        FAST,
        ("torchaudio",),
    ),
}


def measure(arguments: argparse.Namespace) -> None:
    """Measure the chosen workloads with each kind of logits, in folders of --log-dir."""
    for key in arguments.workloads:
        workload, passes = WORKLOADS[key], "correctness,timing,memory"
        small, rows = ((), arguments.peers) if arguments.peers else (workload.small, workload.rows)
        for logits in arguments.logits:
            run(workload, f"{key}-{logits}", ("fused", *rows), ("--logits", logits, "--passes", passes), arguments)
            passes = "correctness,timing"
        if small:
            run(workload, f"{key}-memory", small, ("--passes", "memory"), arguments)


def run(
    workload: Workload, name: str, rows: Sequence[str], flags: Sequence[str], arguments: argparse.Namespace
) -> None:
    """Run benchmark_all.py with the flags of the workload and `flags` in folder `name` of --log-dir.

    Raises UserError if it refuses its flags.
    """
    folder = arguments.log_dir / name
    sized = [word.format(size=arguments.size) for word in workload.flags]
    command = [sys.executable, str(ROOT / "benchmark_all.py"), *sized, *FEW, "--only", ",".join(rows), *flags]
    command += ["--device", arguments.device, "--log-dir", str(folder), *arguments.flags]
    if arguments.resume and any(folder.rglob("*.jsonl")):
        command.append("--resume")
    if subprocess.run(command, stdout=sys.stderr).returncode == EXIT_USAGE:
        raise UserError(f"{name}: benchmark_all.py refused its flags; its line is above")
    print(f"{name}: measured", file=sys.stderr)


class Measured(NamedTuple):
    """The measured rows for a line of the tables.

    rows: those with these logits, by name; memory: the rows of the workload that have peaks, by name.
    """

    workload: Workload
    logits: str
    rows: dict[str, Row]
    memory: dict[str, Row]

    @property
    def fused(self) -> Row:
        return self.rows["fused"]


def workload_of(row: Row) -> str:
    """Return the key of the workload that a row is of, by its preset."""
    return (row.header.settings.preset or "").partition(",")[2] or "bpe500"


def read(folder: Path) -> list[Measured]:
    """Return the lines of the tables; raise UserError if fused has no numbers."""
    lines = []
    measured = logs.rows([folder])
    for key, workload in WORKLOADS.items():
        own = [row for row in measured if workload_of(row) == key]
        memory = {row.name: row for row in own if row.peaks}
        for logits in LOGITS:
            rows = {row.name: row for row in own if row.header.settings.logits == logits}
            if not rows:
                continue
            fused = rows.get("fused")
            if fused is None or fused.status != "ok":
                reason = fused.reason if fused else "it was not measured"
                raise UserError(f"{workload.title}, {logits} logits: fused: {reason}")
            lines.append(Measured(workload, logits, rows, memory))
    if not lines:
        raise UserError(f"{folder}: has no run of this script; start it without --resume")
    return lines


def times(row: Row) -> dict[str, float]:
    """Return the median milliseconds of a step for each batch."""
    samples = gathered((sample.batch, sample.ms) for sample in row.samples_of("step"))
    return {batch: median(values) for batch, values in samples.items()}


class Ratio(NamedTuple):
    """The geometric mean times, or the highest peaks, of fused and of the best other loss, and that loss's name."""

    fused: float
    peer: float
    name: str

    @property
    def value(self) -> float:
        return self.fused / self.peer


def best(
    fused: dict[str, float], peers: dict[str, dict[str, float]], over: Callable[[Sequence[float]], float]
) -> Ratio | None:
    """Return the ratio to the best peer over the batches that all have; None where there are none.

    fused, peers: milliseconds or bytes by batch, of fused and of each peer; over: one number of several batches.
    """
    shared = set(fused).intersection(*peers.values()) if peers else set()
    if not shared:
        return None
    sizes = {name: over([values[batch] for batch in shared]) for name, values in peers.items()}
    name = min(sizes, key=lambda peer: sizes[peer])
    return Ratio(over([fused[batch] for batch in shared]), sizes[name], name)


def peers(rows: dict[str, Row], kind: str) -> dict[str, Row]:
    """Return the other rows of this kind that ended well."""
    return {name: row for name, row in rows.items() if row.kind == kind and name != "fused" and row.status == "ok"}


def time_of(entry: Measured) -> Ratio | None:
    timed = {name: times(row) for name, row in peers(entry.rows, "exact").items()}
    return best(times(entry.fused), {name: values for name, values in timed.items() if values}, geometric_mean)


def faster(entry: Measured, time: Ratio | None) -> str:
    """Return how many times faster fused is than the best other loss, with its interval: "1.19 (0.92 to 1.55)"."""
    ratio = stand(entry.rows[time.name], entry.fused, "step").ratio if time else None
    if ratio is None:
        return "-"
    span = interval(ratio.low, ratio.high)
    return number(ratio.ratio, 3) + (f" ({span})" if span else "")


def memory_of(entry: Measured, kind: str = "exact") -> Ratio | None:
    fused = entry.memory.get("fused")
    peaks = {name: row.peaks for name, row in peers(entry.memory, kind).items()}
    return best(fused.peaks, peaks, max) if fused else None


def limit_of(row: Row) -> float | None:
    return row.limit_percent.get("step")


def pair(ratio: Ratio | None) -> tuple[Cell, Cell]:
    """Return the cells of fused and of the best other loss, with its name."""
    if ratio is None:
        return Cell("-", 0), Cell("-", 0)
    return Cell(number(ratio.fused), 0), Cell(f"{number(ratio.peer)} ({ratio.name})", 0)


def line(entry: Measured) -> dict[str, Cell]:
    """Return a line of the table: fused, the best other exact loss, and how many times faster and smaller fused is."""
    time, memory, pruned = time_of(entry), memory_of(entry), memory_of(entry, "pruned")
    (fused_ms, peer_ms), (fused_mb, peer_mb) = pair(time), pair(memory)
    return {
        "workload": Cell(entry.workload.title),
        "logits": Cell(entry.logits),
        "fused ms": fused_ms,
        "best exact ms": peer_ms,
        "times faster": Cell(faster(entry, time), 0),
        "fused MB": fused_mb,
        "best exact MB": peer_mb,
        "times smaller": Cell(number(memory and 1 / memory.value, 3), 0),
        "smallest pruned MB": Cell(number(pruned and pruned.peer, 3), 0),
        "% of limit": Cell(number(limit_of(entry.fused), 2), 0),
        "gradient error": Cell(
            error(entry.fused.checked.at_size.grad_error if entry.fused.checked.at_size else None), 0
        ),
    }


def described(measured: Sequence[Measured]) -> str:
    """Return what was measured, where and how, and which counter is the memory."""
    row = measured[0].fused
    machine = machines.described(row.header.machine) if row.device == "cpu" else row.device_name
    peaks_mb = next((entry.memory["fused"].peaks_mb["step"] for entry in measured if "fused" in entry.memory), {})
    counter = COUNTERS[next((counter for counter in PEAKS if peaks_mb.get(counter)), "process")]
    return (
        f"`docs/_fused_table.py`, {row.header.started[:10]}, {machine}, torch "
        f"{row.torch}, {count(row.rounds, 'round')}: a step from encoder and decoder outputs to all gradients; MB is "
        f"the {counter}."
    )


def failures(folder: Path) -> str:
    """Return a line for each row that did not end well."""
    rows = [row for row in logs.rows([folder]) if row.status != "ok"]
    lines = [f"{workload_of(row)}: {row.name}: {row.status}: {without_folders(row.reason)}" for row in rows]
    return "\n".join(f"- {escaped(text)}" for text in lines)


def render(folder: Path) -> str:
    """Return Markdown of the runs in `folder`: what was measured, the table, and the rows that failed."""
    measured = read(folder)
    table = markdown(tabulated("fused", "", [line(entry) for entry in measured]))
    return "\n\n".join([described(measured), table, *filter(None, [failures(folder)])])


def main(arguments: argparse.Namespace) -> int:
    measure(arguments)
    print(render(arguments.log_dir))
    return EXIT_OK


def parser() -> Parser:
    result = Parser(prog=Path(sys.argv[0]).name, description=(__doc__ or "").partition("\n\n")[0])
    add = result.add_argument
    add(
        "--workloads",
        type=flag_types.some_of(tuple(WORKLOADS)),
        default=tuple(WORKLOADS),
        metavar="A,B",
        help=f"Workloads to measure: some of {', '.join(WORKLOADS)}. Default: all",
    )
    add(
        "--logits",
        type=flag_types.some_of(LOGITS),
        default=("random", "trained"),
        metavar="A,B",
        help="Kinds of logits to measure. Default: random,trained",
    )
    add(
        "--peers",
        type=lambda text: tuple(text.split(",")),
        metavar="A,B",
        help="Losses beside fused in all runs, in place of the workload's.",
    )
    add("--size", choices=("cpu", "full", "quick"), default="cpu", help="Preset of benchmark_all.py. Default: cpu")
    add("--device", type=flag_types.device, default="auto", help="Device: auto, cpu, cuda or cuda:N. Default: auto")
    add("--resume", action="store_true", help="Continue the runs in --log-dir.")
    add(
        "--log-dir",
        type=flag_types.path,
        default=ROOT / "log" / "fused-table",
        metavar="DIR",
        help="Folder for the runs. Default: log/fused-table",
    )
    add("flags", nargs="*", help="Further flags of benchmark_all.py, after --.")
    return result


if __name__ == "__main__":
    given = parser().parse_args()
    raise SystemExit(guarded("_fused_table.py", lambda: main(given)))
