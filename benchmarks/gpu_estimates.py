#!/usr/bin/env python3
"""Estimate how long the kernels of `fused` take on GPUs that are not here: nothing below was measured.

Each kernel of a step of 30 utterances (V 500, H 512, random logits) is compiled as it is launched; its operations and
bytes follow from the sizes.  It is taken to need the longest of

- its products at SUSTAINED of the peak of the tensor cores, plus its instructions, four a clock and multiprocessor,
  which one block per multiprocessor cannot hide behind the products;
- the bytes that its blocks read through the L2 cache;
- the bytes that must come from memory or go to it;

in whole waves of blocks.  The lattice is a chain of diagonals of so many clocks.  Left out: the host, the encoder, what
caches lose, clocks below the boost clock.  Expect errors of 40%.

    .venv/main/bin/python benchmarks/gpu_estimates.py [--kernels]
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, List, NamedTuple

ROOT = Path(__file__).resolve().parents[1]


class Gpu(NamedTuple):
    """Peak rates by the vendor's data sheets, in units a second; l2_bytes: what reads of the L2 cache reach in
    published microbenchmarks."""

    name: str
    architecture: int
    multiprocessors: int
    hertz: float
    tf32: float
    bfloat16: float
    sgemm: float  # of cuBLAS in float32 without tensor cores, 0.78 (H100) and 0.92 (A100) of the peak
    memory_bytes: float
    l2_bytes: float


GPUS = (
    Gpu("H100", 90, 132, 1.755e9, 495e12, 989e12, 52e12, 3.35e12, 5.5e12),
    Gpu("A100", 80, 108, 1.410e9, 156e12, 312e12, 18e12, 2.0e12, 4.0e12),
)
#: Share of the peak that a well fed product keeps: what Triton's own examples reach.
SUSTAINED = {90: 0.6, 80: 0.7}
#: Of a batch of 30, drawn from shape_info.pt: cells with padding, without, and with a gradient under random logits.
PADDED, USEFUL, WITH_GRADIENT = 1.40e6, 0.71e6, 0.386e6
V, H, FRAMES, TARGETS = 500, 512, 444, 105
#: Clocks of a diagonal of the lattice: the chain of float64 operations and the exchange, forward and back.
DIAGONAL = 220 + 140
#: Between the end of a kernel and the beginning of the next on the same stream, in seconds.
GAP = 2.5e-6


class Estimate(NamedTuple):
    """Holds what a kernel does in a step, and how long its parts would take alone, in seconds."""

    kernel: str
    launches: int
    flops: float
    memory_bytes: float
    l2_bytes: float
    waves: float  # of blocks in each launch
    products: float
    instructions: float
    l2: float
    memory: float

    @property
    def seconds(self) -> float:
        full = math.ceil(self.waves) / self.waves if self.waves > 1 else 1.0
        return max((self.products + self.instructions) * full, self.l2, self.memory) + self.launches * GAP


def compiled(gpu: Gpu, dtype: str) -> Dict[str, Any]:
    """Return the launches of a step and the resources of each kernel, as tests/compiled_launches.py says."""
    command = [sys.executable, str(ROOT / "tests" / "compiled_launches.py"), str(gpu.architecture), str(V), dtype]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def estimates(gpu: Gpu, dtype: str, made: Dict[str, Any]) -> List[Estimate]:
    size, terms = (2, 1) if dtype == "bfloat16" else (4, 3)
    rate = gpu.bfloat16 if dtype == "bfloat16" else gpu.tf32 / 3  # three products of TF32 for one of float32
    issue = gpu.multiprocessors * 4 * gpu.hertz
    launches = {name: [launch for launch in made["launches"] if launch["kernel"] == name] for name in made["kernels"]}

    def estimate(name: str, flops: float, memory: float, l2: float, instructions: float) -> Estimate:
        blocks = max(math.prod(launch["grid"]) for launch in launches[name])
        products = flops / (rate * SUSTAINED[gpu.architecture])
        return Estimate(
            name, len(launches[name]), flops, memory, l2, blocks / gpu.multiprocessors,
            products, instructions / issue, l2 / gpu.l2_bytes, memory / gpu.memory_bytes,
        )  # fmt: skip

    def issued(name: str, blocks: float) -> float:
        """Return the instructions of so many blocks, each as long as the compiled code: loops over H are short of
        that, since a pass of theirs waits for the products, which are counted."""
        kernel = made["kernels"][name]
        return blocks * kernel["instructions"] * kernel["warps"]

    def block(name: str) -> Dict[str, int]:
        return launches[name][0]

    of_weight = terms - 1 if size == 4 else 1  # copies of the weight that a block reads: both halves
    rows = block("logit_gradients")["BM"]
    blocks_of_V = math.ceil(V / block("log_probabilities")["BV"])
    inputs, weight = block("input_gradients"), block("weight_gradients")

    def logits_l2(cells: float) -> float:
        return cells / rows * blocks_of_V * (rows + block("log_probabilities")["BV"] * of_weight) * H * size

    elements = 16 * 64  # a block of `activate`
    chain = (FRAMES + TARGETS) * DIAGONAL / gpu.hertz
    columns = math.ceil(H / inputs["BH"])
    of_layer = math.ceil(V / weight["BV"]) * math.ceil(H / weight["BH"])
    return [
        estimate("activate", 0, (USEFUL + WITH_GRADIENT) * H * size, 0,
                 issued("activate", (USEFUL + WITH_GRADIENT) * H / elements)),
        estimate("log_probabilities", 2 * USEFUL * H * V, USEFUL * 16, logits_l2(USEFUL),
                 issued("log_probabilities", USEFUL / rows * blocks_of_V)),
        Estimate("lattice", 1, 0, PADDED * 24, 0, 30 / gpu.multiprocessors, 0, chain, 0, 0),
        estimate("list_cells", 0, PADDED * (8 + 16 + 4 + 8), 0, 0),
        estimate("logit_gradients", 2 * WITH_GRADIENT * H * V, WITH_GRADIENT * V * size, logits_l2(WITH_GRADIENT),
                 issued("logit_gradients", WITH_GRADIENT / rows * blocks_of_V)),
        estimate("input_gradients", 2 * WITH_GRADIENT * H * V, WITH_GRADIENT * H * size,
                 WITH_GRADIENT / inputs["BM"] * columns * (inputs["BM"] + inputs["BH"] * of_weight) * V * size,
                 issued("input_gradients", WITH_GRADIENT / inputs["BM"] * columns)),
        estimate("weight_gradients", 2 * WITH_GRADIENT * H * V, WITH_GRADIENT * (H + V) * size,
                 WITH_GRADIENT * of_layer * (weight["BV"] + weight["BH"]) * size, 0),
        estimate("add_to_encoder", 0, WITH_GRADIENT * H * size, 0, 0),
        estimate("add_to_decoder", 0, WITH_GRADIENT * H * size, 0, 0),
    ]  # fmt: skip


def optimized_transducer(gpu: Gpu) -> float:
    """Return the seconds of its step in float32: joiner by cuBLAS without TF32, forward and backward, and 20 GB of
    activations and logits written and read."""
    return 6 * USEFUL * H * V / gpu.sgemm + 20e9 / gpu.memory_bytes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--kernels", action="store_true", help="a table of each kernel too")
    arguments = parser.parse_args()
    lines = ["| ms a step, estimated | fused float32 | fused bfloat16 | optimized_transducer float32 |"]
    lines.append("| --- | ---: | ---: | ---: |")
    details = []
    for gpu in GPUS:
        sums = []
        for dtype in ("float32", "bfloat16"):
            made = estimates(gpu, dtype, compiled(gpu, dtype))
            sums.append(sum(row.seconds for row in made))
            details += ["", f"{gpu.name}, {dtype}; ms of each part alone:", ""]
            details += ["| kernel | launches | waves | GFLOP | MB of memory | GB of L2 | products | instructions | L2 |"
                        " memory | ms |", "| --- |" + " ---: |" * 10]  # fmt: skip
            for row in made:
                parts = " | ".join(f"{1e3 * x:.2f}" for x in row[6:])
                details.append(
                    f"| {row.kernel} | {row.launches} | {row.waves:.1f} | {row.flops / 1e9:.0f} | "
                    f"{row.memory_bytes / 1e6:.0f} | {row.l2_bytes / 1e9:.1f} | {parts} | {1e3 * row.seconds:.2f} |"
                )
        other = optimized_transducer(gpu)
        shown = [f"{1e3 * x:.1f} ({x / other:.2f}x)" for x in sums]
        lines.append(f"| {gpu.name} | {' | '.join(shown)} | {1e3 * other:.0f} |")
    print("\n".join(lines + (details if arguments.kernels else [])))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
