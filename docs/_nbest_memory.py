#!/usr/bin/env python3
"""Measure the memory of a step over N-best lists that share encoder_out, and over copies of it, for docs/fused.md.

    .venv/main/bin/python docs/_nbest_memory.py

A step is the losses of all hypotheses, their expected errors and all gradients.  Each peak is of a process of its own,
above what the inputs take.  Output is Markdown; on two cores this takes two minutes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from fused_transducer import transducer_loss  # noqa: E402
from fused_transducer.sequence import mwer_loss  # noqa: E402
from rnnt_bench.core.text import MB  # noqa: E402
from rnnt_bench.instruments import memory  # noqa: E402

N, T, U, H, V = 16, 500, 20, 640, 500
SIZES = (1, 4, 8)
WAYS = ("shared", "copied")


def peaks(size: int, way: str) -> dict[str, int]:
    """Return the peaks in bytes of a step over lists of `size` hypotheses."""
    torch.manual_seed(0)
    rows = torch.arange(N).repeat_interleave(size)
    M = len(rows)
    tensors = [torch.randn(shape) / 5 for shape in ((N, T, H), (M, U + 1, H), (V, H), (V,))]
    targets, U_lengths = torch.randint(1, V, (M, U)), torch.full((M,), U)
    T_lengths, errors = torch.full((N,), T), torch.arange(M) % 5

    def step() -> None:
        leaves = [tensor.requires_grad_() for tensor in tensors]
        if way == "shared":
            losses = transducer_loss(*leaves, targets, T_lengths, U_lengths, reduction="none", utterance_of=rows)
        else:
            copied = leaves[0][rows], *leaves[1:]
            losses = transducer_loss(*copied, targets, T_lengths[rows], U_lengths, reduction="none")
        mwer_loss(losses, errors, rows).backward()
        for leaf in leaves:
            leaf.grad = None

    return memory.peaks(lambda: SimpleNamespace(run=step), torch.device("cpu"))


def main() -> None:
    """Print the table, with a process for each of its peaks."""
    head = f"N {N}, T {T}, U {U}, H {H}, V {V}, float32, {torch.get_num_threads()} threads, torch {torch.__version__}"
    print(f"`docs/_nbest_memory.py`, {head}: peaks of torch's allocations and of the process, in MB (2^20 bytes).\n")
    print("| hypotheses an utterance | shared | copies of encoder_out | process, shared | process, copies |")
    print("| ---: | ---: | ---: | ---: | ---: |")
    for size in SIZES:
        lines = [subprocess.check_output([sys.executable, __file__, str(size), way]) for way in WAYS]
        columns = [json.loads(line)[name] for name in ("torch_allocated_bytes", "process_bytes") for line in lines]
        print(f"| {size} | " + " | ".join(f"{column / MB:.0f}" for column in columns) + " |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("size", nargs="?", type=int, help="Measure this size alone, and print JSON.")
    parser.add_argument("way", nargs="?", choices=WAYS, default=WAYS[0], help=f"Default: {WAYS[0]}")
    options = parser.parse_args()
    if options.size:
        print(json.dumps(peaks(options.size, options.way)))
    else:
        main()
