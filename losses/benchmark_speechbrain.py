#!/usr/bin/env python3
"""Benchmark SpeechBrain's TransducerLoss: numba kernels, one thread for each target and one block
for each utterance.

It runs on CUDA only, with U+1 at most 1024.  It takes log-probabilities of padded logits, int32
targets and lengths, and computes gradients in forward.  SpeechBrain divides the value by T, but not
the gradient; nor does it divide the gradient by N for reduction "mean", its default.  This row
multiplies the values by T again, outside of the gradient, so that both are those of the summed
loss; `rnnt-bench check` asks its reductions without this correction.  The function called is
Transducer.apply: all that TransducerLoss does after torch's log_softmax and a check that its
tensors are on a GPU.  So its kernels also run with NUMBA_ENABLE_CUDASIM=1, in numba's simulator on
the CPU, for --passes correctness. Variant hat: after a sigmoid for the blank and a softmax of the
labels.
"""

import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # Python puts losses/ there alone

from rnnt_bench.command import script_main
from rnnt_bench.losses.adapter import HAT, Adapter


class SpeechBrain(Adapter):
    name = "speechbrain"
    hint = "pip install 'speechbrain>=1.1' numba"
    imports = "speechbrain.integrations.numba.transducer_loss"
    devices = ("cuda",)
    dtypes = ("float32", "float64", "float16")  # numba knows no bfloat16
    log_probs = True
    variants = {
        "hat": HAT,
        "by-utterance": {"by_utterance": True, "fewest_targets": 1},
    }
    positional = True  # autograd's apply takes no keywords
    repairs = True
    simulator = {"NUMBA_ENABLE_CUDASIM": "1"}

    def prepare(self, batch):
        return SimpleNamespace(labels=batch.targets, T=batch.T_lengths, U=batch.U_lengths)

    def function(self):
        return self.module.Transducer.apply

    def options(self):
        return {"blank": self.blank, "reduction": "none" if self.repairs else self.reduction}

    def loss(self, logits, prepared):
        values = super().loss(logits, prepared)
        return self.reduced(values + values.detach() * (prepared.T - 1)) if self.repairs else values


ADAPTER = SpeechBrain

if __name__ == "__main__":
    raise SystemExit(script_main(__file__, __doc__))
