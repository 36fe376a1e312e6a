"""Run one step of a loss on a small batch beside the float64 oracle: loss, gradients, and whether inputs changed."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Callable, Dict, List, NamedTuple, Optional, Tuple

import torch

from common.losses import fingerprint
from common.losses.adapter import Adapter
from common.losses.inputs import Batch
from common.losses.joiner import Joiner
from common.losses.layouts import table
from common.losses.oracle import relative_error
from common.losses.passes.hypotheses import Lattice
from common.losses.step import LossStep, leaves_of, prepare, weighted

#: (the loss's gradient or None, the right one) by name of the leaf.
Gradients = Dict[str, Tuple[Optional[torch.Tensor], torch.Tensor]]


class Answer(NamedTuple):
    """The answer of a loss and the right one."""

    loss: torch.Tensor
    right: torch.Tensor  # the oracle's loss
    gradients: Gradients
    losses: torch.Tensor  # (N,), the oracle's loss of each utterance
    changed: List[str]  # names of inputs that the loss has overwritten
    lattice: Optional[Lattice] = None  # what usual mistakes are tried on; None: they are not tried

    @property
    def errors(self) -> Tuple[float, float]:
        """Return the error of the loss and the largest of any gradient; one that is missing is infinitely wrong."""
        errors = [math.inf if got is None else relative_error(got, right) for got, right in self.gradients.values()]
        return relative_error(self.loss, self.right), max(errors)

    @property
    def slopes(self) -> Dict[str, float]:
        """Return, by tensor, the factor that fits the gradient best as a multiple of the right one."""
        pairs = {name: (got, right) for name, (got, right) in self.gradients.items() if got is not None}
        return {name: slope(got, right) for name, (got, right) in pairs.items() if right.abs().max() > 0}

    @property
    def slope_error(self) -> float:
        """Return the largest difference of a slope from 1."""
        return max((abs(value - 1) if math.isfinite(value) else math.inf for value in self.slopes.values()), default=0)


def slope(got: torch.Tensor, right: torch.Tensor) -> float:
    """Return the least-squares factor from right to got gradients: rounding hardly moves it."""
    got, right = got.detach().cpu().double(), right.detach().cpu().double()
    return float((got * right).sum() / (right * right).sum())


def loss_scope(adapter: Adapter, model: Joiner, batch: Batch, upstream: Optional[torch.Tensor] = None) -> Answer:
    """Return the answer of scope "loss".  Padded cells count: their gradient must be zero.

    `upstream` are factors (N,) of the losses, or (1,) of their sum.
    """
    step, layout = prepare(adapter, model, batch, "loss"), table.of(adapter)
    leaf = step.given.detach().cpu().double().clone().requires_grad_()  # a copy: the loss may overwrite its logits
    lattice = _lattice(adapter, layout.padded(leaf.detach(), batch), batch)
    answer = _judged(step, upstream, {"given": leaf}, lambda: layout.expected(leaf, batch))
    return answer if upstream is not None else answer._replace(lattice=lattice)


def step_scope(adapter: Adapter, model: Joiner, batch: Batch, upstream: Optional[torch.Tensor] = None) -> Answer:
    """Return the answer of scope "step"; `upstream` is that of `loss_scope`."""
    step = prepare(adapter, model, batch, "step")
    double_model, double_batch = in_double(model, batch)
    leaves, layout = leaves_of(double_model, double_batch), table.of(adapter)
    answer = _judged(step, upstream, leaves, lambda: layout.expected_step(double_model, double_batch))
    if upstream is not None or layout.scopes[0] != "step":
        return answer
    return answer._replace(lattice=_lattice(adapter, double_model.logits(double_batch).detach(), double_batch))


def _lattice(adapter: Adapter, logits: torch.Tensor, batch: Batch) -> Lattice:
    return Lattice(logits, batch.targets.cpu().clone(), batch.shapes, adapter.blank, adapter.lattice)


ANSWERS = {"loss": loss_scope, "step": step_scope}


def in_double(model: Joiner, batch: Batch) -> Tuple[Joiner, Batch]:
    """Return both as float64 on the CPU, as new leaves."""
    double_model = copy.deepcopy(model).cpu().double()
    double_model.zero_grad(set_to_none=True)
    outputs = {
        name: getattr(batch, name).detach().cpu().double().clone().requires_grad_()
        for name in ("encoder_out", "decoder_out")
    }
    return double_model, replace(batch, **outputs, targets=batch.targets.cpu().clone())


def _judged(
    step: LossStep,
    upstream: Optional[torch.Tensor],
    leaves: Dict[str, torch.Tensor],
    expected: Callable[[], torch.Tensor],
) -> Answer:
    """Run a step and return its answer.

    Args:
        step: what is judged.
        upstream: factors (N,) of the losses, (1,) of their sum, or None.
        leaves: float64 copies of the step's leaves.
        expected: returns the (N,) losses of `leaves`; called before the step, which may change its inputs.
    """
    losses = expected()
    right = losses.sum() if upstream is None else weighted(losses, upstream.expand(len(losses)))
    right.backward()
    before = fingerprint.fingerprints(step.inputs())
    step.upstream = upstream
    actual = step.run()
    computed = step.gradients()
    # a loss need not use every weight
    gradients = {name: (computed[name], leaf.grad) for name, leaf in leaves.items() if leaf.grad is not None}
    changed = fingerprint.changed(before, step.inputs())
    return Answer(actual, right.detach(), gradients, losses.detach(), changed)


def each_apart(adapter: Adapter, model: Joiner, batch: Batch, scope: str, upstream: torch.Tensor) -> Answer:
    """Judge one backward of a weighted sum of losses, each from a call with a single utterance.  So a loss without the
    reduction "none" can be given weights per utterance.

    upstream: (N,) factors.  A loss that keeps what its backward needs where the next call finds it is wrong.
    """
    apart = [utterance(batch, n) for n in range(len(batch.shapes))]
    singles = [
        ANSWERS[scope](adapter, model, single.fresh(), factor) for single, factor in zip(apart, upstream.split(1))
    ]
    steps = [prepare(adapter, model, single, scope) for single in apart]
    before = [fingerprint.fingerprints(step.inputs()) for step in steps]
    losses = [step.forward().reshape(()) for step in steps]
    total = torch.stack([loss * factor for loss, factor in zip(losses, upstream.to(losses[0]))]).sum()
    gradients: Gradients = {}
    leaves = [(n, name, leaf) for n, step in enumerate(steps) for name, leaf in step.leaves.items()]
    apart_leaves = [(n, name, leaf) for n, name, leaf in leaves if name in ("given", "encoder_out", "decoder_out")]
    computed = torch.autograd.grad(total, [leaf for _, _, leaf in apart_leaves], allow_unused=True)
    for (n, name, _), gradient in zip(apart_leaves, computed):
        gradients[f"{name} of utterance {n + 1}"] = gradient, singles[n].gradients[name][1]
    changed = sorted({name for step, was in zip(steps, before) for name in fingerprint.changed(was, step.inputs())})
    right = torch.stack([single.right for single in singles])
    return Answer(total.detach(), right.sum(), gradients, right, changed)


def utterance(batch: Batch, n: int) -> Batch:
    """Return the utterance `n` alone, without padding, as a batch of new tensors."""
    T, U = batch.shapes[n]
    return replace(
        batch,
        encoder_out=batch.encoder_out.detach()[n : n + 1, :T].clone().requires_grad_(),
        decoder_out=batch.decoder_out.detach()[n : n + 1, : U + 1].clone().requires_grad_(),
        targets=batch.targets[n : n + 1, :U].clone(),
        T_lengths=batch.T_lengths[n : n + 1].clone(),
        U_lengths=batch.U_lengths[n : n + 1].clone(),
        shapes=[(T, U)],
    )
