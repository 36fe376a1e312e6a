#!/usr/bin/env python3
"""Benchmark torchaudio.functional.rnnt_loss.

Takes padded logits and normalises them itself; computes the gradient already in its forward, so its backward alone says
little.  CPU and CUDA; float16 on CUDA.
"""

from types import SimpleNamespace

from common.cli import script_main
from common.losses.adapter import Adapter


class Torchaudio(Adapter):
    name = "torchaudio"
    hint = "pip install torchaudio"
    dtypes = ("float32", "float16")

    def prepare(self, batch):
        return SimpleNamespace(targets=batch.targets, logit_lengths=batch.T_lengths, target_lengths=batch.U_lengths)

    def loss(self, logits, prepared):
        return self.module.functional.rnnt_loss(logits, blank=0, reduction="sum", **vars(prepared))


ADAPTER = Torchaudio

if __name__ == "__main__":
    raise SystemExit(script_main(ADAPTER.name, __doc__))
