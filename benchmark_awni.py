#!/usr/bin/env python3
"""Benchmark transducer.TransducerLoss of awni/transducer, the loss of an additive joiner: logits am + lm, without tanh.

It takes emissions (N, T, V) and predictions (N, U+1, V), float32, contiguous and not normalised, and int32 targets and
lengths.  It holds (N, T, U+1) cells, never V of each.  It trains another model than the full losses (see
common/losses/layouts/additive.py), so it is never ranked with them.  Install it by hand.
"""

import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parent))  # Python leaves it out with -P and PYTHONSAFEPATH

from common.command import script_main
from common.losses.adapter import Adapter


class Awni(Adapter):
    name = "awni"
    hint = (
        "install https://github.com/awni/transducer as its README says; after Python 3.10 it needs a newer pybind11 "
        "than the one it pins"
    )
    layout = "additive"
    reductions = ("none",)
    is_module = True

    def prepare(self, batch):
        return SimpleNamespace(labels=batch.targets, input_lengths=batch.T_lengths, label_lengths=batch.U_lengths)

    def function(self):
        return self.module.TransducerLoss

    def options(self):
        return {"blank": self.blank}


ADAPTER = Awni

if __name__ == "__main__":
    raise SystemExit(script_main(__file__, __doc__))
