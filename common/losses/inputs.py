"""Make the inputs of a batch and the joiner: the same bits for a seed under every torch and numpy.

The numbers come from the raw output of numpy's PCG64, which is guaranteed never to change (NEP 19).
They become floats by exact arithmetic (rnnt_bench.data.shapes).  Random inputs are uniform in [0,
1), as in the 2022 suite.  Random weights are uniform in +-1/sqrt(D), as torch.nn.Linear draws them.
`Speech` makes the inputs and weights of a trained model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

from rnnt_bench.core.errors import UserError
from rnnt_bench.core.settings import STAGES, Settings
from rnnt_bench.data.shapes import ALIGNMENT, DECODER, ENCODER, TARGETS, WEIGHTS, symbols, uniform

FOLDER = Path(__file__).with_name("weights")
#: A symbol that the model was not trained on copies a trained one, with a logit lower by this.
LESS_LIKELY = 10.0


@lru_cache(maxsize=len(STAGES))
def load(stage: str) -> dict[str, np.ndarray]:
    """Return the arrays in the file of one of STAGES, by name.

    Real numbers are float32; docs/_trained_weights.py wrote them as float16."""
    arrays = {}
    with np.load(str(FOLDER / f"{stage}.npz"), allow_pickle=False) as file:
        for name in file.files:
            array = file[name]
            arrays[name] = array.astype(np.float32) if array.dtype == np.float16 else array
    return arrays


@dataclass(frozen=True)
class Speech:
    """Make the inputs and weights of a small model at a stage of its training, in the sizes of a
    run.

    examples/train.py trained the model; docs/_trained_weights.py wrote a file for each stage into
    weights/.  A file has utterances that the model was not trained on: encoder outputs, symbols,
    and the frame at which each symbol is emitted.  It also has the decoder output after each
    symbol, the output layer, and the projections of the simple loss.

    - An utterance of T frames and U targets is a passage of these utterances with U symbols.
      Frames that emit nothing are repeated or left out evenly until there are T.  For a smaller T,
      emitting frames are left out too.
    - The model's dimensions are copied until there are D, and the weights of each are divided by
      the number of its copies, so the logits stay the same.
    - Symbols beyond the trained ones are copies that are 10 nats less likely.  They cost time, and
      hardly change a posterior.

    It leaves out dropout and the effects of a language: the syllables are random.
    """

    stage: str
    vocab_size: int
    encoder_dim: int

    def __post_init__(self) -> None:
        """Raise UserError if the run's V or D is smaller than the trained model's."""
        symbols, dimensions = self.arrays["output.weight"].shape
        for flag, least, size in (
            ("--vocab-size", symbols, self.vocab_size),
            ("--encoder-dim", dimensions, self.encoder_dim),
        ):
            if size < least:
                raise UserError(
                    f"--logits {self.stage} is of a model with {least}: give {flag} {least} or more"
                )

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """Return the arrays of the stage by name."""
        return load(self.stage)

    def columns(self, dimensions: int) -> np.ndarray:
        """Return an index (D,): for each of the run's D dimensions, which dimension of the trained
        model it copies.

        dimensions: number of dimensions of the trained model."""
        return np.arange(self.encoder_dim) % dimensions

    def outputs(
        self,
        encoder_noise: np.ndarray,
        decoder_noise: np.ndarray,
        targets: np.ndarray,
        shapes: Sequence[tuple[int, int]],
        key: Sequence[int],
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return encoder outputs (N, T, D), decoder outputs (N, U+1, D) and targets (N, U): a
        passage for each utterance.

        Args:
            encoder_noise, decoder_noise: arrays that give the encoder and decoder outputs their
                shape and dtype; their numbers are not used.
            targets: (N, U); those of the padding are returned as they are.
            shapes: (T, U) of each utterance.
            key: names the stream that draws where each passage begins.
        """
        encoder_out = np.empty_like(encoder_noise)
        decoder_out = np.empty_like(decoder_noise)
        targets = targets.copy()
        decoder = self.arrays["decoder"]
        columns = self.columns(decoder.shape[1])
        starts = uniform(len(shapes), ALIGNMENT, *key)
        for n, (T, U) in enumerate(shapes):
            frames, symbols = passage(self.arrays, T, U, float(starts[n]))
            targets[n, :U] = symbols
            encoder_out[n, :T] = self.arrays["encoder_out"][frames][:, columns]
            encoder_out[n, T:] = encoder_out[n, T - 1]
            # The output before the first symbol also fills the padding.
            decoder_out[n] = decoder[0, columns]
            decoder_out[n, 1 : U + 1] = decoder[symbols][:, columns]
        return encoder_out, decoder_out, targets

    def layer(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the weight (V, D) and the bias (V,) of one of LAYERS, for the run's V and D.

        A symbol that the model was not trained on has the row of a trained one, with a bias that is
        lower by LESS_LIKELY.  In "lm" the bias is not lower: the simple loss adds the scores of
        "lm" to those of "am", where the bias is lower already.
        """
        weight = self.arrays[f"{name}.weight"]
        bias = self.arrays[f"{name}.bias"]
        columns = self.columns(weight.shape[1])
        # A dimension that has several copies is divided among them, so logits stay the same.
        copies = np.bincount(columns).astype(np.float32)
        weight = (weight / copies)[:, columns]
        # The untrained symbols copy the trained ones 1, 2, ... in turn; 0 is the blank.
        untrained = self.vocab_size - len(bias)
        copied = np.arange(untrained) % (len(bias) - 1) + 1
        penalty = np.float32(0.0 if name == "lm" else LESS_LIKELY)
        weights = np.concatenate([weight, weight[copied]])
        return weights, np.concatenate([bias, bias[copied] - penalty])


def passage(
    arrays: dict[str, np.ndarray], T: int, U: int, start: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return T frames and U symbols of a passage of a stage's utterances, which are put end to end.

    The frames (T,) are indices into the encoder outputs in ascending order; where the utterances
    end, they begin again.  The symbols (U,) are in [1, V).  If the U symbols are emitted at more
    than T frames, some of these are left out.  If at fewer, other frames of the passage are added,
    evenly repeated or left out; without other frames, those of the symbols are repeated.

    Args:
        arrays: those of the stage (`Speech.arrays`); frames and symbols of all its utterances stand
          in one row each.
        start: the passage begins with the utterance that is at this share, in [0, 1), of them all.
    """
    total_frames = len(arrays["encoder_out"])
    total_symbols = len(arrays["targets"])
    utterance = int(start * len(arrays["T_lengths"]))
    first_frame = int(arrays["T_lengths"][:utterance].sum())
    first_symbol = int(arrays["U_lengths"][:utterance].sum())
    # Those of the U symbols and of the next symbol, before whose frame the passage ends.
    positions = np.arange(first_symbol, first_symbol + U + 1)
    # After the last utterance the first one follows again, at frames that count on.
    rounds, positions = np.divmod(positions, total_symbols)
    emitted = arrays["frames"][positions] + total_frames * rounds
    at_symbols, at_next = emitted[:-1], int(emitted[-1])
    # The passage must have the frame of its last symbol, even if the next symbol has that too.
    end = max(at_next, int(at_symbols.max(initial=first_frame)) + 1)
    emitting = np.unique(at_symbols)
    if T < len(emitting):
        frames = _spread(emitting, T)
    else:
        silent = np.setdiff1d(np.arange(first_frame, end), emitting)
        added = _spread(silent if len(silent) else emitting, T - len(emitting))
        frames = np.sort(np.concatenate([emitting, added]))
    return frames % total_frames, arrays["targets"][positions[:-1]]


def _spread(frames: np.ndarray, count: int) -> np.ndarray:
    """Return `count` of the frames in their order, evenly repeated or left out."""
    return frames[np.arange(count) * len(frames) // max(count, 1)]


#: The outputs of encoder and decoder in a batch, which get a gradient in scope "step".
OUTPUTS = ("encoder_out", "decoder_out")


@dataclass
class Labels:
    """Hold what is known of a batch before the clock starts: what an adapter's `prepare` gets.

    The tensors are on the device of the batch."""

    targets: torch.Tensor  # (N, U) int32 in [1, V)
    T_lengths: torch.Tensor  # (N,) int32
    U_lengths: torch.Tensor  # (N,) int32
    # (T, U) of each utterance on the host, to be read without synchronising the device
    shapes: list[tuple[int, int]]


@dataclass
class Batch(Labels):
    """Hold a batch on its device.

    The outputs are leaves of the run's dtype that require a gradient."""

    encoder_out: torch.Tensor  # (N, T, D)
    decoder_out: torch.Tensor  # (N, U+1, D)

    @property
    def labels(self) -> Labels:
        """Return the batch without the outputs of encoder and decoder."""
        return Labels(self.targets, self.T_lengths, self.U_lengths, self.shapes)

    def fresh(self) -> Batch:
        """Return the batch with the same numbers in new leaves, which have no gradient yet."""
        return replace(
            self,
            encoder_out=self.encoder_out.detach().requires_grad_(),
            decoder_out=self.decoder_out.detach().requires_grad_(),
        )

    def utterance(self, n: int) -> Batch:
        """Return a batch of utterance `n` alone, cut to its own T and U.

        Its tensors are views, and its outputs of encoder and decoder require no gradient."""
        T, U = self.shapes[n]
        only = slice(n, n + 1)
        return Batch(
            encoder_out=self.encoder_out.detach()[only, :T],
            decoder_out=self.decoder_out.detach()[only, : U + 1],
            targets=self.targets[only, :U],
            T_lengths=self.T_lengths[only],
            U_lengths=self.U_lengths[only],
            shapes=[(T, U)],
        )


def source_of(settings: Settings) -> Speech | None:
    """Return the source of inputs and weights, None if they are random.

    Raises UserError for a vocabulary or a dimension that is smaller than the trained model's."""
    if settings.logits not in STAGES:
        return None
    return Speech(settings.logits, settings.vocab_size, settings.encoder_dim)


def padded_sizes(shapes: Sequence[Sequence[int]]) -> tuple[int, int, int]:
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
    source: Speech | None = None,
) -> Batch:
    """Return a batch of new inputs.

    Args:
        shapes: (T, U) of each utterance.
        dtype: of the outputs of encoder and decoder.
        key: (seed, batch, ...).  Equal keys give equal random numbers.
        source: gives the outputs and the targets; None: they are random.
    """
    pairs = [(int(T), int(U)) for T, U in shapes]
    N, T, U = padded_sizes(pairs)
    encoder_out = uniform(N * T * encoder_dim, ENCODER, *key).reshape(N, T, encoder_dim)
    decoder_out = uniform(N * (U + 1) * encoder_dim, DECODER, *key).reshape(N, U + 1, encoder_dim)
    targets = symbols((N, U), vocab_size, TARGETS, *key)
    if source is not None:
        # It replaces all these random numbers but the targets of the padding.
        encoder_out, decoder_out, targets = source.outputs(
            encoder_out, decoder_out, targets, pairs, key
        )
    lengths = torch.tensor(pairs, dtype=torch.int32, device=device)
    return Batch(
        encoder_out=torch.from_numpy(encoder_out).to(device, dtype).requires_grad_(),
        decoder_out=torch.from_numpy(decoder_out).to(device, dtype).requires_grad_(),
        targets=torch.from_numpy(targets).to(device),
        T_lengths=lengths[:, 0].contiguous(),
        U_lengths=lengths[:, 1].contiguous(),
        shapes=pairs,
    )


def drawn(inputs: int, outputs: int, key: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return the random weight (outputs, inputs) and bias (outputs,) of a linear layer, float32.

    key: names the stream of the numbers."""
    bound = 1 / math.sqrt(inputs)
    shares = uniform((inputs + 1) * outputs, WEIGHTS, *key).astype(np.float64)
    numbers = (shares * 2 * bound - bound).astype(np.float32)
    weight, bias = np.split(numbers, [inputs * outputs])
    return weight.reshape(outputs, inputs), bias


#: The layers that a run may have: the output layer of the joiner, and the projections of encoder
#: and decoder outputs (acoustic and language model), whose scores the simple loss adds.
LAYERS = ("output", "am", "lm")


def layer(
    name: str, settings: Settings, device: torch.device, dtype: torch.dtype, further: int = 0
) -> torch.nn.Linear:
    """Return one of LAYERS, a Linear(D, V + further) of a run.

    The `further` outputs (durations) are random even if the others are trained.  Raises UserError
    for sizes that are smaller than the trained model's.
    """
    source, D, V = source_of(settings), settings.encoder_dim, settings.vocab_size
    if source is None:
        weight, bias = drawn(D, V + further, (settings.seed, LAYERS.index(name)))
    else:
        weight, bias = source.layer(name)
        # Their stream has the number after those of LAYERS.
        further_weight, further_bias = drawn(D, further, (settings.seed, len(LAYERS)))
        weight = np.concatenate([weight, further_weight])
        bias = np.concatenate([bias, further_bias])
    result = torch.nn.Linear(weight.shape[1], weight.shape[0], device=device, dtype=dtype)
    with torch.no_grad():
        result.weight.copy_(torch.from_numpy(weight))
        result.bias.copy_(torch.from_numpy(bias))
    return result


class Joiner(torch.nn.Module):
    """The joiner of the 2022 suite, logits = output(tanh(encoder_out + decoder_out)).

    It is icefall's joiner without its projections.  `extra` has the other layers that a step
    trains, by name.
    """

    def __init__(self, output: torch.nn.Linear, extra: Mapping[str, torch.nn.Module]):
        super().__init__()
        self.output = output
        self.extra = torch.nn.ModuleDict(dict(extra))

    def forward(self, joined: torch.Tensor) -> torch.Tensor:
        """Return the logits (..., V) of sums of encoder and decoder outputs (..., D)."""
        return self.output(torch.tanh(joined))

    def logits(self, batch: Batch) -> torch.Tensor:
        """Return the padded logits (N, T, U+1, V)."""
        return self(batch.encoder_out.unsqueeze(2) + batch.decoder_out.unsqueeze(1))
