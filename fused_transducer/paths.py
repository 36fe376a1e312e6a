"""Posteriors as a tensor, and the best path: what can be read from the arcs of the cells, on any device."""

from __future__ import annotations

from typing import Tuple

import torch
from torch import Tensor

from fused_transducer.plain import skewed


def _numbers(T: int, U1: int, T_lengths: Tensor, U_lengths: Tensor) -> Tensor:
    """Return the number (N, T, U+1) that each cell has in the order of csrc/cells.h: by utterances, in each by
    anti-diagonals t + u, on each by u.  In the padding there are other numbers."""
    T_lengths, states = T_lengths.view(-1, 1, 1).long(), U_lengths.view(-1, 1, 1).long() + 1
    t, u = (torch.arange(size, device=T_lengths.device) for size in (T, U1))
    diagonal = t[:, None] + u
    shorter, longer = torch.minimum(T_lengths, states), torch.maximum(T_lengths, states)
    left = T_lengths + states - 1 - diagonal
    before = torch.where(
        diagonal <= longer,
        shorter * (shorter + 1) // 2 + (diagonal - shorter) * shorter,
        T_lengths * states - left * (left + 1) // 2,
    )
    before = torch.where(diagonal <= shorter, diagonal * (diagonal + 1) // 2, before)
    cells = (T_lengths * states).flatten()
    first = (cells.cumsum(0) - cells).view(-1, 1, 1)
    return first + before + u - (diagonal - T_lengths + 1).clamp(min=0)


def of_cells(
    arcs: Tensor, T: int, U1: int, T_lengths: Tensor, U_lengths: Tensor, packed: bool, padding: float
) -> Tensor:
    """Return the numbers (N, T, U+1, 2) of the arcs of the blank and of the label from `arcs` of a backend; `padding`
    where an utterance has no cell.  packed: the backend stores the cells of utterances only."""
    T_lengths, U_lengths = T_lengths.to(arcs.device), U_lengths.to(arcs.device)
    t, u = (torch.arange(size, device=arcs.device) for size in (T, U1))
    inside = (t[:, None] < T_lengths.view(-1, 1, 1)) & (u <= U_lengths.view(-1, 1, 1))
    if not packed:
        both = arcs[:2].view(2, *inside.shape).permute(1, 2, 3, 0)
        return both.masked_fill(~inside.unsqueeze(-1), padding)
    number = _numbers(T, U1, T_lengths, U_lengths).masked_fill(~inside, 0)
    cells = (T_lengths.long() * (U_lengths.long() + 1)).sum()  # a compiled graph has room for more
    both = torch.stack([arcs.view(-1)[number], arcs.view(-1)[number + cells]], -1)
    return both.masked_fill(~inside.unsqueeze(-1), padding)


def best(log_probabilities: Tensor, T_lengths: Tensor, U_lengths: Tensor) -> Tuple[Tensor, Tensor]:
    """Return (frames (N, U) int64, log-probabilities (N,)) of the best paths, as `align` does.

    log_probabilities (N, T, U+1, 2): of the arcs of each cell; -inf where there is none.
    """
    N, _, U1, _ = log_probabilities.shape
    n = torch.arange(N, device=log_probabilities.device)
    U_lengths = U_lengths.long()
    last = T_lengths.long() + U_lengths - 1
    blank, label = (skewed(x) for x in log_probabilities.unbind(-1))
    score, by_label = torch.full_like(blank, -torch.inf), torch.zeros_like(blank, dtype=torch.bool)
    score[0, :, 0] = 0
    for d in range(1, len(blank)):
        along_blank, along_label = score[d - 1] + blank[d - 1], torch.full_like(score[d], -torch.inf)
        along_label[:, 1:] = (score[d - 1] + label[d - 1])[:, :-1]
        by_label[d] = along_label > along_blank
        score[d] = torch.maximum(along_blank, along_label)
    total = score[last, n, U_lengths] + blank[last, n, U_lengths]
    frames = torch.full((N, U1), -1, dtype=torch.int64, device=n.device)  # [:, u]: of the arc that leads to u
    u = U_lengths.clone()
    for d in range(len(blank) - 1, 0, -1):
        emitted = by_label[d, n, u] & (d <= last) & (total != -torch.inf)
        frames[n, u] = torch.where(emitted, d - u, frames[n, u])
        u = u - emitted.long()
    return frames[:, 1:], total
