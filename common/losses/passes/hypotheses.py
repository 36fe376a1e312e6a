"""Guess what a wrong loss has computed instead, by trying usual mistakes with the float64 oracle."""

from __future__ import annotations

import math
from typing import Dict, List, NamedTuple, Sequence, Tuple

import torch

from common.losses import oracle
from common.losses.topologies import Topology

#: Largest relative difference between a loss and that of a mistake that explains it.
NEAR = 1e-4
#: Units in the last place that a loss and a gradient lose where they are computed in half precision.
LOSS_PLACES, GRADIENT_PLACES = 1, 4


class Lattice(NamedTuple):
    """Hold the input of a loss: padded logits (N, T, U+1, V) float64, targets (N, U), and (T, U) of each utterance."""

    logits: torch.Tensor
    targets: torch.Tensor
    shapes: Sequence[Tuple[int, int]]
    blank: int
    topology: Topology

    def loss(self, shapes: Sequence[Tuple[int, int]], blank: int) -> float:
        """Return the summed loss of other lengths or another blank."""
        return float(oracle.losses(self.logits, self.targets, shapes, blank, self.topology).sum())


def mistakes(lattice: Lattice) -> Dict[str, float]:
    """Return {mistake in words: loss} of each mistake that this batch can show."""
    shapes, blank = lattice.shapes, lattice.blank
    _, T, U1, V = lattice.logits.shape
    losses: Dict[str, float] = {}
    if min(T for T, _ in shapes) > 1:
        losses["the loss of T - 1 frames"] = lattice.loss([(T - 1, U) for T, U in shapes], blank)
    if min(U for _, U in shapes) > 0:
        losses["the loss of U - 1 targets"] = lattice.loss([(T, U - 1) for T, U in shapes], blank)
    nothing = torch.zeros(len(shapes), dtype=torch.int64)
    ends = torch.stack([lattice.logits[n, T - 1, U] for n, (T, U) in enumerate(shapes)])
    last = lattice.topology.parts(ends, nothing, blank)[:, 0]
    losses["the loss without the final blank"] = lattice.loss(shapes, blank) + float(last.sum())
    if blank != V - 1:
        losses["the loss where the blank is the last symbol"] = lattice.loss(shapes, V - 1)
    if any(shape != (T, U1 - 1) for shape in shapes):
        losses["the loss where padding is not masked"] = lattice.loss([(T, U1 - 1)] * len(shapes), blank)
    return losses


def fitting(got: float, lattice: Lattice) -> str:
    """Return the words of the mistake whose loss is `got`, with a comma before them; "" where none fits."""
    for words, loss in mistakes(lattice).items():
        if math.isfinite(loss) and abs(got - loss) <= NEAR * abs(loss):
            return f", {words}?"
    return ""


def precision(loss_error: float, grad_error: float) -> str:
    """Return the dtype whose rounding explains these relative errors, in words with a comma before them; "" if none."""
    fits: List[str] = []
    for name in ("float16", "bfloat16"):
        eps = torch.finfo(getattr(torch, name)).eps
        if loss_error <= LOSS_PLACES * eps and grad_error <= GRADIENT_PLACES * eps:
            fits.append(f", as if in {name}?")
    return fits[0] if fits else ""
