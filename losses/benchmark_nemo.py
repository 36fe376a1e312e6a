#!/usr/bin/env python3
"""Benchmark NeMo's RNNTLossNumba, its maintained copy of warprnnt_numba.

It takes padded logits, int64 targets and lengths, and computes gradients in forward.  On the CPU
torch normalises the logits and Python itself loops over the cells: numba compiles the CUDA kernels
only. Variant hat: on log-probabilities of a sigmoid and a softmax, as its HATJoint makes them; the
loss's own log_softmax leaves what is normalised as it is.
"""

import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # Python puts losses/ there alone

from rnnt_bench.command import script_main
from rnnt_bench.core.called import or_set_up
from rnnt_bench.losses.adapter import HAT, Adapter


class Nemo(Adapter):
    name = "nemo"
    hint = or_set_up("pip install 'nemo-toolkit[asr]' numba", "nemo")
    imports = "nemo.collections.asr.parts.numba.rnnt_loss"
    dtypes = ("float32", "float16")  # numba knows no bfloat16
    variants = {"hat": HAT}
    is_module = True
    python_loops = ("cpu",)

    def prepare(self, batch):
        return SimpleNamespace(
            labels=batch.targets.long(),
            act_lens=batch.T_lengths.long(),
            label_lens=batch.U_lengths.long(),
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


ADAPTER = Nemo

if __name__ == "__main__":
    raise SystemExit(script_main(__file__, __doc__))
