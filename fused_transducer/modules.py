"""`TransducerLoss` and `TDTLoss`: joiners that are trained without all their logits in memory."""

from __future__ import annotations

import inspect
from numbers import Integral
from typing import Any, Optional, Sequence, Tuple

from torch import Tensor, nn

from fused_transducer.call import check_options
from fused_transducer.functional import align, transducer_loss
from fused_transducer.lattices import check_number
from fused_transducer.layers import of_linear
from fused_transducer.plain import ACTIVATIONS

#: Arguments of `transducer_loss` that are neither a tensor nor a layer.
OPTIONS = {
    name
    for name, parameter in inspect.signature(transducer_loss).parameters.items()
    if "Tensor" not in parameter.annotation and name != "output"
}
#: Those of them that `align` takes too.
OF_ALIGN = OPTIONS & set(inspect.signature(align).parameters)
#: Options that `check_options` does not take, since they are only true or false.
UNCHECKED = {"return_delay", "return_posteriors", "return_skipped", "zero_infinity"}


class TransducerLoss(nn.Module):
    """The joiner output_linear(activation(encoder_proj(encoder_out) + decoder_proj(decoder_out)))
    and its loss.

    Its parameters have the names of icefall's joiner. Under FSDP and DDP, call it within the module
    that they wrap, as any layer.

    Args
        joiner_dim: H
        vocab_size: V, the number of symbols
        encoder_dim, decoder_dim: columns of the encoder's and the decoder's outputs, which are
        projected to H. None is an output that has H columns already.
        bias: whether output_linear has one
        output: an nn.Linear to use as output_linear, in place of joiner_dim, vocab_size and bias.
        Its weight may be tied to another layer's.
        options: those of `transducer_loss`, from blank on. dropout is for training alone. With
        durations, output_linear has a row more for each of them, behind those of the symbols.

    Raises TypeError for an unknown option, and ValueError for a value that `transducer_loss` would
    refuse.
    """

    def __init__(
        self, joiner_dim: Optional[int] = None, vocab_size: Optional[int] = None, *,
        encoder_dim: Optional[int] = None, decoder_dim: Optional[int] = None, bias: bool = True,
        output: Optional[nn.Linear] = None, activation: str = "tanh", device: Any = None, dtype: Any = None,
        **options: Any,
    ):  # fmt: skip
        super().__init__()
        unknown = sorted(set(options) - OPTIONS)
        if unknown:
            raise TypeError(
                f"TransducerLoss has no option {unknown[0]!r}; there are {', '.join(sorted(OPTIONS))}"
            )
        durations = options.get("durations", ())
        # Durations of another type count as none here: check_options refuses them below.
        duration_outputs = len(durations) if isinstance(durations, (list, tuple)) else 0
        if output is not None:
            if joiner_dim is not None or vocab_size is not None:
                raise ValueError("output: give either the layer, or joiner_dim and vocab_size")
            outputs, joiner_dim = of_linear(output)[0].shape
            vocab_size = outputs - duration_outputs
        check_number("joiner_dim", joiner_dim, Integral, 1)
        check_number("vocab_size", vocab_size, Integral, 1)
        checked = {name: value for name, value in options.items() if name not in UNCHECKED}
        check_options(vocab_size + duration_outputs, activation=activation, **checked)
        factory_kwargs = {"device": device, "dtype": dtype}
        self.encoder_proj = (
            nn.Linear(encoder_dim, joiner_dim, **factory_kwargs) if encoder_dim else nn.Identity()
        )
        self.decoder_proj = (
            nn.Linear(decoder_dim, joiner_dim, **factory_kwargs) if decoder_dim else nn.Identity()
        )
        self.output_linear = (
            nn.Linear(joiner_dim, vocab_size + duration_outputs, bias=bias, **factory_kwargs)
            if output is None
            else output
        )
        self.options = {"activation": activation, **options}

    def forward(
        self, encoder_out: Tensor, decoder_out: Tensor, targets: Tensor, T_lengths: Tensor, U_lengths: Tensor,
        utterance_weights: Optional[Tensor] = None, utterance_of: Optional[Tensor] = None,
        window: Optional[Tensor] = None, reference_frames: Optional[Tensor] = None,
    ):  # fmt: skip
        """Return the loss as `transducer_loss` does, from encoder_out (N, T, encoder_dim) and
        decoder_out (N, U+1, decoder_dim). Dropout is only for training."""
        options = self.options if self.training else {**self.options, "dropout": 0.0}
        return transducer_loss(
            self.encoder_proj(encoder_out), self.decoder_proj(decoder_out), targets=targets, T_lengths=T_lengths,
            U_lengths=U_lengths, output=self.output_linear, utterance_weights=utterance_weights,
            utterance_of=utterance_of, window=window, reference_frames=reference_frames, **options,
        )  # fmt: skip

    def align(
        self, encoder_out: Tensor, decoder_out: Tensor, targets: Tensor, T_lengths: Tensor, U_lengths: Tensor,
        confidence_span: Optional[int] = None,
    ) -> Tuple[Tensor, ...]:  # fmt: skip
        """Return (frames, log_probabilities) of the best paths, and confidences with
        confidence_span, as the function `align` does, without dropout."""
        return align(
            self.encoder_proj(encoder_out), self.decoder_proj(decoder_out), targets=targets, T_lengths=T_lengths,
            U_lengths=U_lengths, output=self.output_linear, confidence_span=confidence_span,
            **{name: value for name, value in self.options.items() if name in OF_ALIGN},
        )  # fmt: skip

    def logits(self, encoder_out: Tensor, decoder_out: Tensor) -> Tensor:
        """Return logits (..., V + durations) for decoding, without dropout, from outputs
        (..., encoder_dim) and (..., decoder_dim) that broadcast together."""
        activation = ACTIVATIONS[self.options["activation"]]
        x = self.encoder_proj(encoder_out) + self.decoder_proj(decoder_out)
        return self.output_linear(activation.value(x))

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())


class TDTLoss(TransducerLoss):
    """A joiner of tokens and durations (arXiv 2304.06795), and its loss.

    vocab_size: V, with the blank
    durations: numbers of frames that a token may go ahead
    sigma: a number that is subtracted from the log-probability of each token, so that paths of
        fewer tokens count more
    """

    def __init__(
        self, joiner_dim: Optional[int] = None, vocab_size: Optional[int] = None, *,
        durations: Sequence[int] = (0, 1, 2, 3, 4), sigma: float = 0.0, **options: Any,
    ):  # fmt: skip
        super().__init__(
            joiner_dim, vocab_size, topology="tdt", durations=durations, sigma=sigma, **options
        )
