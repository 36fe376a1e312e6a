#!/usr/bin/env python3
"""Benchmark torchaudio.functional.rnnt_loss.

It takes padded logits and normalises them itself.  It computes the gradient in its forward, so the
time of its backward alone means little.  It runs on CPU and CUDA, in float32 and float16.
Variants: log-probs (fused_log_softmax=False, after torch's log_softmax); hat (likewise, after a
sigmoid for the blank and a softmax of the labels); windowed (likewise, with the log-probabilities
of targets outside their windows masked, as it has no windows). On CUDA its loss and gradient are
wrong for an utterance of one frame or without tokens, also for one within a batch
(docs/defects/torchaudio_cuda_short.py), so these are not asked there.
"""

from types import SimpleNamespace

from rnnt_bench.command import script_main
from rnnt_bench.losses.adapter import HAT, Adapter


class Torchaudio(Adapter):
    name = "torchaudio"
    hint = "pip install torchaudio"
    dtypes = ("float32", "float16")
    variants = {
        "log-probs": {"log_probs": True},
        "hat": HAT,
        "windowed": {"topology": "windowed", "log_probs": True},
    }

    def load(self, device):
        super().load(device)
        if device == "cuda":
            self.fewest_frames, self.fewest_targets = 2, 1

    def prepare(self, batch):
        return SimpleNamespace(
            targets=batch.targets, logit_lengths=batch.T_lengths, target_lengths=batch.U_lengths
        )

    def loss_of(self, tensors, prepared):
        if self.topology == "windowed":
            tensors = {"logits": self.lattice.masked(tensors["logits"], *vars(prepared).values())}
        return super().loss_of(tensors, prepared)

    def function(self):
        return self.module.functional.rnnt_loss

    def options(self):
        return {
            "blank": self.blank,
            "clamp": -1,
            "reduction": self.reduction,
            "fused_log_softmax": not self.log_probs,
        }


ADAPTER = Torchaudio

if __name__ == "__main__":
    raise SystemExit(script_main(__file__, __doc__))
