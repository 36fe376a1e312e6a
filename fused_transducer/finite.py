"""Find the utterances whose loss is not finite, and the input that made it so."""

from __future__ import annotations

from typing import Any, Iterator, Optional, Sequence, Set

import torch
from torch import Tensor


def not_finite(losses: Tensor, weights: Optional[Tensor]) -> Tensor:
    """Return for each row, (M,), whether its loss is inf or NaN and counts. A row counts unless its
    weight is 0; without weights all rows count."""
    wrong = ~losses.detach().isfinite()
    return wrong if weights is None else wrong & (weights != 0)


def check_finite(losses: Tensor, wrong: Tensor, tensors: Sequence[Any], blank: int) -> None:
    """Raise ValueError if a row is `wrong`. The message names the first such row, its T and U, and
    where its inputs are not finite.

    On a GPU this waits for the stream. While a CUDA graph is captured, which cannot wait, nothing
    is checked.

    Args
        losses (M,): the losses
        wrong (M,): whether each loss is not finite and counts, as `not_finite` returned it
        tensors: the tensors of a Call, from encoder_out to utterance_of
        blank: the number of the blank
    """
    if wrong.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    encoder_out, decoder_out, weight, bias, targets, T_lengths, U_lengths, utterance_of = tensors
    for m in wrong.nonzero().flatten().tolist()[:1]:  # the first row, or none
        n = m if utterance_of is None else int(utterance_of[m])
        T, U = int(T_lengths[n]), int(U_lengths[m])
        symbols = {blank, *targets[m, :U].tolist()}
        places = _places(encoder_out[n, :T], decoder_out[m, : U + 1], weight, bias, symbols)
        reason = ", ".join(places)
        if not reason and losses[m] == float("inf"):
            reason = "its inputs are finite, and no path has a probability above 0"
        elif not reason:
            dtype = str(weight.dtype)[len("torch.") :]
            reason = f"its inputs are finite, and their sum is not, in {dtype}"
        row = "" if utterance_of is None else f"row {m}, of "
        raise ValueError(
            f"{row}utterance {n} (T {T}, U {U}) has a loss of {losses[m].item()}: {reason}"
        )


def _places(
    encoder_out: Tensor,
    decoder_out: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],
    symbols: Set[int],
) -> Iterator[str]:
    """Yield, for each input of one row that has a number that is not finite, where the first such
    number is: "encoder_out at frame 3 is nan".

    A bias of -inf takes a symbol out of the softmax. It counts only if the symbol is in `symbols`:
    the blank, and the targets of the row.
    """
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
        for i, j in places.nonzero()[:1].tolist():
            yield f"{name} {i} is {tensor[i, j].item()}"
