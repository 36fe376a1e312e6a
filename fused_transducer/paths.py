"""Posteriors as a tensor, and the best path: what can be read from the arcs of the cells, on any device."""

from __future__ import annotations

from typing import Tuple

import torch
from torch import Tensor

from fused_transducer.lattices import Lattice
from fused_transducer.plain import Walk


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
    arcs: Tensor, T: int, U1: int, T_lengths: Tensor, U_lengths: Tensor, packed: bool, padding: float, parts: int = 2
) -> Tensor:
    """Return the numbers (N, T, U+1, parts) of the parts of each cell from `arcs` of a backend; `padding` where an
    utterance has no cell.  packed: the backend stores the cells of utterances only."""
    T_lengths, U_lengths = T_lengths.to(arcs.device), U_lengths.to(arcs.device)
    t, u = (torch.arange(size, device=arcs.device) for size in (T, U1))
    inside = (t[:, None] < T_lengths.view(-1, 1, 1)) & (u <= U_lengths.view(-1, 1, 1))
    if not packed:
        numbers = arcs[:parts].view(parts, *inside.shape).permute(1, 2, 3, 0)
        return numbers.masked_fill(~inside.unsqueeze(-1), padding)
    number = _numbers(T, U1, T_lengths, U_lengths).masked_fill(~inside, 0)
    cells = (T_lengths.long() * (U_lengths.long() + 1)).sum()  # a compiled graph has room for more
    numbers = torch.stack([arcs.view(-1)[number + part * cells] for part in range(parts)], -1)
    return numbers.masked_fill(~inside.unsqueeze(-1), padding)


def _skewed(cells: Tensor) -> Tensor:
    """Return the anti-diagonals (T+U, N, U+1) of (N, T, U+1); -inf where there is no cell."""
    N, T, U1 = cells.shape
    d, u = (torch.arange(size, device=cells.device) for size in (T + U1 - 1, U1))
    t = d[:, None] - u
    diagonals = cells[:, t.clamp(0, T - 1), u].transpose(0, 1)
    return torch.where(((t >= 0) & (t < T)).unsqueeze(1), diagonals, -torch.inf)


def best(log_probabilities: Tensor, T_lengths: Tensor, U_lengths: Tensor, lattice: Lattice) -> Tuple[Tensor, Tensor]:
    """Return (frames (N, U) int64, log-probabilities (N,)) of the best paths, as `align` does.

    log_probabilities (N, T, U+1, parts): of the parts of each cell; -inf where there is none.
    """
    N, _, U1, _ = log_probabilities.shape
    U_lengths, device = U_lengths.long(), log_probabilities.device
    walk = Walk(lattice, [_skewed(x) for x in log_probabilities.unbind(-1)], T_lengths.long(), U_lengths)
    scores, chosen = walk.best()
    n, u, d = torch.arange(N, device=device), U_lengths.clone(), T_lengths.long() + U_lengths
    total = scores[d, n, u]
    dt, du = (torch.tensor([getattr(arc, name) for arc in lattice.arcs], device=device) for name in ("dt", "du"))
    frames = torch.full((N, U1), -1, dtype=torch.int64, device=device)  # [:, u]: of the arc that leads to u
    for _ in range(len(scores) - 1):
        arc = chosen[d, n, u]
        leaves = (d > 0) & (total != -torch.inf)
        dt_here, du_here = (torch.where(leaves, x[arc], 0) for x in (dt, du))
        frame = d - u - dt_here
        frames[n, u] = torch.where(du_here == 1, frame, frames[n, u])
        d, u = d - dt_here - du_here, u - du_here
    return frames[:, 1:], total
