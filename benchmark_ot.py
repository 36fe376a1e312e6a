#!/usr/bin/env python3
"""Benchmark optimized_transducer.transducer_loss.

It takes packed logits, each utterance's own cells and no padding, and writes the gradient over
them, so it holds no second tensor of that size.  Variants: log-probs (from_log_softmax=True after
torch's log_softmax, which costs that advantage); modified (one_sym_per_frame=True: at most one
symbol per frame and a blank on the last); hat (as log-probs, after a sigmoid and a softmax); cuda
and cuda-modified (its kernels for CUDA, which are judged on a CPU too).  If the package is not
installed, it is built once from its source package.
"""

from types import SimpleNamespace

from rnnt_bench.command import script_main
from rnnt_bench.core.called import or_set_up
from rnnt_bench.losses.adapter import CUDA, HAT, Adapter


class OptimizedTransducer(Adapter):
    name = "optimized_transducer"
    hint = or_set_up("pip install optimized_transducer")
    layout = "packed"
    overwrites_logits = True
    reductions = ("sum", "mean")
    variants = {
        "log-probs": {"log_probs": True},
        "modified": {"topology": "modified-last-blank"},
        "hat": HAT,
        "cuda": CUDA,
        "cuda-modified": {**CUDA, "topology": "modified-last-blank"},
        # it refuses a batch without any target
        "by-utterance": {"by_utterance": True, "fewest_targets": 1},
    }

    def prepare(self, batch):
        return SimpleNamespace(
            targets=batch.targets, logit_lengths=batch.T_lengths, target_lengths=batch.U_lengths
        )

    def function(self):
        return self.module.transducer_loss

    def options(self):
        return {
            "blank": self.blank,
            "reduction": self.reduction,
            "from_log_softmax": self.log_probs,
            "one_sym_per_frame": self.topology == "modified-last-blank",
        }


ADAPTER = OptimizedTransducer

if __name__ == "__main__":
    raise SystemExit(script_main(__file__, __doc__))
