#!/usr/bin/env python3
"""Time a step of `fused_transducer` on another lattice beside one on the regular lattice, of the same sizes.

Forward and backward of a batch of random inputs, in alternation.  Prints both medians, and the ratio with its 95%
interval over the pairs.

    .venv/main/bin/python benchmarks/lattice_ratio.py --topology tdt --vocab-size 1024
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path
from typing import List

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from common.core.statistics import geometric_mean, interval, median  # noqa: E402
from fused_transducer import transducer_loss  # noqa: E402

DURATIONS = [0, 1, 2, 3, 4]
LENGTHS = ((400, 100), (330, 80))
H = 512
#: Columns of the output layer beside the symbols, and options.
LATTICES = {"tdt": (len(DURATIONS), {"durations": DURATIONS}), "hat": (0, {}), "star": (0, {"skip": -1.0})}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", choices=tuple(LATTICES), default="tdt", help="default: tdt")
    parser.add_argument("--vocab-size", type=int, default=1024, help="default: 1024")
    parser.add_argument("--pairs", type=int, default=20, help="default: 20")
    options = parser.parse_args()
    torch.set_flush_denormal(True)
    V, (extra, of_lattice) = options.vocab_size, LATTICES[options.topology]
    draw = torch.Generator().manual_seed(0)
    T_lengths, U_lengths = (torch.tensor(lengths) for lengths in zip(*LENGTHS))
    encoder, decoder = (torch.randn(len(LENGTHS), size, H, generator=draw) for size in (400, 101))
    weight = torch.randn(V + extra, H, generator=draw) * 0.05
    targets = torch.randint(1, V, (len(LENGTHS), 100), generator=draw)

    def seconds(topology: str) -> float:
        columns, more = (V, {}) if topology == "regular" else (V + extra, of_lattice)
        given = (encoder, decoder, weight[:columns], torch.zeros(columns))
        leaves = [tensor.clone().requires_grad_() for tensor in given]
        begin = time.perf_counter()
        loss = transducer_loss(*leaves, targets, T_lengths, U_lengths, blank=0, topology=topology, **more)
        loss.backward()
        return time.perf_counter() - begin

    both: List[List[float]] = []
    for pair in range(-2, options.pairs):  # the first two are warm-up
        order = ["regular", options.topology][:: -1 if pair % 2 else 1]
        taken = {topology: seconds(topology) for topology in order}
        both += [[taken["regular"], taken[options.topology]]] if pair >= 0 else []
    ratios = [other / regular for regular, other in both]
    low, high = interval(ratios) or (math.nan, math.nan)
    regular, other = (1e3 * median([pair[side] for pair in both]) for side in (0, 1))
    ratio = f"{geometric_mean(ratios):.2f}x ({low:.2f} to {high:.2f})"
    print(f"V {V}: regular {regular:.0f} ms, {options.topology} {other:.0f} ms, {ratio}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
