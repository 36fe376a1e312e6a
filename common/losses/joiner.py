"""The joiner that every step goes through: logits = Linear(tanh(encoder_out + decoder_out)), padded or packed.

As in the 2022 suite and icefall's joiner after its projections.  Leaves out the encoder and the decoder: they cost the
same under every loss.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Mapping

import torch

from common.losses import inputs

if TYPE_CHECKING:
    from common.settings import Settings


class Joiner(torch.nn.Module):
    """`output`: Linear(D, V), float weights of the run's dtype; `extra`: layers of an adapter (the pruned
    projections)."""

    def __init__(self, output: torch.nn.Linear, extra: Mapping[str, torch.nn.Module]):
        super().__init__()
        self.output = output
        self.extra = torch.nn.ModuleDict(dict(extra))

    @classmethod
    def of(
        cls, settings: Settings, extra: Mapping[str, torch.nn.Module], device: torch.device, dtype: torch.dtype
    ) -> Joiner:
        return cls(inputs.output_layer(settings, device, dtype), extra)

    def forward(self, joined: torch.Tensor) -> torch.Tensor:
        """Sums of encoder and decoder outputs (..., D) -> logits (..., V)."""
        return self.output(torch.tanh(joined))

    def logits(self, batch: inputs.Batch, layout: str) -> torch.Tensor:
        """ "padded": (N, T, U+1, V); "packed": only the cells of each utterance, row-major, one after the other,
        (sum T_i (U_i+1), V)."""
        if layout == "padded":
            return self(batch.encoder_out.unsqueeze(2) + batch.decoder_out.unsqueeze(1))
        cells = [
            (batch.encoder_out[n, :T].unsqueeze(1) + batch.decoder_out[n, : U + 1].unsqueeze(0)).flatten(0, 1)
            for n, (T, U) in enumerate(batch.shapes)
        ]
        return self(torch.cat(cells))
