"""Compute the transducer loss in plain PyTorch: any device, any dtype, any lattice, twice differentiable, few lines.

Graves 2012, section 2.4, forward variables only; autograd makes the gradient.  The cells of an anti-diagonal t + u = d
depend only on those before, so one step computes a diagonal of every utterance, in T + U steps.  It is readable, not
fast: it keeps several copies of the logits.  float16 and bfloat16 are summed in float32.
"""

from __future__ import annotations

import math
from typing import List, Sequence

import torch

from common.losses.topologies import TOPOLOGIES, Arc, Topology, next_targets

#: Used for log 0 in sums that must stay finite, so that no gradient is inf - inf.
LOG_ZERO = -1e30
REGULAR = TOPOLOGIES["regular"]


def transducer_loss(
    logits: torch.Tensor,
    targets: torch.Tensor,
    logit_lengths: torch.Tensor,
    target_lengths: torch.Tensor,
    blank: int = 0,
    reduction: str = "mean",
    topology: Topology = REGULAR,
) -> torch.Tensor:
    """Return -log Pr(y | x) of each utterance, (N,), or their "mean" or "sum".

    Cells outside an utterance's T_i x (U_i+1) may hold anything and get zero gradient.  If no path is possible the loss
    is infinite, with zero gradient.  Raises ValueError for lengths over the tensor, for targets that are no symbol, and
    for another reduction.

    Args:
        logits: (N, T, U+1, V + topology.extra) of any float dtype, unnormalised.
        targets: (N, U) integers in [0, V) without `blank`.
        logit_lengths, target_lengths: (N,) integers, T_i >= 1 and U_i >= 0.
        reduction: "none", "mean" or "sum".
    """
    N, T, U1, _ = logits.shape
    T_lengths, U_lengths = logit_lengths.long(), target_lengths.long()
    if N and not (1 <= T_lengths.min() and T_lengths.max() <= T and 0 <= U_lengths.min() and U_lengths.max() < U1):
        raise ValueError(f"lengths must be within the logits: 1 to {T} frames and 0 to {U1 - 1} targets")
    V = logits.size(-1) - topology.extra
    if topology.extra and targets.numel() and targets.max() >= V:  # gather would take a column that is no symbol
        raise ValueError(f"targets must be below V = {V}")
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"reduction must be none, mean or sum, not {reduction!r}")
    outside = _outside(T, U1, T_lengths, U_lengths)
    dtype = torch.float32 if logits.dtype in (torch.float16, torch.bfloat16) else logits.dtype
    inside = logits.masked_fill(outside.unsqueeze(-1), 0).to(dtype)
    arcs = topology.arcs(topology.parts(inside, next_targets(targets, T, U1), blank), T_lengths)
    losses = _losses(arcs, outside, T_lengths, U_lengths)
    return losses if reduction == "none" else losses.mean() if reduction == "mean" else losses.sum()


def arc_losses(
    blank_arc: torch.Tensor, label_arc: torch.Tensor, T_lengths: torch.Tensor, U_lengths: torch.Tensor
) -> torch.Tensor:
    """Return the losses (N,) of the log-probabilities (N, T, U+1) of blank and of the next target at each cell.

    Cells outside an utterance may hold anything.  The gradients are contiguous, which kernels of packages expect.
    """
    T_lengths, U_lengths = T_lengths.long(), U_lengths.long()
    _, T, U1 = blank_arc.shape
    outside = _outside(T, U1, T_lengths, U_lengths)
    return _losses([Arc(1, 0, blank_arc), Arc(0, 1, label_arc)], outside, T_lengths, U_lengths)


def _outside(T: int, U1: int, T_lengths: torch.Tensor, U_lengths: torch.Tensor) -> torch.Tensor:
    """Return whether each cell (N, T, U+1) is outside its utterance's T_i x (U_i+1)."""
    t, u = torch.arange(T, device=T_lengths.device).view(T, 1), torch.arange(U1, device=T_lengths.device)
    return (t >= T_lengths.view(-1, 1, 1)) | (u > U_lengths.view(-1, 1, 1))


def _losses(arcs: Sequence[Arc], outside: torch.Tensor, T_lengths: torch.Tensor, U_lengths: torch.Tensor):
    """Return the losses (N,) of utterances from their arcs."""
    N, T, U1 = outside.shape
    # unbind: the backward of indexing one diagonal would write zeros for all the others, each time
    weights = [_by_diagonal(arc.weight.clamp(min=LOG_ZERO).masked_fill(outside, LOG_ZERO)).unbind(1) for arc in arcs]
    alpha = arcs[0].weight.new_full((N, U1), LOG_ZERO)
    alpha[:, 0] = 0
    alphas: List[torch.Tensor] = [alpha]
    for d in range(1, T + U1):
        reached = []
        for (dt, du, _), weight in zip(arcs, weights):
            before = d - dt - du
            if before >= 0:
                moved = alphas[before] + weight[before]
                reached.append(torch.nn.functional.pad(moved[:, : U1 - du], (du, 0), value=LOG_ZERO))
        alphas.append(torch.stack(reached).logsumexp(0) if reached else torch.full_like(alpha, LOG_ZERO))
    # logsumexp: the second derivative of logaddexp would be inf / inf for two numbers that are log 0
    n = torch.arange(N, device=alpha.device)
    losses = -torch.stack(alphas, 1)[n, T_lengths + U_lengths, U_lengths]
    return losses.masked_fill(losses > -LOG_ZERO / 2, math.inf)  # no path


def _by_diagonal(arc: torch.Tensor) -> torch.Tensor:
    """Return (N, T+U, U+1) from (N, T, U+1): element (d, u) is that of cell (d - u, u), LOG_ZERO outside."""
    N, T, U1 = arc.shape
    t = torch.arange(T + U1 - 1, device=arc.device).view(-1, 1) - torch.arange(U1, device=arc.device)
    index = t.clamp(0, T - 1).expand(N, -1, -1)
    return arc.gather(1, index).masked_fill((t < 0) | (t >= T), LOG_ZERO)
