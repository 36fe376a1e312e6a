#!/usr/bin/env python3
"""Benchmark fast_rnnt's pruned loss: rnnt_loss_smoothed, get_rnnt_prune_ranges, do_rnnt_pruning,
rnnt_loss_pruned.

It is an approximation by design: the joiner sees only --prune-range symbols per frame.  So it is
never ranked with the exact losses.  Its step is what icefall trains (see common/losses/layouts.py).
With its range widened to all of U it must equal the exact loss.  It refuses an utterance without a
target.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # Python puts losses/ there alone

from benchmark_k2_pruned import K2Pruned
from rnnt_bench.command import script_main
from rnnt_bench.core.called import or_set_up


class FastRnntPruned(K2Pruned):
    name = "fast_rnnt-pruned"
    hint = or_set_up("pip install fast_rnnt")
    variants = {}
    fewest_targets = 1


ADAPTER = FastRnntPruned

if __name__ == "__main__":
    raise SystemExit(script_main(__file__, __doc__))
