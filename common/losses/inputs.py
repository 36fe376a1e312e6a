"""Random inputs of one batch, and the joiner's weights: the same bits for the same seed under every torch and numpy.

The numbers come from the raw output of numpy's PCG64, whose stream is guaranteed never to change (NEP 19); turning it
into floats is exact arithmetic done here.  torch's own generators make no such promise between versions.  Inputs are
uniform in [0, 1), as in the 2022 suite; weights are uniform in +-1/sqrt(D), as torch.nn.Linear draws them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import List, Sequence, Tuple

import numpy as np
import torch

#: First word of each stream's key, so that no two draw the same numbers.
ENCODER, DECODER, TARGETS, WEIGHTS, POOL = range(5)


def uniform(count: int, *key: int) -> np.ndarray:
    """(count,) float32 in [0, 1), multiples of 2^-24, from the stream that `key` names."""
    words = np.random.PCG64(np.random.SeedSequence(key)).random_raw((count + 1) // 2)
    return (words.astype("<u8").view("<u4")[:count] >> 8).astype(np.float32) * np.float32(2**-24)


def symbols(shape: Tuple[int, int], vocab_size: int, *key: int) -> np.ndarray:
    """`shape` int32 in [1, vocab_size): never the blank, 0."""
    words = np.random.PCG64(np.random.SeedSequence(key)).random_raw(shape[0] * shape[1])
    return (1 + (words >> np.uint64(33)) % np.uint64(vocab_size - 1)).astype(np.int32).reshape(shape)


@dataclass
class Batch:
    """One batch on its device.

    encoder_out (N, T, D) and decoder_out (N, U+1, D): leaves of the run's dtype that require gradients; targets (N, U)
    int32 in [1, V); T_lengths, U_lengths (N,) int32 on the device, and the same as lists in `shapes`, so that no
    implementation needs a device synchronisation to learn them.
    """

    encoder_out: torch.Tensor
    decoder_out: torch.Tensor
    targets: torch.Tensor
    T_lengths: torch.Tensor
    U_lengths: torch.Tensor
    shapes: List[Tuple[int, int]]


def _batch(
    shapes: Sequence[Sequence[int]],
    encoder_out: torch.Tensor,
    decoder_out: torch.Tensor,
    vocab_size: int,
    device: torch.device,
    *key: int,
) -> Batch:
    pairs = [(int(T), int(U)) for T, U in shapes]
    lengths = torch.tensor(pairs, dtype=torch.int32, device=device)
    targets = symbols((len(pairs), max(U for _, U in pairs)), vocab_size, TARGETS, *key)
    return Batch(
        encoder_out=encoder_out.requires_grad_(),
        decoder_out=decoder_out.requires_grad_(),
        targets=torch.from_numpy(targets).to(device),
        T_lengths=lengths[:, 0].contiguous(),
        U_lengths=lengths[:, 1].contiguous(),
        shapes=pairs,
    )


def padded_sizes(shapes: Sequence[Sequence[int]]) -> Tuple[int, int, int]:
    """(N, longest T, longest U) of a batch."""
    return len(shapes), int(max(T for T, _ in shapes)), int(max(U for _, U in shapes))


def make_batch(
    shapes: Sequence[Sequence[int]],
    *,
    vocab_size: int,
    encoder_dim: int,
    device: torch.device,
    dtype: torch.dtype,
    key: Sequence[int],
) -> Batch:
    """A batch of fresh random inputs for utterances of the given (T, U); `key` (seed, batch, ...) names its stream."""
    N, T, U = padded_sizes(shapes)
    encoder_out = torch.from_numpy(uniform(N * T * encoder_dim, ENCODER, *key)).view(N, T, encoder_dim)
    decoder_out = torch.from_numpy(uniform(N * (U + 1) * encoder_dim, DECODER, *key)).view(N, U + 1, encoder_dim)
    return _batch(shapes, encoder_out.to(device, dtype), decoder_out.to(device, dtype), vocab_size, device, *key)


class Pool:
    """Inputs of many batches as views of one random buffer per kind, big enough for the largest.

    For loops whose time or memory must hold nothing of making inputs: a batch costs no kernel and no memory.  Its
    views are fresh leaves each time, with no gradient of an earlier batch.
    """

    def __init__(
        self,
        batches: Sequence[Sequence[Sequence[int]]],
        *,
        vocab_size: int,
        encoder_dim: int,
        device: torch.device,
        dtype: torch.dtype,
        seed: int,
    ):
        sizes = [padded_sizes(shapes) for shapes in batches]
        frames = max(N * T for N, T, _ in sizes)
        tokens = max(N * (U + 1) for N, _, U in sizes)
        self.encoder = torch.from_numpy(uniform(frames * encoder_dim, POOL, ENCODER, seed)).to(device, dtype)
        self.decoder = torch.from_numpy(uniform(tokens * encoder_dim, POOL, DECODER, seed)).to(device, dtype)
        self.vocab_size, self.encoder_dim, self.device, self.seed = vocab_size, encoder_dim, device, seed

    def batch(self, shapes: Sequence[Sequence[int]], index: int) -> Batch:
        """A batch of the given (T, U); `index` names the stream of its targets."""
        N, T, U = padded_sizes(shapes)
        D = self.encoder_dim
        encoder_out = self.encoder[: N * T * D].view(N, T, D).detach()
        decoder_out = self.decoder[: N * (U + 1) * D].view(N, U + 1, D).detach()
        return _batch(shapes, encoder_out, decoder_out, self.vocab_size, self.device, self.seed, index)


def linear(
    inputs: int, outputs: int, *, device: torch.device, dtype: torch.dtype, key: Sequence[int]
) -> torch.nn.Linear:
    """Linear(inputs, outputs) with weights and bias of the stream that `key` names."""
    bound = 1 / math.sqrt(inputs)
    drawn = (uniform((inputs + 1) * outputs, WEIGHTS, *key).astype(np.float64) * 2 * bound - bound).astype(np.float32)
    layer = torch.nn.Linear(inputs, outputs, device=device, dtype=dtype)
    with torch.no_grad():
        layer.weight.copy_(torch.from_numpy(drawn[: inputs * outputs]).view(outputs, inputs))
        layer.bias.copy_(torch.from_numpy(drawn[inputs * outputs :]))
    return layer
