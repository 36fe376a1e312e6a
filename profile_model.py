#!/usr/bin/env python3
"""Profile a training step of a model and its loss: see ``profile_model.py --help`` and docs/profile.md."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # Python leaves it out with -P and PYTHONSAFEPATH

from common.command import run
from common.tools.profile import command as profile

if __name__ == "__main__":
    arguments = profile.parser().parse_args()
    sys.exit(run("profile_model.py", lambda: profile.main(arguments)))
