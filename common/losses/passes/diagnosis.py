"""Tell the author of a wrong loss what is wrong: the utterance, its value, the right one, and a guess at the cause."""

from __future__ import annotations

import math
from typing import Any, Dict, List, Sequence, Tuple

import torch

#: Largest relative difference between the ratio of the two values and a ratio with a known cause.
NEAR = 1e-3
Shapes = Sequence[Tuple[int, int]]


def in_words(shapes: Shapes, answer: Any, loss_tolerance: float, grad_tolerance: float, slope_tolerance: float) -> str:
    """Return what is wrong with an answer in one line.

    Args:
        shapes: (T, U) of each utterance of the batch.
        answer: answers.Answer whose loss, gradient or slope is off, or which has overwritten an input.
        loss_tolerance, grad_tolerance, slope_tolerance: largest relative errors that pass.
    """
    where = f"a batch of {len(shapes)} (T, U: {', '.join(f'{T}, {U}' for T, U in shapes)})"
    if len(shapes) == 1:
        where = f"an utterance alone (T {shapes[0][0]}, U {shapes[0][1]})"
    if answer.changed:
        return f"{where}: it overwrites {', '.join(answer.changed)}, which it may only read"
    loss_error, grad_error = answer.errors
    if not loss_error <= loss_tolerance:
        got, right = float(answer.loss), float(answer.right)
        return f"{where}: loss {got:.6g}, expected {right:.6g}{guess(got, right, shapes)}"
    where = f"{where}: the loss is right"
    if grad_error <= grad_tolerance:
        name, factor = max(answer.slopes.items(), key=lambda each: abs(each[1] - 1))
        return f"{where}, {_of(name)} is {factor:.8g} times what is right; {slope_tolerance:.0e} is allowed"
    errors: Dict[str, float] = {}
    for name, (gradient, right) in answer.gradients.items():
        if gradient is None:
            return f"{where}, {_of(name)} is missing"
        difference = (gradient.cpu().double() - right).abs().nan_to_num(nan=math.inf)
        errors[name] = float(difference.max() / right.abs().max().clamp(min=1e-30))
    name = max(errors, key=lambda each: errors[each])
    gradient, right = (tensor.detach().cpu().double() for tensor in answer.gradients[name])
    factor = answer.slopes.get(name, 1.0)
    left = float((gradient - factor * right).abs().max())
    if left <= min(NEAR * abs(factor), abs(factor - 1) / 2) * float(right.abs().max()):
        reason = guess(factor, 1.0, shapes)
        return f"{where}, {_of(name)} is {factor:.4g} times what is right{reason}"
    at = position((gradient - right).abs().nan_to_num(nan=math.inf))
    place = f"{[*at]}"
    if name == "given" and len(at) == 4:
        n, t, u, v = at
        (T, U), outside = shapes[n], ""
        if t >= T or u > U:
            outside = " (in the padding)"
        place = f"utterance {n + 1} (T {T}, U {U}), t {t}, u {u}, symbol {v}{outside}"
    values = f"{float(gradient[at]):.4g}, expected {float(right[at]):.4g}"
    return f"{where}, {_of(name)} is not: at {place}: {values}"


def _of(name: str) -> str:
    return "the gradient" if name == "given" else f"the gradient of {name}"


def sizes(shapes: Shapes) -> str:
    """Return the size of a batch in words."""
    return f"N {len(shapes)}, T {max(T for T, _ in shapes)}, U {max(U for _, U in shapes)}"


def guess(got: float, right: float, shapes: Shapes) -> str:
    """Return a guess at the cause of the ratio of two losses, with a comma before it; "" if none is known."""
    if not (math.isfinite(got) and math.isfinite(right) and right):
        return ""
    N, (T, U) = len(shapes), shapes[0]
    ratios: List[Tuple[float, str]] = [(-1.0, "its negative: the log-likelihood?")]
    if N > 1:
        ratios.append((1 / N, f"1/{N} of it, 1/N: a mean over the batch?"))
    else:
        divisors = (("T", T), ("U", U), ("T + U", T + U), ("U + 1", U + 1), ("T x (U + 1)", T * (U + 1)))
        ratios += [(1 / size, f"1/{size} of it: divided by {name}?") for name, size in divisors if size > 1]
    ratios += [(1 / math.log(2), "1/log(2) times it: logarithms to the base 2?"), (2.0, "twice it: counted twice?")]
    for factor, words in ratios:
        if abs(got / right / factor - 1) < NEAR:
            return f", {words}"
    return ", is it always 0?" if got == 0 else ""


def position(difference: torch.Tensor) -> Tuple[int, ...]:
    """Return the index of the largest difference."""
    at: List[int] = []
    index = int(difference.argmax())
    for size in reversed(difference.shape):
        at.insert(0, index % size)
        index //= size
    return tuple(at)
