#!/usr/bin/env python3
"""Benchmark fast_rnnt.rnnt_loss, the exact (unpruned) loss of fast_rnnt, from which k2's was made.

Takes padded logits, int64 targets and one boundary tensor (N, 4): first symbol, first frame, U, T of each utterance.
Refuses an utterance without a target.  Without an installed package it is built once from its own source package.
"""

from types import SimpleNamespace

from common.cli import script_main
from common.losses import k2_package
from common.losses.adapter import Adapter
from common.setup import extensions


class FastRnnt(Adapter):
    name = "fast_rnnt"
    hint = "pip install fast_rnnt, or run `make setup`, which builds it"
    dtypes = ("float32", "float64")
    fewest_targets = 1

    def import_module(self, device):
        return extensions.load(self.package, device)

    def prepare(self, batch):
        return SimpleNamespace(symbols=batch.targets.long(), boundary=k2_package.boundary(batch))

    def loss(self, logits, prepared):
        return self.module.rnnt_loss(logits, termination_symbol=0, reduction="sum", **vars(prepared))


ADAPTER = FastRnnt

if __name__ == "__main__":
    raise SystemExit(script_main(ADAPTER.name, __doc__))
