"""Examples of a data set for a pipeline: made ones, audio by a manifest of wav2vec's form, arrays in npz or npy."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Callable, List, NamedTuple, Optional, Sequence, TypedDict

import numpy
import torch

from common.core.errors import UserError
from common.core.files import open_file, read_text
from common.tools import audio
from common.tools.dataset import Dataset


class Example(TypedDict):
    """An example, as the builder of a stage gets it."""

    id: str
    src_tokens: torch.Tensor  # (1, length, ...); of audio: samples
    src_lengths: torch.Tensor  # (1,)


#: Keys of an npz file.
ARRAYS = ("id", "src_tokens", "src_lengths")
SUBSETS = ("random", "short", "long")


class Entry(NamedTuple):
    """One example of a data set.  length: samples or tokens; read: the example itself."""

    id: str
    length: int
    read: Callable[[], Example]


def entries(dataset: Dataset) -> List[Entry]:
    """Return the examples of a data set.  Raises UserError."""
    kind, size = dataset.dataset_type, dataset.dataset_size
    if size is not None and size < 1:
        raise UserError(f"dataset_size: must be at least 1, not {size}")
    if kind == "made":
        return _made(dataset)[:size]
    if not dataset.dataset_path:
        raise UserError(f"dataset_type {kind} needs dataset_path: a manifest (raw), an npz or npy file (npy)")
    path = Path(dataset.dataset_path)
    if not path.is_file():
        raise UserError(f"dataset_path: {path}: no such file")
    every = _manifest(path, dataset.target_sr) if kind == "raw" else _arrays(path, dataset.trust_pickle)
    if not every:
        raise UserError(f"{path}: has no examples")
    return every[:size]


def _made(dataset: Dataset) -> List[Entry]:
    """Return examples of noise."""
    entries = []
    for number, seconds in enumerate(dataset.made_seconds or ()):
        name, samples = f"made-{number}-{seconds:g}s", audio.samples_of(seconds, dataset.target_sr)
        entries.append(Entry(name, samples, partial(_of_noise, name, samples, dataset.seed + number)))
    return entries


def _of_noise(name: str, samples: int, seed: int) -> Example:
    return _of_wave(name, audio.noise(samples, seed))


def _of_file(name: str, path: Path, sample_rate: int) -> Example:
    return _of_wave(name, audio.read(path, sample_rate))


def _of_wave(name: str, wave: torch.Tensor) -> Example:
    return {"id": name, "src_tokens": wave[None], "src_lengths": torch.tensor([len(wave)])}


# -- manifests -------------------------------------------------------------------------------------------------------


def _manifest(path: Path, target_sr: int) -> List[Entry]:
    """Return the examples of a manifest: a line with a folder, then lines of a file below it, a tab and its samples."""
    root, lines = _lines(path)
    entries = []
    for number, name, length in lines:
        file = _below(root, name, f"{path}, line {number}")
        entries.append(Entry(name, length or 0, partial(_of_file, name, file, target_sr)))
    return entries


def _lines(path: Path) -> Any:
    """Return (the folder, [(number of the line, relative path, samples or None)])."""
    first, *others = read_text(path).splitlines() or [""]
    root = path.parent / first.strip()
    if not first.strip() or not root.is_dir():
        raise UserError(f"{path}, line 1: {first.strip()!r} is no folder; it has to be that of the audio")
    files = []
    for number, line in enumerate(others, 2):
        name, _, samples = line.partition("\t")
        if name.strip():
            files.append((number, name.strip(), int(samples) if samples.strip().isdigit() else None))
    return root, files


def _below(root: Path, name: str, where: str) -> Path:
    file = (root / name).resolve()
    if root.resolve() not in file.parents:
        raise UserError(f"{where}: {name} does not stay below {root}")
    if not file.is_file():
        raise UserError(f"{where}: {file}: no such file")
    return file


# -- arrays ----------------------------------------------------------------------------------------------------------


def _arrays(path: Path, trust_pickle: bool) -> List[Entry]:
    try:
        with open_file(path) as stream:
            loaded = numpy.load(stream, allow_pickle=trust_pickle)
            if isinstance(loaded, numpy.ndarray):
                return _list_of_examples(loaded, path)
            missing = [key for key in ARRAYS if key not in loaded.files]
            if missing:
                needed = f"it needs {', '.join(ARRAYS)}, a row of each example"
                raise UserError(f"{path}: has no {', '.join(missing)}; {needed}")
            ids, tokens, lengths = (loaded[key] for key in ARRAYS)
    except UserError:
        raise
    except ValueError as error:
        advice = "store npz with id, src_tokens and src_lengths, or give --trust-pickle if you trust whoever wrote it"
        raise UserError(f"{path}: its examples are pickled objects, which can run code; {advice} ({error})") from None
    except Exception as error:  # zipfile's, pickle's and numpy's own
        raise UserError(f"cannot read {path}: {type(error).__name__}: {error}") from error
    if not len(ids) == len(tokens) == len(lengths) or lengths.ndim != 1:
        raise UserError(f"{path}: id, src_tokens and src_lengths have to be of as many examples each")
    entries = []
    for number, (name, length) in enumerate(zip(map(str, ids), map(int, lengths))):
        if not 0 < length <= tokens.shape[1]:
            raise UserError(f"{path}: src_lengths of {name} is {length}, src_tokens has 1 to {tokens.shape[1]}")
        entries.append(Entry(name, length, partial(_of_array, name, tokens[number, :length])))
    return entries


def _of_array(name: str, row: Any) -> Example:
    return {"id": name, "src_tokens": torch.from_numpy(row.copy())[None], "src_lengths": torch.tensor([len(row)])}


def _list_of_examples(loaded: Any, path: Path) -> List[Entry]:
    """Return the examples of an object array, as fairseq's benchmark stores them.

    Each is {"id", "net_input": {"src_tokens", "src_lengths"}}."""
    entries = []
    for number, stored in enumerate(loaded.tolist() if loaded.dtype == object else []):
        try:
            given = stored["net_input"]
            tokens, lengths = (torch.as_tensor(given[key]) for key in ARRAYS[1:])
            name, lengths = str(stored.get("id", number)), lengths.reshape(-1)
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            raise UserError(f"{path}: example {number} has no net_input with src_tokens and src_lengths") from error
        example: Example = {"id": name, "src_tokens": tokens, "src_lengths": lengths}
        entries.append(Entry(name, int(lengths.max()), example.copy))
    if not entries:
        raise UserError(f"{path}: is no array of examples; store npz with {', '.join(ARRAYS)}")
    return entries


# -- subsets ---------------------------------------------------------------------------------------------------------


def subset(lengths: Sequence[int], how: str, size: int, seed: int) -> List[int]:
    """Return the indices of `size` examples in order: a random choice, the shortest, or the longest."""
    by_length = sorted(range(len(lengths)), key=lambda index: lengths[index])
    if how == "random":
        return sorted(random.Random(seed).sample(by_length, size))
    return sorted(by_length[:size] if how == "short" else by_length[-size:])


def write_subsets(dataset: Dataset, folder: Path, size: int) -> List[Path]:
    """Write a file for each of SUBSETS, in the format of the data set; return their paths.  Raises UserError."""
    kind, path = dataset.dataset_type, Path(dataset.dataset_path or "")
    if kind == "made":
        raise UserError("--write-subsets needs a data set: give --dataset-path and --dataset-type raw or npy")
    every = entries(replace(dataset, dataset_size=None))
    if not 0 < size <= len(every):
        raise UserError(f"--subset-size {size}: {path} has {len(every)} examples; give 1 to {len(every)}")
    lengths = [entry.length or int(entry.read()["src_lengths"][0]) for entry in every]
    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for how in SUBSETS:
            chosen = [every[index] for index in subset(lengths, how, size, dataset.seed)]
            write = _write_manifest if kind == "raw" else _write_arrays
            written.append(write(folder / how, chosen, [lengths[every.index(entry)] for entry in chosen], path))
    except OSError as error:
        raise UserError(f"cannot write {folder}: {error.strerror or error}") from error
    return written


def _write_manifest(target: Path, chosen: Sequence[Entry], lengths: Sequence[int], source: Path) -> Path:
    root, _ = _lines(source)
    lines = [str(root.resolve()), *(f"{entry.id}\t{length}" for entry, length in zip(chosen, lengths))]
    target = target.with_suffix(".tsv")
    target.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return target


def _write_arrays(target: Path, chosen: Sequence[Entry], lengths: Sequence[int], source: Path) -> Path:
    rows = [entry.read()["src_tokens"][0].numpy() for entry in chosen]
    tokens = numpy.zeros((len(rows), max(lengths), *rows[0].shape[1:]), rows[0].dtype)
    for number, row in enumerate(rows):
        tokens[number, : len(row)] = row
    ids = numpy.array([entry.id for entry in chosen])
    target = target.with_suffix(".npz")
    numpy.savez(target, id=ids, src_tokens=tokens, src_lengths=numpy.array(lengths))
    return target


def named(entries: Sequence[Entry], name: Optional[str]) -> Entry:
    """Return the example of this name.  Raises UserError where the data set has changed since the run began."""
    for entry in entries:
        if entry.id == name:
            return entry
    raise UserError(f"the data set has no example {name}; start a new run without --resume")
