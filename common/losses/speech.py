"""Give inputs and weights of a small model in training: real logits, at its first steps, in the middle and at the end.

examples/train.py trained the model; benchmarks/trained_weights.py wrote weights/, a file for each stage.  A file holds,
for utterances that the model was not trained on, what the joiner takes of it: encoder outputs, symbols and the frame at
which each is emitted, decoder outputs by the last symbol, the output layer, and the projections of the simple loss.

- An utterance of T frames and U targets is a passage of these utterances with U symbols.  Frames that emit nothing are
  repeated or left out evenly until there are T; for a smaller T, emitting frames are left out too.
- The H dimensions are copied as often as D has room for, with weights divided by the number of copies: same logits.
- Symbols beyond the trained ones are copies that are 10 nats less likely: they cost time, and hardly change a
  posterior.

Leaves out dropout and the effects of a language: the syllables are random.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Dict, Sequence, Tuple

import numpy as np

from common.core.errors import UserError
from common.core.settings import STAGES
from common.data.streams import ALIGNMENT, uniform

WEIGHTS = Path(__file__).with_name("weights")
#: Logit penalty (nats) of a symbol unseen in training, relative to the trained symbol that it copies.
LESS_LIKELY = 10.0


@lru_cache(maxsize=len(STAGES))
def load(stage: str) -> Dict[str, np.ndarray]:
    """Return the arrays of a stage (see benchmarks/trained_weights.py), real numbers as float32."""
    with np.load(str(WEIGHTS / f"{stage}.npz"), allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}
    return {name: array.astype(np.float32) if array.dtype == np.float16 else array for name, array in arrays.items()}


@dataclass(frozen=True)
class Speech:
    """A stage of the model, with the sizes of a run.

    Raises UserError for fewer symbols or dimensions than it has."""

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
