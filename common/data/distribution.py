"""Histograms of T, U and padding over a whole shape file and over the measured batches, for the report, which reads no
shape file.  numpy only.
"""

from __future__ import annotations

from typing import Any, Dict, Sequence

import numpy as np

from common.data.batching import Batches

MOST_BINS = 40
STEPS = (1, 2, 5)  # times a power of ten: the widths of bins


def of_run(batches: Batches, measured: Sequence[int]) -> Dict[str, Any]:
    """The ``shape_distribution`` of common.records.schema.  measured: indices of the measured batches."""
    frames, tokens = batches.utterances.T
    in_measured = np.concatenate([batches[index] for index in measured]).T
    useful, padded = batches.all_cells()
    percent = 100 * (1 - useful / padded)
    padding = histogram(percent, percent[list(measured)], 0.1)
    lengths = {"T": histogram(frames, in_measured[0], 1), "U": histogram(tokens, in_measured[1], 1)}
    return {**lengths, "padding_percent": padding}


def histogram(values: np.ndarray, measured: np.ndarray, finest: float) -> Dict[str, Any]:
    """Return how many of all `values` and of the `measured` ones are in each bin: at most MOST_BINS bins, of a round
    width of at least `finest`.  Bin i counts values from begin + i * width to below begin + (i + 1) * width."""
    lowest, highest = float(values.min()), float(values.max())
    width = finest
    for width in (finest * step * 10**power for power in range(12) for step in STEPS):
        if highest // width - lowest // width < MOST_BINS:
            break
    first = int(lowest // width)
    count = int(highest // width) - first + 1
    bins = [(np.floor_divide(some, width).astype(np.int64) - first).clip(0, count - 1) for some in (values, measured)]
    of_all, of_measured = (np.bincount(some, minlength=count).tolist() for some in bins)
    ends = {"lowest": lowest, "median": float(np.median(values)), "highest": highest}
    counts = {"begin": round(first * width, 6), "width": round(width, 6), "all": of_all, "measured": of_measured}
    return {**counts, **{key: round(value, 3) for key, value in ends.items()}}
