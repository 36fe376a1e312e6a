"""Compute the transducer loss in float64, simply enough to check by eye: the oracle.

Every implementation is judged by it.  It follows Graves, "Sequence Transduction with Recurrent
Neural Networks" (2012), section 2.4.  Over the lattice of T frames and U targets it computes
forward variables alpha(t, u) and backward variables beta(t, u).  Their product gives the posterior
of each arc.

It shares no code with the implementations that it judges, except the table of
rnnt_bench.losses.topologies, which also `reference` reads.  A test compares it with a sum over all
paths.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from rnnt_bench.losses.rounding import TINY
from rnnt_bench.losses.topologies import REGULAR, Arc, Topology, chosen, next_targets

LOG_ZERO = -math.inf


def _skewed(arc: Arc, dtype: Any) -> np.ndarray:
    """Return the weights of an arc by diagonal, (T+U+1, U+1): row t + u, column u is of cell (t, u).

    LOG_ZERO stands where there is no such cell, or where the arc leads out of the lattice."""
    T, U1 = arc.weight.shape
    u = np.arange(U1)
    t = np.arange(T + U1)[:, None] - u
    inside = (t >= 0) & (t < T) & (t + arc.dt <= T) & (u + arc.du < U1)
    weights = arc.weight.detach().cpu().double().numpy()
    return np.where(inside, weights[t.clip(0, T - 1), u], LOG_ZERO).astype(dtype)


def lattice(arcs: Sequence[Arc], dtype: Any = np.float64) -> tuple[float, list[torch.Tensor]]:
    """Return the log-likelihood of an utterance, and for each of `arcs` its posterior probability
    (T, U+1) at each cell.

    A posterior is the derivative of the log-likelihood with respect to the weight (T, U+1) of the
    arc: exp(alpha at its begin + weight + beta at its end - log-likelihood).  If there is no path
    the log-likelihood is -inf and the posteriors are zero.  Cells of a diagonal, which have t + u
    in common, do not depend on each other, so they are computed at once: arrays are by diagonal,
    as in `_skewed`.

    dtype: numpy's dtype of the sums; float32 shows the errors of a right loss that sums in float32.
    """
    skewed = [_skewed(arc, dtype) for arc in arcs]
    diagonals, U1 = skewed[0].shape
    T = diagonals - U1  # the last diagonal, T + U, holds the end (T, U) alone
    alpha = np.full_like(skewed[0], LOG_ZERO)
    alpha[0, 0] = 0.0
    beta = np.full_like(skewed[0], LOG_ZERO)
    beta[-1, -1] = 0.0
    for diagonal in range(diagonals):
        for (dt, du, _), weight in zip(arcs, skewed):
            ahead = diagonal + dt + du
            if ahead < diagonals:
                moved = (alpha[diagonal] + weight[diagonal])[: U1 - du]
                alpha[ahead, du:] = np.logaddexp(alpha[ahead, du:], moved)
    for diagonal in reversed(range(diagonals)):
        for (dt, du, _), weight in zip(arcs, skewed):
            ahead = diagonal + dt + du
            if ahead < diagonals:
                start = beta[diagonal, : U1 - du]
                moved = weight[diagonal, : U1 - du] + beta[ahead, du:]
                beta[diagonal, : U1 - du] = np.logaddexp(start, moved)
    total = float(alpha[-1, -1])
    u = np.arange(U1)
    posteriors = []
    for (dt, du, _), weight in zip(arcs, skewed):
        posterior = np.zeros((diagonals, U1))
        end = diagonals - dt - du  # the first diagonal from which the arc leads out of the lattice
        if total > LOG_ZERO and end > 0:
            # The log-sums of the paths that take the arc.
            paths = alpha[:end, : U1 - du] + weight[:end, : U1 - du] + beta[dt + du :, du:]
            posterior[:end, : U1 - du] = np.exp(paths - total)
        # back from (t + u, u) to (t, u)
        posteriors.append(torch.from_numpy(posterior[np.arange(T)[:, None] + u, u]))
    return total, posteriors


def of_parts(
    parts: torch.Tensor, topology: Topology = REGULAR, dtype: Any = np.float64
) -> tuple[float, torch.Tensor]:
    """Return the log-likelihood of an utterance, and its derivatives (T, U+1, P) float64 with
    respect to the parts of the cells.

    Args:
        parts: (T, U+1, P), as `topology.parts` makes them.
        dtype: numpy's dtype of the sums along paths.
    """
    with torch.enable_grad():
        leaf = parts.detach().cpu().double().requires_grad_()
        arcs = topology.arcs(leaf)
        total, posteriors = lattice(arcs, dtype)
        # The derivative of this sum by a part is that of the log-likelihood.
        weighted = leaf.new_zeros(())
        for arc, posterior in zip(arcs, posteriors):
            weight = arc.weight.masked_fill(posterior == 0, 0.0)  # -inf times 0 would be NaN
            weighted = weighted + (weight * posterior).sum()
        (derivatives,) = torch.autograd.grad(weighted, leaf)
    return total, derivatives


def cell_gradient(
    logits: torch.Tensor,
    target: torch.Tensor,
    derivatives: torch.Tensor,
    blank: int = 0,
    topology: Topology = REGULAR,
) -> torch.Tensor:
    """Return the gradient (..., V + topology.extra) of the loss with respect to the logits of some
    cells.

    Args:
        logits: (..., V + topology.extra); the gradient has their dtype.
        target: (...) int64, the next target of each cell; any symbol in cells without one.
        derivatives: (..., P), of the log-likelihood by the parts of these cells, from `of_parts`.
    """
    with torch.enable_grad():
        leaf = logits.detach().requires_grad_()
        parts = topology.parts(leaf, target, blank)
    (gradient,) = torch.autograd.grad(parts, leaf, -derivatives)
    return gradient


def needed_cells(posteriors: torch.Tensor, dtype: torch.dtype) -> int:
    """Return the number of cells whose posterior is large enough to change a gradient.

    The posteriors of a frame sum to 1 or more.  So a posterior below half of the dtype's
    epsilon changes nothing when it is added.  Half precision is summed in float32, so float32's
    epsilon counts.
    """
    summed_in = torch.float64 if dtype == torch.float64 else torch.float32
    return int((posteriors >= torch.finfo(summed_in).eps / 2).sum())


class _Lattice(torch.autograd.Function):
    """Make the losses (N,) of utterances, float64, differentiable by the parts (N, T, U+1, P)."""

    @staticmethod
    def forward(ctx, parts, shapes, topology):
        losses = torch.zeros(len(shapes), dtype=torch.float64)
        gradient = torch.zeros_like(parts)
        for n, (T, U) in enumerate(shapes):
            total, derivatives = of_parts(parts[n, :T, : U + 1], topology)
            losses[n] = -total
            gradient[n, :T, : U + 1] = -derivatives
        ctx.save_for_backward(gradient)
        return losses

    @staticmethod
    def backward(ctx, upstream):
        (gradient,) = ctx.saved_tensors
        return upstream.view(-1, 1, 1, 1) * gradient, None, None


def arc_losses(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    shapes: Sequence[tuple[int, int]],
    blank: int = 0,
    topology: Topology = REGULAR,
) -> torch.Tensor:
    """Return the (N,) float64 losses of log-probabilities, on the CPU; they are differentiable.

    Cells outside an utterance's (T, U+1) get zero gradient.

    Args:
        log_probs: (N, T, U+1, V); they are not normalised here.
        targets: (N, U) integers.
        shapes: (T, U) of each utterance, without its padding.
        topology: a cell of it must have two parts only: blank and the next target.
    """
    following = next_targets(targets.cpu(), *log_probs.shape[1:3])
    parts = chosen(log_probs.cpu(), following, blank).double()
    return _Lattice.apply(parts, shapes, topology)


def losses(
    logits: torch.Tensor,
    targets: torch.Tensor,
    shapes: Sequence[tuple[int, int]],
    blank: int = 0,
    topology: Topology = REGULAR,
) -> torch.Tensor:
    """Return the (N,) float64 transducer losses, -log Pr(y | x), on the CPU; they are
    differentiable.

    Args:
        logits: (N, T, U+1, V + topology.extra) of any float dtype, unnormalised.
        targets: (N, U) integers in [0, V) without `blank`.
        shapes: (T, U) of each utterance, T >= 1, U >= 0.
    """
    following = next_targets(targets.cpu(), *logits.shape[1:3])
    parts = topology.parts(logits.cpu().double(), following, blank)
    return _Lattice.apply(parts, shapes, topology)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest absolute difference over the largest expected magnitude.

    It is 0 for tensors without elements, and infinite if an element is not finite."""
    if not expected.numel():
        return 0.0
    expected = expected.detach().cpu().double()
    difference = (actual.detach().cpu().double() - expected).abs().max().item()
    if not math.isfinite(difference):
        return math.inf
    return difference / max(expected.abs().max().item(), TINY)
