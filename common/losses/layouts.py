"""Between the layouts in which losses take their logits: padded (N, T, U+1, V) and packed (sum T_i (U_i+1), V)."""

from __future__ import annotations

from typing import Sequence, Tuple

import torch

Shapes = Sequence[Tuple[int, int]]


def pack(cells: torch.Tensor, shapes: Shapes) -> torch.Tensor:
    """(N, T, U+1, V) -> (sum T_i (U_i+1), V): the cells of each utterance, row-major; differentiable."""
    return torch.cat([cells[n, :T, : U + 1].flatten(0, 1) for n, (T, U) in enumerate(shapes)])


def unpack(cells: torch.Tensor, shapes: Shapes) -> torch.Tensor:
    """The inverse of `pack`, with zeros in the padding; differentiable."""
    T, U = max(T for T, _ in shapes), max(U for _, U in shapes)
    parts = cells.split([T * (U + 1) for T, U in shapes])
    padded = [
        torch.nn.functional.pad(part.view(t, u + 1, -1), (0, 0, 0, U - u, 0, T - t))
        for part, (t, u) in zip(parts, shapes)
    ]
    return torch.stack(padded)
