"""Which utterances have a loss that is not finite, and what made it so."""

from __future__ import annotations

from typing import Any, Iterator, Optional, Sequence, Set

import torch
from torch import Tensor


def not_finite(losses: Tensor, weights: Optional[Tensor]) -> Tensor:
    """Return whether the loss of each row (M,) is inf or NaN; never of one that a weight of 0
    leaves out."""
    wrong = ~losses.detach().isfinite()
    return wrong if weights is None else wrong & (weights != 0)


def check_finite(losses: Tensor, wrong: Tensor, tensors: Sequence[Any], blank: int) -> None:
    """Raise ValueError that names the first row that is `wrong` (M,), its T and U, and where its
    inputs are not finite.

    tensors: those of a Call, from encoder_out to utterance_of.  On a GPU this waits for the stream;
    while a CUDA graph is captured, which cannot wait, nothing is checked.
    """
    if wrong.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    encoder_out, decoder_out, weight, bias, targets, T_lengths, U_lengths, utterance_of = tensors
    for m in wrong.nonzero().flatten().tolist()[:1]:
        n = m if utterance_of is None else int(utterance_of[m])
        T, U = int(T_lengths[n]), int(U_lengths[m])
        of_row = encoder_out[n, :T], decoder_out[m, : U + 1], weight, bias
        sides = list(_places(*of_row, {blank, *targets[m, :U].tolist()}))
        if not sides and losses[m] == float("inf"):
            sides = ["its inputs are finite, and no path has a probability above 0"]
        what = (
            ", ".join(sides)
            or f"its inputs are finite, and their sum is not, in {str(weight.dtype)[6:]}"
        )
        row = "" if utterance_of is None else f"row {m}, of "
        raise ValueError(
            f"{row}utterance {n} (T {T}, U {U}) has a loss of {losses[m].item()}: {what}"
        )


def _places(
    encoder_out: Tensor,
    decoder_out: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],
    symbols: Set[int],
) -> Iterator[str]:
    """Yield, of each tensor of one row's loss, where its first number is that is not finite.

    A bias of -inf takes a symbol away, which harms only those who have it among their `symbols`."""
    wrong = [(x, ~x.detach().isfinite()) for x in (encoder_out, decoder_out, weight)]
    if bias is not None:
        harmless = bias.detach() == -float("inf")
        harmless[list(symbols)] = False
        wrong.append((bias.unsqueeze(1), ~(bias.detach().isfinite() | harmless).unsqueeze(1)))
    names = (
        "encoder_out at frame",
        "decoder_out at position",
        "weight of output",
        "bias of output",
    )
    for name, (tensor, places) in zip(names, wrong):
        for row, column in places.nonzero()[:1].tolist():
            yield f"{name} {row} is {tensor[row, column].item()}"
