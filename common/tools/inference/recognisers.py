"""Loads the models that can be profiled behind one interface, waves (N, samples) in and any outputs, and their audio.

A `type` is "factory" (whatever Python can import), "torchaudio" (a bundle), "transformers" (a pipeline) or a class of
SpeechBrain.  Audio is a file, one channel at the model's rate, or noise."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any, Callable, Iterable, Mapping, NamedTuple, Optional

import torch

from rnnt_bench.core import files, text
from rnnt_bench.core.errors import UserError
from rnnt_bench.tools import loading

SAMPLE_RATE = 16000
#: Names of arguments that take lengths in samples: lengths, x_lens, input_lengths; SpeechBrain's wav_lens are shares.
LENGTHS = re.compile(r"(?!wavs?_lens)(\w+_)?(lengths|lens)")
#: Class of SpeechBrain -> its module below speechbrain.inference, and its method.
INTERFACES = {
    **dict.fromkeys(("EncoderASR", "EncoderDecoderASR", "WhisperASR"), ("ASR", "transcribe_batch")),
    "EndToEndSLU": ("SLU", "decode_batch"),
    "EncoderClassifier": ("classifiers", "classify_batch"),
    "SpeakerRecognition": ("speaker", "verify_batch"),
    "VAD": ("VAD", "get_speech_prob_chunk"),
    "SepformerSeparation": ("separation", "separate_batch"),
    **dict.fromkeys(("SpectralMaskEnhancement", "WaveformEnhancement"), ("enhancement", "enhance_batch")),
    "SNREstimator": ("metrics", "estimate_batch"),
}


class Recogniser(NamedTuple):
    """A model that was loaded.  call: takes waves (N, samples), float32, and lengths (N,) in samples, int64; stream:
    takes the same, yields pieces of the outputs, None or empty ones before there is a first symbol."""

    call: Callable[[torch.Tensor, torch.Tensor], Any]
    sample_rate: int
    stream: Optional[Callable[[torch.Tensor, torch.Tensor], Iterable[Any]]] = None


def plain(module: Any) -> Recogniser:
    """Return a module as a recogniser; it may have a ``sample_rate`` and a method ``stream``.  Its second argument is
    the lengths where it has to be given, else the first one whose name LENGTHS matches."""
    parameters = list(inspect.signature(module.forward).parameters.values())
    needed = [part for part in parameters if part.default is part.empty and part.kind is part.POSITIONAL_OR_KEYWORD]
    keywords = [part for part in parameters if part.kind in (part.POSITIONAL_OR_KEYWORD, part.KEYWORD_ONLY)]
    named = next((part.name for part in keywords if LENGTHS.fullmatch(part.name)), None)

    def call(waves: torch.Tensor, lengths: torch.Tensor) -> Any:
        if len(needed) > 1:
            return module(waves, lengths)
        return module(waves, **{named: lengths}) if named else module(waves)

    return Recogniser(call, int(getattr(module, "sample_rate", SAMPLE_RATE)), getattr(module, "stream", None))


def load(model: Mapping[str, Any], device: torch.device) -> Recogniser:
    """Return the model of a configuration: ``type``, ``source``, ``arguments``.  Raises UserError."""
    kind, source, arguments = model["type"], model["source"], model.get("arguments") or {}
    if kind == "factory":
        return plain(loading.load(source, arguments, str(device)).eval())
    makers = {"torchaudio": _bundle, "transformers": _pipeline, **dict.fromkeys(INTERFACES, _interface)}
    if kind not in makers:
        near = f"{text.closest(kind, makers)}; there are factory, {', '.join(makers)}"
        raise UserError(f"pretrained_model.type: unknown {kind!r}{near}")
    os.environ.update(loading.OFFLINE)
    return makers[kind](kind, source, arguments, device)


def _bundle(kind: str, source: str, arguments: Mapping[str, Any], device: torch.device) -> Recogniser:
    """Return a bundle of torchaudio.pipelines by its name.  arguments: ``beam_width`` of a transducer."""
    pipelines = loading.module("torchaudio.pipelines")
    bundle: Any = getattr(pipelines, source, None)
    if not isinstance(getattr(bundle, "sample_rate", None), (int, float)):
        known = [name for name in pipelines.__all__ if hasattr(getattr(pipelines, name), "sample_rate")]
        raise UserError(f"pretrained_model.source: torchaudio.pipelines has no {source} of audio; {', '.join(known)}")
    decodes = hasattr(bundle, "get_decoder")
    unknown = set(arguments) - ({"beam_width"} if decodes else set())
    if unknown:
        raise UserError(f"pretrained_model.arguments: {source} takes no {', '.join(sorted(unknown))}")
    fetch = "get_feature_extractor(), bundle.get_decoder" if decodes else "get_model"
    code = f"from torchaudio.pipelines import {source} as bundle; bundle.{fetch}()"
    absent = loading.not_here(code, torch.hub.get_dir())
    make = [bundle.get_feature_extractor, bundle.get_decoder] if decodes else [bundle.get_model]
    parts = torch.nn.ModuleList([loading.made(source, each, {}, absent=absent) for each in make]).to(device).eval()

    def search(waves: torch.Tensor, lengths: torch.Tensor) -> Any:
        given = [parts[0](wave) for wave in waves]
        width = int(arguments.get("beam_width", 10))
        return [parts[1](features, length.to(waves.device), width)[0][0][1:] for features, length in given]

    def call(waves: torch.Tensor, lengths: torch.Tensor) -> Any:
        # without lengths: bundles normalised by groups are trained so, and no wave here is padded
        return parts[0](waves)

    return Recogniser(search if decodes else call, int(bundle.sample_rate))


def _pipeline(kind: str, source: str, arguments: Mapping[str, Any], device: torch.device) -> Recogniser:
    """Return a pipeline of transformers, from a folder or from the cache.  arguments: of it, ``task`` among them."""
    transformers = loading.module("transformers")
    given = {"task": "automatic-speech-recognition", **arguments}
    absent = loading.absent_from(source, f"from transformers import pipeline; pipeline('{given['task']}', '{source}')")
    made = loading.made(source, partial(transformers.pipeline, model=source, device=device), given, absent=absent)
    if getattr(made, "feature_extractor", None) is None:
        raise UserError(f"{source}: the pipeline of {given['task']} takes no audio; give arguments: {{task: ...}}")
    rate = int(getattr(made.feature_extractor, "sampling_rate", SAMPLE_RATE))

    def call(waves: torch.Tensor, lengths: torch.Tensor) -> Any:
        rows = [{"raw": wave.cpu().numpy(), "sampling_rate": rate} for wave in waves]
        return [str(result) for result in made(rows, batch_size=len(rows))]

    return Recogniser(call, rate)


def _interface(kind: str, source: str, arguments: Mapping[str, Any], device: torch.device) -> Recogniser:
    """Return a SpeechBrain model from a folder, or from its hub.  arguments: of from_hparams.  The folder's
    hyperparams.yaml names classes to make: it is code, as the model is."""
    name, method = INTERFACES[kind]
    of = f"speechbrain.inference.{name}"
    make = loading.imported(f"{of}:{kind}").from_hparams
    absent = loading.absent_from(source, f"from {of} import {kind}; {kind}.from_hparams('{source}')")
    given = {**arguments, "run_opts": {"device": str(device), **(arguments.get("run_opts") or {})}}
    made = loading.made(source, partial(make, source), given, absent=absent)
    parameters = inspect.signature(getattr(made, method)).parameters

    def call(waves: torch.Tensor, lengths: torch.Tensor) -> Any:
        values = {label: _argument(label, waves, lengths) for label in parameters}
        return getattr(made, method)(**{label: value for label, value in values.items() if value is not None})

    return Recogniser(call, int(getattr(made.hparams, "sample_rate", SAMPLE_RATE)))


def _argument(label: str, waves: torch.Tensor, lengths: torch.Tensor) -> Optional[torch.Tensor]:
    """Return an argument of a method of SpeechBrain by its name; None for one that stays at its default."""
    if re.fullmatch(r"wav\d?_lens|lengths", label):
        return lengths / waves.shape[1]
    if label == "predictions":
        return waves[..., None].expand(-1, -1, 2)  # (N, samples, speakers): an estimate of SpeechBrain is of two
    return waves if re.fullmatch(r"wavs\d?|mix|noisy", label) else None


def read(path: Path, sample_rate: int) -> torch.Tensor:
    """Return the mean of the channels, resampled, (samples,) in float32.  Raises UserError.

    It is read in a process of its own: what reads it would be in the memory of the one that is measured."""
    reason = files.not_a_file(path)
    if reason:
        raise UserError(f"cannot read {path}: {reason}")
    with tempfile.TemporaryDirectory(prefix="rnnt-bench-") as scratch:
        wave = Path(scratch) / "wave.pt"
        code = "import sys; from rnnt_bench.tools.inference.recognisers import decode; sys.exit(decode(*sys.argv[1:]))"
        command = [sys.executable, "-c", code, str(path.resolve()), str(sample_rate), str(wave)]
        ended = subprocess.run(command, cwd=files.ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if ended.returncode:
            raise UserError((ended.stderr.strip().splitlines() or [f"cannot read {path}"])[-1])
        return torch.load(wave, weights_only=True)


def decode(path: str, sample_rate: str, output: str) -> Optional[str]:
    """Write what `read` returns to the file `output`; return why it cannot be, in words."""
    try:
        torch.save(_decoded(Path(path), int(sample_rate)), output)
    except UserError as error:
        return str(error)
    return None


def _decoded(path: Path, sample_rate: int) -> torch.Tensor:
    soundfile, resample = loading.module("soundfile"), loading.imported("torchaudio.functional:resample")
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
    return 0.1 * torch.randn(max(round(seconds * sample_rate), 1), generator=torch.Generator().manual_seed(seed))


def batch(path: Optional[str], seconds: float, size: int, sample_rate: int, seed: int) -> torch.Tensor:
    """Return (size, samples) of equal rows: the file's audio, from its begin again where it is short; else noise."""
    wave = noise(seconds, sample_rate, seed)
    if path is not None:
        audio = read(Path(path), sample_rate)
        wave = audio.repeat(-(-len(wave) // len(audio)))[: len(wave)]
    return wave.repeat(size, 1)
