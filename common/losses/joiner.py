"""The joiner of every step: logits = Linear(tanh(encoder_out + decoder_out)), padded or packed.

As in the 2022 suite, and as icefall's joiner after its projections.  Leaves out the encoder and the decoder, which cost
the same for every loss.
"""

from __future__ import annotations

from typing import Mapping

import torch

from common.losses.inputs import Batch


class Joiner(torch.nn.Module):
    """output: Linear(D, V) of the run's dtype; extra: other layers that the step of a layout trains."""

    def __init__(self, output: torch.nn.Linear, extra: Mapping[str, torch.nn.Module]):
        super().__init__()
        self.output = output
        self.extra = torch.nn.ModuleDict(dict(extra))

    def forward(self, joined: torch.Tensor) -> torch.Tensor:
        """Sums of encoder and decoder outputs (..., D) -> logits (..., V)."""
        return self.output(torch.tanh(joined))

    def logits(self, batch: Batch) -> torch.Tensor:
        """(N, T, U+1, V), padded."""
        return self(batch.encoder_out.unsqueeze(2) + batch.decoder_out.unsqueeze(1))

    def packed_logits(self, batch: Batch) -> torch.Tensor:
        """(sum T_i (U_i+1), V): the cells of each utterance, row-major, one utterance after the other."""
        cells = [
            (batch.encoder_out[n, :T].unsqueeze(1) + batch.decoder_out[n, : U + 1].unsqueeze(0)).flatten(0, 1)
            for n, (T, U) in enumerate(batch.shapes)
        ]
        return self(torch.cat(cells))
