"""Audio that a model is given: read, one channel, at the model's rate, cut or looped to a duration; or noise."""

from __future__ import annotations

from pathlib import Path
from typing import Optional

import torch

from common.core.errors import UserError
from common.core.paths import not_a_file

#: Standard deviation of noise in the place of audio: about that of speech.
LEVEL = 0.1


def read(path: Path, sample_rate: int) -> torch.Tensor:
    """Return the mean of the channels, resampled, (samples,) in float32.  Raises UserError."""
    try:
        import soundfile
        from torchaudio.functional import resample
    except ImportError as error:
        raise UserError(f"reading audio needs soundfile and torchaudio ({error}): pip install them") from error
    reason = not_a_file(path)
    if reason:
        raise UserError(f"cannot read {path}: {reason}")
    try:
        channels, rate = soundfile.read(str(path), dtype="float32", always_2d=True)
    except (RuntimeError, OSError) as error:
        raise UserError(f"cannot read {path}: {error}") from error
    if not len(channels):
        raise UserError(f"{path}: has no samples")
    wave = torch.from_numpy(channels).mean(1)
    return wave if rate == sample_rate else resample(wave, rate, sample_rate)


def noise(seconds: float, sample_rate: int, seed: int) -> torch.Tensor:
    """Return (samples,) of so many seconds, at least one sample."""
    samples = max(round(seconds * sample_rate), 1)
    return LEVEL * torch.randn(samples, generator=torch.Generator().manual_seed(seed))


def batch(path: Optional[str], seconds: float, size: int, sample_rate: int, seed: int) -> torch.Tensor:
    """Return (size, samples) of equal rows: the audio of the file, again from its begin where it is too short; noise
    without a file."""
    wave = noise(seconds, sample_rate, seed)
    if path is not None:
        audio = read(Path(path), sample_rate)
        wave = audio.repeat(-(-len(wave) // len(audio)))[: len(wave)]
    return wave.repeat(size, 1)
