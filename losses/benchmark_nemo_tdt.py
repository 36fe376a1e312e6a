#!/usr/bin/env python3
"""Benchmark NeMo's losses of tokens and durations: `tdt`, in numba kernels, and `tdt_pytorch`, in
loops of Python.

Both run on CUDA only.  They take padded logits with the durations behind the symbols, int64 targets
and lengths; omega, by which `tdt` trains some batches as an ordinary transducer, is 0.  With
NUMBA_ENABLE_CUDASIM=1 the kernels run in numba's simulator on the CPU, for --passes correctness;
`tdt_pytorch` (variant pytorch) then runs without its calls of .cuda().  Its loops take an operation
for each cell and duration.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # Python puts losses/ there alone

from losses import nemo_package
from rnnt_bench.command import script_main


class NemoTdt(nemo_package.NemoPackage):
    name = "nemo-tdt"
    topology = "tdt"
    variants = {"pytorch": nemo_package.PYTORCH}

    def function(self):
        return self.module.TDTLossPytorch if self.by_loops else self.module.TDTLossNumba

    def options(self):
        return {
            "blank": self.blank,
            "durations": list(self.lattice.durations),
            "reduction": self.reduction_name(),
            "sigma": self.lattice.sigma,
            **self.numba_options({"fastemit_lambda": 0.0, "clamp": -1, "omega": 0.0}),
        }


ADAPTER = NemoTdt

if __name__ == "__main__":
    raise SystemExit(script_main(__file__, __doc__))
