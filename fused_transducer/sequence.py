"""A loss of whole sequences, computed from the losses of several hypotheses of each utterance."""

from __future__ import annotations

import torch
from torch import Tensor

from fused_transducer.call import check_tensors

#: Replaces the loss inf of an impossible hypothesis, so that its probability and its gradient are 0
#: and not NaN.
IMPOSSIBLE = 1e30


def mwer_loss(
    losses: Tensor, errors: Tensor, utterance_of: Tensor, reduction: str = "mean"
) -> Tensor:
    """Return the expected number of errors over each utterance's hypotheses, minus the mean over
    them (minimum word error rate; Prabhavalkar et al. 2018, Guo et al. 2020 for transducers).

    To subtract the mean shifts the value, but changes no gradient.

    Args
        losses (M,): the losses of the hypotheses, which `transducer_loss` returns with
        reduction="none". The probabilities of an utterance's hypotheses are normalised to a sum of
        1; a hypothesis with a loss of inf has the probability 0.
        errors (M,): the edit distance of each hypothesis to the transcript, of any dtype
        utterance_of (M,): the utterance of each hypothesis, as `transducer_loss` takes it
        reduction: "mean" over the utterances that have hypotheses, "sum", or "none". With "none"
        there is a number for each hypothesis (M,); those of an utterance add up to its loss.

    Returns a tensor of the losses' dtype, which can be differentiated with respect to `losses`.
    Raises ValueError for other shapes.
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
    # (M, M): whether two hypotheses are of one utterance; the number of utterances is not needed.
    same = utterance_of.unsqueeze(1) == utterance_of
    size = same.sum(1, dtype=losses.dtype)  # hypotheses of the utterance
    mean_errors = (same * errors).sum(1) / size
    # Row m has the scores of the hypotheses of m's utterance, so (m, m) of its softmax is the
    # probability of m.
    scores = torch.where(same, -losses.clamp(max=IMPOSSIBLE), -torch.inf)
    probabilities = scores.softmax(1).diagonal()
    parts = probabilities * (errors - mean_errors)
    if reduction == "none":
        return parts
    if reduction == "sum":
        return parts.sum()
    return parts.sum() / (1 / size).sum()  # 1 / size adds up to 1 for each utterance
