#!/usr/bin/env python3
"""Benchmark the token-and-duration transducer loss of Hugging Face transformers
(transformers.loss.loss_tdt).

Plain PyTorch, an anti-diagonal at a time, any device; it trains Parakeet TDT.  Tokens and durations
are two tensors: here views of the joiner's one.  Its reduction "mean" divides each loss by its
target length, so the mean over the batch is its "mean_batch".  Half precision is computed in
float32.  Variant kernel: kernels-community/tdt-loss of the Hugging Face hub, which takes the same
arguments: CUDA kernels that sum in float64, loaded by the package kernels.
"""

import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # Python puts losses/ there alone

from rnnt_bench.command import script_main
from rnnt_bench.core.errors import NotRunnable
from rnnt_bench.losses.adapter import Adapter, import_package

#: The kernel on the hub, and its version there.
KERNEL, VERSION = "kernels-community/tdt-loss", 1


class Transformers(Adapter):
    name = "transformers"
    hint = "pip install transformers"
    imports = "transformers.loss.loss_tdt"
    topology = "tdt"
    dtypes = ("float32", "float16", "bfloat16")
    variants = {"kernel": {"from_hub": True, "devices": ("cuda",), "hint": "pip install kernels"}}
    from_hub = False

    def import_module(self, device):
        if not self.from_hub:
            return super().import_module(device)
        kernels = import_package("kernels", self.hint)
        try:
            return kernels.get_kernel(KERNEL, version=VERSION)
        except Exception as error:  # it asks the hub, and may lack a build for this torch
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            raise NotRunnable(
                "missing", f"{KERNEL} cannot be loaded from the Hugging Face hub: {reason}"
            ) from error

    def version(self):
        return str(VERSION) if self.from_hub else super().version()

    def prepare(self, batch):
        return SimpleNamespace(
            targets=batch.targets.long(),
            logit_lengths=batch.T_lengths,
            target_lengths=batch.U_lengths,
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
        tokens, durations = self.lattice.split(tensors["logits"])
        return self.function()(tokens, durations, **vars(prepared), **self.options())


ADAPTER = Transformers

if __name__ == "__main__":
    raise SystemExit(script_main(__file__, __doc__))
