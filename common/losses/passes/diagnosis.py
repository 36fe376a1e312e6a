"""Tell the author of a wrong loss what is wrong: the utterance, its value, the right one, and a guess at the cause."""

from __future__ import annotations

import math
from typing import Any, Dict, List, Optional, Sequence, Tuple

import torch

from common.losses.passes import hypotheses

#: Largest relative difference between the ratio of the two values and a ratio with a known cause.
NEAR = 1e-3


def in_words(
    shapes: Sequence[Tuple[int, int]], answer: Any, loss_tolerance: float, grad_tolerance: float, slope_tolerance: float
) -> str:
    """Return what is wrong with an answer in one line.

    Args:
        shapes: (T, U) of each utterance of the batch.
        answer: answers.Answer whose loss, gradient or slope is off, or which has overwritten an input.
        loss_tolerance, grad_tolerance, slope_tolerance: largest relative errors that pass.
    """
    loss_error, grad_error = answer.errors
    where = batch(shapes)
    got, right = float(answer.loss.detach()), float(answer.right.detach())
    if answer.changed:
        return f"{where}: it overwrites {', '.join(answer.changed)}, which it may only read"
    if not loss_error <= loss_tolerance:
        reason = guess(got, right, shapes)
        if not reason and answer.lattice is not None:
            reason = hypotheses.fitting(got, answer.lattice)
        reason = reason or hypotheses.precision(loss_error, grad_error)
        return f"{where}: loss {got:.6g}, expected {right:.6g}{reason}"
    if grad_error <= grad_tolerance:
        name, factor = max(answer.slopes.items(), key=lambda each: abs(each[1] - 1))
        what = "the gradient" if name == "given" else f"the gradient of {name}"
        return (
            f"{where}: the loss is right, {what} is {factor:.8g} times what is right; {slope_tolerance:.0e} is allowed"
        )
    name, gradient, expected = _worst(answer.gradients)
    what = "the gradient" if name == "given" else f"the gradient of {name}"
    if gradient is None:
        return f"{where}: the loss is right, {what} is missing"
    scale = _scale(gradient, expected)
    if scale is not None:
        return f"{where}: the loss is right, {what} is {scale:.4g} times what is right{guess(scale, 1.0, shapes)}"
    reason = hypotheses.precision(loss_error, grad_error)
    return f"{where}: the loss is right, {what} is not: at {_position(name, gradient, expected, shapes)}{reason}"


def batch(shapes: Sequence[Tuple[int, int]]) -> str:
    """Return a batch in words, by (T, U) of each utterance."""
    if len(shapes) == 1:
        return f"an utterance alone (T {shapes[0][0]}, U {shapes[0][1]})"
    return f"a batch of {len(shapes)} (T, U: {', '.join(f'{T}, {U}' for T, U in shapes)})"


def guess(got: float, right: float, shapes: Sequence[Tuple[int, int]]) -> str:
    """Return a guess at the cause of the ratio of two losses, with a comma before it; "" if none is known."""
    if not (math.isfinite(got) and math.isfinite(right) and right):
        return ""
    ratio = got / right
    for factor, words in _factors(shapes).items():
        if abs(ratio / factor - 1) < NEAR:
            return f", {words}"
    return ", is it always 0?" if got == 0 else ""


def _factors(shapes: Sequence[Tuple[int, int]]) -> Dict[float, str]:
    """Return ratios with a known cause, and the cause in words; of equal ratios the first stays."""
    N, (T, U) = len(shapes), shapes[0]
    ratios: List[Tuple[float, str]] = [(-1.0, "its negative: the log-likelihood?")]
    if N > 1:
        ratios.append((1 / N, f"1/{N} of it, 1/N: a mean over the batch?"))
        every = ("T", sum(T for T, _ in shapes)), ("U", sum(U for _, U in shapes))
        ratios += [(1 / size, f"1/{size} of it: a mean over all {name}?") for name, size in every if size > 1]
    else:
        sizes = (("T", T), ("U", U), ("T + U", T + U), ("U + 1", U + 1), ("T x (U + 1)", T * (U + 1)))
        ratios += [(1 / size, f"1/{size} of it: divided by {name}?") for name, size in sizes if size > 1]
    ratios += [(1 / math.log(2), "1/log(2) times it: logarithms to the base 2?"), (2.0, "twice it: counted twice?")]
    return {factor: words for factor, words in reversed(ratios)}


def _worst(gradients: Any) -> Tuple[str, Optional[torch.Tensor], torch.Tensor]:
    """Return (name, gradient, right gradient) of the one that is missing or furthest off, in float64."""

    def error(each: Tuple[str, Optional[torch.Tensor], torch.Tensor]) -> float:
        _, gradient, right = each
        if gradient is None or not bool(gradient.isfinite().all()):
            return math.inf
        return float((gradient - right).abs().max() / right.abs().max().clamp(min=1e-30))

    of = [(name, None if got is None else _plain(got), _plain(right)) for name, (got, right) in gradients.items()]
    return max(of, key=error)


def _plain(values: torch.Tensor) -> torch.Tensor:
    """Return a tensor as float64 on the CPU, without its graph."""
    return values.detach().cpu().double()


def _scale(gradient: torch.Tensor, right: torch.Tensor) -> Optional[float]:
    """Return the factor by which all of a gradient is off; None if it is no multiple of the right one."""
    size = float((right * right).sum())
    if not size or not bool(gradient.isfinite().all()):
        return None
    scale = float((gradient * right).sum()) / size
    left = float((gradient - scale * right).abs().max())
    return scale if left <= min(NEAR * abs(scale), abs(scale - 1) / 2) * float(right.abs().max()) else None


def _position(name: str, gradient: torch.Tensor, right: torch.Tensor, shapes: Sequence[Tuple[int, int]]) -> str:
    """Return the position at which a gradient is furthest off, and both values, in words."""
    difference = (gradient - right).abs().nan_to_num(nan=math.inf)
    at: List[int] = []
    left = int(difference.argmax())
    for size in reversed(difference.shape):
        at.insert(0, left % size)
        left //= size
    values = f"{float(gradient[tuple(at)]):.4g}, expected {float(right[tuple(at)]):.4g}"
    if name == "given" and len(at) == 4:
        n, t, u, v = at
        T, U = shapes[n]
        inside = "" if t < T and u <= U else " (in the padding)"
        return f"utterance {n + 1} (T {T}, U {U}), t {t}, u {u}, symbol {v}{inside}: {values}"
    return f"{at}: {values}"
