#!/usr/bin/env python3
"""Benchmark k2's pruned loss: rnnt_loss_smoothed, get_rnnt_prune_ranges, do_rnnt_pruning, rnnt_loss_pruned.

It is an approximation by design: the joiner sees only --prune-range symbols per frame.  So it is never ranked with the
exact losses.  Its step is what icefall trains (see common/losses/layouts/pruned.py).  With its range widened to all of
U it must equal the exact loss.  Variant hat: use_hat_loss, which k2 1.24.4 or newer has.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # Python leaves it out with -P and PYTHONSAFEPATH

from common.command import script_main
from common.losses.k2_package import K2Package, PrunedLoss


class K2Pruned(K2Package, PrunedLoss):
    name = "k2-pruned"
    variants = {"hat": {"topology": "hat"}}


ADAPTER = K2Pruned

if __name__ == "__main__":
    raise SystemExit(script_main(__file__, __doc__))
