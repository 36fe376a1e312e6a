"""Seeded random numbers that are the same on every machine and for every numpy version.

numpy promises the raw stream of a BitGenerator (NEP 19), not what Generator makes of it, so the floats are made here.
Leaves out the inputs' values (encoder and decoder outputs): those are common.losses.inputs'.
"""

from __future__ import annotations

import numpy as np


def uniform(seed: int, count: int) -> np.ndarray:
    """`count` float64 numbers in [0, 1), multiples of 2**-53, from the raw output of PCG64 with `seed` (>= 0)."""
    raw = np.random.PCG64(seed).random_raw(count)
    return (raw >> np.uint64(11)).astype(np.float64) * 2.0**-53
