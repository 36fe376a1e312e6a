"""The transducer loss in float64, simple enough to check by eye: every implementation is judged by it.

Graves, "Sequence Transduction with Recurrent Neural Networks" (2012), section 2.4: forward variables alpha(t, u),
backward variables beta(t, u) over the lattice of T frames and U targets, and the gradient from their product.  It loops
over cells, in float64 throughout: slow, for small batches only.  It shares no code with the implementations it judges.

In Graves's topology, "regular", a target stays on its frame.  The others: "modified" (k2, fast_rnnt): a target leads to
the next frame, as blank does, so a frame has at most one symbol; "constrained" (likewise): a target leads to the next
frame together with the blank that follows it on its own frame; "modified-last-blank" (optimized_transducer's
one_sym_per_frame): as "modified", and the path must end with a blank.
"""

from __future__ import annotations

import math
from typing import List, Sequence, Tuple

import numpy as np
import torch

LOG_ZERO = -math.inf
TOPOLOGIES = ("regular", "modified", "constrained", "modified-last-blank")


def log_add(a: float, b: float) -> float:
    """log(exp(a) + exp(b))."""
    if a == LOG_ZERO or b == LOG_ZERO:
        return max(a, b)
    high, low = max(a, b), min(a, b)
    return high + math.log1p(math.exp(low - high))


Scores = List[List[float]]


def label_scores(blank: Scores, label: Scores, T: int, U: int, topology: str) -> Scores:
    """Log-probability of the move from (t, u) to the next target, with the blank that "constrained" adds; LOG_ZERO
    where the topology has no such move."""
    scores = [[label[t][u] for u in range(U)] for t in range(T)]
    if topology == "constrained":
        scores = [[scores[t][u] + blank[t][u + 1] for u in range(U)] for t in range(T)]
    if topology == "modified-last-blank":
        scores[T - 1] = [LOG_ZERO] * U
    return scores


def lattice(blank: Scores, label: Scores, T: int, U: int, topology: str = "regular") -> Tuple[float, Scores, Scores]:
    """Log-likelihood of one utterance, and its derivatives with respect to the log-probabilities of its arcs.

    blank[t][u], u <= U: log-probability of blank at (t, u), which leads to (t + 1, u); label[t][u], u < U: of target u
    + 1, which leads to (t, u + 1), or to (t + 1, u + 1) where the topology is not "regular".  The path starts at (0, 0)
    and ends at (T, U).  Returns (log Pr(y | x), d/d blank, d/d label); a derivative is the posterior probability of
    the arc.  Where no path exists the log-likelihood is -inf and the derivatives are zero.
    """
    ahead = 0 if topology == "regular" else 1
    move = label_scores(blank, label, T, U, topology)

    alpha = [[LOG_ZERO] * (U + 1) for _ in range(T + 1)]
    alpha[0][0] = 0.0
    for t in range(T + 1):
        for u in range(U + 1):
            if t > 0:
                alpha[t][u] = log_add(alpha[t][u], alpha[t - 1][u] + blank[t - 1][u])
            if u > 0 and 0 <= t - ahead < T:
                alpha[t][u] = log_add(alpha[t][u], alpha[t - ahead][u - 1] + move[t - ahead][u - 1])

    beta = [[LOG_ZERO] * (U + 1) for _ in range(T + 1)]
    beta[T][U] = 0.0
    for t in reversed(range(T)):
        for u in reversed(range(U + 1)):
            beta[t][u] = beta[t + 1][u] + blank[t][u]
            if u < U:
                beta[t][u] = log_add(beta[t][u], beta[t + ahead][u + 1] + move[t][u])

    total = beta[0][0]
    d_blank = [[0.0] * (U + 1) for _ in range(T)]
    d_label = [[0.0] * U for _ in range(T)]
    if total == LOG_ZERO:
        return total, d_blank, d_label
    for t in range(T):
        for u in range(U + 1):
            d_blank[t][u] += math.exp(alpha[t][u] + blank[t][u] + beta[t + 1][u] - total)
            if u < U:
                taken = math.exp(alpha[t][u] + move[t][u] + beta[t + ahead][u + 1] - total)
                d_label[t][u] += taken
                if topology == "constrained":
                    d_blank[t][u + 1] += taken
    return total, d_blank, d_label


def log_likelihood(blank: np.ndarray, label: np.ndarray, topology: str = "regular") -> float:
    """Return the log-likelihood of `lattice` alone, without a loop over cells: for lattices of a measured batch.

    blank (T, U+1) and label (T, U), float64: as of `lattice`.  Cells that a path reaches after equally many arcs, an
    anti-diagonal or a frame, are one step.
    """
    T, U = label.shape
    move = np.full((T, U + 1), LOG_ZERO)
    move[:, :U] = label
    if topology == "constrained":
        move[:, :U] += blank[:, 1:]
    if topology == "modified-last-blank":
        move[T - 1] = LOG_ZERO
    if topology == "regular":
        u = np.arange(U + 1)
        t = np.arange(T + U)[:, None] - u
        outside = (t < 0) | (t >= T)
        blank, move = (np.where(outside, LOG_ZERO, arcs[t.clip(0, T - 1), u]) for arcs in (blank, move))
    alpha = np.full(U + 1, LOG_ZERO)
    alpha[0] = 0.0
    for to_wait, to_move in zip(blank, move):
        moved = alpha + to_move
        alpha = alpha + to_wait
        alpha[1:] = np.logaddexp(alpha[1:], moved[:-1])
    return float(alpha[U])


def cell_gradient(
    log_probs: torch.Tensor, of_blank: torch.Tensor, of_label: torch.Tensor, target: torch.Tensor, blank: int = 0
) -> torch.Tensor:
    """Gradient of -log Pr(y | x) with respect to the logits of some cells: (..., V) float64, as `log_probs` is.

    of_blank, of_label: (...), the derivatives of `lattice` for the arcs of these cells; target: (...) int64, the symbol
    of the second arc; any symbol, with a derivative of 0, where there is none.
    """
    gradient = log_probs.exp().mul_((of_blank + of_label).unsqueeze(-1))
    gradient[..., blank] -= of_blank
    return gradient.scatter_add_(-1, target.unsqueeze(-1), -of_label.unsqueeze(-1))


def needed_cells(of_blank: torch.Tensor, of_label: torch.Tensor, dtype: torch.dtype) -> int:
    """How many cells have a posterior, the sum of their arcs' derivatives, that a gradient can tell from zero.

    The posteriors of a frame sum to 1 or more, so less than half of the dtype's epsilon is lost in sums over it.  Half
    precision is summed in float32.
    """
    summed_in = torch.float64 if dtype == torch.float64 else torch.float32
    return int((of_blank + of_label >= torch.finfo(summed_in).eps / 2).sum())


class _Lattice(torch.autograd.Function):
    """-log-likelihood of each utterance from its arcs' log-probabilities, with the gradient of `lattice`."""

    @staticmethod
    def forward(ctx, blank, label, shapes, topology):
        losses = torch.zeros(len(shapes), dtype=torch.float64)
        d_blank, d_label = torch.zeros_like(blank), torch.zeros_like(label)
        for n, (T, U) in enumerate(shapes):
            total, from_blank, from_label = lattice(blank[n].tolist(), label[n].tolist(), T, U, topology)
            losses[n] = -total
            d_blank[n, :T, : U + 1] = -torch.tensor(from_blank, dtype=torch.float64)
            if U > 0:
                d_label[n, :T, :U] = -torch.tensor(from_label, dtype=torch.float64)
        ctx.save_for_backward(d_blank, d_label)
        return losses

    @staticmethod
    def backward(ctx, upstream):
        d_blank, d_label = ctx.saved_tensors
        return upstream.view(-1, 1, 1) * d_blank, upstream.view(-1, 1, 1) * d_label, None, None


def arc_losses(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    shapes: Sequence[Tuple[int, int]],
    blank: int = 0,
    topology: str = "regular",
) -> torch.Tensor:
    """(N,) float64 losses from log-probabilities (N, T, U+1, V), normalised or not; differentiable.

    targets (N, U) integers; shapes: (T, U) of each utterance.  Cells outside an utterance's T x (U+1) get zero
    gradient.  Where no gradient is asked for, `log_likelihood` walks the lattice.
    """
    N, T, U1, _ = log_probs.shape
    index = targets[:, : U1 - 1].long().view(N, 1, U1 - 1, 1).expand(N, T, U1 - 1, 1)
    arcs = log_probs[..., blank], log_probs[:, :, : U1 - 1].gather(3, index).squeeze(3)
    if torch.is_grad_enabled() and log_probs.requires_grad:
        return _Lattice.apply(*arcs, shapes, topology)
    blanks, labels = (values.detach().cpu().double().numpy() for values in arcs)
    losses = [-log_likelihood(blanks[n, :T, : U + 1], labels[n, :T, :U], topology) for n, (T, U) in enumerate(shapes)]
    return torch.tensor(losses, dtype=torch.float64)


def losses(
    logits: torch.Tensor,
    targets: torch.Tensor,
    shapes: Sequence[Tuple[int, int]],
    blank: int = 0,
    topology: str = "regular",
) -> torch.Tensor:
    """(N,) float64 transducer losses, -log Pr(y | x), of logits (N, T, U+1, V); differentiable, on the CPU.

    logits: any float dtype, unnormalised; targets (N, U) integers in [0, V) but for `blank`; shapes: (T, U) of each
    utterance, T >= 1, U >= 0; topology: one of TOPOLOGIES.
    """
    return arc_losses(logits.cpu().double().log_softmax(-1), targets.cpu(), shapes, blank, topology)


#: Largest relative error that passes.  float16 and bfloat16 carry 3 and 2 digits through joiner and loss.
TOLERANCE = {"float32": 1e-4, "float64": 1e-9, "float16": 2e-2, "bfloat16": 1e-1}


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest absolute difference over the largest expected magnitude; infinite where a value is not finite."""
    actual = actual.detach().cpu().double()
    expected = expected.detach().cpu().double()
    difference = (actual - expected).abs().max().item() if expected.numel() else 0.0
    if difference != difference:
        return float("inf")
    return difference / max(expected.abs().max().item() if expected.numel() else 0.0, 1e-30)
