#!/usr/bin/env python3
"""Benchmark warprnnt_pytorch.rnnt_loss of warp-transducer, the first loss of its kind: HawkAaron's
or b-flo's.

It takes padded logits, int32 targets and lengths, and computes gradients in forward.  On the CPU
torch normalises the logits, on CUDA its own kernels do.  No package index has a release: install it
by hand.  b-flo's branches have FastEmit on by default (0.001), which changes the loss; this row
switches it off. Variant hat: on log-probabilities of a sigmoid and a softmax; its own log_softmax
leaves what is normalised as it is.
"""

import inspect
import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # Python puts losses/ there alone

from rnnt_bench.command import script_main
from rnnt_bench.losses.adapter import HAT, Adapter


class WarpTransducer(Adapter):
    name = "warp-transducer"
    hint = (
        "install branch update_torch2.1 of https://github.com/b-flo/warp-transducer (for CUDA up to 12), or "
        "https://github.com/HawkAaron/warp-transducer, as its README says: cmake, then pip install in pytorch_binding"
    )
    dtypes = ("float32", "float64")
    variants = {"hat": HAT}

    def prepare(self, batch):
        return SimpleNamespace(
            labels=batch.targets, act_lens=batch.T_lengths, label_lens=batch.U_lengths
        )

    def function(self):
        return self.module.rnnt_loss

    def options(self):
        options = {"blank": self.blank, "reduction": self.reduction}
        if "fastemit_lambda" in inspect.signature(self.function()).parameters:
            options["fastemit_lambda"] = 0.0
        return options


ADAPTER = WarpTransducer

if __name__ == "__main__":
    raise SystemExit(script_main(__file__, __doc__))
