"""Recognisers that can be profiled without a download: give one as `source: recognisers.py:NAME` of
a configuration.

Two transducers of torchaudio with random weights and their beam search, and silero-vad with the
weights of its package.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from rnnt_bench.core.errors import NotRunnable
from rnnt_bench.tools.inference.recognisers import SAMPLE_RATE


class Features(nn.Module):
    """Compute log mel energies (N, frames, mels), 100 frames a second, of waves (N, samples)."""

    def __init__(self, sample_rate: int = SAMPLE_RATE, mels: int = 80):
        super().__init__()
        from torchaudio.transforms import MelSpectrogram

        self.mel = MelSpectrogram(
            sample_rate, n_fft=400, hop_length=sample_rate // 100, n_mels=mels
        )

    def forward(self, waves: torch.Tensor) -> torch.Tensor:
        return self.mel(waves).clamp_min(1e-5).log().transpose(1, 2)


class _Conformer(nn.Module):
    """Compute encodings (N, T, encoding_dim) of features, with T a stride-th of the frames: a
    transcriber of torchaudio's RNNT."""

    def __init__(
        self,
        mels: int,
        stride: int,
        dim: int,
        heads: int,
        feed_forward: int,
        layers: int,
        encoding_dim: int,
    ):
        super().__init__()
        from torchaudio.models import Conformer
        from torchaudio.models.rnnt import _TimeReduction

        self.reduction, self.input = _TimeReduction(stride), nn.Linear(mels * stride, dim)
        self.conformer = Conformer(dim, heads, feed_forward, layers, depthwise_conv_kernel_size=31)
        self.output = nn.Linear(dim, encoding_dim)

    def forward(
        self, features: torch.Tensor, lengths: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        reduced, lengths = self.reduction(features, lengths)
        encoded, lengths = self.conformer(self.input(reduced), lengths)
        return self.output(encoded), lengths


class ConformerRNNT(nn.Module):
    """Run torchaudio's Conformer, prediction network and joiner with random weights, and its beam
    search.

    stride: frames in an encoding; blank_bias: added to the blank's logit, without which random
    weights would emit symbols_per_frame symbols in every frame.
    """

    def __init__(
        self,
        vocab_size: int = 512,
        layers: int = 8,
        dim: int = 256,
        heads: int = 4,
        feed_forward: int = 1024,
        encoding_dim: int = 256,
        stride: int = 8,
        beam_width: int = 4,
        symbols_per_frame: int = 2,
        blank_bias: float = 5.0,
        mels: int = 80,
    ):
        super().__init__()
        from torchaudio.models import RNNT, RNNTBeamSearch
        from torchaudio.models.rnnt import _Joiner, _Predictor

        self.features, self.beam_width = Features(mels=mels), beam_width
        encoder = _Conformer(mels, stride, dim, heads, feed_forward, layers, encoding_dim)
        predictor = _Predictor(
            vocab_size,
            encoding_dim,
            symbol_embedding_dim=dim,
            num_lstm_layers=1,
            lstm_hidden_dim=dim,
        )
        joiner = _Joiner(encoding_dim, vocab_size, activation="tanh")
        with torch.no_grad():
            joiner.linear.bias[-1] += blank_bias  # the search takes the last symbol for the blank
        self.model = RNNT(encoder, predictor, joiner)
        self.search = RNNTBeamSearch(self.model, vocab_size - 1, step_max_tokens=symbols_per_frame)

    def forward(
        self, waves: torch.Tensor, lengths: torch.Tensor
    ) -> tuple[torch.Tensor, list[list[int]]]:
        """Return (encodings (N, T, encoding_dim), the symbols of the best hypothesis of each
        utterance)."""
        features = self.features(waves)
        frames = torch.full_like(lengths, features.shape[1])
        encoded, counts = self.model.transcribe(features, frames)
        rows = zip(encoded.float().split(1), counts.tolist())
        return encoded, [
            _symbols(self.search._search(row[:, :count], None, self.beam_width))
            for row, count in rows
        ]


class EmformerRNNT(nn.Module):
    """Run torchaudio's streaming Emformer transducer with random weights: segments of 0.16 s with
    0.04 s of right context, each through its beam search.  blank_bias: as of ConformerRNNT."""

    SEGMENT, CONTEXT = 16, 4  # frames

    def __init__(
        self,
        vocab_size: int = 512,
        layers: int = 6,
        dim: int = 256,
        beam_width: int = 4,
        blank_bias: float = 5.0,
    ):
        super().__init__()
        from torchaudio.models import RNNTBeamSearch
        from torchaudio.models.rnnt import emformer_rnnt_model

        self.features, self.beam_width = Features(), beam_width
        model = emformer_rnnt_model(
            input_dim=80,
            encoding_dim=dim,
            num_symbols=vocab_size,
            segment_length=self.SEGMENT,
            right_context_length=self.CONTEXT,
            time_reduction_input_dim=dim // 4,
            time_reduction_stride=4,
            transformer_num_heads=4,
            transformer_ffn_dim=4 * dim,
            transformer_num_layers=layers,
            transformer_dropout=0.0,
            transformer_activation="gelu",
            transformer_left_context_length=30,
            transformer_max_memory_size=0,
            transformer_weight_init_scale_strategy="depthwise",
            transformer_tanh_on_mem=True,
            symbol_embedding_dim=dim,
            num_lstm_layers=1,
            lstm_layer_norm=True,
            lstm_layer_norm_epsilon=1e-3,
            lstm_dropout=0.0,
        )
        with torch.no_grad():
            model.joiner.linear.bias[-1] += blank_bias
        self.search = RNNTBeamSearch(model, vocab_size - 1, step_max_tokens=2)

    def forward(self, waves: torch.Tensor, lengths: torch.Tensor) -> list[list[int]]:
        return [symbols for wave in waves.split(1) for symbols in list(self._pieces(wave))[-1:]]

    def stream(self, waves: torch.Tensor, lengths: torch.Tensor) -> Iterator[list[int]]:
        """Yield the symbols so far, after each segment of each utterance."""
        for wave in waves.split(1):
            yield from self._pieces(wave)

    def _pieces(self, wave: torch.Tensor) -> Iterator[list[int]]:
        features = nn.functional.pad(self.features(wave)[0], (0, 0, 0, self.SEGMENT + self.CONTEXT))
        count, state, hypotheses = (
            torch.tensor(self.SEGMENT + self.CONTEXT, device=wave.device),
            None,
            None,
        )
        for begin in range(0, len(features) - self.SEGMENT - self.CONTEXT, self.SEGMENT):
            segment = features[begin : begin + self.SEGMENT + self.CONTEXT]
            hypotheses, state = self.search.infer(
                segment, count, self.beam_width, state=state, hypothesis=hypotheses
            )
            yield _symbols(hypotheses)


def _symbols(hypotheses: Any) -> list[int]:
    """Return the symbols of the best hypothesis, without the blank that it begins with."""
    return list(hypotheses[0][0][1:])


class SileroVad(nn.Module):
    """Run silero-vad's detector of speech with the weights of its package: a probability for each
    32 ms."""

    CHUNK = 512  # samples

    def __init__(self) -> None:
        super().__init__()
        try:
            from silero_vad import load_silero_vad
        except ImportError:
            raise NotRunnable(
                "missing", "silero_vad is not installed here: pip install silero-vad"
            ) from None
        self.detector = load_silero_vad()

    def forward(self, waves: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Return the probabilities of speech (N, chunks)."""
        return torch.cat(list(self.stream(waves, lengths)), 1)

    def stream(self, waves: torch.Tensor, lengths: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the probabilities of speech (N, 1) of each chunk."""
        self.detector.reset_states()
        for chunk in nn.functional.pad(waves, (0, -waves.shape[1] % self.CHUNK)).split(
            self.CHUNK, 1
        ):
            yield self.detector(chunk, SAMPLE_RATE)
