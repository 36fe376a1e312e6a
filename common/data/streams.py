"""Seeded random numbers that are the same on every machine and for every numpy version.

numpy guarantees the raw stream of a BitGenerator (NEP 19), but not the numbers that Generator makes from it, so the
floats are made here.  `uniform64` draws shapes and choices of batches.  `uniform` and `symbols` draw the inputs of a
loss; their keys begin with the number of a stream.
"""

from __future__ import annotations

from typing import Tuple

import numpy as np


def uniform64(seed: int, count: int) -> np.ndarray:
    """Return `count` float64 numbers in [0, 1), multiples of 2**-53, from the raw output of PCG64 with `seed` (>=
    0)."""
    raw = np.random.PCG64(seed).random_raw(count)
    return (raw >> np.uint64(11)).astype(np.float64) * 2.0**-53


def uniform(count: int, *key: int) -> np.ndarray:
    """Return (count,) float32 in [0, 1), multiples of 2^-24, from the stream that `key` names."""
    words = np.random.PCG64(np.random.SeedSequence(key)).random_raw((count + 1) // 2)
    return (words.astype("<u8").view("<u4")[:count] >> 8).astype(np.float32) * np.float32(2**-24)


#: First word of each stream's key, so that no two draw the same numbers; 4 and 6 once had other uses.
ENCODER, DECODER, TARGETS, WEIGHTS, _, ALIGNMENT = range(6)


def symbols(shape: Tuple[int, int], vocab_size: int, *key: int) -> np.ndarray:
    """Return int32 of `shape` in [1, vocab_size): never the blank, 0."""
    words = np.random.PCG64(np.random.SeedSequence(key)).random_raw(shape[0] * shape[1])
    return (1 + (words >> np.uint64(33)) % np.uint64(vocab_size - 1)).astype(np.int32).reshape(shape)
