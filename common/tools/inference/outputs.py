"""Compare the outputs of a model with those of the same model in another dtype.

Whether either is right is left out: a model with random weights has no right outputs.  Outputs are
tensors, numbers, texts, and any nesting of them in lists, tuples, mappings and dataclasses."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch

from rnnt_bench.core.errors import WrongResult

#: The longest sequence of symbols whose edits are counted; a longer one is compared symbol by symbol.
MOST_EDITED = 20_000


def check_numbers(outputs: Any, whose: str = "the model") -> None:
    """Raise WrongResult for outputs that hold a NaN.  whose: what made them, for the message."""
    if any(tensor.isnan().any() for tensor in _float_tensors(outputs)):
        raise WrongResult(
            f"the outputs of {whose} hold NaN: its numbers are wrong before they are timed"
        )


def difference(plain: Any, other: Any) -> float:
    """Return the distance of outputs from the `plain` ones, as a fraction: 0 where they are equal.

    For floating-point outputs this is the RMS of the difference over the RMS of the plain outputs.
    It is infinite where the shapes differ, and for NaN.  For outputs without floating-point numbers
    it is the share of symbols to edit: elements of integer tensors, numbers of a list, characters
    of a text."""
    plain_tensors = _float_tensors(plain)
    other_tensors = _float_tensors(other)
    if not plain_tensors and not other_tensors:
        return _edited_share(plain, other)
    if [tensor.shape for tensor in plain_tensors] != [tensor.shape for tensor in other_tensors]:
        return math.inf
    left = _flat(plain_tensors)
    right = _flat(other_tensors)
    # Equal elements are left out: where both outputs mask one by -inf, -inf - -inf would be NaN.
    differs = left != right
    scale = left[left.isfinite()].norm().clamp_min(1e-30)
    error = float((left - right)[differs].norm() / scale)
    return math.inf if math.isnan(error) else error


def _flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the elements of all tensors as one vector of float64."""
    return torch.cat([tensor.double().flatten() for tensor in tensors])


def _edited_share(plain: Any, other: Any) -> float:
    """Return the number of edits between the sequences of two outputs, as a share of their length.

    Sequences are compared in pairs, by their order.  The length of a pair is that of its longer
    sequence; a missing sequence counts as an empty one."""
    pairs = list(zip_longest(_sequences(plain), _sequences(other), fillvalue=()))
    length = sum(max(len(left), len(right)) for left, right in pairs)
    return sum(edits(left, right) for left, right in pairs) / max(length, 1)


def edits(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Return how many insertions, deletions and substitutions turn `first` into `second`
    (Levenshtein 1966).

    If one of them is longer than MOST_EDITED, return the number of places at which they differ."""
    if first == second:
        return 0
    if max(len(first), len(second)) > MOST_EDITED:
        return sum(a != b for a, b in zip_longest(first, second))
    numbers: dict[Any, int] = {}
    # The symbols of `second` as numbers; a symbol of `first` that is not among them is -1.
    symbols = torch.tensor([numbers.setdefault(symbol, len(numbers)) for symbol in second])
    insertions = torch.arange(len(second) + 1)
    # row[n]: edits from the symbols of `first` so far to the first n symbols of `second`
    row = insertions.clone()
    for symbol in first:
        substituted = row[:-1] + (symbols != numbers.get(symbol, -1))
        row = row + 1  # the symbol is deleted
        row[1:] = torch.minimum(row[1:], substituted)
        # By insertions, row[n] is at most row[m] + n - m for each m < n.  So row[n] - n is the
        # least of row[m] - m, for m = 0 to n.
        row = torch.cummin(row - insertions, 0).values + insertions
    return int(row[-1])


def _sequences(outputs: Any) -> list[Sequence[Any]]:
    """Return the sequences of symbols in outputs, in order.

    A sequence is a row of a tensor's last axis, a text, or a list of plain values.  In a list that
    holds a list, text or tensor, each plain value is a sequence of its own."""
    outputs = _as_list(outputs)
    if isinstance(outputs, torch.Tensor):
        return torch.atleast_2d(outputs).flatten(0, -2).tolist()
    if isinstance(outputs, str):
        return [outputs]
    if not isinstance(outputs, list):
        return [[_symbol(outputs)]]
    parts = list(map(_as_list, outputs))
    if any(isinstance(part, (list, str, torch.Tensor)) for part in parts):
        return [sequence for part in parts for sequence in _sequences(part)]
    return [list(map(_symbol, parts))]


def _symbol(value: Any) -> Any:
    """Return a plain value; for any other object, which may not be comparable, its type."""
    return value if isinstance(value, (int, float, bytes)) else type(value)


def _float_tensors(outputs: Any) -> list[torch.Tensor]:
    """Return the floating-point and complex numbers in outputs as real tensors, in order."""
    outputs = _as_list(outputs)
    if isinstance(outputs, list):
        return [tensor for part in outputs for tensor in _float_tensors(part)]
    if isinstance(outputs, float):
        return [torch.tensor(outputs)]
    if not isinstance(outputs, torch.Tensor):
        return []
    if outputs.is_complex():
        return [torch.view_as_real(outputs.resolve_conj())]
    return [outputs] if outputs.is_floating_point() else []


def _as_list(value: Any) -> Any:
    """Return a mapping, dataclass, list or tuple as the list of its values.

    Return a numpy array of numbers as a tensor, and an array of texts or objects as a list.  Return
    any other value as it is."""
    if isinstance(value, Mapping):
        return list(value.values())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name) for field in dataclasses.fields(value)]
    if isinstance(value, (list, tuple)):
        return list(value)
    if hasattr(value, "__array__") and not isinstance(value, torch.Tensor):
        try:
            return torch.as_tensor(value)
        except TypeError:
            return list(value.tolist())
    return value
