"""Inputs and weights under which the joiner's posteriors are sharp along an alignment, as a trained model's are.

Under uniform inputs posteriors are diffuse, and every path counts.  A trained model knows where each token ends: one
path counts, and denormals, pruning and sparse kernels see another loss.  Here every symbol k has a code c(k) of D
signs; the decoder output before target y is a c(y), the encoder output at a frame is a times the sum of the codes of
the targets that the alignment emits there, and both carry a little noise.  The joiner's weights of symbol k are s c(k)
/ D, and none for the blank, which has a bias only: a label's logit is s tanh(2 a) where both outputs say it, s tanh(a)
where one does, about 0 where none does, and the blank's is s (tanh(2 a) + tanh(a)) / 2, in between.  So where the
alignment emits a target, its logit is above the blank's by `margin` nats, and where it does not, the blank's is above
the next target's by as much; other symbols come far behind.

A target that follows its like is emitted with it, earlier than aligned: still one path.  Where U is above T frames emit
several targets, and above two or three each the margin fades, since tanh clips their sum.

Exact arithmetic on guaranteed streams, as in common.losses.inputs: the same bits under every torch and numpy.  Leaves
out what training would add: wrong and uncertain frames, and targets that are likelier than others.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING, List, Optional, Sequence, Tuple

import numpy as np

from common.errors import UserError

if TYPE_CHECKING:
    from common.settings import Settings

#: a: small, so that tanh adds rather than clips, and a frame may emit several targets; a power of two is exact.
AMPLITUDE = 0.25
#: tanh(2 a) and tanh(a); literals, since libm's last digit differs from machine to machine.
BOTH, ONE = 0.46211715726000975, 0.24491866240370913
#: Largest correlation of two codes: at a half, a target beside another's code would reach the blank's logit.
CORRELATION = 1 / 3
#: Codes drawn at once; when none of so many differs enough from those there are, D is too small for V.
CANDIDATES = 1000


def codes_of(settings: Settings) -> Optional[np.ndarray]:
    """The codes of a run, or None where its logits are random.  Raises UserError as `codes` does."""
    if settings.logits == "random":
        return None
    return codes(settings.vocab_size, settings.encoder_dim, settings.seed)


@lru_cache(maxsize=8)
def codes(vocab_size: int, encoder_dim: int, seed: int) -> np.ndarray:
    """(V, D) float32 of -1 and +1, a row for each symbol (the blank's is all 0), no two correlated by more than
    CORRELATION.

    Raises UserError where D has too few signs for so many symbols.
    """
    from common.losses.inputs import CODES, uniform

    V, D = vocab_size, encoder_dim
    found = np.zeros((V, D), dtype=np.float32)
    count, at_once = 1, max(V - 1, CANDIDATES)
    surely = V * V * math.exp(-D * CORRELATION**2 / 2) < 0.01  # Hoeffding: hardly any two can correlate so much
    for number in range(V):
        drawn = np.where(uniform(at_once * D, CODES, seed, number) < 0.5, -1, 1).astype(np.float32).reshape(-1, D)
        kept = drawn[: V - count] if surely else _apart(found[:count], drawn)[: V - count]
        found[count : count + len(kept)] = kept
        count += len(kept)
        if count == V or not len(kept):
            break
    if count < V:
        raise UserError(
            f"--logits peaky: {D} dimensions hold no {V} codes that differ enough; take a larger --encoder-dim or a "
            "smaller --vocab-size"
        )
    return found


def _apart(found: np.ndarray, drawn: np.ndarray) -> np.ndarray:
    """Rows of `drawn` that neither correlate with `found` nor with each other; the first come first."""
    limit = CORRELATION * drawn.shape[1]  # of products that are whole numbers, exact in float32
    drawn = drawn[(np.abs(drawn @ found.T) <= limit).all(axis=1)]
    close = np.abs(drawn @ drawn.T) > limit
    kept: List[int] = []
    for row in range(len(drawn)):
        if not close[row, kept].any():
            kept.append(row)
    return drawn[kept]


def alignment(T: int, U: int, draws: np.ndarray) -> np.ndarray:
    """(U,) frames in [0, T), ascending, at which the targets are emitted: all different where U <= T, else every frame
    has U // T of them or one more.

    draws: at least T numbers in [0, 1), which choose the frames.
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
    """Encoder outputs (N, T, D) and decoder outputs (N, U+1, D), float32, that follow a random alignment.

    noise: of the same shapes, in [0, 1); targets (N, U); shapes: (T, U) of each utterance; codes (V, D); draws (N, T)
    in [0, 1), for the alignments.
    """
    half = np.float32(0.5)
    encoder_out, decoder_out = (encoder_noise - half) * half, (decoder_noise - half) * half
    for n, (T, U) in enumerate(shapes):
        said = codes[targets[n, :U]]
        np.add.at(encoder_out[n], alignment(T, U, draws[n]), said)
        decoder_out[n, :U] += said
    return encoder_out * np.float32(AMPLITUDE), decoder_out * np.float32(AMPLITUDE)


def joiner_layer(codes: np.ndarray, margin: float) -> Tuple[np.ndarray, np.ndarray]:
    """(V, D) weights and (V,) bias, float32, of the joiner's output layer; `margin` in nats."""
    scale = margin / ((BOTH - ONE) / 2)
    return _layer(codes, scale, blank_bias=scale * (BOTH + ONE) / 2)


def simple_layers(codes: np.ndarray, margin: float) -> Tuple[Tuple[np.ndarray, ...], Tuple[np.ndarray, ...]]:
    """(weights, bias) of the projections am and lm whose sum, without tanh, has the same alignment and margin.

    There a label has 2 a s where both say it, a s where one does, the blank 1.5 a s: 0.5 of them from am, 1 from lm, so
    that the decoder alone prefers neither the blank nor the next target.
    """
    scale = margin / (AMPLITUDE / 2)
    am_bias, lm_bias = (share * AMPLITUDE * scale for share in (0.5, 1.0))
    return _layer(codes, scale, am_bias), _layer(codes, scale, lm_bias)


def _layer(codes: np.ndarray, scale: float, blank_bias: float) -> Tuple[np.ndarray, np.ndarray]:
    weight = (codes.astype(np.float64) * (scale / codes.shape[1])).astype(np.float32)
    weight[0] = 0
    bias = np.zeros(len(codes), dtype=np.float32)
    bias[0] = blank_bias
    return weight, bias
