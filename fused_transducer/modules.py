"""`TransducerLoss`: a joiner that is trained without ever writing its logits."""

from __future__ import annotations

import inspect
from numbers import Integral
from typing import Any, Optional

from torch import Tensor, nn

from fused_transducer.backends import check_name
from fused_transducer.call import check_options
from fused_transducer.functional import transducer_loss
from fused_transducer.plain import ACTIVATIONS

#: The arguments of `transducer_loss` that are no tensors.
_OPTIONS = {p.name for p in inspect.signature(transducer_loss).parameters.values() if p.default is not p.empty}
#: Those whose values mean nothing before a call.
UNCHECKED = ("backend", "dropout_seed", "return_dropped")


class TransducerLoss(nn.Module):
    """The joiner output_linear(activation(encoder_proj(encoder_out) + decoder_proj(decoder_out))) and its loss.

    joiner_dim: H; vocab_size: V; encoder_dim, decoder_dim: of the outputs that are projected to H first, as icefall's
    joiner does (its parameters have the same names); None: that output has H columns already.  bias: of output_linear.
    The other options are those of `transducer_loss`, from blank on; dropout is for training alone.  Raises TypeError
    for one that it does not have, and ValueError for a value that it would refuse.
    """

    def __init__(
        self,
        joiner_dim: int,
        vocab_size: int,
        *,
        encoder_dim: Optional[int] = None,
        decoder_dim: Optional[int] = None,
        bias: bool = True,
        activation: str = "tanh",
        device: Any = None,
        dtype: Any = None,
        **options: Any,
    ):
        super().__init__()
        unknown = sorted(set(options) - _OPTIONS)
        if unknown:
            raise TypeError(f"TransducerLoss has no option {unknown[0]!r}; there are {', '.join(sorted(_OPTIONS))}")
        for name, size in (("joiner_dim", joiner_dim), ("vocab_size", vocab_size)):
            if isinstance(size, bool) or not isinstance(size, Integral) or size < 1:
                raise ValueError(f"{name} must be an integer, 1 at least; it is {size!r}")
        checked = {name: value for name, value in options.items() if name not in UNCHECKED}
        check_options(vocab_size, activation=activation, **checked)
        check_name(options.get("backend"))
        how = {"device": device, "dtype": dtype}
        self.encoder_proj = nn.Linear(encoder_dim, joiner_dim, **how) if encoder_dim else nn.Identity()
        self.decoder_proj = nn.Linear(decoder_dim, joiner_dim, **how) if decoder_dim else nn.Identity()
        self.output_linear = nn.Linear(joiner_dim, vocab_size, bias=bias, **how)
        self.options = {"activation": activation, **options}

    def forward(self, encoder_out: Tensor, decoder_out: Tensor, targets: Tensor, T_lengths: Tensor, U_lengths: Tensor):
        """The loss; encoder_out (N, T, encoder_dim), decoder_out (N, U+1, decoder_dim), see `transducer_loss`."""
        options = self.options if self.training else {**self.options, "dropout": 0.0}
        return transducer_loss(
            self.encoder_proj(encoder_out),
            self.decoder_proj(decoder_out),
            self.output_linear.weight,
            self.output_linear.bias,
            targets,
            T_lengths,
            U_lengths,
            **options,
        )

    def logits(self, encoder_out: Tensor, decoder_out: Tensor) -> Tensor:
        """(..., V) for decoding: of outputs (..., encoder_dim) and (..., decoder_dim) that broadcast together."""
        activation = ACTIVATIONS[self.options["activation"]].value
        return self.output_linear(activation(self.encoder_proj(encoder_out) + self.decoder_proj(decoder_out)))

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())
