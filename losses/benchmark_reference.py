#!/usr/bin/env python3
"""Benchmark this suite's own loss in plain PyTorch, common/losses/topologies.py: the row that
always runs.

It takes any device and any dtype and is twice differentiable, in a few readable lines: a baseline
for the gain of a kernel.  It is not the float64 oracle that judges every loss
(common/losses/oracle.py); the oracle judges it too.
Variants: one of each other lattice.
"""

import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # Python puts losses/ there alone

from rnnt_bench.command import script_main
from rnnt_bench.core.implementations import LATTICES
from rnnt_bench.losses.adapter import Adapter


class Reference(Adapter):
    name = "reference"
    hint = "pip install torch"
    variants = {name: {"topology": name} for name in LATTICES}
    dtypes = ("float32", "float64", "float16", "bfloat16")

    def version(self):
        return "this suite"

    def prepare(self, batch):
        return SimpleNamespace(
            targets=batch.targets, logit_lengths=batch.T_lengths, target_lengths=batch.U_lengths
        )

    def function(self):
        from rnnt_bench.losses import topologies

        return topologies.transducer_loss

    def options(self):
        return {
            "blank": self.blank,
            "reduction": self.reduction,
            **({} if self.topology == "regular" else {"topology": self.lattice}),
        }


ADAPTER = Reference

if __name__ == "__main__":
    raise SystemExit(script_main(__file__, __doc__))
