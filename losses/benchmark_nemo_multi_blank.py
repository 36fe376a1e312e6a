#!/usr/bin/env python3
"""Benchmark NeMo's losses with blanks of several frames: `multiblank_rnnt`, in numba kernels, and
its loops of Python.

Both take padded logits in which the blank is the last column and the longer blanks stand before it,
the longest first. So this row moves the blank behind the others, which copies the logits, as part
of what is timed.  The numba kernels run on CUDA only, and with NUMBA_ENABLE_CUDASIM=1 in numba's
simulator on the CPU, for --passes correctness.  Variant
pytorch: multiblank_rnnt_pytorch, which runs everywhere, with an operation for each cell of a padded
batch.
"""

import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # Python puts losses/ there alone

from losses import nemo_package
from rnnt_bench.command import script_main


class NemoMultiBlank(nemo_package.NemoPackage):
    name = "nemo-multi-blank"
    topology = "multi-blank"
    variants = {"pytorch": {**nemo_package.PYTORCH, "devices": ("cpu", "cuda"), "simulator": {}}}

    def function(self):
        if self.by_loops:
            return self.module.MultiblankRNNTLossPytorch
        return self.module.MultiblankRNNTLossNumba

    def options(self):
        return {
            "blank": self.outputs(self.settings.vocab_size) - 1,
            "big_blank_durations": list(reversed(self.lattice.durations)),
            "reduction": self.reduction_name(),
            "sigma": self.lattice.sigma,
            **self.numba_options({"fastemit_lambda": 0.0, "clamp": -1}),
        }

    def call(self, tensors, prepared):
        # Symbol 0, the blank, becomes the last column, so each label has a number lower by 1.
        moved = tensors["logits"].roll(-1, -1)
        blank = moved.size(-1) - 1
        labels = (prepared.labels - 1).masked_fill(prepared.labels == 0, blank)
        arguments = SimpleNamespace(**{**vars(prepared), "labels": labels})
        return self.answer({**self.options(), "blank": blank}, moved, arguments)


ADAPTER = NemoMultiBlank

if __name__ == "__main__":
    raise SystemExit(script_main(__file__, __doc__))
