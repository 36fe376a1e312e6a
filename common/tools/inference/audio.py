"""Audio and examples that models are given: files, one channel, at the model's rate; a data set; or noise."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, Optional, Tuple

import numpy
import torch

from common.core.errors import UserError
from common.core.files import open_file, read_text
from common.core.paths import not_a_file


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
    """Return (samples,) of so many seconds, at least one sample, about as loud as speech."""
    samples = max(round(seconds * sample_rate), 1)
    return 0.1 * torch.randn(samples, generator=torch.Generator().manual_seed(seed))


def batch(path: Optional[str], seconds: float, size: int, sample_rate: int, seed: int) -> torch.Tensor:
    """Return (size, samples) of equal rows: the audio of the file, again from its begin where it is too short; noise
    without a file."""
    wave = noise(seconds, sample_rate, seed)
    if path is not None:
        audio = read(Path(path), sample_rate)
        wave = audio.repeat(-(-len(wave) // len(audio)))[: len(wave)]
    return wave.repeat(size, 1)


#: An example, as the builder of a stage gets it: "id", "src_tokens" (1, length, ...), of audio samples, and
#: "src_lengths" (1,).
Example = Dict[str, Any]
#: Keys of an npz file.
ARRAYS = ("id", "src_tokens", "src_lengths")


def entries(dataset: Any, seed: int, trust_pickle: bool = False) -> Dict[str, Callable[[], Example]]:
    """Return the examples of a data set by name, each as what reads it.  Raises UserError.

    dataset: a common.tools.pipelines.rows.General."""
    if dataset.dataset_type == "made":
        listed = _made(dataset, seed)
    elif not dataset.dataset_path:
        words = "needs dataset_path: a manifest (raw) or an npz file (npy)"
        raise UserError(f"dataset_type {dataset.dataset_type} {words}")
    else:
        path = Path(dataset.dataset_path)
        listed = _manifest(path, dataset.target_sr) if dataset.dataset_type == "raw" else _arrays(path, trust_pickle)
    result: Dict[str, Callable[[], Example]] = {}
    for name, read in listed:
        if len(result) == dataset.dataset_size:
            break
        if name in result:
            raise UserError(f"{dataset.dataset_path}: two examples are called {name}; names have to differ")
        result[name] = read
    if not result:
        raise UserError(f"{dataset.dataset_path}: has no examples")
    return result


Named = Iterator[Tuple[str, Callable[[], Example]]]


def _made(dataset: Any, seed: int) -> Named:
    for number, seconds in enumerate(dataset.made_seconds):
        name = f"made-{number}-{seconds:g}s"
        yield name, partial(_of_wave, name, partial(noise, seconds, dataset.target_sr, seed + number))


def _of_wave(name: str, read: Callable[[], torch.Tensor]) -> Example:
    wave = read()
    return {"id": name, "src_tokens": wave[None], "src_lengths": torch.tensor([len(wave)])}


def _manifest(path: Path, target_sr: int) -> Named:
    """Yield the examples of a manifest: a line with a folder, then lines of a file below it, a tab and its samples."""
    first, *others = read_text(path).splitlines() or [""]
    root = path.parent / first.strip()
    if not first.strip() or not root.is_dir():
        raise UserError(f"{path}, line 1: {first.strip()!r} is no folder; it has to be that of the audio")
    for number, line in enumerate(others, 2):
        name = line.partition("\t")[0].strip()
        if not name:
            continue
        file = (root / name).resolve()
        if root.resolve() not in file.parents:
            raise UserError(f"{path}, line {number}: {name} does not stay below {root}")
        if not file.is_file():
            raise UserError(f"{path}, line {number}: {file}: no such file")
        yield name, partial(_of_wave, name, partial(read, file, target_sr))


def _arrays(path: Path, trust_pickle: bool) -> Named:
    """Yield the examples of an npz file; with `trust_pickle` those of an npy file too, as fairseq's benchmark stores
    them: each {"id", "net_input": {"src_tokens", "src_lengths"}}."""
    try:
        with open_file(path) as stream:
            loaded = numpy.load(stream, allow_pickle=trust_pickle)
            if isinstance(loaded, numpy.ndarray):
                for number, stored in enumerate(loaded.tolist()):
                    given = {key: torch.as_tensor(stored["net_input"][key]) for key in ARRAYS[1:]}
                    yield str(stored.get("id", number)), {"id": str(stored.get("id", number)), **given}.copy
                return
            ids, tokens, lengths = (loaded[key] for key in ARRAYS)
    except Exception as error:  # zipfile's, pickle's and numpy's own, and a key that is missing
        words = f"store npz with {', '.join(ARRAYS)}, a row of each example, or give --trust-pickle for an npy file"
        raise UserError(f"cannot read {path}: {type(error).__name__}: {error}; {words}") from None
    if not len(ids) == len(tokens) == len(lengths) or lengths.ndim != 1:
        raise UserError(f"{path}: id, src_tokens and src_lengths have to be of as many examples each")
    for row, name, length in zip(tokens, map(str, ids), map(int, lengths)):
        if not 0 < length <= len(row):
            raise UserError(f"{path}: src_lengths of {name} is {length}, src_tokens has 1 to {len(row)}")
        cut = torch.from_numpy(row[:length].copy())
        yield name, {"id": name, "src_tokens": cut[None], "src_lengths": torch.tensor([length])}.copy
