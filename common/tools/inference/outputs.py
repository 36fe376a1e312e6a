"""Compares the outputs of a model with those of the same model in another dtype.

Leaves out whether either is right: a model with random weights has no right outputs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch

from rnnt_bench.core.errors import WrongResult

#: Symbols of a sequence up to which edits are counted; a longer one is compared place by place.
MOST_EDITED = 20_000


def check_numbers(outputs: Any, whose: str = "the model") -> None:
    """Raise WrongResult for outputs that hold a NaN."""
    if any(tensor.isnan().any() for tensor in _tensors(_leaves(outputs))):
        raise WrongResult(
            f"the outputs of {whose} hold NaN: its numbers are wrong before they are timed"
        )


def difference(plain: Any, other: Any) -> float:
    """Return how far outputs are from the `plain` ones: 0 where they are equal, infinity for NaN or
    another shape.

    Of floating-point outputs it is the RMS of the difference over the RMS of the plain ones.  Of a
    model without any it is the share of symbols to edit: elements of integer tensors, numbers of a
    list, characters of a text."""
    tensors = _tensors(_leaves(plain))
    others = _tensors(_leaves(other))
    if not tensors and not others:
        pairs = list(zip_longest(_sequences(plain), _sequences(other), fillvalue=()))
        longest = sum(max(len(left), len(right)) for left, right in pairs)
        return sum(edits(left, right) for left, right in pairs) / max(longest, 1)
    if [tensor.shape for tensor in tensors] != [tensor.shape for tensor in others]:
        return math.inf
    left = _flat(tensors)
    right = _flat(others)
    differs = left != right  # -inf of a masked place is equal to itself, but has no difference
    scale = left[left.isfinite()].norm().clamp_min(1e-30)
    error = float((left - right)[differs].norm() / scale)
    return math.inf if math.isnan(error) else error


def _flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the numbers of tensors in one of float64."""
    return torch.cat([tensor.double().flatten() for tensor in tensors])


def edits(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Return how many insertions, deletions and substitutions make `second` of `first` (Levenshtein
    1966)."""
    if first == second:
        return 0
    if max(len(first), len(second)) > MOST_EDITED:
        return sum(a != b for a, b in zip_longest(first, second))
    numbers: dict[Any, int] = {}
    columns = torch.tensor([numbers.setdefault(symbol, len(numbers)) for symbol in second])
    slope = torch.arange(len(second) + 1)
    row = slope.clone()  # edits to each beginning of `second`
    for symbol in first:
        substituted = row[:-1] + (columns != numbers.get(symbol, -1))
        row = row + 1
        row[1:] = torch.minimum(row[1:], substituted)
        # an insertion costs 1 more than the place to its left: a running minimum once the slope is
        # taken away
        row = torch.cummin(row - slope, 0).values + slope
    return int(row[-1])


def _sequences(outputs: Any) -> list[Sequence[Any]]:
    """Return the sequences of symbols in any nesting: rows of tensors, lists of plain values,
    texts."""
    outputs = _plain(outputs)
    if isinstance(outputs, torch.Tensor):
        return outputs.reshape(-1, outputs.shape[-1] if outputs.dim() else 1).tolist()
    if isinstance(outputs, str):
        return [outputs]
    if not isinstance(outputs, list):
        return [[outputs if isinstance(outputs, (int, float, bytes)) else type(outputs)]]
    parts = [_plain(part) for part in outputs]
    sequences = [sequence for part in parts for sequence in _sequences(part)]
    if any(isinstance(part, (list, str, torch.Tensor)) for part in parts):
        return sequences
    return [[symbol for (symbol,) in sequences]]  # plain values, which together are one sequence


def _leaves(outputs: Any) -> list[Any]:
    """Return the tensors, numbers and texts of any nesting, in order."""
    outputs = _plain(outputs)
    return (
        [leaf for part in outputs for leaf in _leaves(part)]
        if isinstance(outputs, list)
        else [outputs]
    )


def _tensors(leaves: Sequence[Any]) -> list[torch.Tensor]:
    """Return those leaves that are floating-point numbers as real tensors."""
    tensors = []
    for leaf in leaves:
        if isinstance(leaf, float):
            tensors.append(torch.tensor(leaf))
        elif isinstance(leaf, torch.Tensor) and leaf.is_complex():
            tensors.append(torch.view_as_real(leaf.resolve_conj()))
        elif isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
            tensors.append(leaf)
    return tensors


def _plain(value: Any) -> Any:
    """Return a mapping, dataclass or tuple as a list, an array of numpy as a tensor, or a list if
    it has no numbers."""
    if isinstance(value, Mapping):
        return list(value.values())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name) for field in dataclasses.fields(value)]
    if isinstance(value, (list, tuple)):
        return list(value)
    if hasattr(value, "__array__") and not isinstance(value, torch.Tensor):
        try:
            return torch.as_tensor(value)
        except TypeError:  # of texts or objects
            return list(value.tolist())
    return value
