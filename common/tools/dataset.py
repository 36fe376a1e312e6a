"""Name the data set that the examples of a pipeline are from.  No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import List, Optional


@dataclass(frozen=True)
class Dataset:
    """A data set; the fields are keys of a configuration, and flags."""

    dataset_type: str = "made"  # "made", "raw" (a manifest) or "npy"
    dataset_path: Optional[str] = None  # of the manifest or the arrays
    dataset_size: Optional[int] = None  # the first of its examples; None: all
    target_sr: int = 16000  # Hz
    made_seconds: Optional[List[float]] = None  # of each made example
    seed: int = 0
    trust_pickle: bool = False  # load arrays of pickled objects, which can run any code
