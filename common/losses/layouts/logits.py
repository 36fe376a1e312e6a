"""Define the layouts of logits: "padded" (N, T, U+1, V), and "packed" (sum T_i (U_i+1), V), without padding."""

from __future__ import annotations

from typing import Any

import torch

from common.losses.layouts.base import Layout, Shapes
from common.losses.layouts.cells import Cells


class Padded(Layout):
    """The layout of padded logits (N, T, U+1, V)."""

    def given(self, model, batch, prepared):
        return model.logits(batch)


class PackedCells(Cells):
    """The cells of packed logits."""

    def __init__(self, batch: Any, *others: Any):
        super().__init__(batch, *others)
        sizes = [T * (U + 1) for T, U in batch.shapes]
        self.begins = [sum(sizes[:n]) for n in range(len(sizes))]

    def of(self, tensor, n, begin, end):
        first, row = self.begins[n], self.batch.shapes[n][1] + 1
        return tensor[first + begin * row : first + end * row].view(end - begin, row, -1)

    def padding(self, n):
        return iter(())


class Packed(Layout):
    """The layout of packed logits (sum T_i (U_i+1), V)."""

    cells = PackedCells

    def given(self, model, batch, prepared):
        return model.packed_logits(batch)

    def padded(self, given, batch):
        return unpack(given, batch.shapes)

    def padding(self, shapes, T, U):
        return None

    def take(self, logits, batch, prepared):
        return pack(logits, batch.shapes)

    def packed_code(self, batch):
        parts = [f"logits[{n}, :{T}, :{U + 1}].flatten(0, 1)" for n, (T, U) in enumerate(batch.shapes)]
        return [f"logits = torch.cat([{', '.join(parts)}])"]


def pack(logits: torch.Tensor, shapes: Shapes) -> torch.Tensor:
    """Return the cells (sum T_i (U_i+1), V) of padded logits (N, T, U+1, V), row-major; differentiable.

    It is a view if there is no padding.
    """
    if all((T, U + 1) == logits.shape[1:3] for T, U in shapes):
        return logits.flatten(0, 2)
    return torch.cat([logits[n, :T, : U + 1].flatten(0, 1) for n, (T, U) in enumerate(shapes)])


def unpack(cells: torch.Tensor, shapes: Shapes) -> torch.Tensor:
    """Return the padded logits (N, T, U+1, V) of packed `cells`, with zeros in the padding; differentiable."""
    T, U = max(T for T, _ in shapes), max(U for _, U in shapes)
    parts = cells.split([T * (U + 1) for T, U in shapes])
    padded = [
        torch.nn.functional.pad(part.view(t, u + 1, -1), (0, 0, 0, U - u, 0, T - t))
        for part, (t, u) in zip(parts, shapes)
    ]
    return torch.stack(padded)
