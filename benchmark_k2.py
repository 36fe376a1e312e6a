#!/usr/bin/env python3
"""Benchmark k2.rnnt_loss, the exact (unpruned) loss of k2.

It takes padded logits, int64 targets and one boundary tensor (N, 4): first symbol, first frame, U,
T of each utterance.
Variants: rnnt_type modified and constrained, in which a target leads to the next frame;
delay-penalty; hat, on log-probabilities of a sigmoid and a softmax, which its own normalisation
leaves as they are.
"""

from types import SimpleNamespace

from rnnt_bench.command import script_main
from rnnt_bench.core.called import or_set_up
from rnnt_bench.core.implementations import ONE_SYMBOL
from rnnt_bench.losses.adapter import HAT, Adapter


class K2(Adapter):
    name = "k2"
    hint = or_set_up("take the wheel for your torch from https://k2-fsa.github.io/k2", "k2")
    dtypes = ("float32", "float64")
    takes_many_targets = False  # it asserts that T is above U
    variants = {
        "hat": HAT,
        # it refuses a batch without any target
        "by-utterance": {"by_utterance": True, "fewest_targets": 1},
        **{name: {"topology": name} for name in ("modified", "constrained", "delay-penalty")},
    }

    def prepare(self, batch):
        import torch

        begin = torch.zeros_like(batch.T_lengths)
        boundary = torch.stack([begin, begin, batch.U_lengths, batch.T_lengths], dim=1).long()
        return SimpleNamespace(symbols=batch.targets.long(), boundary=boundary)

    def function(self):
        return self.module.rnnt_loss

    def options(self):
        options = {
            "termination_symbol": self.blank,
            "rnnt_type": self.topology if self.topology in ONE_SYMBOL else "regular",
            "reduction": self.reduction,
        }
        if self.topology == "delay-penalty":
            options["delay_penalty"] = self.lattice.penalty
        return options


ADAPTER = K2

if __name__ == "__main__":
    raise SystemExit(script_main(__file__, __doc__))
