"""Load the models of an inference profile behind one interface, a Recogniser, and make their audio.

The type of a model is "factory" (anything that Python can import), "torchaudio" (a bundle),
"transformers" (a pipeline), or a class of SpeechBrain.  Audio is a file, of one channel at the
model's sample rate, or noise."""

from __future__ import annotations

import inspect
import math
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

#: Hz, of a model that does not say its own.
SAMPLE_RATE = 16000
#: Matches the name of an argument that takes lengths in samples: lengths, x_lens, input_lengths.
#: SpeechBrain's wav_lens and wavs_lens are fractions of the longest, and do not match.
LENGTHS = re.compile(r"(?!wavs?_lens)(\w+_)?(lengths|lens)")
#: Class of SpeechBrain -> its module below speechbrain.inference, and the method that is measured.
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
    """A loaded model.

    Attributes:
        call: takes waves (N, samples), float32, and lengths (N,) in samples, int64; returns outputs
        sample_rate: of the waves, Hz
        stream: takes what `call` takes; yields pieces of the outputs, which are None or empty until
            there is a first symbol
    """

    call: Callable[[torch.Tensor, torch.Tensor], Any]
    sample_rate: int
    stream: Callable[[torch.Tensor, torch.Tensor], Iterable[Any]] | None = None


def of_module(module: Any) -> Recogniser:
    """Return the recogniser of a module, which takes waves as its first argument.

    The module may have a `sample_rate` and a method `stream`.  A module that needs two arguments
    gets the lengths as the second.  Any other gets the lengths by name, as the first argument whose
    name matches LENGTHS.  Without such an argument it gets only the waves."""
    parameters = inspect.signature(module.forward).parameters
    required = [
        parameter
        for parameter in parameters.values()
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        and parameter.default is parameter.empty
    ]
    by_name = [
        name
        for name, parameter in parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]
    lengths_name = next(filter(LENGTHS.fullmatch, by_name), None)

    def call(waves: torch.Tensor, lengths: torch.Tensor) -> Any:
        if len(required) > 1:
            return module(waves, lengths)
        if lengths_name is None:
            return module(waves)
        return module(waves, **{lengths_name: lengths})

    rate = int(getattr(module, "sample_rate", SAMPLE_RATE))
    return Recogniser(call, rate, getattr(module, "stream", None))


def load(model: Model, device: torch.device) -> Recogniser:
    """Return the model of a configuration, on a device.  Raises UserError.

    For every type but "factory", this sets the environment variables loading.OFFLINE in this
    process, which keep the model from downloading."""
    if model.type == "factory":
        return of_module(loading.load(model.source, model.arguments, str(device)).eval())
    makers: dict[str, Callable[..., Recogniser]]
    makers = {"torchaudio": _bundle, "transformers": _pipeline}
    makers.update((name, partial(_interface, name)) for name in INTERFACES)
    if model.type not in makers:
        raise UserError(
            f"pretrained_model.type: unknown {model.type!r}{text.closest(model.type, makers)}; "
            f"there are factory, {', '.join(makers)}"
        )
    os.environ.update(loading.OFFLINE)
    return makers[model.type](model.source, model.arguments, device)


def _bundle(source: str, arguments: Mapping[str, Any], device: torch.device) -> Recogniser:
    """Return a bundle of torchaudio.pipelines, by its name `source`, as a recogniser.

    arguments: a bundle of a transducer takes `beam_width`, the width of its search; other bundles
    take none.  Raises UserError."""
    pipelines = loading.module("torchaudio.pipelines")
    bundle: Any = getattr(pipelines, source, None)
    if not isinstance(getattr(bundle, "sample_rate", None), (int, float)):
        names = [
            name
            for name in pipelines.__all__
            if hasattr(getattr(pipelines, name), "sample_rate") and name.isupper()  # not a class
        ]
        raise UserError(
            f"pretrained_model.source: torchaudio.pipelines has no {source} of audio; {', '.join(names)}"
        )
    is_transducer = hasattr(bundle, "get_decoder")
    methods = ["get_feature_extractor", "get_decoder"] if is_transducer else ["get_model"]
    unknown = set(arguments).difference(["beam_width"] if is_transducer else [])
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
        outputs = []
        for features, length in [extract(wave) for wave in waves]:
            best, *_ = decode(features, length.to(waves.device), width)  # the best hypothesis
            symbols, *_ = best  # its score and its state follow
            outputs.append(symbols[1:])  # the first one is a blank
        return outputs

    def call(waves: torch.Tensor, lengths: torch.Tensor) -> Any:
        # The model gets no lengths: no wave here is padded, and models whose features are
        # normalised by groups were trained without lengths.
        (module,) = parts  # what `get_model` made; only a transducer has two parts
        return module(waves)

    return Recogniser(search if is_transducer else call, int(bundle.sample_rate))


def _pipeline(source: str, arguments: Mapping[str, Any], device: torch.device) -> Recogniser:
    """Return a pipeline of transformers as a recogniser, from a folder or from the cache.

    Raises UserError.

    arguments: keyword arguments of transformers.pipeline; `task` is by default speech
        recognition"""
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
    """Return a model of SpeechBrain as a recogniser, from a folder or from the cache of its hub.

    SpeechBrain makes the classes that hyperparams.yaml of the folder names: so this file can run
    any code.  Raises UserError.

    kind: name of the model's class, a key of INTERFACES; arguments: keyword arguments of
        from_hparams of this class"""
    submodule, method = INTERFACES[kind]
    module = f"speechbrain.inference.{submodule}"
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
    """Return the value for an argument of a SpeechBrain method, by the argument's name.

    Return None for an argument that keeps its default."""
    if re.fullmatch(r"wav\d?_lens|lengths", name):  # wav_lens, wav1_lens
        return lengths / waves.shape[1]
    if name == "predictions":  # the separated speakers (N, samples, 2)
        return waves[..., None].expand(-1, -1, 2)
    return waves if re.fullmatch(r"wavs\d?|mix|noisy", name) else None  # wavs, wavs1


def read(path: Path, sample_rate: int) -> torch.Tensor:
    """Return the audio of a file (samples,) in float32: the mean of its channels, resampled.

    A process of its own decodes the file, so that the decoder's memory is not in the process that
    is measured.  Raises UserError."""
    reason = files.not_a_file(path)
    if reason:
        raise UserError(f"cannot read {path}: {reason}")
    with tempfile.TemporaryDirectory(prefix="rnnt-bench-") as scratch:
        wave = Path(scratch) / "wave.pt"
        code = "import sys; from rnnt_bench.tools.inference import recognisers; recognisers.decode(*sys.argv[1:])"
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


def decode(path: str, sample_rate: str, output: str) -> None:
    """Decode an audio file for `read`, and save the wave to the file `output`.  The arguments are
    words of a command line.

    End the process with the reason on stderr where the file cannot be decoded."""
    try:
        soundfile = loading.module("soundfile")
        channels, rate = soundfile.read(path, dtype="float32", always_2d=True)
        if not len(channels):
            raise UserError(f"{path}: has no samples")
        wave = torch.from_numpy(channels).mean(1)
        if rate != int(sample_rate):
            resample = loading.imported("torchaudio.functional:resample")
            wave = resample(wave, rate, int(sample_rate))
    except UserError as error:
        sys.exit(str(error))
    except (RuntimeError, OSError) as error:
        sys.exit(f"cannot read {path}: {error}")
    torch.save(wave, output)


def noise(seconds: float, sample_rate: int, seed: int) -> torch.Tensor:
    """Return noise (samples,) about as loud as speech, of at least one sample."""
    samples = max(round(seconds * sample_rate), 1)
    return 0.1 * torch.randn(samples, generator=torch.Generator().manual_seed(seed))


def batch(path: str | None, seconds: float, size: int, sample_rate: int, seed: int) -> torch.Tensor:
    """Return a batch (size, samples) of equal waves, each `seconds` long.

    A wave is the audio of the file at `path`, cut or repeated.  Without a path it is noise."""
    wave = noise(seconds, sample_rate, seed)
    if path is not None:
        audio = read(Path(path), sample_rate)
        repeats = math.ceil(len(wave) / len(audio))
        wave = audio.repeat(repeats)[: len(wave)]  # only the length of the noise counts here
    return wave.repeat(size, 1)
