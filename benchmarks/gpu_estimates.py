#!/usr/bin/env python3
"""Estimate how long the kernels of `fused` take on GPUs that are not at hand.  Nothing is measured.

Each kernel of a step of 30 utterances (V 500, H 512, random logits) is compiled as it is launched.  Its operations and
bytes follow from the sizes.  Its time is the longest of three, in whole waves of blocks:

- Compute: its products, at the share SUSTAINED of the tensor cores' peak, plus its other instructions, at four a clock
  and multiprocessor.  The two add up, since there is only one block per multiprocessor to hide them behind each other.
- L2 cache: the bytes that its blocks read.
- Memory: the bytes that must be read or written.

The lattice is a chain of diagonals that take DIAGONAL clocks each.  Left out: the host, the encoder, cache misses, and
clocks below the boost clock.  Expect errors of 40%.

    .venv/main/bin/python benchmarks/gpu_estimates.py [--kernels]
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Dict, List, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from common.present.table import Column  # noqa: E402
from common.present.text import markdown_of  # noqa: E402


class Gpu(NamedTuple):
    """Peak rates by the vendor's data sheets, in units per second.

    l2_bytes: the rate of reads from the L2 cache in published microbenchmarks.
    """

    name: str
    architecture: int
    hertz: float
    tf32: float
    bfloat16: float
    sgemm: float  # of cuBLAS in float32 without tensor cores, 0.78 (H100) and 0.92 (A100) of the peak
    memory_bytes: float
    l2_bytes: float


GPUS = (
    Gpu("H100", 90, 1.755e9, 495e12, 989e12, 52e12, 3.35e12, 5.5e12),
    Gpu("A100", 80, 1.410e9, 156e12, 312e12, 18e12, 2.0e12, 4.0e12),
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
    """The work of a kernel in a step, and the seconds that each part would take alone."""

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


class Kernel(NamedTuple):
    """The launches of a kernel in a step, and the size of its compiled code."""

    blocks: int  # of the largest launch
    launches: int
    sizes: Dict[str, int]  # BM, BV and BH, the rows and columns of a block
    instructions: int
    in_loop: int  # of these, those of the innermost loop that multiplies matrices
    warps: int

    @property
    def issued(self) -> int:
        """Return the instructions of a block, each loop counted once.

        Further passes of loops over H wait for the products, which are counted apart.
        """
        return self.instructions * self.warps

    def issued_in(self, passes: int) -> int:
        """Return the instructions of a block whose innermost loop runs `passes` times."""
        return (self.instructions + (passes - 1) * self.in_loop) * self.warps


class Compiled(NamedTuple):
    """The kernels of a step, by name, and the number of multiprocessors of the GPU they are launched for."""

    kernels: Dict[str, Kernel]
    multiprocessors: int


def compiled(gpu: Gpu, dtype: str) -> Compiled:
    """Compile the kernels of a step with tests/compiled_launches.py.  Raises subprocess.CalledProcessError."""
    command = [sys.executable, str(ROOT / "tests" / "compiled_launches.py"), str(gpu.architecture), str(V), dtype]
    made = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    kernels = {}
    for name, taken in made["kernels"].items():
        launches = [launch for launch in made["launches"] if launch["kernel"] == name]
        blocks = max(math.prod(launch["grid"]) for launch in launches)
        counts = (taken["instructions"], taken["in_loop"], taken["warps"])
        kernels[name] = Kernel(blocks, len(launches), launches[0], *counts)
    return Compiled(kernels, made["multiprocessors"])


def estimates(gpu: Gpu, dtype: str) -> List[Estimate]:
    """Return the estimate of each kernel of a step in "float32" or "bfloat16", in the order of their launches."""
    kernels, multiprocessors = compiled(gpu, dtype)
    size, terms = (2, 1) if dtype == "bfloat16" else (4, 3)
    rate = gpu.bfloat16 if dtype == "bfloat16" else gpu.tf32 / 3  # three products of TF32 for one of float32
    issue = multiprocessors * 4 * gpu.hertz

    def estimate(name: str, flops: float, memory: float, l2: float, blocks: float = 0) -> Estimate:
        """Return the estimate of a kernel.  blocks: those whose instructions count; 0 where they hide behind others."""
        kernel = kernels[name]
        products = flops / (rate * SUSTAINED[gpu.architecture])
        return Estimate(
            name, kernel.launches, flops, memory, l2, kernel.blocks / multiprocessors,
            products, blocks * kernel.issued / issue, l2 / gpu.l2_bytes, memory / gpu.memory_bytes,
        )  # fmt: skip

    def kept(name: str, cells: float, written: float) -> Estimate:
        """Return the estimate of a kernel that keeps the activations of a block of cells.

        Each block reads the inputs and all of the weight; programs take blocks in turn.  written: bytes.
        """
        kernel = kernels[name]
        blocks = cells / kernel.sizes["BM"]
        products = 2 * cells * H * V / (rate * SUSTAINED[gpu.architecture])
        instructions = blocks * kernel.issued_in(math.ceil(V / kernel.sizes["BV"])) / issue
        l2 = (blocks * V + 2 * cells) * H * size
        waves = blocks / kernel.launches / kernel.blocks
        return Estimate(
            name, kernel.launches, 2 * cells * H * V, written, l2, waves,
            products, instructions, l2 / gpu.l2_bytes, written / gpu.memory_bytes,
        )  # fmt: skip

    of_weight = terms - 1 if size == 4 else 1  # copies of the weight that a block reads: both halves
    inputs, weight = kernels["input_gradients"].sizes, kernels["weight_gradients"].sizes

    def with_tiles(name: str, cells: float, memory: float) -> List[Estimate]:
        """Return the estimates of `activate` and of a product with the weight, for `cells` cells."""
        rows, columns = kernels[name].sizes["BM"], kernels[name].sizes["BV"]
        blocks = cells / rows * math.ceil(V / columns)
        l2 = blocks * (rows + columns * of_weight) * H * size
        elements = 16 * 64  # a block of `activate`
        activate = estimate("activate", 0, cells * H * size, 0, cells * H / elements)
        activate = activate._replace(launches=kernels[name].launches)
        return [activate, estimate(name, 2 * cells * H * V, memory, l2, blocks)]

    chain = (FRAMES + TARGETS) * DIAGONAL / gpu.hertz
    columns = math.ceil(H / inputs["BH"])
    of_layer = math.ceil(V / weight["BV"]) * math.ceil(H / weight["BH"])
    if "arcs_of_cells" in kernels:
        arcs = [kept("arcs_of_cells", USEFUL, USEFUL * 16)]
    else:
        arcs = with_tiles("log_probabilities", USEFUL, USEFUL * 16)
    if "gradients_of_cells" in kernels:
        of_logits = [kept("gradients_of_cells", WITH_GRADIENT, WITH_GRADIENT * (H + V) * size)]
    else:
        of_logits = with_tiles("logit_gradients", WITH_GRADIENT, WITH_GRADIENT * V * size)
    return [
        *arcs,
        Estimate("lattice", 1, 0, PADDED * 24, 0, 30 / multiprocessors, 0, chain, 0, 0),
        estimate("list_cells", 0, PADDED * (8 + 16 + 4 + 8), 0),
        *of_logits,
        estimate("input_gradients", 2 * WITH_GRADIENT * H * V, WITH_GRADIENT * H * size,
                 WITH_GRADIENT / inputs["BM"] * columns * (inputs["BM"] + inputs["BH"] * of_weight) * V * size,
                 WITH_GRADIENT / inputs["BM"] * columns),
        estimate("weight_gradients", 2 * WITH_GRADIENT * H * V, WITH_GRADIENT * (H + V) * size,
                 WITH_GRADIENT * of_layer * (weight["BV"] + weight["BH"]) * size),
        estimate("add_to_encoder", 0, WITH_GRADIENT * H * size, 0),
        estimate("add_to_decoder", 0, WITH_GRADIENT * H * size, 0),
    ]  # fmt: skip


def optimized_transducer(gpu: Gpu) -> float:
    """Return the seconds of a float32 step of optimized_transducer.

    cuBLAS computes forward and backward of the joiner without TF32; 20 GB of activations and logits are moved.
    """
    return 6 * USEFUL * H * V / gpu.sgemm + 20e9 / gpu.memory_bytes


def _kernels(rows: List[Estimate]) -> str:
    """Return a Markdown table with a line for each kernel."""
    heads = ["launches", "waves", "GFLOP", "MB of memory", "GB of L2", "products", "instructions", "L2", "memory", "ms"]
    lines = []
    for row in rows:
        sizes = [f"{row.flops / 1e9:.0f}", f"{row.memory_bytes / 1e6:.0f}", f"{row.l2_bytes / 1e9:.1f}"]
        times = [row.products, row.instructions, row.l2, row.memory, row.seconds]
        words = [row.kernel, str(row.launches), f"{row.waves:.1f}", *sizes, *(f"{1e3 * time:.2f}" for time in times)]
        lines.append(words)
    return markdown_of(["kernel", *map(Column, heads)], lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--kernels", action="store_true", help="Also print a table of the kernels.")
    arguments = parser.parse_args()
    lines, details = [], []
    for gpu in GPUS:
        other = optimized_transducer(gpu)
        cells = [gpu.name]
        for dtype in ("float32", "bfloat16"):
            made = estimates(gpu, dtype)
            seconds = sum(row.seconds for row in made)
            cells.append(f"{1e3 * seconds:.1f} ({seconds / other:.2f}x)")
            details.append(f"{gpu.name}, {dtype}; ms of each part alone:\n\n{_kernels(made)}")
        lines.append([*cells, f"{1e3 * other:.0f}"])
    heads = ["fused float32", "fused bfloat16", "optimized_transducer float32"]
    tables = [markdown_of(["ms a step, estimated", *map(Column, heads)], lines)]
    print("\n\n".join(tables + (details if arguments.kernels else [])))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
