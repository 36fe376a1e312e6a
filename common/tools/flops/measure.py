"""Counting a model's operations on given inputs, or on utterances of given lengths."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from rnnt_bench.core import errors, files, text
from rnnt_bench.core.jobspec import JobSpec
from rnnt_bench.flops.counter import FlopCounter
from rnnt_bench.records.schema import Measured
from rnnt_bench.tools import configuration, loading

AUDIO = (".wav", ".flac", ".ogg", ".mp3", ".opus")
BUCKETS = ("short", "medium", "long", "longer")
#: An input; S and F stand for the samples of the utterance and for its frames.
_SPEC = re.compile(
    r"(?:(?P<name>\w+)@)?(?P<shape>(\d+|[SF])(x(\d+|[SF]))*)(?::(?P<dtype>\w+))?(?:=(?P<value>-?\d+(\.\d+)?|[SF]))?"
)


def tensor(spec: str, device: str, letters: Mapping[str, int]) -> tuple[str, torch.Tensor]:
    """Return (keyword, tensor) of "1x80x1000" (random), "2:int64=1000" (filled),
    "lengths@2:int32=F" or "1xS"; the keyword is "" for the next positional argument; letters:
    values of S and F.  Raises UserError."""
    match = _SPEC.fullmatch(spec)
    dtype = getattr(torch, match["dtype"] or "float32", None) if match else None
    if not match or not isinstance(dtype, torch.dtype):
        raise errors.UserError(
            f"{spec!r}: give a shape such as 1x80x1000, 2x1000:int64, 2:int64=1000 or name@1x80"
        )
    *sizes, value = [
        str(letters.get(word, word)) for word in (*match["shape"].split("x"), match["value"] or "")
    ]
    if {"S", "F"} & {*sizes, value}:
        raise errors.UserError(
            f"{spec!r}: S and F are a length of audio, which --audio or --pseudo-input gives"
        )
    shape = [int(size) for size in sizes]
    filled = float(value) if "." in value else int(value or 1)
    try:
        if not value and (dtype.is_floating_point or dtype.is_complex):
            return match["name"] or "", torch.randn(shape, dtype=dtype, device=device)
        return match["name"] or "", torch.full(shape, filled, dtype=dtype, device=device)
    except (RuntimeError, OverflowError, TypeError, MemoryError) as error:
        raise errors.UserError(
            f"no tensor of {match['shape']} can be made here; give smaller sizes"
        ) from error


def lengths(source: Path, sample_rate: int) -> list[int]:
    """Return the sorted samples of every file below a directory, by their headers, or the numbers
    of a text file ("#": a comment).  Raises UserError."""
    problem = files.not_a_file_or_folder(source)
    if problem:
        raise errors.UserError(f"{source}: {problem}")
    samples = []
    if source.is_dir():
        for path in sorted(
            path for path in source.rglob("*") if path.suffix.lower() in AUDIO and path.is_file()
        ):
            try:
                import soundfile

                header = soundfile.info(str(path))
            except (ImportError, RuntimeError) as error:
                raise errors.UserError(f"cannot read {path} with soundfile: {error}") from error
            rate = header.samplerate
            if rate != sample_rate:
                raise errors.UserError(
                    f"{path} has {rate} samples a second: give --sample-rate {rate}"
                )
            samples.append(header.frames)
    else:
        for number, line in enumerate(files.read_text(source).splitlines(), 1):
            words = line.split("#")[0].split()[:1]
            if words and not (words[0].isdigit() and int(words[0])):
                raise errors.UserError(
                    f"{source}, line {number}: give a number of samples, not {words[0]!r}"
                )
            samples += map(int, words)
    if not samples:
        raise errors.UserError(f"{source}: no audio in it ({', '.join(AUDIO)})")
    return sorted(samples)


def run(job: JobSpec) -> Iterator[Measured]:
    """Yield the record of a count; `request` has its `flags`, and `current`, the folder that their
    paths are relative to. Raises UserError."""
    flags = job.request["flags"]
    os.chdir(job.request["current"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what is not counted is named below the table
        made_with = configuration.read(Path(flags["args"])) if flags["args"] else {}
        made_with.update(
            (key, configuration.parsed(value, f"--arg {key}")) for key, value in flags["arg"]
        )
        try:
            torch.empty(0, device=flags["device"])
        except (RuntimeError, AssertionError) as error:
            raise errors.UserError(
                f"--device {flags['device']}: {text.first_line(error)}"
            ) from error
        if flags["register"]:
            loading.module(str(Path(flags["register"]).with_suffix(".py")))
        model = loading.load(flags["model"], made_with, flags["device"])
        model.train(flags["train"])
        counter = FlopCounter(model, strict=flags["strict"])
        batch = flags["batch_size"]
        buckets = []
        for name, utterances in _utterances(flags).items():
            before = counter.total()
            macs = []
            for samples in utterances:
                macs_before = counter.total().macs
                _count(counter, model, samples, flags)
                macs += [(counter.total().macs - macs_before) / batch] * batch
            bucket = {
                "name": name,
                "samples": [samples for samples in utterances for _ in range(batch)],
                "macs": macs,
                "flops": counter.total().flops - before.flops,
            }
            buckets.append(bucket)
    yield Measured(value={"buckets": buckets if buckets[0]["name"] else [], **counter.document()})


def _utterances(flags: Mapping[str, Any]) -> dict[str, list[int]]:
    """Return the samples of each utterance by bucket: four parts of as many utterances as possible,
    the shortest first, without the empty ones; one run of no length where the input is no audio."""
    if not flags["audio"]:
        return {"pseudo": [flags["pseudo_input"]]} if flags["pseudo_input"] else {"": [0]}
    ordered = lengths(Path(flags["audio"]), flags["sample_rate"])
    bounds = [len(ordered) * number // len(BUCKETS) for number in range(len(BUCKETS) + 1)]
    parts = {name: ordered[begin:end] for name, begin, end in zip(BUCKETS, bounds, bounds[1:])}
    return {name: part for name, part in parts.items() if part}


def _count(
    counter: FlopCounter, model: torch.nn.Module, samples: int, flags: Mapping[str, Any]
) -> None:
    """Call --method of the model on the inputs, as given or an utterance of so many samples, and
    with --backward its backward; raise UserError for whatever that raises."""
    owner: Any = None
    function: Any = model
    for name in [] if flags["method"] == "forward" else flags["method"].split("."):
        owner, function = function, getattr(function, name, None)
    if not callable(function):
        raise errors.UserError(
            f"--method {flags['method']}: {type(model).__name__} has no such method"
        )
    letters = {"S": samples, "F": samples // flags["hop"]} if samples else {}
    shapes = flags["input_shape"] or [f"{flags['batch_size']}xS"]
    tensors = [tensor(spec, flags["device"], letters) for spec in shapes]
    positional: list[Any] = [value for name, value in tensors if not name]
    if flags["model"].startswith(loading.S3PRL) and not flags["input_shape"]:
        positional = [list(positional[0])]  # a list of waveforms
    with torch.set_grad_enabled(flags["backward"]), counter:
        try:
            # hooks do not see a call that is not of a module's `forward`
            with (
                counter.modules.call(owner) if isinstance(owner, torch.nn.Module) else nullcontext()
            ):
                outputs = function(*positional, **{name: value for name, value in tensors if name})
            if flags["backward"]:  # from ones for every output that has a gradient
                leaves = torch.utils._pytree.tree_flatten(outputs)[0]
                wanted = [
                    output
                    for output in leaves
                    if isinstance(output, torch.Tensor) and output.requires_grad
                ]
                if not wanted:
                    raise errors.UserError("--backward: no output of the model has a gradient")
                torch.autograd.backward(wanted, [torch.ones_like(output) for output in wanted])
        except errors.UserError:
            raise
        # whatever a model that is given something else raises
        except (Exception, SystemExit) as error:
            where = counter.modules.current()[0] or "the model"
            why = (
                f"the model does not take {', '.join(shapes)} ({text.reason_of(error)}, in {where})"
            )
            hint = "; if it looks at values, which the meta device has not, try --device cpu"
            raise errors.UserError(why + (hint if flags["device"] == "meta" else "")) from error
