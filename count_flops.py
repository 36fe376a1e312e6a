#!/usr/bin/env python3
"""Count the FLOPs and MACs of a model: see ``count_flops.py --help`` and docs/flops.md."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # Python leaves it out with -P and PYTHONSAFEPATH

from common.command import run
from common.tools.flops import command as flops

if __name__ == "__main__":
    arguments = flops.parser().parse_args()
    sys.exit(run("count_flops.py", lambda: flops.main(arguments)))
