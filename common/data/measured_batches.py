"""The batches of a run: the utterances of its shape file, with the lengths, order and batch size of its settings.

Each timing round has batches of its own (--batches random or spread), or all rounds have the same (first, longest).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import List, Optional, Sequence, Tuple

import numpy as np

from common.core.settings import Settings
from common.data import batching, provenance, shapes, variations
from common.data.batching import Batches


def load(
    settings: Settings, pool: Optional[int] = None, round_number: Optional[int] = None
) -> Tuple[Batches, List[int]]:
    """Return (all batches of the shape file, indices of the measured ones).

    Args:
        settings: of the run.
        pool: a batch size, or a number of frames when sorted.  Only the utterances of the measured batches of that
            size are used, in all their batches, so that batches of different sizes are timed over the same utterances.
        round_number: whose batches; None: those of all rounds.

    Raises UserError.
    """
    utterances = load_utterances(settings)
    if pool is None:
        batches = in_batches(utterances, settings)
        return batches, select(batches, settings, round_number)
    pooled = in_batches(utterances, replace(settings, batch_size=pool, max_frames=pool))
    batches = in_batches(np.concatenate([pooled[index] for index in select(pooled, settings)]), settings)
    return batches, list(range(len(batches)))


def load_utterances(settings: Settings) -> np.ndarray:
    """Return the utterances of the shape file with the durations and variations of the settings: int32 (utterances, 2),
    columns T and U. Raises UserError."""
    path = Path(settings.shape_file)
    known = provenance.known_factor(path)
    factor = variations.check_subsampling(path, known, settings.subsampling)
    front_end = provenance.frame_shift(path), known or variations.SUBSAMPLING
    utterances = variations.between(shapes.load(path), *front_end, settings.min_duration, settings.max_duration)
    lengths = {key: getattr(settings, key) for key in ("token_scale", "concatenate", "frames", "tokens")}
    return variations.vary(utterances, subsampling=factor, **lengths)


def in_batches(utterances: np.ndarray, settings: Settings) -> Batches:
    if settings.sort_utterance:
        return batching.max_frames(utterances, settings.max_frames)
    return batching.fixed_size(utterances, settings.batch_size)


def warnings(batches: Batches, selected: Sequence[int], settings: Settings) -> List[str]:
    """Return a line for each surprise in the batches of a run."""
    lines = [batches.warning()]
    available, wanted = len(batches), settings.num_batches
    if not settings.find_largest:  # which has sizes of its own
        if len(selected) < wanted:
            lines.append(f"--num-batches {wanted}: there are no more than {len(selected)}, and all are measured")
        elif settings.own_batches and available < wanted * settings.rounds:
            shared = f"there are {available} batches for {settings.rounds} rounds, so rounds share some"
            lines.append(f"--num-batches {wanted}: {shared}")
    return [line for line in lines if line]


def select(batches: Batches, settings: Settings, round_number: Optional[int] = None) -> List[int]:
    """Return the indices of the measured batches of a round; without one, of all rounds, each once."""
    if not settings.own_batches:
        round_number = 1
    rounds = range(1, settings.rounds + 1) if round_number is None else [round_number]
    how = settings.batches, settings.num_batches, settings.seed
    return list(dict.fromkeys(index for number in rounds for index in batching.select(batches, *how, number)))
