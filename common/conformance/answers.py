"""Is the answer of a loss right?"""

from __future__ import annotations

import math
from typing import Optional, Tuple

import torch

from common.conformance.questions import Question
from common.conformance.records import DIFFERS, NAN_GRADIENT, PASS, Outcome
from common.losses.layouts.base import Shapes
from common.losses.oracle import TOLERANCE, relative_error


def tolerances(dtype: torch.dtype, losses: torch.Tensor, shapes: Shapes) -> Tuple[float, float]:
    """Largest relative errors of loss and gradient that pass.

    In float32 and float64 the gradient may have one error more than the correctness pass allows: the rounding of T + U
    additions (a random walk) to the log-likelihood by which every posterior is divided.  With logits of 1e4 no loss in
    log space can do better.
    """
    base = TOLERANCE[str(dtype).partition(".")[2]]
    if dtype in (torch.float16, torch.bfloat16):
        return base, base
    finite = losses[torch.isfinite(losses)]
    largest = finite.abs().max().item() if finite.numel() else 0.0
    return base, base + math.sqrt(max(T + U for T, U in shapes)) * torch.finfo(dtype).eps * largest


def size(value: float) -> str:
    return "nan" if value != value else f"{value:.1e}"


def compare(
    question: Question, loss: torch.Tensor, gradient: Optional[torch.Tensor], right: torch.Tensor, truth: torch.Tensor
) -> Outcome:
    """right: the expected loss, a scalar or (N,); truth: the tensor whose gradient is the expected one; gradient: None
    where only the loss is compared."""
    loss = loss.detach().cpu().double()
    right = right.detach()
    if loss.numel() != right.numel():
        return Outcome(DIFFERS, f"a loss of shape {tuple(loss.shape)} instead of {tuple(right.shape)}")
    loss = loss.reshape(right.shape)
    if not torch.isfinite(right).all():
        return _without_path(loss, right, gradient)
    loss_tolerance, grad_tolerance = tolerances(question.leaf.dtype, right, question.batch.shapes)
    wrong, loss_error = [], relative_error(loss, right)
    if not loss_error <= loss_tolerance:
        wrong.append(f"loss {listed(loss)} instead of {listed(right)} (off by {size(loss_error)})")
    if gradient is None:
        return Outcome(DIFFERS if wrong else PASS, "; ".join(wrong), loss_error)
    gradient = gradient.detach().cpu().double()
    expected = truth.grad
    real = torch.ones(gradient.shape[:-1], dtype=torch.bool) if question.padding is None else ~question.padding
    grad_error = relative_error(gradient[real], expected[real])
    if not grad_error <= grad_tolerance:
        worst = (gradient[real] - expected[real]).abs().max().item()
        wrong.append("gradient nan" if worst != worst else f"gradient off by {size(grad_error)}")
    outside = gradient[~real]
    if outside.numel() and not (outside == 0).all():
        worst = outside.abs().max().item()
        wrong.append(f"gradient in the padding {size(worst)} instead of 0")
        grad_error = max(grad_error, math.inf if worst != worst else relative_error(gradient, expected))
    return Outcome(DIFFERS if wrong else PASS, "; ".join(wrong), loss_error, grad_error)


def _without_path(loss: torch.Tensor, right: torch.Tensor, gradient: Optional[torch.Tensor]) -> Outcome:
    """Judge the loss of an utterance without a path, which must be infinite.  Its gradient may be anything; the message
    says what."""
    impossible = ~torch.isfinite(right)
    if not torch.isinf(loss[impossible]).all():
        return Outcome(DIFFERS, f"loss {listed(loss)} where its lattice has no path: must be infinite or refused")
    kinds = {NAN_GRADIENT: torch.isnan, "gradient infinite": torch.isinf, "gradient not 0": lambda values: values != 0}
    names = [name for name, has in kinds.items() if gradient is not None and has(gradient).any()]
    remark = f", {names[0] if names else 'gradient all 0'}" if gradient is not None else ""
    return Outcome(PASS, f"no path through its lattice: an infinite loss{remark}")


def listed(values: torch.Tensor) -> str:
    words = [f"{value:.6g}" for value in values.reshape(-1).tolist()]
    return words[0] if len(words) == 1 else f"({', '.join(words)})"
