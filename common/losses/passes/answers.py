"""Run steps of a loss on small batches beside the float64 oracle: loss, gradients, and whether inputs changed."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch

from common.losses import fingerprint
from common.losses.adapter import Adapter
from common.losses.inputs import OUTPUTS, Batch
from common.losses.joiner import Joiner
from common.losses.layouts import table
from common.losses.oracle import relative_error
from common.losses.step import leaves_of, prepare, weighted

#: (the loss's gradient or None, the right one) by name of the leaf.
Gradients = Dict[str, Tuple[Optional[torch.Tensor], torch.Tensor]]


class Answer(NamedTuple):
    """The answer of a loss and the right one."""

    loss: torch.Tensor
    right: torch.Tensor  # the oracle's loss
    gradients: Gradients
    losses: torch.Tensor  # (N,), the oracle's loss of each utterance
    changed: List[str]  # names of inputs that the loss has overwritten

    @property
    def errors(self) -> Tuple[float, float]:
        """Return the error of the loss and the largest of any gradient; one that is missing is infinitely wrong."""
        errors = [math.inf if got is None else relative_error(got, right) for got, right in self.gradients.values()]
        return relative_error(self.loss, self.right), max(errors)

    @property
    def slopes(self) -> Dict[str, float]:
        """Return, by tensor, the factor of the right gradient that fits the loss's best: rounding hardly moves it."""
        slopes = {}
        for name, (got, right) in self.gradients.items():
            square = float((right.double() ** 2).sum())
            if got is not None and square > 0:
                slopes[name] = float((got.detach().cpu().double() * right).sum()) / square
        return slopes

    @property
    def slope_error(self) -> float:
        """Return the largest difference of a slope from 1."""
        return max((abs(value - 1) if math.isfinite(value) else math.inf for value in self.slopes.values()), default=0)


def answer(
    adapter: Adapter, model: Joiner, batches: Sequence[Batch], scope: str, upstream: Optional[torch.Tensor] = None
) -> Answer:
    """Run one forward for each batch and one backward of their sum; return the answer.

    Padded cells count in scope "loss": their gradient must be zero.

    Args:
        adapter: the loss.
        model: the joiner.
        batches: one; or each utterance alone, so that a loss without the reduction "none" can be given a factor for
            each.  A loss that keeps what its backward needs where the next call finds it is wrong then.
        scope: "loss" or "step".
        upstream: factors (N,) of the losses, or (1,) of their sum; None for 1.
    """
    layout, double_model = table.of(adapter), copy.deepcopy(model).cpu().double()
    steps, leaves, losses = [], [], []
    for batch in batches:
        step = prepare(adapter, model, batch, scope)
        if scope == "loss":  # a copy: the loss may overwrite its logits
            right_leaves = {"given": step.given.detach().cpu().double().clone().requires_grad_()}
            losses.append(layout.expected(right_leaves["given"], batch))
        else:
            outputs = {name: getattr(batch, name) for name in OUTPUTS}
            outputs = {
                name: leaf.detach().cpu().double().clone().requires_grad_(leaf.requires_grad)
                for name, leaf in outputs.items()
            }
            double_batch = replace(batch, **outputs, targets=batch.targets.cpu().clone())
            right_leaves = leaves_of(double_model, double_batch)
            losses.append(layout.expected_step(double_model, double_batch))
        steps.append(step)
        leaves.append(right_leaves)
    of_each = torch.cat(losses)
    right = of_each.sum() if upstream is None else weighted(of_each, upstream.expand(len(of_each)))
    right.backward()
    before = [fingerprint.fingerprints(step.inputs()) for step in steps]
    if len(steps) > 1 and upstream is not None:
        actual = weighted(torch.stack([step.forward().reshape(()) for step in steps]), upstream)
        actual.backward()
    else:
        steps[0].upstream = upstream
        actual = steps[0].run()
    gradients: Gradients = {}
    for n, (step, right_leaves) in enumerate(zip(steps, leaves)):
        of = f" of utterance {n + 1}" if len(steps) > 1 else ""
        for name, leaf in right_leaves.items():
            if leaf.grad is not None:  # a loss need not use every weight
                gradients[f"{name}{of if name in ('given', *OUTPUTS) else ''}"] = step.gradients()[name], leaf.grad
    changed = sorted({name for step, was in zip(steps, before) for name in fingerprint.changed(was, step.inputs())})
    return Answer(actual.detach(), right.detach(), gradients, of_each.detach(), changed)


def utterance(batch: Batch, n: int) -> Batch:
    """Return the utterance `n` alone, without padding, as a batch of new tensors."""
    T, U = batch.shapes[n]
    only = slice(n, n + 1)
    return replace(
        batch,
        encoder_out=batch.encoder_out.detach()[only, :T].clone().requires_grad_(),
        decoder_out=batch.decoder_out.detach()[only, : U + 1].clone().requires_grad_(),
        targets=batch.targets[only, :U].clone(),
        T_lengths=batch.T_lengths[only].clone(),
        U_lengths=batch.U_lengths[only].clone(),
        shapes=[(T, U)],
    )
