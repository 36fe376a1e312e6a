#!/usr/bin/env python3
"""Benchmark k2.rnnt_loss, the exact (unpruned) loss of k2.

Takes padded logits, int64 targets and one boundary tensor (N, 4): first symbol, first frame, U, T of each utterance.
"""

from types import SimpleNamespace

import common.losses.k2_package
from common.cli import script_main
from common.losses.adapter import Adapter


class K2(Adapter):
    name = "k2"
    hint = common.losses.k2_package.HINT
    dtypes = ("float32", "float64")

    def version(self):
        return common.losses.k2_package.version(self.module)

    def prepare(self, batch):
        return SimpleNamespace(symbols=batch.targets.long(), boundary=common.losses.k2_package.boundary(batch))

    def loss(self, logits, prepared):
        return self.module.rnnt_loss(logits, termination_symbol=0, reduction="sum", **vars(prepared))


ADAPTER = K2

if __name__ == "__main__":
    raise SystemExit(script_main(ADAPTER.name, __doc__))
