"""Small models with random weights for the shipped pipelines: what each kind of speech system does,
in its shape.

Random weights never end a sentence, so the length of what is generated is a share of the length of
the source.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

import torch
from torch import nn
from torchaudio.transforms import MelSpectrogram

#: Text that is read aloud: tokens for each second.
TOKENS_PER_SECOND = 3
SAMPLE_RATE = 16000


class Generator(nn.Module):
    """A Transformer from audio or tokens to tokens, which are chosen greedily one after the other.

    ratio: tokens generated for each frame or token of the source; stride: mel frames of a frame of
    audio.
    """

    def __init__(
        self,
        source: str = "audio",
        vocab_size: int = 256,
        target_size: int = 256,
        dim: int = 128,
        heads: int = 4,
        layers: int = 3,
        ratio: float = 0.25,
        stride: int = 8,
    ):
        super().__init__()
        self.ratio, self.stride = ratio, stride
        self.mel = (
            MelSpectrogram(SAMPLE_RATE, n_fft=400, hop_length=160, n_mels=80)
            if source == "audio"
            else None
        )
        self.source = (
            nn.Linear(80 * stride, dim) if source == "audio" else nn.Embedding(vocab_size, dim)
        )
        self.target, self.output = nn.Embedding(target_size, dim), nn.Linear(dim, target_size)
        self.transformer = nn.Transformer(
            dim, heads, layers, layers, 4 * dim, dropout=0.0, batch_first=True
        )

    def forward(self, source: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Return tokens (1, length) of a source (1, samples) or (1, tokens)."""
        encoded = self.transformer.encoder(self._embedded(source))
        count = max(round(self.ratio * encoded.shape[1]), 1)
        tokens = torch.zeros(len(source), 1, dtype=torch.long, device=encoded.device)
        for _ in range(count):
            decoded = self.transformer.decoder(self.target(tokens), encoded)
            tokens = torch.cat([tokens, self.output(decoded[:, -1:]).argmax(-1)], 1)
        return tokens[:, 1:]

    def _embedded(self, source: torch.Tensor) -> torch.Tensor:
        if self.mel is None:
            return self.source(source)
        features = self.mel(source).clamp_min(1e-5).log().transpose(1, 2)  # 100 frames a second
        frames = features.shape[1] // self.stride
        return self.source(features[:, : frames * self.stride].reshape(len(source), frames, -1))


class Speech(TypedDict):
    """The output of a stage that speaks."""

    waveform: torch.Tensor  # (1, samples)
    sample_rate: int


class Vocoder(nn.Module):
    """Tokens or units to a waveform: `upsampling` samples for each, by transposed convolutions."""

    def __init__(
        self, vocab_size: int = 256, channels: int = 128, upsampling: tuple[int, ...] = (8, 8, 5, 4)
    ):
        super().__init__()
        self.units = nn.Embedding(vocab_size, channels)
        layers = []
        for factor in upsampling:
            layers += [
                nn.ConvTranspose1d(channels, channels // 2, 2 * factor, factor, factor // 2),
                nn.LeakyReLU(0.1),
            ]
            channels //= 2
        self.layers = nn.Sequential(*layers, nn.Conv1d(channels, 1, 7, padding=3), nn.Tanh())

    def forward(self, units: torch.Tensor) -> Speech:
        """Return the speech of units (1, units)."""
        return {
            "waveform": self.layers(self.units(units).transpose(1, 2))[:, 0],
            "sample_rate": SAMPLE_RATE,
        }


class TextToSpeech(nn.Module):
    """Tokens, each of them held for `duration` units, a Transformer over these, and a vocoder."""

    def __init__(
        self,
        vocab_size: int = 256,
        dim: int = 128,
        heads: int = 4,
        layers: int = 3,
        duration: int = 4,
    ):
        super().__init__()
        self.duration, self.tokens = duration, nn.Embedding(vocab_size, dim)
        layer = nn.TransformerEncoderLayer(dim, heads, 4 * dim, dropout=0.0, batch_first=True)
        self.encoder, self.units = nn.TransformerEncoder(layer, layers), nn.Linear(dim, vocab_size)
        self.vocoder = Vocoder(vocab_size)

    def forward(self, tokens: torch.Tensor, lengths: torch.Tensor) -> Speech:
        held = self.tokens(tokens).repeat_interleave(self.duration, 1)
        return self.vocoder(self.units(self.encoder(held)).argmax(-1))


class SpeechToSpeech(nn.Module):
    """A Generator of units and a vocoder, end to end."""

    def __init__(self, units: int = 256, ratio: float = 1.0, **sizes: Any):
        super().__init__()
        self.generator, self.vocoder = (
            Generator("audio", target_size=units, ratio=ratio, **sizes),
            Vocoder(units),
        )

    def forward(self, source: torch.Tensor, lengths: torch.Tensor) -> Speech:
        return self.vocoder(self.generator(source, lengths))


def text_of(example: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Build the inputs of a stage that takes text: the example's own, or as many as are spoken in
    its audio."""
    if not example["src_tokens"].is_floating_point():
        return example["src_tokens"], example["src_lengths"]
    seconds = int(example["src_lengths"].max()) / SAMPLE_RATE
    count = max(round(TOKENS_PER_SECOND * seconds), 1)
    return (torch.arange(count) * 7 % 256)[None], torch.tensor([count])


def with_lengths(tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Convert tokens (1, length) for a stage that takes tokens and their lengths."""
    return tokens, torch.tensor([tokens.shape[1]])
