"""Measures how far the outputs of a changed model are from those of the plain one.

Leaves out whether either is right: a model with random weights has no right outputs.
"""

from __future__ import annotations

from typing import Any, List, Mapping, Sequence

import torch

#: Symbols of a sequence up to which edits are counted; a longer one is compared place by place, which never gives less.
MOST_EDITED = 2_000


def difference(plain: Any, other: Any) -> float:
    """Return the distance of two outputs, 0 where they are equal.

    Of floating-point outputs it is the RMS of their difference over the RMS of the plain ones.  Of a model without
    any it is the share of symbols that have to be edited: each element of an integer tensor, each character of a text.
    """
    first, second = leaves(plain), leaves(other)
    numbers = [
        (left.double().flatten(), right.double().flatten())
        for left, right in zip(first, second)
        if isinstance(left, torch.Tensor) and left.is_floating_point() and isinstance(right, torch.Tensor)
    ]
    if numbers:
        if any(left.shape != right.shape for left, right in numbers):
            return float("inf")
        left, right = (torch.cat(parts) for parts in zip(*numbers))
        error = float((left - right).norm() / left.norm().clamp_min(1e-30))
        return error if error == error else float("inf")
    symbols = [[symbol for leaf in each for symbol in _symbols(leaf)] for each in (first, second)]
    return edits(*symbols) / max(*map(len, symbols), 1)


def edits(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Return how many insertions, deletions and substitutions make `second` of `first`."""
    if max(len(first), len(second)) > MOST_EDITED:
        return sum(a != b for a, b in zip(first, second)) + abs(len(first) - len(second))
    from torchaudio.functional import edit_distance

    return int(edit_distance(first, second))


def _symbols(leaf: Any) -> List[Any]:
    """Return the elements of a tensor, the characters of a text; anything else is one symbol."""
    if isinstance(leaf, torch.Tensor):
        return list(leaf.flatten().tolist())
    return list(leaf) if isinstance(leaf, str) else [str(leaf)]


def leaves(outputs: Any) -> List[Any]:
    """Return the tensors, numbers and texts of any nesting, in order; arrays of numpy as tensors."""
    if isinstance(outputs, Mapping):
        outputs = list(outputs.values())
    if isinstance(outputs, (list, tuple)):
        return [leaf for part in outputs for leaf in leaves(part)]
    if hasattr(outputs, "__array__") and not isinstance(outputs, torch.Tensor):
        try:
            outputs = torch.as_tensor(outputs)
        except TypeError:  # an array of texts or objects
            return leaves(outputs.tolist())
    return [] if outputs is None else [outputs]
