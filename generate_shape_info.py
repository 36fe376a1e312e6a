#!/usr/bin/env python3
"""Write a shape file: the frames and tokens (T, U) of every utterance of a corpus.  See
``generate_shape_info.py --help``."""

import sys

from rnnt_bench.command import script

if __name__ == "__main__":
    sys.exit(script("shapes"))
