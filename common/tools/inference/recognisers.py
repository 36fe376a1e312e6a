"""Loads the models that can be profiled behind one interface, waves (N, samples) in and any
outputs, and their audio.

A `type` is "factory" (whatever Python can import), "torchaudio" (a bundle), "transformers" (a
pipeline) or a class of SpeechBrain.  Audio is a file, one channel at the model's rate, or noise."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from rnnt_bench.core import files, text
from rnnt_bench.core.errors import UserError
from rnnt_bench.tools import loading
from rnnt_bench.tools.inference.rows import Model

SAMPLE_RATE = 16000
#: The name of an argument that takes lengths in samples: lengths, x_lens, input_lengths;
#: SpeechBrain's wav_lens are shares.
LENGTHS = re.compile(r"(?!wavs?_lens)(\w+_)?(lengths|lens)")
#: Class of SpeechBrain -> its module below speechbrain.inference, and its method.
INTERFACES = {
    "EncoderASR": ("ASR", "transcribe_batch"),
    "EncoderDecoderASR": ("ASR", "transcribe_batch"),
    "WhisperASR": ("ASR", "transcribe_batch"),
    "EndToEndSLU": ("SLU", "decode_batch"),
    "EncoderClassifier": ("classifiers", "classify_batch"),
    "SpeakerRecognition": ("speaker", "verify_batch"),
    "VAD": ("VAD", "get_speech_prob_chunk"),
    "SepformerSeparation": ("separation", "separate_batch"),
    "SpectralMaskEnhancement": ("enhancement", "enhance_batch"),
    "WaveformEnhancement": ("enhancement", "enhance_batch"),
    "SNREstimator": ("metrics", "estimate_batch"),
}


class Recogniser(NamedTuple):
    """A model that was loaded.  call: takes waves (N, samples), float32, and lengths (N,) in
    samples, int64; stream: takes the same, yields pieces of the outputs, None or empty ones before
    there is a first symbol."""

    call: Callable[[torch.Tensor, torch.Tensor], Any]
    sample_rate: int
    stream: Callable[[torch.Tensor, torch.Tensor], Iterable[Any]] | None = None


def plain(module: Any) -> Recogniser:
    """Return a module as a recogniser; it may have a ``sample_rate`` and a method ``stream``.  Its
    second argument is the lengths where it has to be given, else the first one whose name LENGTHS
    matches."""
    needed = 0
    names = []
    for parameter in inspect.signature(module.forward).parameters.values():
        is_positional = parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        if is_positional or parameter.kind is parameter.KEYWORD_ONLY:
            names.append(parameter.name)
        needed += is_positional and parameter.default is parameter.empty
    name = next(filter(LENGTHS.fullmatch, names), None)

    def call(waves: torch.Tensor, lengths: torch.Tensor) -> Any:
        if needed > 1:
            return module(waves, lengths)
        return module(waves, **{name: lengths}) if name else module(waves)

    return Recogniser(
        call, int(getattr(module, "sample_rate", SAMPLE_RATE)), getattr(module, "stream", None)
    )


def load(model: Model, device: torch.device) -> Recogniser:
    """Return the model of a configuration.  Raises UserError."""
    kind, source, arguments = model.type, model.source, model.arguments
    if kind == "factory":
        return plain(loading.load(source, arguments, str(device)).eval())
    kinds = ("torchaudio", "transformers", *INTERFACES)
    if kind not in kinds:
        raise UserError(
            f"pretrained_model.type: unknown {kind!r}{text.closest(kind, kinds)}; there are factory, {', '.join(kinds)}"
        )
    os.environ.update(loading.OFFLINE)
    if kind == "torchaudio":
        return _bundle(source, arguments, device)
    if kind == "transformers":
        return _pipeline(source, arguments, device)
    return _interface(kind, source, arguments, device)


def _bundle(source: str, arguments: Mapping[str, Any], device: torch.device) -> Recogniser:
    """Return a bundle of torchaudio.pipelines by its name.  arguments: ``beam_width`` of a
    transducer."""
    pipelines = loading.module("torchaudio.pipelines")
    bundle: Any = getattr(pipelines, source, None)
    if not isinstance(getattr(bundle, "sample_rate", None), (int, float)):
        names = [
            name
            for name in pipelines.__all__
            if hasattr(getattr(pipelines, name), "sample_rate") and name.isupper()  # no class
        ]
        raise UserError(
            f"pretrained_model.source: torchaudio.pipelines has no {source} of audio; {', '.join(names)}"
        )
    decodes = hasattr(bundle, "get_decoder")
    methods = ["get_feature_extractor", "get_decoder"] if decodes else ["get_model"]
    unknown = set(arguments).difference(["beam_width"] if decodes else [])
    if unknown:
        raise UserError(
            f"pretrained_model.arguments: {source} takes no {', '.join(sorted(unknown))}"
        )
    fetch = ", ".join(f"bundle.{method}()" for method in methods)
    code = f"from torchaudio.pipelines import {source} as bundle; {fetch}"
    absent = loading.not_here(code, torch.hub.get_dir())
    parts = [loading.made(source, getattr(bundle, method), {}, absent=absent) for method in methods]
    for part in parts:
        part.to(device).eval()

    def search(waves: torch.Tensor, lengths: torch.Tensor) -> Any:
        extract, decode = parts
        width = int(arguments.get("beam_width", 10))
        inputs = [extract(wave) for wave in waves]
        return [
            decode(features, length.to(waves.device), width)[0][0][1:]
            for features, length in inputs
        ]

    def call(waves: torch.Tensor, lengths: torch.Tensor) -> Any:
        # No lengths: bundles normalised by groups are trained without, and no wave here is padded.
        return parts[0](waves)

    return Recogniser(search if decodes else call, int(bundle.sample_rate))


def _pipeline(source: str, arguments: Mapping[str, Any], device: torch.device) -> Recogniser:
    """Return a pipeline of transformers, from a folder or from the cache.  arguments: of it,
    ``task`` among them."""
    transformers = loading.module("transformers")
    arguments = {"task": "automatic-speech-recognition", **arguments}
    task = arguments["task"]
    absent = loading.absent_from(
        source, f"from transformers import pipeline; pipeline('{task}', '{source}')"
    )
    make = partial(transformers.pipeline, model=source, device=device)
    pipeline = loading.made(source, make, arguments, absent=absent)
    if getattr(pipeline, "feature_extractor", None) is None:
        raise UserError(
            f"{source}: the pipeline of {task} takes no audio; give arguments: {{task: ...}}"
        )
    rate = int(getattr(pipeline.feature_extractor, "sampling_rate", SAMPLE_RATE))

    def call(waves: torch.Tensor, lengths: torch.Tensor) -> Any:
        rows = [{"raw": wave.cpu().numpy(), "sampling_rate": rate} for wave in waves]
        return [str(result) for result in pipeline(rows, batch_size=len(rows))]

    return Recogniser(call, rate)


def _interface(
    kind: str, source: str, arguments: Mapping[str, Any], device: torch.device
) -> Recogniser:
    """Return a SpeechBrain model from a folder, or from its hub.  arguments: of from_hparams.  The
    folder's hyperparams.yaml names classes to make: it is code, as the model is."""
    name, method = INTERFACES[kind]
    module = f"speechbrain.inference.{name}"
    make = loading.imported(f"{module}:{kind}").from_hparams
    absent = loading.absent_from(
        source, f"from {module} import {kind}; {kind}.from_hparams('{source}')"
    )
    options = {"device": str(device), **(arguments.get("run_opts") or {})}
    model = loading.made(
        source, partial(make, source), {**arguments, "run_opts": options}, absent=absent
    )
    function = getattr(model, method)
    names = list(inspect.signature(function).parameters)

    def call(waves: torch.Tensor, lengths: torch.Tensor) -> Any:
        values = {name: _argument(name, waves, lengths) for name in names}
        return function(**{name: value for name, value in values.items() if value is not None})

    return Recogniser(call, int(getattr(model.hparams, "sample_rate", SAMPLE_RATE)))


def _argument(name: str, waves: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor | None:
    """Return an argument of a method of SpeechBrain by its name; None for one that stays at its
    default."""
    if re.fullmatch(r"wav\d?_lens|lengths", name):
        return lengths / waves.shape[1]
    if name == "predictions":
        # (N, samples, speakers): an estimate of SpeechBrain is of two
        return waves[..., None].expand(-1, -1, 2)
    return waves if re.fullmatch(r"wavs\d?|mix|noisy", name) else None


def read(path: Path, sample_rate: int) -> torch.Tensor:
    """Return the mean of the channels, resampled, (samples,) in float32.  Raises UserError.

    It is read in a process of its own: what reads it would be in the memory of the one that is
    measured."""
    reason = files.not_a_file(path)
    if reason:
        raise UserError(f"cannot read {path}: {reason}")
    with tempfile.TemporaryDirectory(prefix="rnnt-bench-") as scratch:
        wave = Path(scratch) / "wave.pt"
        code = "import sys; from rnnt_bench.tools.inference.recognisers import decode; sys.exit(decode(*sys.argv[1:]))"
        ended = subprocess.run(
            [sys.executable, "-c", code, str(path.resolve()), str(sample_rate), str(wave)],
            cwd=files.ROOT,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        if ended.returncode:
            lines = ended.stderr.strip().splitlines() or [f"cannot read {path}"]
            raise UserError(lines[-1])
        return torch.load(wave, weights_only=True)


def decode(path: str, sample_rate: str, output: str) -> str | None:
    """Write what `read` returns to the file `output`; return why it cannot be, in words."""
    try:
        torch.save(_decoded(Path(path), int(sample_rate)), output)
    except UserError as error:
        return str(error)
    return None


def _decoded(path: Path, sample_rate: int) -> torch.Tensor:
    soundfile = loading.module("soundfile")
    resample = loading.imported("torchaudio.functional:resample")
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


def batch(path: str | None, seconds: float, size: int, sample_rate: int, seed: int) -> torch.Tensor:
    """Return (size, samples) of equal rows: the file's audio, from its begin again where it is
    short; else noise."""
    wave = noise(seconds, sample_rate, seed)
    if path is not None:
        audio = read(Path(path), sample_rate)
        wave = audio.repeat(-(-len(wave) // len(audio)))[: len(wave)]
    return wave.repeat(size, 1)
