"""Make the inputs of a model: tensors by their shapes, and the lengths of audio."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple, Union

import torch

from common.core.errors import UserError
from common.core.files import read_text
from common.core.paths import not_there

#: Letters in a shape or value: samples of the utterance, and its frames.
SAMPLES, FRAMES = "S", "F"
AUDIO = (".wav", ".flac", ".ogg", ".mp3", ".opus")
BUCKETS = ("short", "medium", "long", "longer")

_SPEC = re.compile(r"(?:(?P<name>\w+)@)?(?P<shape>[^:=]+)(?::(?P<dtype>\w+))?(?:=(?P<value>[^=]+))?")
_SIZE = re.compile(r"\d+|[SF]")


class Given(NamedTuple):
    """One input tensor.

    Args:
        name: its keyword; "" for the next positional argument.
        sizes: its shape, in which letters stand for lengths.
        value: the number that fills it; None for random numbers.
    """

    name: str
    sizes: Tuple[str, ...]
    dtype: torch.dtype
    value: Optional[str]

    def tensor(self, letters: Dict[str, int], device: str) -> torch.Tensor:
        """Raises UserError where there is no memory for it."""
        shape = [_number(size, letters) for size in self.sizes]
        try:
            if self.value is not None:
                return torch.full(shape, _number(self.value, letters), dtype=self.dtype, device=device)
            if self.dtype.is_floating_point or self.dtype.is_complex:
                return torch.randn(shape, dtype=self.dtype, device=device)
            return torch.ones(shape, dtype=self.dtype, device=device)
        except (RuntimeError, OverflowError, TypeError, MemoryError) as error:
            wanted = "x".join(map(str, shape))
            raise UserError(f"no tensor of {wanted} can be made here; give smaller sizes") from error


def parse(text: str) -> Given:
    """Parse "1x80x1000", "2:int64=1000", "lengths@2:int32=F" or "1xS".  Raises UserError."""
    match = _SPEC.fullmatch(text)
    sizes = match["shape"].split("x") if match else []
    dtype = getattr(torch, match["dtype"] or "float32", None) if match else None
    if not match or not all(map(_SIZE.fullmatch, sizes)):
        raise UserError(f"{text!r}: give a shape such as 1x80x1000, 2x1000:int64, 2:int64=1000 or name@1x80")
    if not isinstance(dtype, torch.dtype):
        raise UserError(f"{text!r}: torch has no dtype {match['dtype']}")
    value = match["value"]
    if value is not None and not re.fullmatch(r"-?\d+(\.\d+)?|[SF]", value):
        raise UserError(f"{text!r}: give a number after '=', or {SAMPLES} or {FRAMES}")
    return Given(match["name"] or "", tuple(sizes), dtype, value)


@dataclass(frozen=True)
class Inputs:
    """Arguments of a model: tensors, or lists of tensors."""

    positional: Sequence[Union[torch.Tensor, List[torch.Tensor]]]
    keywords: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def shapes(self) -> str:
        """Return all shapes in words: "1x80x1000, 2"."""
        flat: List[torch.Tensor] = []
        for argument in (*self.positional, *self.keywords.values()):
            flat += argument if isinstance(argument, list) else [argument]
        return ", ".join("x".join(map(str, tensor.shape)) or "a number" for tensor in flat) or "nothing"


def made(given: Sequence[Given], device: str, letters: Optional[Dict[str, int]] = None) -> Inputs:
    """Return the tensors of these shapes as arguments of a model; letters: values of the letters in them."""
    tensors = [(shape.name, shape.tensor(letters or {}, device)) for shape in given]
    keywords = {name: tensor for name, tensor in tensors if name}
    return Inputs([tensor for name, tensor in tensors if not name], keywords)


def _number(text: str, letters: Dict[str, int]) -> Any:
    if text in (SAMPLES, FRAMES):
        if text not in letters:
            raise UserError(f"the shape has {text}: that is a length of audio, which --audio or --pseudo-input gives")
        return letters[text]
    return float(text) if "." in text else int(text)


# -- audio -----------------------------------------------------------------------------------------------------------


def lengths(source: Path, sample_rate: int) -> List[int]:
    """Return the sorted samples of every file below a directory, by their headers, or the numbers at the beginning of
    the lines of a text file ("#": a comment).  Raises UserError."""
    problem = not_there(source)
    if problem:
        raise UserError(f"{source}: {problem}")
    if os.path.isdir(source):
        files = [path for path in sorted(source.rglob("*")) if path.suffix.lower() in AUDIO and path.is_file()]
        samples = [_length(path, sample_rate) for path in files]
    else:
        samples = _listed(source)
    if not samples:
        raise UserError(f"{source}: no audio in it ({', '.join(AUDIO)})")
    return sorted(samples)


def _length(path: Path, sample_rate: int) -> int:
    try:
        import soundfile
    except ImportError as error:
        raise UserError("reading the length of audio needs soundfile: pip install soundfile") from error
    try:
        header = soundfile.info(str(path))
    except RuntimeError as error:
        raise UserError(f"cannot read {path}: {error}") from error
    if header.samplerate != sample_rate:
        raise UserError(f"{path} has {header.samplerate} samples a second: give --sample-rate {header.samplerate}")
    return header.frames


def _listed(path: Path) -> List[int]:
    """Return the numbers that the lines of a text file begin with.  Raises UserError."""
    samples = []
    for number, line in enumerate(read_text(path).splitlines(), 1):
        words = line.split("#")[0].split()
        if words:
            if not words[0].isdigit() or int(words[0]) < 1:
                raise UserError(f"{path}, line {number}: give a number of samples, not {words[0]!r}")
            samples.append(int(words[0]))
    return samples


def bucketed(sorted_lengths: Sequence[int]) -> Dict[str, List[int]]:
    """Return four parts of as many utterances each as possible, the shortest first, without the empty ones."""
    count = len(sorted_lengths)
    bounds = [count * number // len(BUCKETS) for number in range(len(BUCKETS) + 1)]
    parts = {name: list(sorted_lengths[begin:end]) for name, begin, end in zip(BUCKETS, bounds, bounds[1:])}
    return {name: part for name, part in parts.items() if part}
