#!/usr/bin/env python3
"""Ask whether a speech model is faster than real time: see ``profile_inference.py --help``, docs/inference.md."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # Python leaves it out with -P and PYTHONSAFEPATH

from common.command import run
from common.tools.inference import command as inference

if __name__ == "__main__":
    arguments, overrides = inference.parsed(sys.argv[1:])
    sys.exit(run("profile_inference.py", lambda: inference.main(arguments, overrides)))
