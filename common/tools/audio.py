"""Audio that a model is given: read, one channel, at the model's rate, cut or looped to a duration; or noise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from common.core.errors import UserError
from common.core.paths import not_a_file

#: Standard deviation of noise in the place of audio: about that of speech.
LEVEL = 0.1


def read(path: Path, sample_rate: int) -> torch.Tensor:
    """Return the mean of the channels, resampled, (samples,) in float32.  Raises UserError."""
    try:
        import soundfile
    except ImportError as error:
        raise UserError("reading audio needs soundfile: pip install soundfile") from error
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
    if rate == sample_rate:
        return wave
    try:
        from torchaudio.functional import resample
    except ImportError as error:
        raise UserError(f"{path} has {rate} samples a second: resampling to {sample_rate} needs torchaudio") from error
    return resample(wave, rate, sample_rate)


def write(path: Path, wave: torch.Tensor, sample_rate: int) -> None:
    """Write a wave of one channel to a file.  Raises UserError."""
    import soundfile

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        soundfile.write(str(path), wave.detach().float().cpu().numpy(), sample_rate)
    except (RuntimeError, OSError) as error:
        raise UserError(f"cannot write {path}: {error}") from error


def samples_of(seconds: float, sample_rate: int) -> int:
    """Return the number of samples in so many seconds, at least one."""
    return max(round(seconds * sample_rate), 1)


def fitted(wave: torch.Tensor, samples: int) -> torch.Tensor:
    """Return exactly `samples` of `wave`, which begins again where it is too short."""
    return wave.repeat(-(-samples // len(wave)))[:samples]


def noise(samples: int, seed: int) -> torch.Tensor:
    return LEVEL * torch.randn(samples, generator=torch.Generator().manual_seed(seed))


def batch(path: Any, seconds: float, size: int, sample_rate: int, seed: int) -> torch.Tensor:
    """Return (size, samples) of equal rows: the audio of the file, or noise if `path` is None."""
    samples = samples_of(seconds, sample_rate)
    wave = noise(samples, seed) if path is None else fitted(read(Path(path), sample_rate), samples)
    return wave.repeat(size, 1)
