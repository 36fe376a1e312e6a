"""Histograms of T, U and padding over a whole shape file and over the measured batches, for the report, which reads no
shape file.  numpy only.
"""

from __future__ import annotations

from typing import Sequence

import numpy as np

from common.data.batching import Batches
from common.records.schema import Distribution, Histogram

MOST_BINS = 40
STEPS = (1, 2, 5)  # times a power of ten: the widths of bins


def of_run(batches: Batches, measured: Sequence[int]) -> Distribution:
    """Return the distribution of all batches.  measured: indices of the measured batches."""
    frames, tokens = batches.utterances.T
    in_measured = np.concatenate([batches[index] for index in measured]).T
    useful, padded = batches.all_cells()
    percent = 100 * (1 - useful / padded)
    padding = histogram(percent, percent[list(measured)], 0.1)
    return Distribution(histogram(frames, in_measured[0], 1), histogram(tokens, in_measured[1], 1), padding)


def histogram(values: np.ndarray, measured: np.ndarray, finest: float) -> Histogram:
    """Return how many of all `values` and of the `measured` ones are in each bin.

    There are at most MOST_BINS bins, of a round width of at least `finest`.
    """
    lowest, highest = float(values.min()), float(values.max())
    width = finest
    for width in (finest * step * 10**power for power in range(12) for step in STEPS):
        if highest // width - lowest // width < MOST_BINS:
            break
    first = int(lowest // width)
    count = int(highest // width) - first + 1
    bins = [(np.floor_divide(some, width).astype(np.int64) - first).clip(0, count - 1) for some in (values, measured)]
    of_all, of_measured = (np.bincount(some, minlength=count).tolist() for some in bins)
    return Histogram(
        begin=round(first * width, 6),
        width=round(width, 6),
        all=of_all,
        measured=of_measured,
        lowest=round(lowest, 3),
        median=round(float(np.median(values)), 3),
        highest=round(highest, 3),
    )
