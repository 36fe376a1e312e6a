#!/usr/bin/env python3
"""Write a shape file, (T, U) of every utterance of a corpus: see ``generate_shape_info.py
--help``."""

import sys

from rnnt_bench.command import script

if __name__ == "__main__":
    sys.exit(script("shapes"))
