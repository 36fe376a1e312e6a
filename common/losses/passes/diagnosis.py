"""What is wrong with a loss that is not the oracle's, for who wrote it: the utterance, what it gave, what is right, and
a guess where the ratio of the two tells something."""

from __future__ import annotations

import math
from typing import Any, Dict, List, Optional, Sequence, Tuple

import torch

from common.losses.passes import hypotheses

#: How near the ratio of what was given to what is right must be to one that tells something.
NEAR = 1e-3


def in_words(
    shapes: Sequence[Tuple[int, int]], answer: Any, loss_tolerance: float, grad_tolerance: float, slope_tolerance: float
) -> str:
    """One line.  shapes: (T, U) of each utterance of the batch; answer: answers.Answer, of which the loss, a gradient
    or a slope is off by more than its tolerance, relative, or an input is overwritten."""
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
    name, found, expected = _worst(answer.gradients)
    what = "the gradient" if name == "given" else f"the gradient of {name}"
    if found is None:
        return f"{where}: the loss is right, {what} is missing"
    scale = _scale(found, expected)
    if scale is not None:
        return f"{where}: the loss is right, {what} is {scale:.4g} times what is right{guess(scale, 1.0, shapes)}"
    reason = hypotheses.precision(loss_error, grad_error)
    return f"{where}: the loss is right, {what} is not: at {_place(name, found, expected, shapes)}{reason}"


def batch(shapes: Sequence[Tuple[int, int]]) -> str:
    if len(shapes) == 1:
        return f"an utterance alone (T {shapes[0][0]}, U {shapes[0][1]})"
    return f"a batch of {len(shapes)} (T, U: {', '.join(f'{T}, {U}' for T, U in shapes)})"


def guess(got: float, right: float, shapes: Sequence[Tuple[int, int]]) -> str:
    """What a telling ratio may come from, with a comma before it; "" for one that tells nothing."""
    if not (math.isfinite(got) and math.isfinite(right) and right):
        return ""
    ratio = got / right
    for factor, words in _factors(shapes).items():
        if abs(ratio / factor - 1) < NEAR:
            return f", {words}"
    return ", is it always 0?" if got == 0 else ""


def _factors(shapes: Sequence[Tuple[int, int]]) -> Dict[float, str]:
    """Ratios that tell something; the first words of equal ones stay."""
    N, (T, U) = len(shapes), shapes[0]
    found: List[Tuple[float, str]] = [(-1.0, "its negative: the log-likelihood?")]
    if N > 1:
        found.append((1 / N, f"1/{N} of it, 1/N: a mean over the batch?"))
        every = ("T", sum(T for T, _ in shapes)), ("U", sum(U for _, U in shapes))
        found += [(1 / size, f"1/{size} of it: a mean over all {name}?") for name, size in every if size > 1]
    else:
        sizes = (("T", T), ("U", U), ("T + U", T + U), ("U + 1", U + 1), ("T x (U + 1)", T * (U + 1)))
        found += [(1 / size, f"1/{size} of it: divided by {name}?") for name, size in sizes if size > 1]
    found += [(1 / math.log(2), "1/log(2) times it: logarithms to the base 2?"), (2.0, "twice it: counted twice?")]
    return {factor: words for factor, words in reversed(found)}


def _worst(gradients: Any) -> Tuple[str, Optional[torch.Tensor], torch.Tensor]:
    """The gradient that is missing or furthest off, in float64."""

    def error(each: Tuple[str, Optional[torch.Tensor], torch.Tensor]) -> float:
        _, found, right = each
        if found is None or not bool(found.isfinite().all()):
            return math.inf
        return float((found - right).abs().max() / right.abs().max().clamp(min=1e-30))

    of = [(name, None if one is None else _plain(one), _plain(right)) for name, (one, right) in gradients.items()]
    return max(of, key=error)


def _plain(values: torch.Tensor) -> torch.Tensor:
    return values.detach().cpu().double()


def _scale(found: torch.Tensor, right: torch.Tensor) -> Optional[float]:
    """The factor by which all of it is off; None where it is not one."""
    size = float((right * right).sum())
    if not size or not bool(found.isfinite().all()):
        return None
    scale = float((found * right).sum()) / size
    left = float((found - scale * right).abs().max())
    return scale if left <= min(NEAR * abs(scale), abs(scale - 1) / 2) * float(right.abs().max()) else None


def _place(name: str, found: torch.Tensor, right: torch.Tensor, shapes: Sequence[Tuple[int, int]]) -> str:
    """Where it is furthest off."""
    difference = (found - right).abs().nan_to_num(nan=math.inf)
    at: List[int] = []
    left = int(difference.argmax())
    for size in reversed(difference.shape):
        at.insert(0, left % size)
        left //= size
    values = f"{float(found[tuple(at)]):.4g}, expected {float(right[tuple(at)]):.4g}"
    if name == "given" and len(at) == 4:
        n, t, u, v = at
        T, U = shapes[n]
        inside = "" if t < T and u <= U else " (in the padding)"
        return f"utterance {n + 1} (T {T}, U {U}), t {t}, u {u}, symbol {v}{inside}: {values}"
    return f"{at}: {values}"
