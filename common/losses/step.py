"""Prepare one step of a loss on one batch (inputs and leaves, untimed), and run it (forward and backward, measured).

Scope "loss": from what the loss is given (logits, ...) to its gradient, by torch.autograd.grad: `.backward()` would
copy a gradient that a loss wrote over its logits, which no training step does (docs/method.md).  Scope "step": from
encoder and decoder outputs through the joiner (packing or pruning included) and the loss to the gradients of
encoder_out, decoder_out and all weights.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Callable, Dict, Optional

import torch

from common.losses.adapter import Adapter
from common.losses.inputs import Batch
from common.losses.joiner import Joiner
from common.losses.layouts import table
from common.measure.stages import stage


@dataclass
class LossStep:
    """One step that is ready to run once."""

    forward: Callable[[], torch.Tensor]  # returns the loss to differentiate
    batch: Batch
    prepared: Any  # what the adapter's `prepare` returned
    leaves: Dict[str, torch.Tensor]  # tensors that get a gradient; in scope "loss" only "given", the input of the loss
    overwrites: bool = False  # whether the loss may overwrite "given"
    upstream: Optional[torch.Tensor] = None  # factors (1,) of the sum, or (N,) of the losses that `forward` returns
    computed: Dict[str, Optional[torch.Tensor]] = field(default_factory=dict)  # the gradient of "given", after `run`
    answer: Optional[torch.Tensor] = None  # the detached loss, after `run`

    @property
    def given(self) -> torch.Tensor:
        """Return the input of the loss in scope "loss"."""
        return self.leaves["given"]

    def inputs(self) -> Dict[str, torch.Tensor]:
        """Return all that the loss reads and must leave as it is, by name."""
        prepared = {name: value for name, value in vars(self.prepared).items() if isinstance(value, torch.Tensor)}
        batch = {name: getattr(self.batch, name) for name in ("targets", "T_lengths", "U_lengths")}
        leaves = {("logits" if name == "given" else name): leaf for name, leaf in self.leaves.items()}
        if self.overwrites:
            leaves.pop("logits", None)
        return {**prepared, **batch, **leaves}

    def gradients(self) -> Dict[str, Optional[torch.Tensor]]:
        """Return the gradient of each leaf by name, after `run`; None if the loss does not use the leaf."""
        return self.computed or {name: leaf.grad for name, leaf in self.leaves.items()}

    def run(self, after_forward: Callable[[], None] = lambda: None) -> torch.Tensor:
        """Run forward, call `after_forward`, and run backward; return the detached loss, multiplied by `upstream`.

        Raises TypeError or ValueError if the loss is no tensor of one element.
        """
        loss = self.forward()
        after_forward()
        if not isinstance(loss, torch.Tensor):
            raise TypeError(f"the loss is {loss!r:.50}, not a tensor: return the sum over the batch")
        if self.upstream is not None:
            loss = weighted(loss, self.upstream)
        if loss.numel() != 1:  # some packages sum to (1,)
            raise ValueError(f"the loss has the shape {tuple(loss.shape)}: return the sum over the batch")
        with stage("backward"):
            if "given" in self.leaves:
                (self.computed["given"],) = torch.autograd.grad(loss, [self.given], allow_unused=True)
            else:
                loss.backward()
        self.answer = loss.detach()
        return self.answer


class NotOfEach(ValueError):
    """A loss was asked for the losses of utterances and returned another number of them."""


def weighted(losses: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Return the sum of losses times factors, both (N,).  Raises NotOfEach where their numbers differ."""
    if losses.numel() != factors.numel():
        raise NotOfEach(f"the losses have the shape {tuple(losses.shape)}, not ({factors.numel()},)")
    return (losses.reshape(-1) * factors.to(losses)).sum()


def leaves_of(model: Joiner, batch: Batch) -> Dict[str, torch.Tensor]:
    """Return the tensors that get a gradient in scope "step", by name."""
    outputs = {"encoder_out": batch.encoder_out, "decoder_out": batch.decoder_out}
    return {**outputs, **dict(model.named_parameters())}


def prepare(adapter: Adapter, model: Joiner, batch: Batch, scope: str) -> LossStep:
    """Return a step of a scope with fresh leaves, after dropping the gradients of an earlier step.  Untimed."""
    model.zero_grad(set_to_none=True)
    layout, prepared = table.of(adapter), adapter.prepare(batch)
    if scope == "step":
        return LossStep(lambda: layout.step(model, batch, prepared), batch, prepared, leaves_of(model, batch))
    with torch.no_grad():
        given = layout.taken(model, batch, prepared)
    given.requires_grad_()

    def forward() -> torch.Tensor:
        with stage("loss"):
            return layout.loss(given, batch, prepared)

    return LossStep(forward, batch, prepared, {"given": given}, adapter.overwrites_logits)
