"""The sizes of the Conformer transducer that `profile` and `largest` make, the YAML files that say
them, and the losses that it can have."""

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

#: In the place of a file: icefall's own Conformer, at its own sizes.
ICEFALL = "icefall"


class Sizes(Struct, frozen=True, forbid_unknown_fields=True):
    """The sizes that a configuration may change.  Defaults are icefall's, but dropout, which
    --no-dropout sets to 0."""

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
    """Return the sizes in a YAML file, the defaults for ICEFALL or "".  Raises UserError.

    changes: (key, YAML) of sizes that `flag` gives in place of those of the file."""
    values = {} if config in ("", ICEFALL) else configuration.read(Path(config))
    configuration.converted(values, Sizes, config)
    values.update((key, configuration.parsed(value, f"{flag} {key}")) for key, value in changes)
    return configuration.converted(values, Sizes, flag)


def loss_here(name: str, flag: str) -> Implementation:
    """Return a loss for the model.  Raises UserError for one that does not run in this Python; the
    advice is one of its kind that does."""
    row = find(name)
    if not row.condition and (row.environment == "main" or not interpreters.lacks(row.package)):
        return row
    others = (other for other in IMPLEMENTATIONS if OTHER_TORCH in other.controls)
    advice = next((other.name for other in others if other.kind == row.kind), "fused")
    raise UserError(
        f"{flag} {row.name}: the model runs in this Python alone ({sys.executable}), under torch 2.1 or newer; give "
        f"{flag} {advice}"
    )
