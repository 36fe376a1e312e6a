#!/usr/bin/env python3
"""Benchmark NeMo's rnnt_logprobs_triton: blank's and the targets' log-probabilities of padded
logits, in one kernel.

It is half a loss: NeMo's own lattice needs k2's graphs, so this suite's lattice runs on top
(common/losses/topologies.py, a step of torch operations for each anti-diagonal), and its time
counts.  It runs on CUDA only.  With TRITON_INTERPRET=1 its kernels run in Triton's interpreter on
the CPU, for --passes correctness.
"""

import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # Python puts losses/ there alone

from rnnt_bench.command import script_main
from rnnt_bench.core.called import or_set_up
from rnnt_bench.losses.adapter import Adapter


class NemoTriton(Adapter):
    name = "nemo-triton"
    hint = or_set_up("pip install 'nemo-toolkit[asr]' triton", "nemo")
    imports = "nemo.collections.asr.parts.k2.rnnt_logprobs_triton"
    devices = ("cuda",)
    dtypes = ("float32", "float16", "bfloat16")
    reductions = ("none",)
    simulator = {"TRITON_INTERPRET": "1"}

    def prepare(self, batch):
        return SimpleNamespace(
            targets=batch.targets, source_lengths=batch.T_lengths, target_lengths=batch.U_lengths
        )

    def function(self):
        return self.module.rnnt_logprobs_triton

    def options(self):
        return {"blank_id": self.blank}

    def loss(self, logits, prepared):
        from rnnt_bench.losses import topologies

        label_arcs, blank_arcs = self.call({"logits": logits}, prepared)
        losses = topologies.arc_losses(
            blank_arcs, label_arcs, prepared.source_lengths, prepared.target_lengths
        )
        return self.reduced(losses)


ADAPTER = NemoTriton

if __name__ == "__main__":
    raise SystemExit(script_main(__file__, __doc__))
