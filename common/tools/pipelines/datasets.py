"""Reads the data sets of pipelines: noise of given lengths, audio by a manifest, or tokens of a
text.

No torch here, but for arrays of fairseq that hold its tensors."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from rnnt_bench.core import files
from rnnt_bench.core.errors import UserError
from rnnt_bench.core.text import first_line, shown
from rnnt_bench.tools.pipelines.rows import General


@dataclass
class Tokens:
    """Inputs of an example as its file has them: numbers (1, length) or (length,), or features; and
    their length."""

    src_tokens: Any
    src_lengths: Any


#: Seconds of noise, a file of audio, or tokens.
Example = float | Path | Tokens


def examples(dataset: General) -> dict[str, Example]:
    """Return the examples of a data set by name.  Raises UserError."""
    if dataset.dataset_type == "made":
        if dataset.dataset_path:
            words = f"dataset_type made reads no file; give one of {', '.join(READERS)}"
            raise UserError(f"dataset_path {dataset.dataset_path}: {words}")
        durations = dataset.made_seconds[: dataset.dataset_size]
        return {f"made-{n}-{seconds:g}s": seconds for n, seconds in enumerate(durations)}
    reader = READERS[dataset.dataset_type]
    if not dataset.dataset_path:
        raise UserError(f"dataset_type {dataset.dataset_type} needs dataset_path: {reader.content}")
    path = Path(dataset.dataset_path)
    result: dict[str, Example] = {}
    for name, example in islice(reader.read(path), dataset.dataset_size):
        if name in result:
            raise UserError(f"{path}: two examples are called {name}; names have to differ")
        result[name] = example
    if not result:
        raise UserError(f"{path}: has no examples")
    return result


def _manifest(path: Path) -> Iterator[tuple[str, Path]]:
    """Yield the files of a manifest of wav2vec: a line of a folder, then lines of a file in it, a
    tab, its samples."""
    first, *lines = files.read_text(path).splitlines() or [""]
    root = (path.parent / first.strip()).resolve()
    if not first.strip() or not root.is_dir():
        raise UserError(
            f"{path}, line 1: {first.strip()!r} is no folder; it has to be that of the audio"
        )
    for number, line in enumerate(lines, 2):
        name = line.partition("\t")[0].strip()
        if not name:
            continue
        file = (root / name).resolve()
        if root not in file.parents or not file.is_file():
            raise UserError(f"{path}, line {number}: {name}: no such file below {root}")
        yield name, file


class _Line(msgspec.Struct):
    id: str | int
    tokens: list[int]


def _lines(path: Path) -> Iterator[tuple[str, Tokens]]:
    """Yield the utterances of JSON lines: {"id": "a", "tokens": [4, 5, 2]}."""
    decoder = msgspec.json.Decoder(_Line)
    for number, text in enumerate(files.read_text(path).splitlines(), 1):
        if not text.strip():
            continue
        try:
            line = decoder.decode(text)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise UserError(
                f'{path}, line {number}: {first_line(error)}; give lines such as {{"id": "a", "tokens": [4, 5, 2]}}'
            ) from None
        if not line.tokens:
            raise UserError(f"{path}, line {number}: {line.id} has no tokens")
        yield str(line.id), Tokens(line.tokens, len(line.tokens))


class _Plain(pickle.Unpickler):
    """Makes arrays of numpy and tensors of torch, and calls nothing else that a pickle names."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch.storage", "_load_from_bytes"):
            return _storage
        module = module.replace("numpy._core.", "numpy.core.")  # numpy 2 takes the old name too
        if (module, name) not in _MAKERS:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is no plain data")
        return super().find_class(module, name)


_MAKERS = {
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy.core.multiarray", "scalar"),
    ("numpy.core.numeric", "_frombuffer"),
    ("torch._utils", "_rebuild_tensor_v2"),
    ("collections", "OrderedDict"),
}


def _storage(content: bytes) -> Any:
    """Return the storage of a tensor, as torch.storage does, which would run what a pickle in it
    says."""
    import torch

    return torch.load(io.BytesIO(content), weights_only=True)


def _arrays(path: Path) -> Iterator[tuple[str, Tokens]]:
    """Yield the examples of an array of fairseq's benchmark: {id, net_input: {src_tokens,
    src_lengths}} each.

    It is a pickle, of which arrays, tensors, numbers and texts are made."""
    import numpy

    try:
        stream = io.BytesIO(files.read_bytes(path))
        major, _ = numpy.lib.format.read_magic(stream)
        read_header = getattr(numpy.lib.format, f"read_array_header_{major}_0")
        _, _, dtype = read_header(stream)
        if not dtype.hasobject:
            raise ValueError(f"an array of {dtype}")
        values = _Plain(stream).load()
    except Exception as error:  # a pickle raises errors of any kind
        reason = getattr(error, "strerror", None) or first_line(error)
        raise UserError(
            f"cannot read {path}: {reason}; give a list of examples that numpy.save wrote"
        ) from error
    for number, value in enumerate(getattr(values, "flat", ()), 1):
        try:
            inputs = value["net_input"]
            yield str(value["id"]), Tokens(inputs["src_tokens"], inputs["src_lengths"])
        except (KeyError, IndexError, TypeError, ValueError):
            raise UserError(
                f"{path}, example {number}: {shown(value)} is not {{id, net_input: {{src_tokens, src_lengths}}}}"
            ) from None


class Reader(NamedTuple):
    """Yields the name and the example of each in a file; content: what such a file holds."""

    read: Callable[[Path], Iterator[tuple[str, Example]]]
    content: str


#: Type of a data set -> its reader.
READERS = {
    "raw": Reader(_manifest, "a manifest"),
    "npy": Reader(
        _arrays,
        "an array of {id, net_input: {src_tokens, src_lengths}}, as fairseq's benchmark saves it",
    ),
    "jsonl": Reader(_lines, "JSON lines of id and tokens"),
}
