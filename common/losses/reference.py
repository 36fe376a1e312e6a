"""The transducer loss in float64, plain enough to check by eye: what every implementation is judged against.

Graves, "Sequence Transduction with Recurrent Neural Networks" (2012), section 2.4: forward variables alpha(t, u),
backward variables beta(t, u) over the lattice of T frames and U targets, and the gradient from their product.  Loops
over cells, no vectorising, float64 throughout: slow, for small batches only.  It shares no code with any
implementation it judges.
"""

from __future__ import annotations

import math
from typing import List, Sequence, Tuple

import torch

LOG_ZERO = -math.inf


def log_add(a: float, b: float) -> float:
    """log(exp(a) + exp(b))."""
    if a == LOG_ZERO or b == LOG_ZERO:
        return max(a, b)
    high, low = max(a, b), min(a, b)
    return high + math.log1p(math.exp(low - high))


def lattice(
    blank: List[List[float]], label: List[List[float]], T: int, U: int
) -> Tuple[float, List[List[float]], List[List[float]]]:
    """Log-likelihood of one utterance, and its derivatives with respect to the log-probabilities of its arcs.

    blank[t][u], u <= U: log-probability of blank at (t, u), which leads to (t + 1, u); label[t][u], u < U: of target u
    + 1, which leads to (t, u + 1).  The path ends with the blank at (T - 1, U).  Returns (log Pr(y | x), d/d blank,
    d/d label); a derivative is the posterior probability that the path takes that arc.
    """
    alpha = [[LOG_ZERO] * (U + 1) for _ in range(T)]
    alpha[0][0] = 0.0
    for t in range(T):
        for u in range(U + 1):
            if t > 0:
                alpha[t][u] = log_add(alpha[t][u], alpha[t - 1][u] + blank[t - 1][u])
            if u > 0:
                alpha[t][u] = log_add(alpha[t][u], alpha[t][u - 1] + label[t][u - 1])

    beta = [[LOG_ZERO] * (U + 1) for _ in range(T)]
    beta[T - 1][U] = blank[T - 1][U]
    for t in reversed(range(T)):
        for u in reversed(range(U + 1)):
            if t < T - 1:
                beta[t][u] = log_add(beta[t][u], beta[t + 1][u] + blank[t][u])
            if u < U:
                beta[t][u] = log_add(beta[t][u], beta[t][u + 1] + label[t][u])

    total = beta[0][0]
    d_blank = [[0.0] * (U + 1) for _ in range(T)]
    d_label = [[0.0] * U for _ in range(T)]
    for t in range(T):
        for u in range(U + 1):
            after = beta[t + 1][u] if t < T - 1 else (0.0 if u == U else LOG_ZERO)
            d_blank[t][u] = math.exp(alpha[t][u] + blank[t][u] + after - total)
            if u < U:
                d_label[t][u] = math.exp(alpha[t][u] + label[t][u] + beta[t][u + 1] - total)
    return total, d_blank, d_label


class _Lattice(torch.autograd.Function):
    """-log-likelihood of each utterance from its arcs' log-probabilities, with the gradient of `lattice`."""

    @staticmethod
    def forward(ctx, blank, label, shapes):
        losses = torch.zeros(len(shapes), dtype=torch.float64)
        d_blank, d_label = torch.zeros_like(blank), torch.zeros_like(label)
        for n, (T, U) in enumerate(shapes):
            total, from_blank, from_label = lattice(blank[n].tolist(), label[n].tolist(), T, U)
            losses[n] = -total
            d_blank[n, :T, : U + 1] = -torch.tensor(from_blank, dtype=torch.float64)
            if U > 0:
                d_label[n, :T, :U] = -torch.tensor(from_label, dtype=torch.float64)
        ctx.save_for_backward(d_blank, d_label)
        return losses

    @staticmethod
    def backward(ctx, upstream):
        d_blank, d_label = ctx.saved_tensors
        return upstream.view(-1, 1, 1) * d_blank, upstream.view(-1, 1, 1) * d_label, None


def arc_losses(
    log_probs: torch.Tensor, targets: torch.Tensor, shapes: Sequence[Tuple[int, int]], blank: int = 0
) -> torch.Tensor:
    """(N,) float64 losses from log-probabilities (N, T, U+1, V) that need not be normalised; differentiable.

    targets (N, U) integers; shapes: (T, U) of each utterance.  Cells outside an utterance's T x (U+1) get zero
    gradient.
    """
    N, T, U1, _ = log_probs.shape
    index = targets[:, : U1 - 1].long().view(N, 1, U1 - 1, 1).expand(N, T, U1 - 1, 1)
    return _Lattice.apply(log_probs[..., blank], log_probs[:, :, : U1 - 1].gather(3, index).squeeze(3), shapes)


def losses(
    logits: torch.Tensor, targets: torch.Tensor, shapes: Sequence[Tuple[int, int]], blank: int = 0
) -> torch.Tensor:
    """(N,) float64 transducer losses, -log Pr(y | x), of logits (N, T, U+1, V); differentiable, on the CPU.

    logits: any float dtype, unnormalised; targets (N, U) integers in [0, V) but for `blank`; shapes: (T, U) of each
    utterance, T >= 1, U >= 0.
    """
    return arc_losses(logits.cpu().double().log_softmax(-1), targets.cpu(), shapes, blank)
