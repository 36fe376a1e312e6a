"""Loads the models that can be profiled behind one interface: waves (N, samples) in, any outputs.

A `type` of the configuration is one of model_types.TYPES: a factory that Python can import, the bundles of torchaudio,
the pipelines of Hugging Face, the pretrained interfaces of SpeechBrain.  What is not installed, and weights that are
not here, are NotRunnable "missing".
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
from contextlib import contextmanager
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

import torch
from torch import nn

from common.core.errors import NotRunnable, UserError
from common.system.memory import is_out_of_memory
from common.tools import loading
from common.tools.inference.model_types import INTERFACES, TYPES

SAMPLE_RATE = 16000
#: Names of arguments that take lengths in samples: lengths, x_lens, input_lengths; SpeechBrain's wav_lens are shares.
LENGTHS = re.compile(r"(?!wavs?_lens)(\w+_)?(lengths|lens)")
KEYWORDS = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class Recogniser(nn.Module):
    """A model from waves to tensors, symbols or words; sample_rate: of the audio that it takes."""

    sample_rate = SAMPLE_RATE

    def forward(self, waves: torch.Tensor, lengths: torch.Tensor) -> Any:
        """Return tensors, symbols or words in any nesting, from waves (N, samples), float32, and lengths (N,) in
        samples, int64."""
        raise NotImplementedError

    #: Of a model that streams a method of the same arguments, which yields pieces of the outputs: empty ones or None
    #: before there is a first symbol.
    stream: Any = None

    def parts(self) -> Sequence[nn.Module]:
        """Return the modules that take and give tensors alone, which --compile compiles."""
        return [self]


class Plain(Recogniser):
    """Calls any module that takes waves, or waves and their lengths.

    Its second argument is the lengths where it has to be given, else the first one whose name LENGTHS matches.
    """

    def __init__(self, module: nn.Module, sample_rate: Optional[int] = None):
        """Wrap a module; sample_rate: for a module that has none of its own."""
        super().__init__()
        self.module = module
        rate: Any = sample_rate or getattr(module, "sample_rate", SAMPLE_RATE)
        self.sample_rate = int(rate)
        parameters = [*inspect.signature(module.forward).parameters.values()]
        needed = [part for part in parameters if part.default is part.empty and part.kind is part.POSITIONAL_OR_KEYWORD]
        self.needs_lengths = len(needed) > 1
        named = [part.name for part in parameters if part.kind in KEYWORDS and LENGTHS.fullmatch(part.name)]
        self.lengths_name = named[0] if named and not self.needs_lengths else None

    def forward(self, waves: torch.Tensor, lengths: torch.Tensor) -> Any:
        if self.lengths_name:
            return self.module(waves, **{self.lengths_name: lengths})
        return self.module(waves, lengths) if self.needs_lengths else self.module(waves)

    def parts(self) -> Sequence[nn.Module]:
        return [self.module]


class Called(Recogniser):
    """Something that is called with a dict of arguments; module: what it computes with, if that is known."""

    def __init__(self, call: Callable[[torch.Tensor, torch.Tensor], Any], module: Any = None, rate: int = SAMPLE_RATE):
        super().__init__()
        self.call, self.sample_rate = call, rate
        self.module = module if isinstance(module, nn.Module) else nn.Module()

    def forward(self, waves: torch.Tensor, lengths: torch.Tensor) -> Any:
        return self.call(waves, lengths)

    def parts(self) -> Sequence[nn.Module]:
        raise NotRunnable("unsupported", "--compile: is not known to work for this type of model; leave it out")


def load(model: Mapping[str, Any], device: torch.device) -> Recogniser:
    """Return the model of a configuration: ``type``, ``source``, ``arguments``.  Raises UserError and NotRunnable."""
    made = MAKERS[model["type"]](model["source"], model.get("arguments") or {}, device)
    return made.to(device).eval()


def _factory(source: str, arguments: Mapping[str, Any], device: torch.device) -> Recogniser:
    module = loading.load(source, arguments, str(device)).model
    return module if isinstance(module, Recogniser) else Plain(module)


# -- torchaudio ------------------------------------------------------------------------------------------------------


def _bundle(source: str, arguments: Mapping[str, Any], device: torch.device) -> Recogniser:
    """Return a bundle of torchaudio.pipelines by its name, "WAV2VEC2_ASR_BASE_960H".  arguments: ``beam_width`` of a
    transducer."""
    pipelines = _imported("torchaudio.pipelines", "torchaudio")
    bundle: Any = getattr(pipelines, source, None)
    if not _takes_audio(bundle):
        known = ", ".join(name for name in pipelines.__all__ if _takes_audio(getattr(pipelines, name)))
        raise UserError(f"pretrained_model.source: torchaudio.pipelines has no {source} of audio; it has {known}")
    decodes, rate = hasattr(bundle, "get_decoder"), int(bundle.sample_rate)
    unknown = set(arguments) - ({"beam_width"} if decodes else set())
    if unknown:
        raise UserError(f"pretrained_model.arguments: {source} takes no {', '.join(sorted(unknown))}")
    os.environ.update(loading.OFFLINE)
    getters = "get_feature_extractor(), bundle.get_decoder" if decodes else "get_model"
    fetch = f'python -c "from torchaudio.pipelines import {source} as bundle; bundle.{getters}()"'
    with _making(source, f"its weights are not below {torch.hub.get_dir()}; fetch them: {fetch}"):
        if decodes:
            return _Transducer(bundle.get_feature_extractor(), bundle.get_decoder(), rate, **arguments)
        module = bundle.get_model()
    if isinstance(bundle, getattr(pipelines, "SourceSeparationBundle", ())):
        return _Separation(module, rate)
    made = Plain(module, rate)
    if made.needs_lengths:
        raise NotRunnable("unsupported", f"{source}: takes more than one wave for each utterance")
    made.lengths_name = None  # bundles normalised by groups are trained without lengths, and no wave here is padded
    return made


def _takes_audio(bundle: Any) -> bool:
    return isinstance(getattr(bundle, "sample_rate", None), (int, float)) and (
        hasattr(bundle, "get_decoder") or hasattr(bundle, "get_model")
    )


class _Separation(Recogniser):
    """Separate speakers or instruments, from one channel, or two equal ones where the model wants them."""

    def __init__(self, module: nn.Module, sample_rate: int):
        super().__init__()
        self.module, self.sample_rate = module, sample_rate
        self.channels = int(getattr(module, "audio_channels", 1))

    def forward(self, waves: torch.Tensor, lengths: torch.Tensor) -> Any:
        return self.module(waves[:, None].expand(-1, self.channels, -1))

    def parts(self) -> Sequence[nn.Module]:
        return [self.module]


class _Transducer(Recogniser):
    """Run an RNNTBundle: features of each wave, then the beam search."""

    def __init__(self, features: Any, search: Any, sample_rate: int, beam_width: int = 10):
        super().__init__()
        self.features, self.search, self.beam_width, self.sample_rate = features, search, beam_width, sample_rate

    def forward(self, waves: torch.Tensor, lengths: torch.Tensor) -> List[List[int]]:
        transcripts = []
        for wave in waves:
            features, length = self.features(wave)
            transcripts.append(_symbols(self.search(features, length.to(waves.device), self.beam_width)))
        return transcripts

    def parts(self) -> Sequence[nn.Module]:
        return [self.search.model.transcriber]


# -- Hugging Face ----------------------------------------------------------------------------------------------------


def _pipeline(source: str, arguments: Mapping[str, Any], device: torch.device) -> Recogniser:
    """Return a pipeline of transformers, from a folder or from the cache.  arguments: of it, ``task`` among them."""
    os.environ.update(loading.OFFLINE)
    transformers = _imported("transformers", "transformers")
    given = {"task": "automatic-speech-recognition", **arguments}
    with _making(source, "no model that transformers has here"):
        made = transformers.pipeline(model=source, device=device, **given)
    if getattr(made, "feature_extractor", None) is None:
        raise UserError(f"{source}: the pipeline of {given['task']} takes no audio; give arguments: {{task: ...}}")
    rate = int(getattr(made.feature_extractor, "sampling_rate", SAMPLE_RATE))

    def call(waves: torch.Tensor, lengths: torch.Tensor) -> Any:
        rows = [{"raw": wave.cpu().numpy(), "sampling_rate": rate} for wave in waves]
        return [str(result) for result in made(rows, batch_size=len(rows))]

    return Called(call, made.model, rate)


# -- SpeechBrain -----------------------------------------------------------------------------------------------------

SPEAKERS = 2
#: How an argument of a method of SpeechBrain is made of waves and lengths; any other one is the waves.
ARGUMENTS: Dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    **dict.fromkeys(("wav_lens", "wav1_lens", "wav2_lens", "lengths"), lambda waves, lengths: lengths / waves.shape[1]),
    "predictions": lambda waves, lengths: waves[..., None].expand(-1, -1, SPEAKERS),  # (N, samples, speakers)
}


def _interface(name: str) -> Callable[[str, Mapping[str, Any], torch.device], Recogniser]:
    module_name, method, labels = INTERFACES[name]

    def make(source: str, arguments: Mapping[str, Any], device: torch.device) -> Recogniser:
        """Return a SpeechBrain model from a folder, or from its hub.  arguments: of from_hparams.

        The folder's hyperparams.yaml is SpeechBrain's own format, which names classes to make: it is code, as the model
        is.
        """
        module = _imported(f"speechbrain.inference.{module_name}", "speechbrain")
        given = {**arguments, "run_opts": {"device": str(device), **(arguments.get("run_opts") or {})}}
        with _making(source, "SpeechBrain has no such model here"):
            made = getattr(module, name).from_hparams(source=source, **given)

        def call(waves: torch.Tensor, lengths: torch.Tensor) -> Any:
            given = {label: ARGUMENTS[label](waves, lengths) if label in ARGUMENTS else waves for label in labels}
            return getattr(made, method)(**given)

        return Called(call, made, int(getattr(made.hparams, "sample_rate", SAMPLE_RATE)))

    return make


#: What makes a model, by its type in the configuration.
MAKERS: Dict[str, Callable[[str, Mapping[str, Any], torch.device], Recogniser]] = dict(
    zip(TYPES, (_factory, _bundle, _pipeline, *map(_interface, INTERFACES)))
)


def _imported(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        words = loading.line(error)
        raise NotRunnable("missing", f"{package} is not installed here ({words}): pip install {package}") from None
    except Exception as error:  # whatever a release does that does not fit the others
        raise NotRunnable("missing", f"{package} does not import here ({loading.line(error)})") from None


@contextmanager
def _making(source: str, missing: str) -> Iterator[None]:
    """Turn errors of a package that makes a model of `source` in the block into NotRunnable or UserError.

    missing: advice for a file that is not there or cannot be fetched.
    """
    try:
        yield
    except (MemoryError, NotRunnable, UserError):
        raise
    except (OSError, ValueError) as error:  # a name that no hub can have is a ValueError
        raise NotRunnable("missing", f"{source}: {missing} ({loading.line(error)})") from None
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise UserError(f"{source}: cannot be made: {loading.line(error)}") from error


# -- those that come with this suite ---------------------------------------------------------------------------------


class Features(nn.Module):
    """Compute log mel energies (N, frames, mels), 100 frames a second, of waves (N, samples)."""

    def __init__(self, sample_rate: int = SAMPLE_RATE, mels: int = 80):
        super().__init__()
        from torchaudio.transforms import MelSpectrogram

        self.mel = MelSpectrogram(sample_rate, n_fft=400, hop_length=sample_rate // 100, n_mels=mels)

    def forward(self, waves: torch.Tensor) -> torch.Tensor:
        return self.mel(waves).clamp_min(1e-5).log().transpose(1, 2)


class _Conformer(nn.Module):
    """Compute encodings (N, T, encoding_dim) of features, with T a stride-th of the frames: a transcriber of
    torchaudio's RNNT."""

    def __init__(self, mels: int, stride: int, dim: int, heads: int, feed_forward: int, layers: int, encoding_dim: int):
        super().__init__()
        from torchaudio.models import Conformer
        from torchaudio.models.rnnt import _TimeReduction

        self.reduction, self.input = _TimeReduction(stride), nn.Linear(mels * stride, dim)
        self.conformer = Conformer(dim, heads, feed_forward, layers, depthwise_conv_kernel_size=31)
        self.output = nn.Linear(dim, encoding_dim)

    def forward(self, features: torch.Tensor, lengths: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
        reduced, lengths = self.reduction(features, lengths)
        encoded, lengths = self.conformer(self.input(reduced), lengths)
        return self.output(encoded), lengths


class ConformerRNNT(Recogniser):
    """Run torchaudio's Conformer, prediction network and joiner with random weights, and its beam search.

    stride: frames in an encoding; blank_bias: added to the blank's logit, without which random weights would emit
    symbols_per_frame symbols in every frame.
    """

    def __init__(
        self,
        vocab_size: int = 512,
        layers: int = 8,
        dim: int = 256,
        heads: int = 4,
        feed_forward: int = 1024,
        encoding_dim: int = 256,
        stride: int = 8,
        beam_width: int = 4,
        symbols_per_frame: int = 2,
        blank_bias: float = 5.0,
        mels: int = 80,
    ):
        super().__init__()
        from torchaudio.models import RNNT, RNNTBeamSearch
        from torchaudio.models.rnnt import _Joiner, _Predictor

        self.features, self.beam_width = Features(mels=mels), beam_width
        encoder = _Conformer(mels, stride, dim, heads, feed_forward, layers, encoding_dim)
        predictor = _Predictor(
            vocab_size, encoding_dim, symbol_embedding_dim=dim, num_lstm_layers=1, lstm_hidden_dim=dim
        )
        joiner = _Joiner(encoding_dim, vocab_size, activation="tanh")
        with torch.no_grad():
            joiner.linear.bias[-1] += blank_bias  # the search takes the last symbol for the blank
        self.model = RNNT(encoder, predictor, joiner)
        self.search = RNNTBeamSearch(self.model, vocab_size - 1, step_max_tokens=symbols_per_frame)

    def forward(self, waves: torch.Tensor, lengths: torch.Tensor) -> Tuple[torch.Tensor, List[List[int]]]:
        """Return (encodings (N, T, encoding_dim), the symbols of the best hypothesis of each utterance)."""
        features = self.features(waves)
        frames = torch.full_like(lengths, features.shape[1])
        encoded, counts = self.model.transcribe(features, frames)
        rows = zip(encoded.float().split(1), counts.tolist())
        return encoded, [_symbols(self.search._search(row[:, :count], None, self.beam_width)) for row, count in rows]

    def parts(self) -> Sequence[nn.Module]:
        return [self.model.transcriber]


class EmformerRNNT(Recogniser):
    """Run torchaudio's streaming Emformer transducer with random weights: segments of 0.16 s with 0.04 s of right
    context, each through its beam search.  blank_bias: as of ConformerRNNT."""

    SEGMENT, CONTEXT = 16, 4  # frames

    def __init__(
        self, vocab_size: int = 512, layers: int = 6, dim: int = 256, beam_width: int = 4, blank_bias: float = 5.0
    ):
        super().__init__()
        from torchaudio.models import RNNTBeamSearch
        from torchaudio.models.rnnt import emformer_rnnt_model

        self.features, self.beam_width = Features(), beam_width
        model = emformer_rnnt_model(
            input_dim=80,
            encoding_dim=dim,
            num_symbols=vocab_size,
            segment_length=self.SEGMENT,
            right_context_length=self.CONTEXT,
            time_reduction_input_dim=dim // 4,
            time_reduction_stride=4,
            transformer_num_heads=4,
            transformer_ffn_dim=4 * dim,
            transformer_num_layers=layers,
            transformer_dropout=0.0,
            transformer_activation="gelu",
            transformer_left_context_length=30,
            transformer_max_memory_size=0,
            transformer_weight_init_scale_strategy="depthwise",
            transformer_tanh_on_mem=True,
            symbol_embedding_dim=dim,
            num_lstm_layers=1,
            lstm_layer_norm=True,
            lstm_layer_norm_epsilon=1e-3,
            lstm_dropout=0.0,
        )
        with torch.no_grad():
            model.joiner.linear.bias[-1] += blank_bias
        self.search = RNNTBeamSearch(model, vocab_size - 1, step_max_tokens=2)

    def forward(self, waves: torch.Tensor, lengths: torch.Tensor) -> List[List[int]]:
        return [symbols for wave in waves.split(1) for symbols in list(self._pieces(wave))[-1:]]

    def stream(self, waves: torch.Tensor, lengths: torch.Tensor) -> Iterator[List[int]]:
        """Yield the symbols so far, after each segment of each utterance."""
        for wave in waves.split(1):
            yield from self._pieces(wave)

    def _pieces(self, wave: torch.Tensor) -> Iterator[List[int]]:
        features = nn.functional.pad(self.features(wave)[0], (0, 0, 0, self.SEGMENT + self.CONTEXT))
        count, state, hypotheses = torch.tensor(self.SEGMENT + self.CONTEXT, device=wave.device), None, None
        for begin in range(0, len(features) - self.SEGMENT - self.CONTEXT, self.SEGMENT):
            segment = features[begin : begin + self.SEGMENT + self.CONTEXT]
            hypotheses, state = self.search.infer(segment, count, self.beam_width, state=state, hypothesis=hypotheses)
            yield _symbols(hypotheses)

    def parts(self) -> Sequence[nn.Module]:
        raise NotRunnable("unsupported", "--compile: the Emformer streams, with a state, which is not compiled")


def _symbols(hypotheses: Any) -> List[int]:
    """Return the symbols of the best hypothesis, without the blank that it begins with."""
    return list(hypotheses[0][0][1:])


class SileroVad(Recogniser):
    """Run silero-vad's detector of speech with the weights of its package: a probability for each 32 ms."""

    CHUNK = 512  # samples

    def __init__(self) -> None:
        super().__init__()
        try:
            from silero_vad import load_silero_vad
        except ImportError:
            advice = "`make setup ENVIRONMENTS=silero`, or pip install silero-vad"
            raise NotRunnable("missing", f"silero_vad is not installed here: {advice}") from None
        self.detector = load_silero_vad()

    def forward(self, waves: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Return the probabilities of speech (N, chunks)."""
        return torch.cat(list(self.stream(waves, lengths)), 1)

    def stream(self, waves: torch.Tensor, lengths: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the probabilities of speech (N, 1) of each chunk."""
        self.detector.reset_states()
        for chunk in nn.functional.pad(waves, (0, -waves.shape[1] % self.CHUNK)).split(self.CHUNK, 1):
            yield self.detector(chunk, self.sample_rate)

    def parts(self) -> Sequence[nn.Module]:
        raise NotRunnable("unsupported", "--compile: silero-vad's model is compiled by TorchScript already")
