"""The transducer loss in float64, simple enough to check by eye: every implementation is judged by
it.

Graves, "Sequence Transduction with Recurrent Neural Networks" (2012), section 2.4: forward
variables alpha(t, u) and backward variables beta(t, u) over the lattice of T frames and U targets,
and the posterior of each arc from their product.  Beside the table of rnnt_bench.losses.topologies,
which `reference` reads too, it shares no code with the implementations that it judges.  A test
compares it with a sum over all paths.
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


def _by_diagonal(arcs: Sequence[Arc], dtype: Any = np.float64) -> list[np.ndarray]:
    """Return the weights (T + U + 1, U + 1) of each arc: [t + u, u] is that of cell (t, u),
    LOG_ZERO outside."""
    T, U1 = arcs[0].weight.shape
    t, u = np.arange(T + U1)[:, None] - np.arange(U1), np.arange(U1)
    weights = []
    for dt, du, weight in arcs:
        inside = (t >= 0) & (t < T) & (t + dt <= T) & (u + du < U1)
        numbers = weight.detach().cpu().double().numpy()
        weights.append(np.where(inside, numbers[t.clip(0, T - 1), u], LOG_ZERO).astype(dtype))
    return weights


def lattice(arcs: Sequence[Arc], dtype: Any = np.float64) -> tuple[float, list[torch.Tensor]]:
    """Return the log-likelihood of an utterance, and the posterior probability (T, U+1) of each of
    its arcs.

    A posterior is the derivative of the log-likelihood with respect to the weight (T, U+1) of the
    arc.  If there is no path the log-likelihood is -inf and the posteriors are zero.  Cells that
    have t + u in common do not depend on each other, so they are one step.  dtype: of the sums;
    numpy.float32 tells what a right loss in float32 loses.
    """
    weights = _by_diagonal(arcs, dtype)
    alpha = np.full_like(weights[0], LOG_ZERO)
    alpha[0, 0] = 0.0
    steps, U1 = alpha.shape
    T, u = steps - U1, np.arange(U1)
    for step in range(steps):
        for (dt, du, _), skewed in zip(arcs, weights):
            ahead = step + dt + du
            if ahead < steps:
                alpha[ahead, du:] = np.logaddexp(
                    alpha[ahead, du:], (alpha[step] + skewed[step])[: U1 - du]
                )
    beta = np.full_like(alpha, LOG_ZERO)
    beta[-1, -1] = 0.0
    for step in reversed(range(steps)):
        for (dt, du, _), skewed in zip(arcs, weights):
            ahead = step + dt + du
            if ahead < steps:
                beta[step, : U1 - du] = np.logaddexp(
                    beta[step, : U1 - du], skewed[step, : U1 - du] + beta[ahead, du:]
                )
    total = float(alpha[-1, -1])
    posteriors = []
    for (dt, du, _), skewed in zip(arcs, weights):
        posterior = np.zeros((steps, U1))
        last = steps - dt - du
        if total > LOG_ZERO and last > 0:
            taken = alpha[:last, : U1 - du] + skewed[:last, : U1 - du] + beta[dt + du :, du:]
            posterior[:last, : U1 - du] = np.exp(taken - total)
        posteriors.append(torch.from_numpy(posterior[np.arange(T)[:, None] + u, u]))
    return total, posteriors


def of_parts(
    parts: torch.Tensor, topology: Topology = REGULAR, dtype: Any = np.float64
) -> tuple[float, torch.Tensor]:
    """Return an utterance's log-likelihood, summed in `dtype`, and its derivatives by its parts (T,
    U+1, P) float64."""
    with torch.enable_grad():
        leaf = parts.detach().cpu().double().requires_grad_()
        arcs = topology.arcs(leaf)
        total, posteriors = lattice(arcs, dtype)
        weights = [arc.weight for arc in arcs]
        taken = [
            (weight, posterior)
            for weight, posterior in zip(weights, posteriors)
            if weight.requires_grad
        ]
        products = [
            (weight.masked_fill(posterior == 0, 0.0) * posterior).sum()
            for weight, posterior in taken
        ]
        (derivatives,) = torch.autograd.grad(sum(products, leaf.new_zeros(())), leaf)
    return total, derivatives


def cell_gradient(
    logits: torch.Tensor,
    target: torch.Tensor,
    derivatives: torch.Tensor,
    blank: int = 0,
    topology: Topology = REGULAR,
) -> torch.Tensor:
    """Return the float64 gradient (..., C) of the loss with respect to the logits (..., C) of some
    cells.

    target: (...) int64, the next target of each cell, or any symbol; derivatives: (..., P), of
    `of_parts`, for these cells.
    """
    with torch.enable_grad():
        leaf = logits.detach().requires_grad_()
        parts = topology.parts(leaf, target, blank)
    (gradient,) = torch.autograd.grad(parts, leaf, -derivatives)
    return gradient


def needed_cells(posteriors: torch.Tensor, dtype: torch.dtype) -> int:
    """Return how many cells have a posterior that a gradient can tell from zero; half precision is
    summed in float32.

    The posteriors of a frame sum to 1 or more, so less than half of the dtype's epsilon is lost in
    sums over it.
    """
    summed_in = torch.float64 if dtype == torch.float64 else torch.float32
    return int((posteriors >= torch.finfo(summed_in).eps / 2).sum())


class _Lattice(torch.autograd.Function):
    """-log-likelihood (N,) of utterances from the parts of their cells, with the gradient of
    `of_parts`."""

    @staticmethod
    def forward(ctx, parts, shapes, topology):
        losses, gradient = torch.zeros(len(shapes), dtype=torch.float64), torch.zeros_like(parts)
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
    """Return the (N,) float64 losses of log-probabilities (N, T, U+1, V) on the CPU, normalised or
    not; differentiable.

    Cells outside an utterance's (T, U+1) get zero gradient.  topology: one whose parts are blank
    and the next target alone.
    """
    following = next_targets(targets, *log_probs.shape[1:3])
    return _Lattice.apply(chosen(log_probs, following, blank).double(), shapes, topology)


def losses(
    logits: torch.Tensor,
    targets: torch.Tensor,
    shapes: Sequence[tuple[int, int]],
    blank: int = 0,
    topology: Topology = REGULAR,
) -> torch.Tensor:
    """Return the (N,) float64 transducer losses, -log Pr(y | x); differentiable, on the CPU.

    Args:
        logits: (N, T, U+1, V + topology.extra) of any float dtype, unnormalised.
        targets: (N, U) integers in [0, V) without `blank`.
        shapes: (T, U) of each utterance, T >= 1, U >= 0.
    """
    following = next_targets(targets.cpu(), *logits.shape[1:3])
    parts = topology.parts(logits.cpu().double(), following, blank)
    return _Lattice.apply(parts, shapes, topology)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest absolute difference over the largest expected magnitude; infinite if one
    is not finite."""
    actual, expected = (tensor.detach().cpu().double() for tensor in (actual, expected))
    difference = (actual - expected).abs().max().item() if expected.numel() else 0.0
    if math.isnan(difference):
        return math.inf
    return difference / max(expected.abs().max().item() if expected.numel() else 0.0, TINY)
