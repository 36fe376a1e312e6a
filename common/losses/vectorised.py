"""The transducer loss in plain PyTorch: any device, any dtype, twice differentiable, in a few lines.

Graves 2012, section 2.4, forward variables only; autograd makes the gradient.  The cells of an anti-diagonal t + u = d
depend only on the anti-diagonal before, so one step computes a diagonal of every utterance, T + U steps in all.  It is
readable, not fast: it keeps several copies of the logits.  float16 and bfloat16 are summed in float32.
"""

from __future__ import annotations

import math

import torch

from common.losses.compiler import compiled

#: Used for log 0 in sums that must stay finite, so that no gradient is inf - inf.
LOG_ZERO = -1e30


def transducer_loss(
    logits: torch.Tensor,
    targets: torch.Tensor,
    logit_lengths: torch.Tensor,
    target_lengths: torch.Tensor,
    blank: int = 0,
    reduction: str = "mean",
    by_compiler: bool = False,
) -> torch.Tensor:
    """-log Pr(y | x) of each utterance, (N,), or their "mean" or "sum".

    logits: (N, T, U+1, V) of any float dtype, unnormalised; targets: (N, U) integers in [0, V) but for `blank`;
    logit_lengths, target_lengths: (N,) integers, T_i >= 1 and U_i >= 0.  Cells outside an utterance's T_i x (U_i+1) may
    hold anything and get zero gradient.  Where no path is possible the loss is infinite, with zero gradient.
    by_compiler: what is done with all logits is compiled by torch.compile; the loop over the lattice is not, which it
    would unroll.  Raises ValueError for lengths over the tensor and for another reduction.
    """
    N, T, U1, _ = logits.shape
    T_lengths, U_lengths = logit_lengths.long(), target_lengths.long()
    if N and not (1 <= T_lengths.min() and T_lengths.max() <= T and 0 <= U_lengths.min() and U_lengths.max() < U1):
        raise ValueError(f"lengths must be within the logits: 1 to {T} frames and 0 to {U1 - 1} targets")
    outside = _outside(T, U1, T_lengths, U_lengths)
    arcs = compiled(_arcs) if by_compiler else _arcs
    return _reduced(_losses(*arcs(logits, targets, outside, blank), outside, T_lengths, U_lengths), reduction)


def arc_losses(
    blank_arc: torch.Tensor, label_arc: torch.Tensor, T_lengths: torch.Tensor, U_lengths: torch.Tensor
) -> torch.Tensor:
    """(N,) losses from the log-probabilities of blank and of the next target at each cell, both (N, T, U+1).  Cells
    outside an utterance, and the target after its last, may hold anything."""
    T_lengths, U_lengths = T_lengths.long(), U_lengths.long()
    outside = _outside(*blank_arc.shape[1:], T_lengths, U_lengths)
    return _losses(blank_arc, label_arc, outside, T_lengths, U_lengths)


def _outside(T: int, U1: int, T_lengths: torch.Tensor, U_lengths: torch.Tensor) -> torch.Tensor:
    """(N, T, U+1): whether a cell is outside its utterance's T_i x (U_i+1)."""
    t, u = torch.arange(T, device=T_lengths.device).view(T, 1), torch.arange(U1, device=T_lengths.device)
    return (t >= T_lengths.view(-1, 1, 1)) | (u > U_lengths.view(-1, 1, 1))


def _arcs(logits: torch.Tensor, targets: torch.Tensor, outside: torch.Tensor, blank: int):
    """Log-probabilities of blank and of the next target at each cell, both (N, T, U+1); LOG_ZERO without a target."""
    N, T, U1, _ = logits.shape
    dtype = torch.float32 if logits.dtype in (torch.float16, torch.bfloat16) else logits.dtype
    log_probs = logits.masked_fill(outside.unsqueeze(-1), 0).log_softmax(-1, dtype=dtype)
    index = targets[:, : U1 - 1].long().view(N, 1, U1 - 1, 1).expand(N, T, U1 - 1, 1)
    label = log_probs[:, :, : U1 - 1].gather(3, index).squeeze(3)
    return log_probs[..., blank], torch.nn.functional.pad(label, (0, 1), value=LOG_ZERO)


def _losses(blank_arc, label_arc, outside, T_lengths, U_lengths) -> torch.Tensor:
    N, T, U1 = blank_arc.shape
    blank_arc = _by_diagonal(blank_arc.clamp(min=LOG_ZERO).masked_fill(outside, LOG_ZERO))
    label_arc = _by_diagonal(label_arc.clamp(min=LOG_ZERO).masked_fill(outside, LOG_ZERO))
    # unbind: the backward of indexing one diagonal would write zeros for all the others, each time
    blanks, labels = blank_arc.unbind(1), label_arc.unbind(1)
    alpha = blank_arc.new_full((N, U1), LOG_ZERO)
    alpha[:, 0] = 0
    alphas = [alpha]
    for d in range(T + U1 - 2):
        waited = alpha + blanks[d]
        emitted = torch.nn.functional.pad((alpha + labels[d])[:, :-1], (1, 0), value=LOG_ZERO)
        alpha = torch.stack([waited, emitted]).logsumexp(0)  # logaddexp's second derivative would be inf / inf here
        alphas.append(alpha)
    n, last = torch.arange(N, device=alpha.device), T_lengths - 1 + U_lengths
    losses = -(torch.stack(alphas, 1)[n, last, U_lengths] + blank_arc[n, last, U_lengths])
    return losses.masked_fill(losses > -LOG_ZERO / 2, math.inf)  # no path


def _by_diagonal(arc: torch.Tensor) -> torch.Tensor:
    """(N, T, U+1) -> (N, T+U, U+1): element (d, u) is that of cell (d - u, u), LOG_ZERO outside the lattice."""
    N, T, U1 = arc.shape
    t = torch.arange(T + U1 - 1, device=arc.device).view(-1, 1) - torch.arange(U1, device=arc.device)
    index = t.clamp(0, T - 1).expand(N, -1, -1)
    return arc.gather(1, index).masked_fill((t < 0) | (t >= T), LOG_ZERO)


def _reduced(losses: torch.Tensor, reduction: str) -> torch.Tensor:
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"reduction must be none, mean or sum, not {reduction!r}")
    return losses if reduction == "none" else losses.mean() if reduction == "mean" else losses.sum()
