"""Compare the answer of a loss with the right one."""

from __future__ import annotations

import math
from typing import Callable, Dict, Optional, Tuple

import torch

from common.conformance.outcomes import DIFFERS, NAN_GRADIENT, PASS, Outcome
from common.conformance.questions import Question
from common.losses.layouts.base import Shapes
from common.losses.oracle import TOLERANCE, relative_error

#: From (N,) losses to a right answer.
Reduce = Callable[[torch.Tensor], torch.Tensor]


def tolerances(
    dtype: torch.dtype, losses: torch.Tensor, shapes: Shapes, negligible: float = 0.0
) -> Tuple[float, float]:
    """Return the largest relative errors of the loss and of the gradient that pass.

    negligible: the posterior below which the loss leaves cells out of the gradient, by design.

    In float32 and float64 the gradient may have an error beyond that of the correctness pass: T + U additions are
    rounded (a random walk) in the log-likelihood that divides every posterior.  With logits of 1e4 no loss in log space
    can do better.
    """
    base = TOLERANCE[str(dtype).partition(".")[2]]
    if dtype in (torch.float16, torch.bfloat16):
        return base, base
    finite = losses[torch.isfinite(losses)]
    largest = finite.abs().max().item() if finite.numel() else 0.0
    rounded = math.sqrt(max(T + U for T, U in shapes)) * torch.finfo(dtype).eps * largest
    return base, base + rounded + negligible * max(T * (U + 1) for T, U in shapes)


def size(value: float) -> str:
    """Return an error as text ("1.2e-03", "nan")."""
    return "nan" if value != value else f"{value:.1e}"


def right_of(question: Question, reduce: Reduce = torch.sum) -> Tuple[torch.Tensor, torch.Tensor]:
    """Return (expected value, expected gradient of the leaf), float64, for the losses (N,) reduced by `reduce`."""
    losses, truth = question.expected()
    value = reduce(losses)
    (gradient,) = torch.autograd.grad(value.sum(), truth)
    return value.detach(), gradient


def compare(
    question: Question,
    loss: torch.Tensor,
    gradient: Optional[torch.Tensor],
    right: torch.Tensor,
    expected: torch.Tensor,
) -> Outcome:
    """Return the outcome of comparing loss and gradient with the right ones.

    Args:
        question: what was asked.
        loss: the answer, a scalar or (N,).
        gradient: of the question's leaf; None compares the loss only.
        right: the expected loss, float64, a scalar or (N,).
        expected: the expected gradient, float64, of the shape of the leaf.
    """
    loss, right = loss.detach().cpu().double(), right.detach()
    if loss.numel() != right.numel():
        return Outcome(DIFFERS, f"a loss of shape {tuple(loss.shape)} instead of {tuple(right.shape)}")
    loss = loss.reshape(right.shape)
    if not torch.isfinite(right).all():
        return _without_path(loss, right, gradient)
    negligible = question.adapter.negligible
    loss_tolerance, grad_tolerance = tolerances(question.leaf.dtype, right, question.batch.shapes, negligible)
    wrong, loss_error, grad_error = [], relative_error(loss, right), None
    if not loss_error <= loss_tolerance:
        wrong.append(f"loss {listed(loss)} instead of {listed(right)} (off by {size(loss_error)})")
    if gradient is not None:
        gradient = gradient.detach().cpu().double()
        valid = torch.ones(gradient.shape[:-1], dtype=torch.bool) if question.padding is None else ~question.padding
        grad_error = relative_error(gradient[valid], expected[valid])
        if not grad_error <= grad_tolerance:
            is_nan = gradient[valid].isnan().any()
            wrong.append(NAN_GRADIENT if is_nan else f"gradient off by {size(grad_error)}")
        if (gradient[~valid] != 0).any():
            worst = gradient[~valid].abs().max().item()
            wrong.append(f"gradient in the padding {size(worst)} instead of 0")
            grad_error = max(grad_error, math.inf if worst != worst else relative_error(gradient, expected))
    return Outcome(DIFFERS if wrong else PASS, "; ".join(wrong), loss_error, grad_error)


def _without_path(loss: torch.Tensor, right: torch.Tensor, gradient: Optional[torch.Tensor]) -> Outcome:
    """Return the outcome for a batch in which an utterance has no path: its loss must be infinite.

    The gradient may be anything; the message describes it.
    """
    if not torch.isinf(loss[~torch.isfinite(right)]).all():
        return Outcome(DIFFERS, f"loss {listed(loss)} where its lattice has no path: must be infinite or refused")
    message = "no path through its lattice: an infinite loss"
    if gradient is None:
        return Outcome(PASS, message)
    kinds: Dict[str, torch.Tensor] = {
        NAN_GRADIENT: gradient.isnan(),
        "gradient infinite": gradient.isinf(),
        "gradient not 0": gradient != 0,
    }
    return Outcome(PASS, f"{message}, {next((name for name, of in kinds.items() if of.any()), 'gradient all 0')}")


def listed(values: torch.Tensor) -> str:
    """Return numbers as text: "1.5" for one, "(1.5, 2)" for several."""
    words = [f"{value:.6g}" for value in values.reshape(-1).tolist()]
    return words[0] if len(words) == 1 else f"({', '.join(words)})"
