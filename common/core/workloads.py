"""What is trained: vocabulary, front end, length of utterances and kind of logits; presets, and the words in headings.

A size preset (common.core.settings) says how much is measured, a workload of what: any size goes with any workload.
Plain data, read by the report too: no torch, no numpy."""

from __future__ import annotations

from typing import Any, Dict, List, Mapping

#: The settings of this module, and their values in results that are older than them.
DEFAULTS: Dict[str, Any] = {
    "min_duration": None,
    "max_duration": None,
    "subsampling": 4,
    "token_scale": 1.0,
    "concatenate": 1,
    "frames": None,
    "tokens": None,
    "logits": "random",
    "margin": 5.0,  # leaves an utterance about half a nat; 10 leaves a few thousandths, which float32 can hardly add up
}

#: Lengths of None in comparisons, where None would say that nothing is known.
AS_IN_SHAPE_FILE = "as in the shape file"

DEFAULT = "bpe500"
#: A value may depend on the size preset: long utterances make batches of as many frames, so of fewer utterances.
#:
#: The token scales are estimates, from 38 LibriSpeech utterances (299 s, in lhotse's tests) that have 4211 characters,
#: spaces included: 0.567 per frame at x4, while shape_info.pt has 0.213 BPE-500 tokens per frame, 2.66 times less.
#: BPE models trained on other English books (1.1 million words of Project Gutenberg) give the same 38 transcripts 1600
#: tokens at 500 symbols (0.215 per frame, as shape_info.pt) and 1057 at 4096, 0.66 times as many.
WORKLOADS: Dict[str, Dict[str, Any]] = {
    "bpe500": {},
    "bpe4096-x8": {"vocab_size": 4096, "subsampling": 8, "token_scale": 0.66},
    "chars": {"vocab_size": 30, "token_scale": 2.66},
    "long-form": {"concatenate": 4, "batch_size": {"seed": 8, "cpu": 1, "quick": 1}},
}

NOTES = {
    "bpe500": "the shape file as it is (V 500; 50 with quick)",
    "bpe4096-x8": "a large vocabulary behind a strong front end, V 4096, x8 frames, 0.66 times the tokens",
    "chars": "V 30 (letters, space, apostrophe, blank, unknown), 2.66 times the tokens",
    "long-form": "4 utterances in a row as one of 30 to 65 s; batches of as many frames, a quarter of the utterances",
}
ESTIMATE = "the token scales are estimates: generate_shape_info.py counts those of your own vocabulary"


def described(settings: Mapping[str, Any]) -> List[str]:
    """What is not default of a run's settings (or of a row's configuration), in a few words each."""
    values = {key: default if settings.get(key) is None else settings[key] for key, default in DEFAULTS.items()}
    words = {"min_duration": "at least {:g} s", "max_duration": "at most {:g} s", "subsampling": "x{} frames"}
    words.update(token_scale="{:g} x tokens", concatenate="{} utterances as one")
    words.update(frames="T {}", tokens="U {}", logits="{} logits")
    found = [
        text.format(values[key]) for key, text in words.items() if values[key] not in (DEFAULTS[key], AS_IN_SHAPE_FILE)
    ]
    return found + ([f"margin {values['margin']:g}"] if values["logits"] == "peaky" else [])


def comparable(settings: Mapping[str, Any]) -> Dict[str, Any]:
    """The settings of this module that must agree between results that are compared; older results get the
    defaults.  None: does not apply."""
    values = {key: settings.get(key, default) for key, default in DEFAULTS.items()}
    if values["logits"] == "random":
        values["margin"] = None
    unset = ("min_duration", "max_duration", "frames", "tokens")
    lengths = {key: AS_IN_SHAPE_FILE for key in unset if values[key] is None}
    return {**values, **lengths}
