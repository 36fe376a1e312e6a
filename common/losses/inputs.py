"""Make the inputs of a batch and the joiner: the same bits for a seed under every torch and numpy.

The numbers come from the raw output of numpy's PCG64, which is guaranteed never to change (NEP 19), and become floats
by exact arithmetic (common.data.streams).  torch's own generators may change between versions.  Random inputs are
uniform in [0, 1), as in the 2022 suite, and weights uniform in +-1/sqrt(D), as torch.nn.Linear draws them; for others
see Speech.  Leaves out the encoder and the decoder, which cost the same for every loss.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Dict, List, Mapping, Optional, Sequence, Tuple

import numpy as np
import torch

from common.core.errors import UserError
from common.core.settings import STAGES, Settings
from common.data.streams import ALIGNMENT, DECODER, ENCODER, TARGETS, WEIGHTS, symbols, uniform

FOLDER = Path(__file__).with_name("weights")
#: Logit penalty (nats) of a symbol unseen in training, relative to the trained symbol that it copies.
LESS_LIKELY = 10.0


@lru_cache(maxsize=len(STAGES))
def load(stage: str) -> Dict[str, np.ndarray]:
    """Return the arrays of a stage (see benchmarks/trained_weights.py), real numbers as float32."""
    with np.load(str(FOLDER / f"{stage}.npz"), allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}
    return {name: array.astype(np.float32) if array.dtype == np.float16 else array for name, array in arrays.items()}


@dataclass(frozen=True)
class Speech:
    """Real logits: inputs and weights of a small model at a stage of its training, with the sizes of a run.

    examples/train.py trained the model; benchmarks/trained_weights.py wrote weights/, a file for each stage.  A file
    holds, for utterances that the model was not trained on, what the joiner takes of it: encoder outputs, symbols and
    the frame at which each is emitted, decoder outputs by the last symbol, the output layer, and the projections of the
    simple loss.

    - An utterance of T frames and U targets is a passage of these utterances with U symbols.  Frames that emit nothing
      are repeated or left out evenly until there are T; for a smaller T, emitting frames are left out too.
    - The H dimensions are copied as often as D has room for, with weights divided by the number of copies: same logits.
    - Symbols beyond the trained ones are copies that are 10 nats less likely: they cost time, and hardly change a
      posterior.

    Leaves out dropout and the effects of a language: the syllables are random.  Raises UserError for fewer symbols or
    dimensions than it has.
    """

    stage: str
    vocab_size: int
    encoder_dim: int

    def __post_init__(self) -> None:
        symbols, dimensions = self.arrays["output.weight"].shape
        for flag, least, given in (
            ("--vocab-size", symbols, self.vocab_size),
            ("--encoder-dim", dimensions, self.encoder_dim),
        ):
            if given < least:
                raise UserError(f"--logits {self.stage} is of a model with {least}: give {flag} {least} or more")

    @property
    def arrays(self) -> Dict[str, np.ndarray]:
        """Return the arrays of the stage."""
        return load(self.stage)

    def outputs(
        self,
        encoder_noise: np.ndarray,
        decoder_noise: np.ndarray,
        targets: np.ndarray,
        shapes: Sequence[Tuple[int, int]],
        key: Sequence[int],
    ) -> Tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return encoder outputs (N, T, D), decoder outputs (N, U+1, D) and targets (N, U) of passages.

        Args:
            encoder_noise, decoder_noise: arrays of the shapes of the first two.
            targets: (N, U); those of the padding are kept.
            shapes: (T, U) of each utterance.
            key: names the stream that draws where each passage begins.
        """
        encoder_out, decoder_out, targets = np.empty_like(encoder_noise), np.empty_like(decoder_noise), targets.copy()
        columns = self._columns()
        for n, ((T, U), start) in enumerate(zip(shapes, uniform(len(shapes), ALIGNMENT, *key))):
            frames, symbols = passage(self.arrays, T, U, float(start))
            targets[n, :U] = symbols
            encoder_out[n, :T] = self.arrays["encoder_out"][frames][:, columns]
            encoder_out[n, T:] = encoder_out[n, T - 1]
            decoder_out[n] = self.arrays["decoder"][0, columns]
            decoder_out[n, 1 : U + 1] = self.arrays["decoder"][symbols][:, columns]
        return encoder_out, decoder_out, targets

    def _columns(self) -> np.ndarray:
        """Return the model's dimension that each of the D is a copy of."""
        return np.arange(self.encoder_dim) % self.arrays["decoder"].shape[1]

    def layer(self, name: str) -> Tuple[np.ndarray, np.ndarray]:
        """Return weights (V, D) and bias (V,) of "output", the joiner's layer, or of the projections "am" and "lm".

        Rows of symbols that the model was not trained on are copies; those of "lm" are as likely as the others."""
        weight, bias = self.arrays[f"{name}.weight"], self.arrays[f"{name}.bias"]
        further = np.arange(self.vocab_size - len(bias)) % (len(bias) - 1) + 1  # never the blank
        columns = self._columns()
        copies = np.bincount(columns).astype(np.float32)
        weight = (weight / copies[: weight.shape[1]])[:, columns]
        return np.concatenate([weight, weight[further]]), np.concatenate(
            [bias, bias[further] - np.float32(LESS_LIKELY * (name != "lm"))]
        )


def passage(arrays: Dict[str, np.ndarray], T: int, U: int, start: float) -> Tuple[np.ndarray, np.ndarray]:
    """Return the frames (T,) and the symbols (U,) of a passage that begins with an utterance.

    Args:
        arrays: of a stage.
        T, U: the passage's numbers of frames and symbols.
        start: in [0, 1), which chooses the utterance.
    """
    total, symbols, utterances = len(arrays["encoder_out"]), len(arrays["targets"]), len(arrays["T_lengths"])
    first = int(start * utterances)
    begin, offset = int(arrays["T_lengths"][:first].sum()), int(arrays["U_lengths"][:first].sum())
    places = np.arange(offset, offset + U + 1)  # and the next one, at which the passage ends
    emitted = arrays["frames"][places % symbols] + total * (places // symbols)  # from the end to the beginning again
    end = max(int(emitted[-1]), int(emitted[:-1].max(initial=begin)) + 1)
    needed = np.unique(emitted[:-1])
    others = np.setdiff1d(np.arange(begin, end), needed)
    if T < len(needed):
        frames = _spread(needed, T)
    else:
        frames = np.sort(np.concatenate([needed, _spread(others if len(others) else needed, T - len(needed))]))
    return frames % total, arrays["targets"][places[:-1] % symbols]


def _spread(frames: np.ndarray, count: int) -> np.ndarray:
    """Return `count` of the frames in their order, evenly repeated or left out."""
    return frames[np.arange(count) * len(frames) // max(count, 1)]


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
