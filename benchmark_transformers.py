#!/usr/bin/env python3
"""Benchmark the token-and-duration transducer loss of Hugging Face transformers (transformers.loss.loss_tdt).

Plain PyTorch, an anti-diagonal at a time, any device; it trains Parakeet TDT.  Tokens and durations are two tensors:
here views of the joiner's one.  Its reduction "mean" divides each loss by its target length, so the mean over the batch
is its "mean_batch".  Half precision is computed in float32.
"""

import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parent))  # Python leaves it out with -P and PYTHONSAFEPATH

from common.command import script_main
from common.losses.adapter import Adapter


class Transformers(Adapter):
    name = "transformers"
    hint = "pip install transformers"
    imports = "transformers.loss.loss_tdt"
    topology = "tdt"
    dtypes = ("float32", "float16", "bfloat16")

    def prepare(self, batch):
        return SimpleNamespace(
            targets=batch.targets.long(), logit_lengths=batch.T_lengths, target_lengths=batch.U_lengths
        )

    def function(self):
        return self.module.tdt_loss

    def options(self):
        return {
            "blank_token_id": self.blank,
            "durations": list(self.lattice.durations),
            "sigma": self.lattice.sigma,
            "reduction": "mean_batch" if self.reduction == "mean" else self.reduction,
        }

    def call(self, tensors, prepared):
        logits = tensors["logits"]
        durations = len(self.lattice.durations)
        scores = logits.split([logits.size(-1) - durations, durations], -1)
        return self.function()(*scores, **vars(prepared), **self.options())


ADAPTER = Transformers

if __name__ == "__main__":
    raise SystemExit(script_main(__file__, __doc__))
