#!/usr/bin/env python3
"""Ask every loss the corner cases: see ``conformance.py --help`` and docs/corners.md."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # Python leaves it out with -P and PYTHONSAFEPATH

from common.command import run
from common.conformance import command

if __name__ == "__main__":
    arguments = command.parser().parse_args()
    sys.exit(run("conformance.py", lambda: command.main(arguments)))
