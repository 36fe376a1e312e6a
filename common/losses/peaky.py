"""Make inputs and weights whose posteriors are sharp along one alignment, even sharper than a trained model's.

With uniform inputs all paths have similar probabilities.  A trained model puts almost all of the probability on one
path, which matters for denormals, pruning and sparse kernels.

Every symbol k has a code c(k) of D signs.  The decoder output before target y is a c(y); the encoder output at a frame
is a times the sum of the codes of the targets emitted there; both have a little noise.  The joiner's weights of symbol
k are s c(k) / D; the blank has a bias alone.  So a label's logit is s tanh(2 a) where both outputs contain its code, s
tanh(a) where one does, else about 0.  The blank's is s (tanh(2 a) + tanh(a)) / 2.  Label and blank thus differ by
`margin` nats, in favour of the label where the alignment emits a target.

A target equal to the one before is emitted together with it: still one path.  With more than two or three targets a
frame the margin gets smaller, since tanh clips their sum.

Exact arithmetic on guaranteed streams, as in common.losses.inputs: the same bits under every torch and numpy.  Leaves
out wrong and uncertain frames, and targets of different probabilities.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, List, Sequence, Tuple

import numpy as np

from common.core.errors import UserError
from common.data.streams import ALIGNMENT, CODES, uniform

if TYPE_CHECKING:
    from common.core.settings import Settings

#: a: small, so that tanh hardly clips and a frame may emit several targets; a power of two, so that it is exact.
AMPLITUDE = 0.25
#: tanh(2 a) and tanh(a), as literals: the last digit of libm's differs between machines.
BOTH, ONE = 0.46211715726000975, 0.24491866240370913
#: Largest correlation of two codes: at one half, a target could reach the blank's logit by another target's code.
CORRELATION = 1 / 3
#: Codes drawn at once.  If none of them differs enough from the codes found so far, D is too small for V.
CANDIDATES = 1000


@dataclass(frozen=True)
class Peaky:
    """The source of a run's inputs and weights (common.losses.inputs)."""

    codes: np.ndarray  # (V, D), see `codes`
    margin: float  # nats

    @classmethod
    def of(cls, settings: Settings) -> Peaky:
        """Return the source of a run; raise UserError as `codes` does."""
        return cls(codes(settings.vocab_size, settings.encoder_dim, settings.seed), settings.margin)

    def outputs(
        self,
        encoder_noise: np.ndarray,
        decoder_noise: np.ndarray,
        targets: np.ndarray,
        shapes: Sequence[Tuple[int, int]],
        key: Sequence[int],
    ) -> Tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the inputs of `outputs` along alignments of the stream that `key` names, and the targets as given."""
        N, T, _ = encoder_noise.shape
        draws = uniform(N * T, ALIGNMENT, *key).reshape(N, T)
        return (*outputs(encoder_noise, decoder_noise, targets, shapes, self.codes, draws), targets)

    def joiner_layer(self) -> Tuple[np.ndarray, np.ndarray]:
        """Return weights (V, D) and bias (V,) of the joiner's output layer."""
        return joiner_layer(self.codes, self.margin)

    def simple_layers(self) -> Tuple[Tuple[np.ndarray, ...], Tuple[np.ndarray, ...]]:
        """Return (weights, bias) of the projections am and lm."""
        return simple_layers(self.codes, self.margin)


@lru_cache(maxsize=8)
def codes(vocab_size: int, encoder_dim: int, seed: int) -> np.ndarray:
    """Return the codes (V, D) float32 of the symbols: -1 and +1, but all 0 for the blank.

    No two are correlated by more than CORRELATION.  Raises UserError if D is too small for so many symbols.
    """
    V, D = vocab_size, encoder_dim
    result = np.zeros((V, D), dtype=np.float32)
    count, at_once = 1, max(V - 1, CANDIDATES)
    surely = V * V * math.exp(-D * CORRELATION**2 / 2) < 0.01  # Hoeffding: hardly any two correlate more
    for number in range(V):
        drawn = np.where(uniform(at_once * D, CODES, seed, number) < 0.5, -1, 1).astype(np.float32).reshape(-1, D)
        kept = drawn[: V - count] if surely else _apart(result[:count], drawn)[: V - count]
        result[count : count + len(kept)] = kept
        count += len(kept)
        if count == V or not len(kept):
            break
    if count < V:
        raise UserError(
            f"--logits peaky: {D} dimensions are too few for {V} codes that differ enough; use a larger --encoder-dim "
            "or a smaller --vocab-size"
        )
    return result


def _apart(codes: np.ndarray, drawn: np.ndarray) -> np.ndarray:
    """Return the rows of `drawn` that correlate neither with `codes` nor with an earlier row that is kept."""
    limit = CORRELATION * drawn.shape[1]  # of products that are whole numbers, exact in float32
    drawn = drawn[(np.abs(drawn @ codes.T) <= limit).all(axis=1)]
    close = np.abs(drawn @ drawn.T) > limit
    kept: List[int] = []
    for row in range(len(drawn)):
        if not close[row, kept].any():
            kept.append(row)
    return drawn[kept]


def alignment(T: int, U: int, draws: np.ndarray) -> np.ndarray:
    """Return the frames (U,) in [0, T), ascending, at which the targets are emitted.

    They are all different if U <= T, else every frame has U // T or U // T + 1 targets.  `draws` are at least T random
    numbers in [0, 1), which choose the frames.
    """
    chosen = np.argsort(draws[:T], kind="stable")[: U % T]
    return np.sort(np.concatenate([np.repeat(np.arange(T), U // T), chosen]))


def outputs(
    encoder_noise: np.ndarray,
    decoder_noise: np.ndarray,
    targets: np.ndarray,
    shapes: Sequence[Tuple[int, int]],
    codes: np.ndarray,
    draws: np.ndarray,
) -> Tuple[np.ndarray, np.ndarray]:
    """Return encoder outputs (N, T, D) and decoder outputs (N, U+1, D), float32, that follow a random alignment.

    Args:
        encoder_noise, decoder_noise: random numbers in [0, 1) of these shapes.
        targets: (N, U).
        shapes: (T, U) of each utterance.
        codes: (V, D), see `codes`.
        draws: (N, T) random numbers in [0, 1), for the alignments.
    """
    half = np.float32(0.5)
    encoder_out, decoder_out = (encoder_noise - half) * half, (decoder_noise - half) * half
    for n, (T, U) in enumerate(shapes):
        of_targets = codes[targets[n, :U]]
        np.add.at(encoder_out[n], alignment(T, U, draws[n]), of_targets)
        decoder_out[n, :U] += of_targets
    return encoder_out * np.float32(AMPLITUDE), decoder_out * np.float32(AMPLITUDE)


def joiner_layer(codes: np.ndarray, margin: float) -> Tuple[np.ndarray, np.ndarray]:
    """Return weights (V, D) and bias (V,), float32, of the joiner's output layer; `margin` is in nats."""
    scale = margin / ((BOTH - ONE) / 2)
    return _layer(codes, scale, blank_bias=scale * (BOTH + ONE) / 2)


def simple_layers(codes: np.ndarray, margin: float) -> Tuple[Tuple[np.ndarray, ...], Tuple[np.ndarray, ...]]:
    """Return (weights, bias) of the projections am and lm whose sum, without tanh, has the same alignment and margin.

    A label has 2 a s where both contain its code and a s where one does; the blank has 1.5 a s, of which 0.5 are from
    am and 1 from lm, so that lm alone prefers neither the blank nor the next target.
    """
    scale = margin / (AMPLITUDE / 2)
    am_bias, lm_bias = (share * AMPLITUDE * scale for share in (0.5, 1.0))
    return _layer(codes, scale, am_bias), _layer(codes, scale, lm_bias)


def _layer(codes: np.ndarray, scale: float, blank_bias: float) -> Tuple[np.ndarray, np.ndarray]:
    """Return weights (V, D), the codes times `scale` / D, and a bias (V,) of the blank alone."""
    weight = (codes.astype(np.float64) * (scale / codes.shape[1])).astype(np.float32)
    weight[0] = 0
    bias = np.zeros(len(codes), dtype=np.float32)
    bias[0] = blank_bias
    return weight, bias
