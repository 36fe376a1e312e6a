#!/usr/bin/env python3
"""Benchmark k2's pruned loss: rnnt_loss_smoothed, get_rnnt_prune_ranges, do_rnnt_pruning,
rnnt_loss_pruned.

It is an approximation by design: the joiner sees only --prune-range symbols per frame.  So it is
never ranked with the exact losses.  common/losses/layouts.py calls its functions in the order in
which icefall trains them.  With its range widened to all of U it must equal the exact loss.
Variant hat: use_hat_loss, which k2 1.24.4 or newer has.
"""

import inspect

from benchmark_k2 import K2
from rnnt_bench.command import script_main
from rnnt_bench.core.errors import NotRunnable
from rnnt_bench.losses.adapter import described


class K2Pruned(K2):
    name = "k2-pruned"
    layout = "pruned"
    variants = {"hat": {"topology": "hat"}}
    lm_only_scale = 0.25

    def load(self, device):
        super().load(device)
        if (
            self.topology == "hat"
            and "use_hat_loss" not in inspect.signature(self.function()).parameters
        ):
            here = f"{self.implementation.package} {self.version()}"
            raise NotRunnable(
                "unsupported", f"{here} has no use_hat_loss; k2 1.24.4 or newer has it"
            )

    def simple_loss(self, am, lm, prepared):
        """Return the summed simple loss, smoothed, and the gradients of its arcs.

        am, lm: scores (N, T, V) and (N, U+1, V)."""
        return self.module.rnnt_loss_smoothed(
            lm=lm,
            am=am,
            symbols=prepared.symbols,
            boundary=prepared.boundary,
            **self.simple_options(),
        )

    def simple_options(self):
        """Return the arguments of the simple loss beside scores, symbols and boundary."""
        return {
            "termination_symbol": self.blank,
            "lm_only_scale": self.lm_only_scale,
            "am_only_scale": 0.0,
            "reduction": "sum",
            "return_grad": True,
        }

    def ranges(self, arc_gradients, prepared):
        """Return the ranges (N, T, S): the S positions u that matter at each frame."""
        px_grad, py_grad = arc_gradients
        return self.module.get_rnnt_prune_ranges(
            px_grad=px_grad, py_grad=py_grad, boundary=prepared.boundary, s_range=self.prune_range
        )

    def pruned(self, encoder_out, decoder_out, ranges):
        """Return the encoder and decoder outputs (N, T, S, D) of the cells in `ranges`."""
        return self.module.do_rnnt_pruning(am=encoder_out, lm=decoder_out, ranges=ranges)

    def function(self):
        return self.module.rnnt_loss_pruned

    def options(self):
        options = super().options()
        if self.topology == "hat":
            options["use_hat_loss"] = True
        return options

    def described_options(self):
        from rnnt_bench.records.schema import Option

        simple = described(
            self.module.rnnt_loss_smoothed, self.simple_options(), prefix="rnnt_loss_smoothed."
        )
        return {**super().described_options(), "s_range": Option(self.prune_range, "-"), **simple}


ADAPTER = K2Pruned

if __name__ == "__main__":
    raise SystemExit(script_main(__file__, __doc__))
