#!/usr/bin/env python3
"""Measure every loss and print which one to use, see ``benchmark_all.py --help`` and
docs/usage.md."""

import sys

from rnnt_bench.command import script

if __name__ == "__main__":
    sys.exit(script("run"))
