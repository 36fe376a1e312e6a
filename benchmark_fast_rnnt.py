#!/usr/bin/env python3
"""Benchmark fast_rnnt.rnnt_loss, the exact (unpruned) loss of fast_rnnt, from which k2's was made.

It takes padded logits, int64 targets and one boundary tensor (N, 4): first symbol, first frame, U, T of each utterance.
Variants: rnnt_type modified and constrained, in which a target leads to the next frame; delay-penalty; hat, on
log-probabilities of a sigmoid and a softmax, which its own normalisation leaves as they are.  It refuses an utterance
without a target.  If the package is not installed, it is built once from its source package.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # Python leaves it out with -P and PYTHONSAFEPATH

from common.command import script_main
from common.losses.k2_package import FastRnntPackage, FullLoss


class FastRnnt(FastRnntPackage, FullLoss):
    name = "fast_rnnt"


ADAPTER = FastRnnt

if __name__ == "__main__":
    raise SystemExit(script_main(__file__, __doc__))
