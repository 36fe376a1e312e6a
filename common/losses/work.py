"""One sample of a scope, split in what is untimed (inputs, leaves) and what a pass watches (forward, backward).

Scope "loss": given logits, to the gradient of the logits.  Scope "step": from encoder and decoder outputs through the
joiner (packing or pruning included) and the loss to the gradients of encoder_out, decoder_out and all weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable

import torch

from common.losses.adapter import Adapter
from common.losses.inputs import Batch
from common.losses.joiner import Joiner
from common.losses.stages import stage


@dataclass
class Work:
    """`forward` returns the scalar to differentiate.  `logits` is the leaf of scope "loss", None for "step"."""

    forward: Callable[[], torch.Tensor]
    batch: Batch
    prepared: Any
    logits: Any = None

    def run(self, after_forward: Callable[[], None] = lambda: None) -> torch.Tensor:
        """Forward and backward; `after_forward` is called between them.  Returns the detached loss."""
        loss = self.forward()
        after_forward()
        if loss.numel() != 1:  # some packages sum to (1,)
            raise ValueError(f"the loss has the shape {tuple(loss.shape)}: return the sum over the batch")
        with stage("backward"):
            loss.backward()
        return loss.detach()


def prepare(adapter: Adapter, model: Joiner, batch: Batch, scope: str) -> Work:
    """Work of one sample, with fresh leaves and no gradient of an earlier one anywhere.  Untimed."""
    model.zero_grad(set_to_none=True)
    prepared = adapter.prepare(batch)
    if scope == "step":
        return Work(lambda: adapter.step(model, batch, prepared), batch, prepared)
    with torch.no_grad():
        logits = adapter.logits(model, batch, prepared)
    logits.requires_grad_()

    def forward() -> torch.Tensor:
        with stage("loss"):
            return adapter.loss(logits, prepared)

    return Work(forward, batch, prepared, logits)
