#!/usr/bin/env python3
"""Benchmark fast_rnnt.rnnt_loss, the exact (unpruned) loss of fast_rnnt, from which k2's was made.

It takes padded logits, int64 targets and one boundary tensor (N, 4): first symbol, first frame, U,
T of each utterance.
Variants: rnnt_type modified and constrained, in which a target leads to the next frame;
delay-penalty; hat, on log-probabilities of a sigmoid and a softmax, which its own normalisation
leaves as they are; cuda and cuda-modified (its kernels for CUDA, which are judged on a CPU too).
It refuses an utterance without a target.  If the package is not installed, it is built once from
its source package.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # Python puts losses/ there alone

from benchmark_k2 import K2
from rnnt_bench.command import script_main
from rnnt_bench.core.called import or_set_up
from rnnt_bench.losses.adapter import CUDA


class FastRnnt(K2):
    name = "fast_rnnt"
    hint = or_set_up("pip install fast_rnnt")
    fewest_targets = 1
    variants = {**K2.variants, "cuda": CUDA, "cuda-modified": {**CUDA, "topology": "modified"}}


ADAPTER = FastRnnt

if __name__ == "__main__":
    raise SystemExit(script_main(__file__, __doc__))
