#!/usr/bin/env python3
"""Benchmark k2.rnnt_loss, the exact (unpruned) loss of k2.

It takes padded logits, int64 targets and one boundary tensor (N, 4): first symbol, first frame, U, T of each utterance.
Variants: rnnt_type modified and constrained, in which a target leads to the next frame; delay-penalty; hat, on
log-probabilities of a sigmoid and a softmax, which its own normalisation leaves as they are.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # Python leaves it out with -P and PYTHONSAFEPATH

from common.command import script_main
from common.losses.k2_package import FullLoss, K2Package


class K2(K2Package, FullLoss):
    name = "k2"


ADAPTER = K2

if __name__ == "__main__":
    raise SystemExit(script_main(__file__, __doc__))
