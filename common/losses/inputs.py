"""Make the inputs of a batch and the joiner: the same bits for a seed under every torch and numpy.

The numbers come from the raw output of numpy's PCG64, which is guaranteed never to change (NEP 19), and become floats
by exact arithmetic (common.data.streams).  torch's own generators may change between versions.  Random inputs are
uniform in [0, 1), as in the 2022 suite, and weights uniform in +-1/sqrt(D), as torch.nn.Linear draws them; for others
see common.losses.speech.  Leaves out the encoder and the decoder, which cost the same for every loss.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Dict, List, Mapping, Optional, Sequence, Tuple

import numpy as np
import torch

from common.core.settings import STAGES, Settings
from common.data.streams import DECODER, ENCODER, TARGETS, WEIGHTS, symbols, uniform
from common.losses.speech import Speech


@dataclass
class Batch:
    """One batch on its device."""

    encoder_out: torch.Tensor  # (N, T, D), a leaf of the run's dtype that requires a gradient
    decoder_out: torch.Tensor  # (N, U+1, D), likewise
    targets: torch.Tensor  # (N, U) int32 in [1, V)
    T_lengths: torch.Tensor  # (N,) int32
    U_lengths: torch.Tensor  # (N,) int32
    shapes: List[Tuple[int, int]]  # (T, U) of each utterance on the host, to be read without synchronising the device

    def fresh(self) -> Batch:
        """Return the batch with the same numbers in new leaves, without the gradient of an earlier step."""
        return replace(self, **{name: getattr(self, name).detach().requires_grad_() for name in OUTPUTS})


def source_of(settings: Settings) -> Optional[Speech]:
    """Return the source of a run's inputs and weights, None if they are random; raise UserError if it does not have the
    run's sizes."""
    if settings.logits not in STAGES:
        return None
    return Speech(settings.logits, settings.vocab_size, settings.encoder_dim)


#: Leaves of a batch.
OUTPUTS = ("encoder_out", "decoder_out")


def padded_sizes(shapes: Sequence[Sequence[int]]) -> Tuple[int, int, int]:
    """Return (N, longest T, longest U) of a batch."""
    return len(shapes), int(max(T for T, _ in shapes)), int(max(U for _, U in shapes))


def make_batch(
    shapes: Sequence[Sequence[int]],
    *,
    vocab_size: int,
    encoder_dim: int,
    device: torch.device,
    dtype: torch.dtype,
    key: Sequence[int],
    source: Optional[Speech] = None,
) -> Batch:
    """Return a batch of fresh inputs.

    Args:
        shapes: (T, U) of each utterance.
        vocab_size, encoder_dim: V and D.
        device, dtype: of encoder_out and decoder_out.
        key: (seed, batch, ...), which names the stream of random numbers.
        source: of inputs that are not random (source_of).
    """
    pairs = [(int(T), int(U)) for T, U in shapes]
    N, T, U = padded_sizes(pairs)
    encoder_out = uniform(N * T * encoder_dim, ENCODER, *key).reshape(N, T, encoder_dim)
    decoder_out = uniform(N * (U + 1) * encoder_dim, DECODER, *key).reshape(N, U + 1, encoder_dim)
    targets = symbols((N, U), vocab_size, TARGETS, *key)
    if source is not None:
        encoder_out, decoder_out, targets = source.outputs(encoder_out, decoder_out, targets, pairs, key)
    lengths = torch.tensor(pairs, dtype=torch.int32, device=device)
    return Batch(
        encoder_out=torch.from_numpy(encoder_out).to(device, dtype).requires_grad_(),
        decoder_out=torch.from_numpy(decoder_out).to(device, dtype).requires_grad_(),
        targets=torch.from_numpy(targets).to(device),
        T_lengths=lengths[:, 0].contiguous(),
        U_lengths=lengths[:, 1].contiguous(),
        shapes=pairs,
    )


def linear(
    inputs: int, outputs: int, *, device: torch.device, dtype: torch.dtype, key: Sequence[int]
) -> torch.nn.Linear:
    """Return Linear(inputs, outputs) with weights and bias of the stream that `key` names."""
    return _layer(*_drawn(inputs, outputs, key), device, dtype)


def _drawn(inputs: int, outputs: int, key: Sequence[int]) -> Tuple[np.ndarray, np.ndarray]:
    """Return the weight (outputs, inputs) and the bias (outputs,) of the stream that `key` names, float32."""
    bound = 1 / math.sqrt(inputs)
    numbers = (uniform((inputs + 1) * outputs, WEIGHTS, *key).astype(np.float64) * 2 * bound - bound).astype(np.float32)
    return numbers[: inputs * outputs].reshape(outputs, inputs), numbers[inputs * outputs :]


def _layer(weight: np.ndarray, bias: np.ndarray, device: torch.device, dtype: torch.dtype) -> torch.nn.Linear:
    """Return a Linear layer with these weights (outputs, inputs) and bias (outputs,)."""
    layer = torch.nn.Linear(weight.shape[1], weight.shape[0], device=device, dtype=dtype)
    with torch.no_grad():
        layer.weight.copy_(torch.from_numpy(weight))
        layer.bias.copy_(torch.from_numpy(bias))
    return layer


def output_layer(settings: Settings, outputs: int, device: torch.device, dtype: torch.dtype) -> torch.nn.Linear:
    """Return the joiner's Linear(D, outputs) of a run; its first V outputs are the symbols.

    Further outputs (durations) are random with any logits.  Raises UserError as source_of does.
    """
    source = source_of(settings)
    if source is None:
        return linear(settings.encoder_dim, outputs, device=device, dtype=dtype, key=(settings.seed, 0))
    parts = [source.layer("output")]
    if outputs > settings.vocab_size:
        parts.append(_drawn(settings.encoder_dim, outputs - settings.vocab_size, (settings.seed, 3)))
    weight, bias = (np.concatenate(both) for both in zip(*parts))
    return _layer(weight, bias, device, dtype)


def simple_projections(settings: Settings, device: torch.device, dtype: torch.dtype) -> Dict[str, torch.nn.Module]:
    """Return the two Linear(D, V) whose outputs the simple loss adds: "am" of the encoder, "lm" of the decoder."""
    source, D, V = source_of(settings), settings.encoder_dim, settings.vocab_size
    if source is None:
        layers = [linear(D, V, device=device, dtype=dtype, key=(settings.seed, number)) for number in (1, 2)]
    else:
        layers = [_layer(weight, bias, device, dtype) for weight, bias in map(source.layer, ("am", "lm"))]
    return dict(zip(("am", "lm"), layers))


class Joiner(torch.nn.Module):
    """The joiner and all other layers that a step trains: logits = Linear(tanh(encoder_out + decoder_out)).

    It is that of the 2022 suite, and icefall's joiner without its projections.

    Args:
        output: Linear(D, V) of the run's dtype.
        extra: other layers that the step of a layout trains, by name.
    """

    def __init__(self, output: torch.nn.Linear, extra: Mapping[str, torch.nn.Module]):
        super().__init__()
        self.output = output
        self.extra = torch.nn.ModuleDict(dict(extra))

    def forward(self, joined: torch.Tensor) -> torch.Tensor:
        """Return the logits (..., V) of sums of encoder and decoder outputs (..., D)."""
        logits: torch.Tensor = self.output(torch.tanh(joined))
        return logits

    def logits(self, batch: Batch) -> torch.Tensor:
        """Return the padded logits (N, T, U+1, V)."""
        return self(batch.encoder_out.unsqueeze(2) + batch.decoder_out.unsqueeze(1))

    def packed_logits(self, batch: Batch) -> torch.Tensor:
        """Return the packed logits (sum T_i (U_i+1), V): the cells of each utterance, row-major, in turn."""
        cells = [
            (batch.encoder_out[n, :T].unsqueeze(1) + batch.decoder_out[n, : U + 1].unsqueeze(0)).flatten(0, 1)
            for n, (T, U) in enumerate(batch.shapes)
        ]
        return self(torch.cat(cells))
