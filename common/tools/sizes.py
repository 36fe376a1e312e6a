"""The sizes of the Conformer transducer that `profile` and `largest` make, and the losses that it
can have.  No torch here."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct

from rnnt_bench.core.errors import UserError
from rnnt_bench.core.implementations import IMPLEMENTATIONS, OTHER_TORCH, Implementation, find
from rnnt_bench.setup import interpreters
from rnnt_bench.tools import configuration
from rnnt_bench.tools.configuration import Positive

#: Stands in place of a file of sizes for icefall's own Conformer, at its own sizes.
ICEFALL = "icefall"


class Sizes(Struct, frozen=True, forbid_unknown_fields=True):
    """Hold the sizes of a Conformer transducer, as a YAML file may give them.

    The defaults are those of icefall's pruned_transducer_stateless2.

    Attributes:
        features: numbers of a feature frame
        embed_channels: channels of the three convolutions before the encoder
        encoder_dim, decoder_dim: dimensions of their outputs
        feed_forward: hidden units of a feed-forward
        kernel: frames that a convolution of the encoder spans, an odd number
        context: symbols that the decoder sees
        joiner_dim: dimension at which both outputs are added
    """

    features: Positive = 80
    embed_channels: tuple[Positive, Positive, Positive] = (8, 32, 128)
    encoder_dim: Positive = 512
    heads: Positive = 8
    feed_forward: Positive = 2048
    layers: Positive = 12
    kernel: Positive = 31
    decoder_dim: Positive = 512
    context: Positive = 2
    joiner_dim: Positive = 512
    vocab_size: Positive = 500
    dropout: Annotated[float, Meta(ge=0, lt=1)] = 0.1

    def __post_init__(self) -> None:
        if self.encoder_dim % self.heads:
            raise ValueError(
                f"encoder_dim is {self.encoder_dim}; give a multiple of heads ({self.heads})"
            )
        if self.kernel % 2 == 0:
            raise ValueError(f"kernel is {self.kernel}; give an odd number")


def read_sizes(config: str, changes: Sequence[tuple[str, str]], flag: str) -> Sizes:
    """Return the sizes of a file, or the defaults, after the changes that a flag gives.  Raises
    UserError.

    Args:
        config: a YAML file of sizes; ICEFALL or "" for the defaults
        changes: (key, YAML) of each size that the flag gives
        flag: the name of that flag, for messages
    """
    values = {} if config in ("", ICEFALL) else configuration.read(Path(config))
    # Only checks the file: a message about its sizes names the file, not the flag.
    configuration.converted(values, Sizes, config)
    for key, value in changes:
        values[key] = configuration.parsed(value, f"{flag} {key}")
    return configuration.converted(values, Sizes, flag)


def loss_here(name: str, flag: str) -> Implementation:
    """Return the loss `name` if it runs in this Python, which also runs the model.

    Raises UserError if it does not.  The message names a loss that does, of the same kind if there
    is one.

    flag: the flag that gave the name, for the message"""
    row = find(name)
    if not row.condition and (row.environment == "main" or not interpreters.lacks(row.package)):
        return row
    # Losses that run under more than one torch, so under this one too.
    others = (other for other in IMPLEMENTATIONS if OTHER_TORCH in other.controls)
    advice = next((other.name for other in others if other.kind == row.kind), "fused")
    raise UserError(
        f"{flag} {row.name}: the model runs in this Python alone ({sys.executable}), under torch 2.1 or newer; give "
        f"{flag} {advice}"
    )
