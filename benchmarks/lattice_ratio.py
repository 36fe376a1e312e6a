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
from typing import List, Tuple

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from common.core.statistics import geometric_mean, interval, median  # noqa: E402
from fused_transducer import transducer_loss  # noqa: E402

DURATIONS = [0, 1, 2, 3, 4]
LENGTHS = ((400, 100), (330, 80))
H = 512
#: (columns of the output layer beyond the symbols, options of transducer_loss) of each topology.
LATTICES = {"tdt": (len(DURATIONS), {"durations": DURATIONS}), "hat": (0, {}), "star": (0, {"skip": -1.0})}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", choices=tuple(LATTICES), default="tdt", help="Lattice to compare. Default: tdt")
    parser.add_argument("--vocab-size", type=int, default=1024, help="Number of symbols. Default: 1024")
    parser.add_argument("--pairs", type=int, default=20, help="Number of pairs of steps. Default: 20")
    options = parser.parse_args()
    torch.set_flush_denormal(True)
    V, (extra, lattice_options) = options.vocab_size, LATTICES[options.topology]
    draw = torch.Generator().manual_seed(0)
    T_lengths, U_lengths = (torch.tensor(lengths) for lengths in zip(*LENGTHS))
    encoder, decoder = (torch.randn(len(LENGTHS), size, H, generator=draw) for size in (400, 101))
    weight = torch.randn(V + extra, H, generator=draw) * 0.05
    targets = torch.randint(1, V, (len(LENGTHS), 100), generator=draw)

    def seconds(topology: str) -> float:
        columns, keywords = (V, {}) if topology == "regular" else (V + extra, lattice_options)
        inputs = (encoder, decoder, weight[:columns], torch.zeros(columns))
        leaves = [tensor.clone().requires_grad_() for tensor in inputs]
        begin = time.perf_counter()
        loss = transducer_loss(*leaves, targets, T_lengths, U_lengths, blank=0, topology=topology, **keywords)
        loss.backward()
        return time.perf_counter() - begin

    pairs: List[Tuple[float, float]] = []  # seconds on the regular lattice, and on the other
    for index in range(-2, options.pairs):  # the first two are warm-up
        order = ["regular", options.topology]
        times = {topology: seconds(topology) for topology in (reversed(order) if index % 2 else order)}
        if index >= 0:
            pairs.append((times["regular"], times[options.topology]))
    ratios = [other / regular for regular, other in pairs]
    low, high = interval(ratios) or (math.nan, math.nan)
    regular, other = (1e3 * median([pair[side] for pair in pairs]) for side in (0, 1))
    ratio = f"{geometric_mean(ratios):.2f}x ({low:.2f} to {high:.2f})"
    print(f"V {V}: regular {regular:.0f} ms, {options.topology} {other:.0f} ms, {ratio}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
