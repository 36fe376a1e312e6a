"""Read the data sets of pipelines: noise of given lengths, audio files by a manifest, or tokens.

This module imports torch only for a .npy file that holds its tensors."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from rnnt_bench.core import files
from rnnt_bench.core.errors import UserError
from rnnt_bench.core.text import first_line, shown
from rnnt_bench.tools.pipelines.rows import General


@dataclass
class Tokens:
    """The inputs of an example, as its file has them: lists, arrays or tensors.

    Attributes:
        src_tokens: token numbers (length,) or (1, length), or features (1, length, F)
        src_lengths: the length, or an array of one length
    """

    src_tokens: Any
    src_lengths: Any


#: Type of a data set -> what its file has.
CONTENTS = {
    "raw": "a manifest",
    "npy": "an array of {id, net_input: {src_tokens, src_lengths}}, as fairseq's benchmark saves it",
    "jsonl": "JSON lines of id and tokens",
}

#: Seconds of noise to make, an audio file, or inputs.
Example = float | Path | Tokens


def examples(dataset: General) -> dict[str, Example]:
    """Return the first `dataset_size` examples of a data set, by their names.

    Raises UserError where dataset_path is needed and not given, or given for dataset_type "made".
    Raises it also for a file without examples, with a wrong one, or with two of the same name."""
    if dataset.dataset_type == "made":
        if dataset.dataset_path:
            raise UserError(
                f"dataset_path {dataset.dataset_path}: dataset_type made reads no file; "
                f"give one of {', '.join(READERS)}"
            )
        durations = dataset.made_seconds[: dataset.dataset_size]
        return {f"made-{n}-{seconds:g}s": seconds for n, seconds in enumerate(durations)}
    if not dataset.dataset_path:
        content = CONTENTS[dataset.dataset_type]
        raise UserError(f"dataset_type {dataset.dataset_type} needs dataset_path: {content}")
    path = Path(dataset.dataset_path)
    examples_of_file = READERS[dataset.dataset_type](path)
    result: dict[str, Example] = {}
    for name, example in islice(examples_of_file, dataset.dataset_size):
        if name in result:
            raise UserError(f"{path}: two examples are called {name}; names have to differ")
        result[name] = example
    if not result:
        raise UserError(f"{path}: has no examples")
    return result


def _read_manifest(path: Path) -> Iterator[tuple[str, Path]]:
    """Yield the name and the path of each audio file that a manifest of wav2vec lists.

    Its first line is a folder.  Each further line is a file below this folder, which is the name, a
    tab, and the number of samples, which is not read.  Raises UserError."""
    first, *lines = files.read_text(path).splitlines() or [""]
    root = (path.parent / first.strip()).resolve()
    if not first.strip() or not root.is_dir():
        raise UserError(
            f"{path}, line 1: {first.strip()!r} is no folder; it has to be that of the audio"
        )
    for number, line in enumerate(lines, start=2):
        name = line.partition("\t")[0].strip()
        if not name:
            continue
        file = (root / name).resolve()
        if root not in file.parents or not file.is_file():
            raise UserError(f"{path}, line {number}: {name}: no such file below {root}")
        yield name, file


class _Utterance(msgspec.Struct):
    """A line of a .jsonl file."""

    id: str | int
    tokens: list[int]


def _read_jsonl(path: Path) -> Iterator[tuple[str, Tokens]]:
    """Yield the id and the tokens of each line such as {"id": "a", "tokens": [4, 5, 2]}.  Raises
    UserError."""
    decoder = msgspec.json.Decoder(_Utterance)
    for number, line in enumerate(files.read_text(path).splitlines(), start=1):
        if not line.strip():
            continue
        try:
            utterance = decoder.decode(line)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise UserError(
                f'{path}, line {number}: {first_line(error)}; give lines such as {{"id": "a", "tokens": [4, 5, 2]}}'
            ) from None
        if not utterance.tokens:
            raise UserError(f"{path}, line {number}: {utterance.id} has no tokens")
        yield str(utterance.id), Tokens(utterance.tokens, len(utterance.tokens))


#: Functions and classes of which a pickle of arrays and tensors is made: module, name.
_MAKERS = {
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy.core.multiarray", "scalar"),
    ("numpy.core.numeric", "_frombuffer"),
    ("torch._utils", "_rebuild_tensor_v2"),
    ("collections", "OrderedDict"),
}


class _PlainUnpickler(pickle.Unpickler):
    """Makes arrays of numpy and tensors of torch, and refuses to call anything else."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a function or class of _MAKERS, or a safe substitute for torch's own function.
        Raises pickle.UnpicklingError for others."""
        if (module, name) == ("torch.storage", "_load_from_bytes"):
            return _load_storage
        module = module.replace("numpy._core.", "numpy.core.")  # valid in numpy 2 too
        if (module, name) not in _MAKERS:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is no plain data")
        return super().find_class(module, name)


def _load_storage(content: bytes) -> Any:
    """Return the storage of a tensor from its bytes.

    torch's own function would run whatever code the pickle within these bytes names."""
    import torch

    return torch.load(io.BytesIO(content), weights_only=True)


def _read_npy(path: Path) -> Iterator[tuple[str, Tokens]]:
    """Yield the id and the inputs of each example that fairseq's benchmark saved.

    The file holds dicts {id, net_input: {src_tokens, src_lengths}}.  Raises UserError."""
    for number, example in enumerate(_load_objects(path), start=1):
        try:
            inputs = example["net_input"]
            yield str(example["id"]), Tokens(inputs["src_tokens"], inputs["src_lengths"])
        except (KeyError, IndexError, TypeError, ValueError):
            raise UserError(
                f"{path}, example {number}: {shown(example)} is not {{id, net_input: {{src_tokens, src_lengths}}}}"
            ) from None


def _load_objects(path: Path) -> list[Any]:
    """Return the elements of an array of objects that numpy.save wrote.

    It is read as numpy.load does, but with an unpickler that runs no code.  Raises UserError."""
    import numpy

    try:
        stream = io.BytesIO(files.read_bytes(path))
        major, _ = numpy.lib.format.read_magic(stream)
        read_header = getattr(numpy.lib.format, f"read_array_header_{major}_0")
        _, _, dtype = read_header(stream)
        if not dtype.hasobject:
            raise ValueError(f"an array of {dtype}")
        return list(_PlainUnpickler(stream).load().flat)
    except Exception as error:  # a pickle raises errors of any kind
        reason = getattr(error, "strerror", None) or first_line(error)
        raise UserError(
            f"cannot read {path}: {reason}; give a list of examples that numpy.save wrote"
        ) from error


#: Type of a data set that is read from a file -> a function that takes the path of the file and
#: yields pairs: the name of an example, and the example.
READERS: dict[str, Callable[[Path], Iterator[tuple[str, Example]]]] = {
    "raw": _read_manifest,
    "npy": _read_npy,
    "jsonl": _read_jsonl,
}
