"""The batches of a run: the utterances of its shape file, with the lengths, order and batch size of its settings.

Each timing round has batches of its own (--batches random or spread), or all rounds have the same (first, longest).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import List, Optional, Sequence, Tuple

import numpy as np

from common.core.settings import Settings
from common.data import batching, shapes, variations
from common.data.batching import Batches


def load(
    settings: Settings, pool: Optional[int] = None, round_number: Optional[int] = None
) -> Tuple[Batches, List[int]]:
    """(all batches of the shape file's utterances, indices of those of this round; without one, of all rounds).

    pool: a batch size, or a number of frames when sorted.  Only the utterances of the measured batches of that size are
    used then, and all their batches are measured, so that implementations with batches of different sizes are timed
    over the same utterances.  Raises UserError for a wrong shape file or wrong settings.
    """
    utterances = load_utterances(settings)
    if pool is None:
        batches = in_batches(utterances, settings)
        return batches, select(batches, settings, round_number)
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
    """A line for each surprise in the batches of a run."""
    found = [batches.warning()]
    there, wanted = len(batches), settings.num_batches
    if not settings.find_largest:  # which has sizes of its own
        if len(selected) < wanted:
            found.append(f"--num-batches {wanted}: there are no more than {len(selected)}, and all are measured")
        elif settings.own_batches and there < wanted * settings.rounds:
            found.append(
                f"--num-batches {wanted}: there are {there} batches for {settings.rounds} rounds, so rounds share some"
            )
    return [line for line in found if line]


def select(batches: Batches, settings: Settings, round_number: Optional[int] = None) -> List[int]:
    """Indices of the measured batches of a round; without one, of all rounds, each once."""
    if not settings.own_batches:
        round_number = 1
    rounds = range(1, settings.rounds + 1) if round_number is None else [round_number]
    picked = (
        batching.select(batches, settings.batches, settings.num_batches, settings.seed, number) for number in rounds
    )
    return list(dict.fromkeys(index for indices in picked for index in indices))
