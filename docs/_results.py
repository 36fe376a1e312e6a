#!/usr/bin/env python3
"""Measure what docs/results.md shows: `docs/_results.py NAME ...`, on a machine that does nothing else.

Each NAME is a command of RUNS, and goes on where it was stopped (its log is log/results-NAME).  Its records are kept as
results/DATE-MACHINE-NAME, as rnnt-bench submit writes them (those of rnnt-bench largest as they are), in place of a
folder of that name if git has it.  Then docs/_figures.py writes the pages; sentences about the numbers are left to
people.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]

from rnnt_bench.records.schema import TOOL_FILE_NAME  # noqa: E402
from rnnt_bench.tools import submit  # noqa: E402
from rnnt_bench.tools.kept import read  # noqa: E402

import _figures  # noqa: E402

#: NAME -> flags of benchmark_all.py, of the script that _figures.MADE_BY names, or of rnnt-bench largest; how long
#: that takes on two cores.
RUNS: dict[str, str] = {
    "bench": "--rounds 10",  # 14 minutes
    "allocator": "--only fused,optimized_transducer,fast_rnnt --sweep allocator=reuse,system --scope step "
    "--rounds 10 --passes correctness,timing",  # 5 minutes
    "threads": "--only fused,optimized_transducer,fast_rnnt,reference,torchaudio,fast_rnnt-pruned --sweep threads=1,2 "
    "--frames 200 --tokens 40 --num-batches 1 --max-seconds 1 --rounds 5 --passes correctness,timing "
    "--scope step",  # 3 minutes
    "sorted": "--only fused,optimized_transducer,fast_rnnt,torchaudio,fast_rnnt-pruned --sort-utterance true "
    "--scope step --rounds 10 --passes correctness,timing,memory",  # 5 minutes
    "batch-30": "--only fused,optimized_transducer,fast_rnnt,torchaudio,fast_rnnt-pruned --batch-size 30 "
    "--vocab-size 100 --rounds 5 --num-batches 2 --scope step --passes correctness,timing,memory",  # 10 minutes
    "short": "--only fused,optimized_transducer,fast_rnnt --sweep vocab-size=500,1000 --frames 100 --tokens 20 "
    "--rounds 5 --passes correctness,timing,memory",  # 2 minutes
    "v1024": "--only fused,optimized_transducer,fast_rnnt,torchaudio --vocab-size 1024 --rounds 5 --limits false "
    "--passes correctness,timing,memory",  # 6 minutes
    "v4096": "--only fused,optimized_transducer,fast_rnnt --vocab-size 4096 --rounds 3 --limits false "
    "--passes correctness,timing,memory",  # 10 minutes
    "logits": "--only fused,optimized_transducer,fast_rnnt,torchaudio,fast_rnnt-pruned --sweep "
    "logits=random,early,middle,trained --num-batches 1 --rounds 3 --scope step --max-seconds 0.5 "
    "--passes correctness,timing",  # 8 minutes
    "v13088": "--only fused,torchaudio --vocab-size 13088 --encoder-dim 640 --frames 250 --tokens 60 --batch-size 2 "
    "--num-batches 1 --rounds 3 --scope step --limits false --passes correctness,timing,memory",  # 4 minutes
    "few-cells": "--only fused,torchaudio,optimized_transducer --sweep vocab-size=32,500,5000,50000 --sweep "
    "frames=2,15,150,1400 --tokens 6 --batch-size 1 --num-batches 1 --rounds 3 --max-seconds 0.2 --scope step "
    "--limits false --passes correctness,timing,memory",  # 16 minutes
    "tdt": "--topology tdt --rounds 10",  # 8 minutes
    "windows": "--topology windowed --only fused:windowed --sweep window=799,100,50,25 --frames 400 --tokens 60 "
    "--batch-size 16 --num-batches 1 --rounds 10 --limits false --passes correctness,timing,memory",  # 10 minutes
    "windowed": "--topology windowed --window 25 --rounds 10",  # 5 minutes
    "fused-table": "--logits random,trained",  # 27 minutes
    "largest": "--memory-limit 2GiB --largest-cap 48",  # 4 minutes
    "largest-train": "--model examples/largest.py:small --losses torchaudio,fused --buckets 3 --memory-limit 2GiB",
    "largest-parakeet": "--model examples/largest_parakeet.py:small --losses torchaudio,fused --buckets 3 "
    "--memory-limit 2GiB",
}


def keep_tool(file: Path, name: str) -> Path:
    """Keep the run of a tool, without the path of this checkout; return its folder."""
    header = read(file).header
    machine = f"{header.machine.cpu} {header.machine.cores} cores"
    folder = ROOT / "results" / submit.dashed(header.started[:10], machine, name)
    below = folder / file.parent.name
    below.mkdir(parents=True, exist_ok=True)
    text = file.read_text(encoding="utf-8").replace(f"{ROOT}/", "")
    (below / file.name).write_text(text, encoding="utf-8")
    return folder


def shown(page: str, folder: str) -> str:
    """Return the page with this folder in place of one of another day."""
    return re.sub(rf"results/\d{{4}}-\d\d-\d\d{re.escape(folder[10:])}(?![\w-])", f"results/{folder}", page)


def is_committed(folder: Path) -> bool:
    """Tell whether git has every file of a folder as it is on the disk."""

    def says(*command: str) -> str:
        git = ["git", "-C", str(folder), *command, "--", "."]
        return subprocess.run(git, stdout=subprocess.PIPE, text=True, check=True).stdout

    return bool(says("ls-files")) and not says("status", "--porcelain", "--ignored")


def measure(name: str) -> tuple[str, int]:
    """Measure one of RUNS and keep its records; return (the folder's name, "" where there is none, the exit code)."""
    log = ROOT / "log" / f"results-{name}"
    resume = ["--resume"] if any(log.rglob("*.jsonl")) else []
    is_tool = name.startswith("largest")
    script = "rnnt-bench largest" if is_tool else _figures.MADE_BY.get(name, "benchmark_all.py")
    command = [sys.executable, *script.split(), *RUNS[name].split(), "--log-dir", f"log/{log.name}", *resume]
    code = subprocess.run(command, cwd=ROOT).returncode
    if code not in (0, 1):  # 1: a row failed, and says why
        return "", code
    if is_tool:
        kept = keep_tool(next(log.rglob(TOOL_FILE_NAME)), name)
    else:
        rows = submit.rows_of(log)
        kept = ROOT / "results" / "-".join([submit.folder_name(rows), *([name] if name != "bench" else [])])
        if kept.exists() and not is_committed(kept):
            words = "git does not have it as it is here: commit it or move it away, and start this command again"
            print(f"{kept}: {words}", file=sys.stderr)
            return "", 1
        submit.write(rows, kept, replaces=True)
    if wrong := list(submit.problems(kept)):
        print(*wrong, sep="\n", file=sys.stderr)
        return "", 1
    return kept.name, 0


def main(names: list[str]) -> int:
    folders: list[str] = []
    code = 0
    for name in names:
        folder, code = measure(name)
        if code:
            break
        folders.append(folder)
    for folder in folders:  # after the last run, since a run whose checkout has changes is refused
        for page in _figures.PAGES:
            page.write_text(shown(page.read_text(encoding="utf-8"), folder), encoding="utf-8")
    if folders:
        _figures.write()
    return code


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="+", choices=RUNS, help="Runs to measure again.")
    sys.exit(main(parser.parse_args().names))
