"""Losses of whole sequences, made of the losses of several target sequences of each utterance."""

from __future__ import annotations

import torch
from torch import Tensor

from fused_transducer.call import check_tensors

#: In place of the loss of a hypothesis that is impossible: its probability is 0, and so is its
#: gradient.
IMPOSSIBLE = 1e30


def mwer_loss(
    losses: Tensor, errors: Tensor, utterance_of: Tensor, reduction: str = "mean"
) -> Tensor:
    """Return the expected number of errors of each utterance's hypotheses (Prabhavalkar et al.
    2018; of transducers Guo et al. 2020), less the mean of their errors, which shifts the value and
    no gradient.

    Args
        losses (M,): of the hypotheses, as `transducer_loss` returns them with reduction="none".
        Their probabilities are normalised over the list of an utterance; one whose loss is inf has
        none.
        errors (M,): the edit distance of each hypothesis to the transcript, of any dtype.
        utterance_of (M,): the utterance of each, as `transducer_loss` takes it.
        reduction: "mean" over the utterances that have hypotheses, "sum", or "none" for the (M,)
        parts, of which those of an utterance add up to its loss.

    Returns a tensor of the losses' dtype, differentiable by them.  Raises ValueError for other
    shapes.
    """
    check_tensors(losses=losses, errors=errors, utterance_of=utterance_of)
    if losses.dim() != 1:
        raise ValueError(
            f"losses must be (M,), by reduction='none'; it has the shape {tuple(losses.shape)}"
        )
    for name, tensor in (("errors", errors), ("utterance_of", utterance_of)):
        if tensor.shape != losses.shape:
            raise ValueError(
                f"{name} must be {tuple(losses.shape)}, as losses; it has the shape {tuple(tensor.shape)}"
            )
    if reduction not in ("none", "sum", "mean"):
        raise ValueError(f"reduction: there are none, sum, mean, not {reduction!r}")
    errors, utterance_of = errors.to(losses), utterance_of.to(losses.device)
    # (M, M): the lists, which need no number of utterances
    same = utterance_of.unsqueeze(1) == utterance_of
    size = same.sum(1, dtype=losses.dtype)
    scores = torch.where(same, -losses.clamp(max=IMPOSSIBLE), -torch.inf)
    parts = scores.softmax(1).diagonal() * (errors - (same * errors).sum(1) / size)
    if reduction == "none":
        return parts
    return parts.sum() if reduction == "sum" else parts.sum() / (1 / size).sum()
