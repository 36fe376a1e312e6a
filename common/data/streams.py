"""Seeded random numbers that are the same on every machine and for every numpy version, and what is drawn with them.

numpy guarantees the raw stream of a BitGenerator (NEP 19), but not the numbers that Generator makes from it, so the
floats are made here.  `uniform64` draws shapes and choices of batches.  `uniform` and `symbols` draw the inputs of a
loss; their keys begin with the number of a stream.

`draw` draws the utterances of shape_info.pt from the published figures of LibriSpeech train-clean-100 at speeds 0.9,
1.0 and 1.1 (train_clean_100_shapes.json, beside this file): the joint distribution of T and U, whose "about" says how
to draw from it.  A draw has the real marginal of T and the real spread of U given T; it is not the corpus, and its
order is random.
"""

from __future__ import annotations

import json
from pathlib import Path
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


# The published figures.


FIGURES = Path(__file__).with_name("train_clean_100_shapes.json")
#: Seed of the committed shape_info.pt.  Of seeds 0 to 299, 36 also give the published batches (2,772-2,773 sorted ones
#: at 10,000 frames, useful/padded cells 0.504-0.505 at 30); of those this one has means and longest T near the
#: published.  data/shape_info.features.pt has seed 1097, chosen below 2,500 because its sorted batches at 30,000
#: feature frames are the published 3,733, of 14, 15, 15 ... 150 utterances; draws lie between about 3,721 and 3,746.
SEED = 34


def draw(seed: int = SEED) -> Tuple[np.ndarray, np.ndarray]:
    """Return as many utterances as the figures were taken from: int32 (utterances, 2), columns T and U, and the same
    with feature frames in the place of T.

    T is the inverse interpolation of its percentiles at a uniform percentage; U is T / 1000 times the inverse
    interpolation of the percentiles of the bin that holds T, at an independent uniform percentage; both are rounded. U
    is clipped to the published minimum and maximum: a product of a T and a U per T can miss them by a token or two.
    Four numbers of feature frames have the same T; which it is comes from what rounding takes from the drawn T.  The
    same seed gives the same rows on every machine."""
    known = json.loads(FIGURES.read_text(encoding="utf-8"))
    count, figures = known["utterances"], {name: np.asarray(value) for name, value in known.items()}
    percent_t, percent_u = 100.0 * uniform64(seed, 2 * count).reshape(2, count)
    at_percent = figures["T_at_percent"][np.newaxis]
    frames = _interpolate(percent_t, figures["T_percent"], at_percent, np.zeros(count, dtype=np.intp))
    rates = figures["U_per_1000_T_at_percent_by_T_bin"]
    bins = np.clip(np.searchsorted(figures["T_bin_edges"], frames, side="right") - 1, 0, len(rates) - 1)
    tokens = frames / 1000.0 * _interpolate(percent_u, figures["U_per_1000_T_percent"], rates, bins)
    shapes = np.rint(np.stack([frames, tokens], axis=1))
    shapes = np.clip(shapes, [known["T_min"], known["U_min"]], [known["T_max"], known["U_max"]]).astype(np.int32)
    quarter = np.clip(np.floor(4 * (frames - shapes[:, 0] + 0.5)), 0, 3).astype(np.int32)
    return shapes, np.stack([4 * shapes[:, 0] + 3 + quarter, shapes[:, 1]], axis=1)


def _interpolate(at: np.ndarray, known_at: np.ndarray, tables: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Interpolate row ``table[i]`` of `tables` (rows, points) linearly at ``at[i]``.

    Not np.interp: a compiler may fuse its multiplication and addition, which rounds differently from machine to
    machine.  Single numpy operations are exact IEEE.
    """
    left = np.clip(np.searchsorted(known_at, at, side="right") - 1, 0, len(known_at) - 2)
    share = (at - known_at[left]) / (known_at[left + 1] - known_at[left])
    low, high = tables[table, left], tables[table, left + 1]
    return low + share * (high - low)
