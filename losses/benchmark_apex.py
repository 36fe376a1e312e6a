#!/usr/bin/env python3
"""Benchmark TransducerLoss of NVIDIA apex (apex.contrib.transducer).

It runs on CUDA only.  It takes padded logits, int32 targets and lengths; torch's log_softmax runs
inside it, and its backward writes the gradient of the logits in one kernel (fuse_softmax_backward).
Variant: packed logits.  No package index has a release: install it by hand.
"""

import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # Python puts losses/ there alone

from rnnt_bench.command import script_main
from rnnt_bench.losses.adapter import Adapter


class Apex(Adapter):
    name = "apex"
    hint = "install https://github.com/NVIDIA/apex as its README says, with APEX_TRANSDUCER=1"
    imports = "apex.contrib.transducer"
    devices = ("cuda",)
    dtypes = ("float32", "float64", "float16")
    reductions = ("none",)
    is_module = True
    variants = {"packed": {"layout": "packed"}}

    def prepare(self, batch):
        prepared = SimpleNamespace(
            label=batch.targets, f_len=batch.T_lengths, y_len=batch.U_lengths
        )
        if self.layout == "packed":
            # int64, the end of each
            prepared.batch_offset = (batch.T_lengths * (batch.U_lengths + 1)).cumsum(0)
            prepared.max_f_len = max(T for T, _ in batch.shapes)
        return prepared

    def function(self):
        return self.module.TransducerLoss

    def options(self):
        return {"fuse_softmax_backward": True, "opt": 1, "packed_input": self.layout == "packed"}

    def loss(self, logits, prepared):
        losses = self.function()(**self.options())(logits, blank_idx=self.blank, **vars(prepared))
        # its backward wants a contiguous gradient, which that of a sum alone is not
        return self.reduced(losses * 1)


ADAPTER = Apex

if __name__ == "__main__":
    raise SystemExit(script_main(__file__, __doc__))
