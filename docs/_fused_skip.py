#!/usr/bin/env python3
"""Measure fused with nonfinite="skip" as a row beside fused: what it costs where every loss is finite.

./benchmark_all.py --only fused,docs/_fused_skip.py --rounds 20
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmark_fused import Fused
from rnnt_bench.command import script_main


class Skip(Fused):
    name = "fused-skip"
    imports = "fused_transducer"
    variants = {}

    def options(self):
        return {**super().options(), "nonfinite": "skip"}


ADAPTER = Skip

if __name__ == "__main__":
    raise SystemExit(script_main(__file__, __doc__))
