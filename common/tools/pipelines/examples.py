"""Examples of a data set for a pipeline: noise, audio by a manifest of wav2vec's form, arrays in an npz file."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, Tuple

import numpy
import torch

from common.core.errors import UserError
from common.core.files import open_file, read_text
from common.tools.inference import audio
from common.tools.pipelines.stages import General

#: An example, as the builder of a stage gets it: "id", "src_tokens" (1, length, ...), of audio samples, and
#: "src_lengths" (1,).
Example = Dict[str, Any]
#: Keys of an npz file.
ARRAYS = ("id", "src_tokens", "src_lengths")


def entries(dataset: General, seed: int) -> Dict[str, Callable[[], Example]]:
    """Return the examples of a data set by name, each as what reads it.  Raises UserError."""
    if dataset.dataset_type == "made":
        listed = _made(dataset, seed)
    elif not dataset.dataset_path:
        words = "needs dataset_path: a manifest (raw) or an npz file (npy)"
        raise UserError(f"dataset_type {dataset.dataset_type} {words}")
    else:
        path = Path(dataset.dataset_path)
        listed = _manifest(path, dataset.target_sr) if dataset.dataset_type == "raw" else _arrays(path)
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


def _made(dataset: General, seed: int) -> Named:
    for number, seconds in enumerate(dataset.made_seconds):
        name = f"made-{number}-{seconds:g}s"
        yield name, partial(_of_wave, name, partial(audio.noise, seconds, dataset.target_sr, seed + number))


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
        yield name, partial(_of_wave, name, partial(audio.read, file, target_sr))


def _arrays(path: Path) -> Named:
    try:
        with open_file(path) as stream:
            loaded = numpy.load(stream)
            ids, tokens, lengths = (loaded[key] for key in ARRAYS)
    except Exception as error:  # zipfile's and numpy's own, and a key that is missing
        words = f"store npz with {', '.join(ARRAYS)}, a row of each example, and no pickled objects"
        raise UserError(f"cannot read {path}: {type(error).__name__}: {error}; {words}") from None
    if not len(ids) == len(tokens) == len(lengths) or lengths.ndim != 1:
        raise UserError(f"{path}: id, src_tokens and src_lengths have to be of as many examples each")
    for row, name, length in zip(tokens, map(str, ids), map(int, lengths)):
        if not 0 < length <= len(row):
            raise UserError(f"{path}: src_lengths of {name} is {length}, src_tokens has 1 to {len(row)}")
        cut = torch.from_numpy(row[:length].copy())
        yield name, {"id": name, "src_tokens": cut[None], "src_lengths": torch.tensor([length])}.copy
