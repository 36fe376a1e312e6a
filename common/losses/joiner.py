"""Define the joiner of every step: logits = Linear(tanh(encoder_out + decoder_out)), padded or packed.

It is that of the 2022 suite, and icefall's joiner without its projections.  Leaves out the encoder and the decoder,
which cost the same for every loss.
"""

from __future__ import annotations

from typing import Mapping

import torch

from common.losses.compiler import compiled
from common.losses.inputs import Batch


class Joiner(torch.nn.Module):
    """The joiner and all other layers that a step trains.

    Args:
        output: Linear(D, V) of the run's dtype.
        extra: other layers that the step of a layout trains, by name.
        by_compiler: compile it by torch.compile when it is first used.
    """

    def __init__(self, output: torch.nn.Linear, extra: Mapping[str, torch.nn.Module], by_compiler: bool = False):
        super().__init__()
        self.output = output
        self.extra = torch.nn.ModuleDict(dict(extra))
        self.by_compiler = by_compiler

    def forward(self, joined: torch.Tensor) -> torch.Tensor:
        """Return the logits (..., V) of sums of encoder and decoder outputs (..., D)."""
        return (compiled(_project) if self.by_compiler else _project)(joined, self.output)

    def logits(self, batch: Batch) -> torch.Tensor:
        """Return the padded logits (N, T, U+1, V)."""
        run = compiled(_join) if self.by_compiler else _join
        return run(batch.encoder_out, batch.decoder_out, self.output)

    def packed_logits(self, batch: Batch) -> torch.Tensor:
        """Return the packed logits (sum T_i (U_i+1), V): the cells of each utterance, row-major, in turn."""
        cells = [
            (batch.encoder_out[n, :T].unsqueeze(1) + batch.decoder_out[n, : U + 1].unsqueeze(0)).flatten(0, 1)
            for n, (T, U) in enumerate(batch.shapes)
        ]
        return self(torch.cat(cells))


def _project(joined: torch.Tensor, output: torch.nn.Module) -> torch.Tensor:
    """Return the logits of sums of encoder and decoder outputs."""
    logits: torch.Tensor = output(torch.tanh(joined))
    return logits


def _join(encoder_out: torch.Tensor, decoder_out: torch.Tensor, output: torch.nn.Module) -> torch.Tensor:
    """Return the padded logits (N, T, U+1, V) of encoder outputs (N, T, D) and decoder outputs (N, U+1, D)."""
    return _project(encoder_out.unsqueeze(2) + decoder_out.unsqueeze(1), output)
