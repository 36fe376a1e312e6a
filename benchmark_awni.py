#!/usr/bin/env python3
"""Benchmark transducer.TransducerLoss of awni/transducer, the loss of an additive joiner: logits am + lm, without tanh.

Takes emissions (N, T, V) and predictions (N, U+1, V), float32, contiguous and not normalised, int32 targets and
lengths; holds (N, T, U+1) cells, never V of each.  Another model than the full losses train (see
common/losses/additive.py), so it is never ranked with them.  Used where it is installed.
"""

from types import SimpleNamespace

from common.cli import script_main
from common.losses.additive import Additive


class Awni(Additive):
    name = "awni"
    hint = (  # the pybind11 that it pins ends at Python 3.10, SO was dropped by Python, and its LTO breaks with nvcc
        "git clone https://github.com/awni/transducer, then in it: "
        "sed -i s/f7b499615e14d70ab098a20deb0cdb3889998a1a/v2.13.6/ transducer/cmake/Buildpybind11.cmake && "
        "sed -i \"s/'SO'/'EXT_SUFFIX'/\" transducer/cmake/FindPythonLibsNew.cmake && "
        "sed -i 's/_module(_transducer/& NO_EXTRAS/' transducer/CMakeLists.txt && pip install --no-build-isolation ."
    )
    reductions = ("none",)
    is_module = True

    def prepare(self, batch):
        return SimpleNamespace(labels=batch.targets, input_lengths=batch.T_lengths, label_lengths=batch.U_lengths)

    def function(self):
        return self.module.TransducerLoss

    def options(self):
        return {"blank": self.blank}

    def scores_loss(self, am, lm, prepared):
        return self.reduced(self.function()(**self.options())(am, lm, **vars(prepared)))


ADAPTER = Awni

if __name__ == "__main__":
    raise SystemExit(script_main(ADAPTER.name, __doc__))
