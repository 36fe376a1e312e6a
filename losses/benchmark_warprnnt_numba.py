#!/usr/bin/env python3
"""Benchmark warprnnt_numba.RNNTLossNumba, warp-transducer's kernels in Python, compiled by numba.

It takes padded logits, int32 targets and lengths, and computes gradients in forward.  On the CPU
torch normalises the logits and Python itself loops over the cells: numba compiles the CUDA kernels
only, for which U+1 must be at most 1024.
"""

import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # Python puts losses/ there alone

from rnnt_bench.command import script_main
from rnnt_bench.losses.adapter import Adapter


class WarpRnntNumba(Adapter):
    name = "warprnnt_numba"
    hint = "pip install warprnnt_numba numba"
    dtypes = ("float32", "float64", "float16")  # numba knows no bfloat16
    is_module = True
    python_loops = ("cpu",)

    def prepare(self, batch):
        return SimpleNamespace(
            labels=batch.targets, act_lens=batch.T_lengths, label_lens=batch.U_lengths
        )

    def function(self):
        return self.module.RNNTLossNumba

    def options(self):
        return {
            "blank": self.blank,
            "reduction": self.reduction,
            "fastemit_lambda": 0.0,
            "clamp": -1,
        }


ADAPTER = WarpRnntNumba

if __name__ == "__main__":
    raise SystemExit(script_main(__file__, __doc__))
