#!/usr/bin/env python3
"""Benchmark warp_rnnt.rnnt_loss, one warp of a GPU for 32 targets.

It runs on CUDA only; with RNNT_SIMULATED=1 its kernels are compiled for the CPU, for --passes
correctness.  It takes padded log-probabilities, so torch's log_softmax is part of what is timed,
and int32 targets and lengths.  Variants: gather, which takes blank and target out of each cell
first; compact, which takes packed log-probabilities and targets; hat, after a sigmoid for the blank
and a softmax of the labels.  If the package is not installed, it is built once from its source
package, with nvcc.
"""

import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # Python puts losses/ there alone

from rnnt_bench.command import script_main
from rnnt_bench.losses.adapter import CUDA, HAT, Adapter


class WarpRnnt(Adapter):
    name = "warp-rnnt"
    hint = "pip install warp_rnnt, or run it where nvcc is, which builds it"
    devices = CUDA["devices"]
    simulator = CUDA["simulator"]
    simulator_compiled = CUDA["simulator_compiled"]
    log_probs = True
    gather = False
    variants = {"gather": {"gather": True}, "compact": {"layout": "packed"}, "hat": HAT}

    def prepare(self, batch):
        import torch

        compact = self.layout == "packed"
        labels = [row[:U] for row, (_, U) in zip(batch.targets, batch.shapes)]
        return SimpleNamespace(
            labels=torch.cat(labels) if compact else batch.targets,
            frames_lengths=batch.T_lengths,
            labels_lengths=batch.U_lengths,
        )

    def function(self):
        return self.module.rnnt_loss

    def options(self):
        compact = self.layout == "packed"
        return {
            "blank": self.blank,
            "reduction": self.reduction,
            "gather": self.gather,
            "compact": compact,
        }


ADAPTER = WarpRnnt

if __name__ == "__main__":
    raise SystemExit(script_main(__file__, __doc__))
