"""Define layouts of several tensors that are rows of one, so that such a loss has one leaf too; each is a view."""

from __future__ import annotations

from typing import Any, Dict, List, Tuple

import torch

from common.losses.inputs import Batch
from common.losses.layouts.base import Layout, Region, Shapes


class Rows(Layout):
    """A layout whose first two tensors belong to frames (N, T, width) and to targets (N, U+1, width)."""

    def rows(self, V: int) -> int:
        """Return the number of rows of the tensors after the first two."""
        return 0

    def parts(self, given: torch.Tensor, batch: Batch) -> Dict[str, torch.Tensor]:
        """Return `tensors` by name, as views of `given`."""
        N, U = batch.targets.shape
        return dict(zip(self.tensors, split(given, N, U, self.rows(given.size(1)))))

    def loss(self, given: torch.Tensor, batch: Batch, prepared: Any) -> torch.Tensor:
        return self.adapter.loss_of(self.parts(given, batch), prepared)

    def size(self, N, T, U, V):
        return N * T + N * (U + 1) + self.rows(V), V

    def padding(self, shapes: Shapes, T: int, U: int) -> List[Region]:
        regions = []
        for n, (frames, targets) in enumerate(shapes):
            first = len(shapes) * T + n * (U + 1)
            for begin, end in ((n * T + frames, (n + 1) * T), (first + targets + 1, first + U + 1)):
                regions += [(slice(begin, end),)] if begin < end else []
        return regions

    def parts_code(self, given: torch.Tensor, batch: Batch) -> List[str]:
        begin, code = 0, []
        for part in self.parts(given, batch).values():
            end = begin + part.numel() // given.size(1)
            code.append(f"logits[{begin}:{end}].view{(*part.shape,)}")
            begin = end
        return [f"{', '.join(self.tensors)} = {', '.join(code)}"]


def split(rows: torch.Tensor, N: int, U: int, others: int = 0) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split rows (count, width) into views: frames (N, T, width), targets (N, U+1, width), and `others` more rows."""
    width = rows.size(1)
    frames, targets, rest = rows.split([len(rows) - N * (U + 1) - others, N * (U + 1), others])
    return frames.view(N, -1, width), targets.view(N, U + 1, width), rest
