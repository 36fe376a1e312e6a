"""The batches of a run: its shape file's utterances in the lengths, the order and the batches of its settings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import List, Optional, Sequence, Tuple

import numpy as np

from common.data import batching, shapes, variations
from common.data.batching import Batches
from common.settings import Settings


def load(settings: Settings, pool: Optional[int] = None) -> Tuple[Batches, List[int]]:
    """(all batches of the shape file's utterances, indices of the measured ones).

    pool: a batch size, or a number of frames when sorted.  The utterances are then those of the measured batches of
    that size alone, and all batches of theirs are measured: so implementations whose batches differ in size are timed
    over the same utterances.  Raises UserError for a shape file or settings that do not do.
    """
    utterances = load_utterances(settings)
    if pool is None:
        batches = in_batches(utterances, settings)
        return batches, select(batches, settings)
    pooled = in_batches(utterances, replace(settings, batch_size=pool, max_frames=pool))
    batches = in_batches(np.concatenate([pooled[index] for index in select(pooled, settings)]), settings)
    return batches, list(range(len(batches)))


def load_utterances(settings: Settings) -> np.ndarray:
    """(utterances, 2) int32, columns T and U: the shape file's, varied as the settings say."""
    path = Path(settings.shape_file)
    return variations.vary(
        shapes.load(path),
        subsampling=variations.check_subsampling(path, shapes.known_factor(path), settings.subsampling),
        token_scale=settings.token_scale,
        concatenate=settings.concatenate,
        frames=settings.frames,
        tokens=settings.tokens,
    )


def in_batches(utterances: np.ndarray, settings: Settings) -> Batches:
    if settings.sort_utterance:
        return batching.max_frames(utterances, settings.max_frames)
    return batching.fixed_size(utterances, settings.batch_size)


def warnings(batches: Batches, selected: Sequence[int], settings: Settings) -> List[str]:
    """A line for each thing about the batches of a run that its flags do not tell."""
    found = [batches.warning()]
    if len(selected) < settings.num_batches and not settings.find_largest:  # which has sizes of its own
        found.append(
            f"--num-batches {settings.num_batches}: there are no more than {len(selected)}, and all are measured"
        )
    return [line for line in found if line]


def select(batches: Batches, settings: Settings) -> List[int]:
    return batching.select(batches, settings.batches, settings.num_batches, settings.seed)
