"""The types of models that a configuration can name.  No torch, so that a command can check them before it starts."""

from __future__ import annotations

from typing import Dict, Tuple

#: Interface of SpeechBrain -> its module below speechbrain.inference, its method, and what that is called with.
INTERFACES: Dict[str, Tuple[str, str, Tuple[str, ...]]] = {
    "EncoderASR": ("ASR", "transcribe_batch", ("wavs", "wav_lens")),
    "EncoderDecoderASR": ("ASR", "transcribe_batch", ("wavs", "wav_lens")),
    "WhisperASR": ("ASR", "transcribe_batch", ("wavs", "wav_lens")),
    "EndToEndSLU": ("SLU", "decode_batch", ("wavs", "wav_lens")),
    "EncoderClassifier": ("classifiers", "classify_batch", ("wavs", "wav_lens")),
    "SpeakerRecognition": ("speaker", "verify_batch", ("wavs1", "wavs2", "wav1_lens", "wav2_lens")),
    "VAD": ("VAD", "get_speech_prob_chunk", ("wavs", "wav_lens")),
    "SepformerSeparation": ("separation", "separate_batch", ("mix",)),
    "SpectralMaskEnhancement": ("enhancement", "enhance_batch", ("noisy", "lengths")),
    "WaveformEnhancement": ("enhancement", "enhance_batch", ("noisy", "lengths")),
    "SNREstimator": ("metrics", "estimate_batch", ("mix", "predictions")),
}

#: A factory that Python can import, a bundle of torchaudio, a pipeline of Hugging Face, an interface of SpeechBrain.
TYPES = ("factory", "torchaudio", "transformers", *INTERFACES)
