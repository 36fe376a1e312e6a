#!/usr/bin/env python3
"""Benchmark fused_transducer.transducer_loss, this repository's own: joiner and exact loss in one
(docs/fused.md).

It takes encoder and decoder outputs and the output layer, and holds no logits, so it has no scope
"loss".  On the CPU it is C++, compiled when it is first used; on CUDA it is Triton.  Variants:
all-cells (negligible=0: backward leaves no cell out); torch (its plain PyTorch code, which needs no
compiler); one of each other lattice.
"""

import os
from types import SimpleNamespace

from rnnt_bench.command import script_main
from rnnt_bench.core.errors import NotRunnable
from rnnt_bench.core.files import BUILD
from rnnt_bench.core.implementations import OF_FUSED
from rnnt_bench.losses.adapter import Adapter


class Fused(Adapter):
    name = "fused"
    hint = "pip install ./fused_transducer, a folder of the suite's checkout; it needs torch 2.4 or newer"
    variants = {
        "all-cells": {"negligible": 0.0},
        "torch": {"backend": "torch"},
        **{name: {"topology": name} for name in OF_FUSED},
    }
    layout = "joint"
    dtypes = ("float32", "float64", "float16", "bfloat16")
    negligible = 1e-8
    backend = ""

    def load(self, device):
        os.environ.setdefault("FUSED_TRANSDUCER_CACHE", str(BUILD / "fused_transducer"))
        super().load(device)
        import torch

        wanted = self.backend or {"cpu": "native", "cuda": "triton"}[device]
        try:
            self.backend = self.module.backend_of(
                device, getattr(torch, self.settings.dtype), wanted
            )
        except ValueError as error:
            raise NotRunnable("missing", f"{error}; fused:torch runs without it") from error

    def prepare(self, batch):
        prepared = SimpleNamespace(
            targets=batch.targets, T_lengths=batch.T_lengths, U_lengths=batch.U_lengths
        )
        if self.topology == "windowed":
            prepared.window = self.lattice.windows(
                batch.T_lengths, batch.U_lengths, batch.targets.shape[1]
            )
        return prepared

    def function(self):
        return self.module.transducer_loss

    def options(self):
        return {
            "blank": self.blank,
            "reduction": self.reduction,
            "fastemit_lambda": 0.0,
            "negligible": self.negligible,
            "backend": self.backend,
            **self.lattice_options(),
        }

    def lattice_options(self):
        """Return the options that choose the lattice."""
        if self.topology in ("regular", "windowed"):
            return {}
        if self.topology == "delay-penalty":
            return {"delay_penalty": self.lattice.penalty}
        if self.lattice.extra:
            durations = list(self.lattice.durations)
            return {"topology": self.topology, "durations": durations, "sigma": self.lattice.sigma}
        return {"topology": self.topology}


ADAPTER = Fused

if __name__ == "__main__":
    raise SystemExit(script_main(__file__, __doc__))
