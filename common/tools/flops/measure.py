"""Count a model's operations on inputs of given shapes, or on utterances of given lengths."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from rnnt_bench.core import errors, files, text
from rnnt_bench.core.jobspec import JobSpec
from rnnt_bench.flops.counter import FlopCounter
from rnnt_bench.records.schema import Measured
from rnnt_bench.tools import configuration, loading
from rnnt_bench.tools.flops.show import Bucket

#: Endings of audio files.
AUDIO = (".wav", ".flac", ".ogg", ".mp3", ".opus")
#: Names of the buckets of utterances, the shortest first.
BUCKETS = ("short", "medium", "long", "longer")
#: Matches an input: "1x80x1000", "2:int64=1000", "lengths@2:int32=F", "1xS".
_SPEC = re.compile(
    r"(?:(?P<name>\w+)@)?(?P<shape>(\d+|[SF])(x(\d+|[SF]))*)(?::(?P<dtype>\w+))?(?:=(?P<value>-?\d+(\.\d+)?|[SF]))?"
)


def tensor(spec: str, device: str, letters: Mapping[str, int]) -> tuple[str, torch.Tensor]:
    """Return the keyword and the tensor of an input; the keyword of a positional one is "".

    spec: [KEYWORD@]SHAPE[:DTYPE][=VALUE], such as "1x80x1000" or "lengths@2:int32=F".  VALUE fills
    the tensor.  Without it, the numbers are random, or ones for a dtype of integers.  A size and
    VALUE may be S or F.
    letters: values of S, the number of samples, and F, of frames; {} without audio.

    Raises UserError."""
    match = _SPEC.fullmatch(spec)
    dtype = getattr(torch, match["dtype"] or "float32", None) if match else None
    if not match or not isinstance(dtype, torch.dtype):
        raise errors.UserError(
            f"{spec!r}: give a shape such as 1x80x1000, 2x1000:int64, 2:int64=1000 or name@1x80"
        )
    words = [*match["shape"].split("x"), match["value"] or ""]
    *sizes, value = [str(letters.get(word, word)) for word in words]
    if {"S", "F"} & {*sizes, value}:  # a letter without a value
        raise errors.UserError(
            f"{spec!r}: S and F are a length of audio, which --audio or --pseudo-input gives"
        )
    shape = [int(size) for size in sizes]
    try:
        if not value and (dtype.is_floating_point or dtype.is_complex):
            result = torch.randn(shape, dtype=dtype, device=device)
        else:
            filled = float(value) if "." in value else int(value or 1)
            result = torch.full(shape, filled, dtype=dtype, device=device)
    except (RuntimeError, OverflowError, TypeError, MemoryError) as error:
        raise errors.UserError(
            f"no tensor of {match['shape']} can be made here; give smaller sizes"
        ) from error
    return match["name"] or "", result


def lengths(source: Path, sample_rate: int) -> list[int]:
    """Return the number of samples of each utterance, sorted.  Raises UserError.

    source: a folder of audio files, or a text file with a number on each line; sample_rate: that of
    each audio file, Hz."""
    problem = files.not_a_file_or_folder(source)
    if problem:
        raise errors.UserError(f"{source}: {problem}")
    samples = _of_audio(source, sample_rate) if source.is_dir() else _of_text(source)
    if not samples:
        raise errors.UserError(f"{source}: no audio in it ({', '.join(AUDIO)})")
    return sorted(samples)


def _of_audio(folder: Path, sample_rate: int) -> list[int]:
    """Return the number of samples of each audio file below a folder, as the file's header says.

    Raises UserError for a file that cannot be read, or that has another sample rate."""
    samples = []
    for path in sorted(folder.rglob("*")):
        if path.suffix.lower() not in AUDIO or not path.is_file():
            continue
        try:
            import soundfile

            header = soundfile.info(str(path))
        except (ImportError, RuntimeError) as error:
            raise errors.UserError(f"cannot read {path} with soundfile: {error}") from error
        rate = header.samplerate
        if rate != sample_rate:
            raise errors.UserError(f"{path} has {rate} samples a second: give --sample-rate {rate}")
        samples.append(header.frames)
    return samples


def _of_text(file: Path) -> list[int]:
    """Return the numbers of samples in a text file: the first word of each line.

    Further words, empty lines and comments from "#" on are left out.  Raises UserError for a first
    word that is no positive integer."""
    samples = []
    for number, line in enumerate(files.read_text(file).splitlines(), 1):
        for word in line.partition("#")[0].split()[:1]:
            if not word.isdigit() or not int(word):
                raise errors.UserError(
                    f"{file}, line {number}: give a number of samples, not {word!r}"
                )
            samples.append(int(word))
    return samples


def run(job: JobSpec) -> Iterator[Measured]:
    """Yield the record of a count.  Raises UserError.

    The request has `flags`, the flags of the command, and `current`, the folder to which paths in
    these flags are relative.  This process changes to that folder."""
    flags = job.request["flags"]
    os.chdir(job.request["current"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what is not counted is named below the table
        model = _model(flags)
        counter = FlopCounter(model, strict=flags["strict"])
        buckets = [
            _bucket(counter, model, name, utterances, flags)
            for name, utterances in _utterances(flags).items()
        ]
    spoken = [bucket for bucket in buckets if bucket.name]  # "" is for inputs that are no audio
    yield Measured(value={"buckets": spoken, **counter.document()})


def _model(flags: Mapping[str, Any]) -> torch.nn.Module:
    """Import the file of --register, which registers rules of its own for counting operations;
    load the model of the flags and return it.  Raises UserError."""
    arguments = configuration.read(Path(flags["args"])) if flags["args"] else {}
    for key, value in flags["arg"]:
        arguments[key] = configuration.parsed(value, f"--arg {key}")
    try:
        torch.empty(0, device=flags["device"])  # fails if the device cannot be used
    except (RuntimeError, AssertionError) as error:
        raise errors.UserError(f"--device {flags['device']}: {text.first_line(error)}") from error
    if flags["register"]:
        # A file in any case: `module` would take a name without .py for that of a module.
        loading.module(str(Path(flags["register"]).with_suffix(".py")))
    model = loading.load(flags["model"], arguments, flags["device"])
    model.train(flags["train"])  # a model's own train() may return nothing
    return model


def _utterances(flags: Mapping[str, Any]) -> dict[str, list[int]]:
    """Return name of a bucket -> the number of samples of each of its utterances.

    --pseudo-input gives one utterance, in the bucket "pseudo".  The utterances of --audio are cut
    into BUCKETS of about as many utterances each, the shortest first; empty buckets are left out.
    Without either flag the inputs are no audio: one utterance of 0 samples, in the bucket ""."""
    if flags["pseudo_input"]:
        return {"pseudo": [flags["pseudo_input"]]}
    if not flags["audio"]:
        return {"": [0]}
    ordered = lengths(Path(flags["audio"]), flags["sample_rate"])
    bounds = [len(ordered) * number // len(BUCKETS) for number in range(len(BUCKETS) + 1)]
    parts = {name: ordered[begin:end] for name, begin, end in zip(BUCKETS, bounds, bounds[1:])}
    return {name: part for name, part in parts.items() if part}


def _bucket(
    counter: FlopCounter,
    model: torch.nn.Module,
    name: str,
    utterances: Sequence[int],
    flags: Mapping[str, Any],
) -> Bucket:
    """Run and count the model once for each utterance of a bucket, on a batch of --batch-size
    copies of it.

    Return the bucket with its counts.  In them each copy is an utterance of its own, with an equal
    share of the MACs of its batch.

    utterances: the number of samples of each."""
    batch_size = flags["batch_size"]
    flops_before = counter.total().flops
    bucket = Bucket(name=name, samples=[], macs=[], flops=0)
    for samples in utterances:
        macs_before = counter.total().macs
        _count(counter, model, samples, flags)
        bucket.samples += [samples] * batch_size
        bucket.macs += [(counter.total().macs - macs_before) / batch_size] * batch_size
    bucket.flops = counter.total().flops - flops_before
    return bucket


def _count(
    counter: FlopCounter, model: torch.nn.Module, samples: int, flags: Mapping[str, Any]
) -> None:
    """Count one call of the model, and with --backward its backward.  Raises UserError for whatever
    the call or the backward raises.

    samples: number of samples of the utterance, the value of S in the shapes; F is its number of
    frames.  0 for no utterance: then S and F have no value."""
    shapes = flags["input_shape"] or [f"{flags['batch_size']}xS"]
    letters = {"S": samples, "F": samples // flags["hop"]} if samples else {}
    inputs = [tensor(spec, flags["device"], letters) for spec in shapes]
    positional: list[Any] = [value for name, value in inputs if not name]
    named = {name: value for name, value in inputs if name}
    if flags["model"].startswith(loading.S3PRL) and not flags["input_shape"]:
        positional = [list(positional[0])]  # s3prl takes a list of waveforms
    with torch.set_grad_enabled(flags["backward"]), counter:
        try:
            outputs = _called(counter, model, flags["method"], positional, named)
            if flags["backward"]:
                _run_backward(outputs)
        except errors.UserError:
            raise
        except (Exception, SystemExit) as error:  # a model may raise anything
            path, _ = counter.modules.current()  # "" for the whole model
            reason = f"{text.reason_of(error)}, in {path or 'the model'}"
            hint = ""
            if flags["device"] == "meta":
                hint = "; if it looks at values, which the meta device has not, try --device cpu"
            raise errors.UserError(
                f"the model does not take {', '.join(shapes)} ({reason}){hint}"
            ) from error


def _called(
    counter: FlopCounter,
    model: torch.nn.Module,
    method: str,
    positional: Sequence[Any],
    named: Mapping[str, torch.Tensor],
) -> Any:
    """Call a method of the model, or of a module in it ("encoder.embed" is the method `embed` of the
    module `encoder`); return its result.

    Raises UserError if there is no such method, and whatever the method raises."""
    if method == "forward":
        return model(*positional, **named)
    *path, name = method.split(".")
    owner: Any = model
    for attribute in path:
        owner = getattr(owner, attribute, None)
    function = getattr(owner, name, None)
    if not callable(function):
        raise errors.UserError(f"--method {method}: {type(model).__name__} has no such method")
    # The counter's hooks see only calls of `forward`, so it is told of a call of another method.
    is_module = isinstance(owner, torch.nn.Module)
    with counter.modules.call(owner) if is_module else nullcontext():
        return function(*positional, **named)


def _run_backward(outputs: Any) -> None:
    """Run the backward from gradients of ones for every output that needs a gradient.  Raises
    UserError where none does."""
    leaves, _ = torch.utils._pytree.tree_flatten(outputs)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if not tensors:
        raise errors.UserError("--backward: no output of the model has a gradient")
    torch.autograd.backward(tensors, [torch.ones_like(output) for output in tensors])
