#!/usr/bin/env python3
"""Benchmark k2.rnnt_loss_simple, the loss of an additive joiner: logits am + lm, without tanh.

It takes am (N, T, V) and lm (N, U+1, V), not normalised, and never holds logits of all cells.  It trains another model
than the full losses (see common/losses/layouts/additive.py), so it is never ranked with them.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # Python leaves it out with -P and PYTHONSAFEPATH

from common.command import script_main
from common.losses.k2_package import K2Package, SimpleLoss


class K2Simple(K2Package, SimpleLoss):
    name = "k2-simple"


ADAPTER = K2Simple

if __name__ == "__main__":
    raise SystemExit(script_main(__file__, __doc__))
