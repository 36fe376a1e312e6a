"""Counting a model's operations on given inputs, or on utterances of given lengths."""

from __future__ import annotations

import os
import re
import warnings
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import torch

from common.core.errors import UserError
from common.core.files import not_there, read_text
from common.core.text import first_line
from common.flops.counter import FlopCounter
from common.records.schema import Measured
from common.tools import configuration, loading

#: Letters in a shape or value: samples of the utterance, and its frames.
SAMPLES, FRAMES = "S", "F"
AUDIO = (".wav", ".flac", ".ogg", ".mp3", ".opus")
BUCKETS = ("short", "medium", "long", "longer")
_SPEC = re.compile(r"(?:(?P<name>\w+)@)?(?P<shape>[^:=]+)(?::(?P<dtype>\w+))?(?:=(?P<value>[^=]+))?")


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


@dataclass(frozen=True)
class Inputs:
    """Arguments of a model: tensors, or lists of tensors."""

    positional: Sequence[Any]
    keywords: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def shapes(self) -> str:
        """Return all shapes in words: "1x80x1000, 2"."""
        lists = [each if isinstance(each, list) else [each] for each in (*self.positional, *self.keywords.values())]
        shapes = ["x".join(map(str, tensor.shape)) or "a number" for tensors in lists for tensor in tensors]
        return ", ".join(shapes) or "nothing"


def parse(text: str) -> Given:
    """Parse "1x80x1000", "2:int64=1000", "lengths@2:int32=F" or "1xS".  Raises UserError."""
    match = _SPEC.fullmatch(text)
    if not match or not re.fullmatch(r"(\d+|[SF])(x(\d+|[SF]))*", match["shape"]):
        raise UserError(f"{text!r}: give a shape such as 1x80x1000, 2x1000:int64, 2:int64=1000 or name@1x80")
    dtype, value = getattr(torch, match["dtype"] or "float32", None), match["value"]
    if not isinstance(dtype, torch.dtype):
        raise UserError(f"{text!r}: torch has no dtype {match['dtype']}")
    if value is not None and not re.fullmatch(r"-?\d+(\.\d+)?|[SF]", value):
        raise UserError(f"{text!r}: give a number after '=', or {SAMPLES} or {FRAMES}")
    return Given(match["name"] or "", tuple(match["shape"].split("x")), dtype, value)


def made(given: Sequence[Given], device: str, letters: Mapping[str, int]) -> Inputs:
    """Return the tensors of these shapes as arguments of a model; letters: values of the letters in them."""
    tensors = [(each.name, _tensor(each, device, letters)) for each in given]
    return Inputs([tensor for name, tensor in tensors if not name], {name: tensor for name, tensor in tensors if name})


def _tensor(given: Given, device: str, letters: Mapping[str, int]) -> torch.Tensor:
    """Return one input; raise UserError where there is no memory for it, or no length for a letter."""
    if {*given.sizes, given.value} & {SAMPLES, FRAMES} and not letters:
        raise UserError("a shape has S or F: that is a length of audio, which --audio or --pseudo-input gives")
    shape = [letters.get(size) or int(size) for size in given.sizes]
    try:
        if given.value is not None:
            value = letters.get(given.value) or (float if "." in given.value else int)(given.value)
            return torch.full(shape, value, dtype=given.dtype, device=device)
        if given.dtype.is_floating_point or given.dtype.is_complex:
            return torch.randn(shape, dtype=given.dtype, device=device)
        return torch.ones(shape, dtype=given.dtype, device=device)
    except (RuntimeError, OverflowError, TypeError, MemoryError) as error:
        raise UserError(f"no tensor of {'x'.join(map(str, shape))} can be made here; give smaller sizes") from error


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
        lines = [line.split("#")[0].split()[:1] for line in read_text(source).splitlines()]
        wrong = [n for n, words in enumerate(lines, 1) if words and not (words[0].isdigit() and int(words[0]))]
        if wrong:
            raise UserError(f"{source}, line {wrong[0]}: give a number of samples, not {lines[wrong[0] - 1][0]!r}")
        samples = [int(word) for words in lines for word in words]
    if not samples:
        raise UserError(f"{source}: no audio in it ({', '.join(AUDIO)})")
    return sorted(samples)


def _length(path: Path, sample_rate: int) -> int:
    try:
        import soundfile

        header = soundfile.info(str(path))
    except ImportError as error:
        raise UserError("reading the length of audio needs soundfile: pip install soundfile") from error
    except RuntimeError as error:
        raise UserError(f"cannot read {path}: {error}") from error
    if header.samplerate != sample_rate:
        raise UserError(f"{path} has {header.samplerate} samples a second: give --sample-rate {header.samplerate}")
    return header.frames


def run(job: Mapping[str, Any]) -> Iterator[Measured]:
    """Yield the records of a count: one, or one for each bucket of audio.

    job: ``given`` has its `flags`, and `current`, the folder that their paths are relative to.  Raises UserError.
    """
    flags = job["given"]["flags"]
    os.chdir(job["given"]["current"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what is not counted is named below the table
        given = [parse(text) for text in flags["input_shape"]]
        made_with = configuration.read(Path(flags["args"])) if flags["args"] else {}
        made_with.update((key, configuration.parsed(value, f"--arg {key}")) for key, value in flags["arg"])
        try:
            device = str(torch.device(flags["device"]))
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError) as error:
            raise UserError(f"--device {flags['device']}: {first_line(error)}") from error
        if flags["register"]:
            loading.module(str(Path(flags["register"]).with_suffix(".py")))
        model = loading.load(flags["model"], made_with, device)
        model.train(flags["train"])
        for bucket, lengths in _lengths(flags).items():
            counter, batch = FlopCounter(model, strict=flags["strict"]), flags["batch_size"]
            macs: List[int] = []
            for samples in lengths:
                before = counter.total().macs
                _count(counter, model, _inputs(given, device, samples, flags), flags)
                each, rest = divmod(counter.total().macs - before, batch)
                macs += [each + (number < rest) for number in range(batch)]
            of_each = [samples for samples in lengths for _ in range(batch)]
            spoken = {"samples": of_each, "macs": macs} if bucket else {}
            yield Measured(value={"name": bucket, "document": counter.document(), **spoken})


def _lengths(flags: Mapping[str, Any]) -> Dict[str, List[int]]:
    """Return the samples of each utterance by bucket: four parts of as many utterances as possible, the
    shortest first, without the empty ones; one run of no length where the input is no audio."""
    if flags["audio"]:
        ordered = lengths(Path(flags["audio"]), flags["sample_rate"])
        bounds = [len(ordered) * number // len(BUCKETS) for number in range(len(BUCKETS) + 1)]
        parts = {name: ordered[begin:end] for name, begin, end in zip(BUCKETS, bounds, bounds[1:])}
        return {name: part for name, part in parts.items() if part}
    return {"pseudo": [flags["pseudo_input"]]} if flags["pseudo_input"] else {"": [0]}


def _inputs(given: Sequence[Given], device: str, samples: int, flags: Mapping[str, Any]) -> Inputs:
    """Return the input of one run: as given, or an utterance of so many samples, `batch_size` equal ones."""
    if not samples:
        return made(given, device, {})
    if flags["model"].startswith(loading.S3PRL) and not given:
        return Inputs([[torch.randn(samples, device=device) for _ in range(flags["batch_size"])]])
    letters = {SAMPLES: samples, FRAMES: samples // flags["hop"]}
    return made(given or [parse(f"{flags['batch_size']}x{SAMPLES}")], device, letters)


def _count(counter: FlopCounter, model: torch.nn.Module, given: Inputs, flags: Mapping[str, Any]) -> None:
    """Call --method of the model on the inputs, and with --backward its backward; raise UserError for whatever that
    raises."""
    owner: Any = None
    function: Any = model
    for name in [] if flags["method"] == "forward" else flags["method"].split("."):
        owner, function = function, getattr(function, name, None)
    if not callable(function):
        raise UserError(f"--method {flags['method']}: {type(model).__name__} has no such method")
    with torch.set_grad_enabled(flags["backward"]), counter:
        try:
            # hooks do not see a call that is not of a module's `forward`
            with counter.modules.call(owner) if isinstance(owner, torch.nn.Module) else nullcontext():
                outputs = function(*given.positional, **given.keywords)
            if flags["backward"]:  # from ones for every output that has a gradient
                leaves = torch.utils._pytree.tree_flatten(outputs)[0]
                wanted = [output for output in leaves if isinstance(output, torch.Tensor) and output.requires_grad]
                if not wanted:
                    raise UserError("--backward: no output of the model has a gradient")
                torch.autograd.backward(wanted, [torch.ones_like(output) for output in wanted])
        except UserError:
            raise
        except (Exception, SystemExit) as error:  # whatever a model that is given something else raises
            where = counter.modules.current()[0] or "the model"
            why = f"{type(error).__name__} in {where}: {first_line(error)}"
            hint = "; if it looks at values, which the meta device has not, try --device cpu"
            hint = hint if flags["device"] == "meta" else ""
            raise UserError(f"the model does not take {given.shapes()} ({why}){hint}") from error
