#!/usr/bin/env python3
"""Print one table from log folders: see ``summarize.py --help`` and docs/reading.md."""

import sys

from rnnt_bench.command import script

if __name__ == "__main__":
    sys.exit(script("summarize"))
