"""The presets: how much is measured (a size) and of what (a workload); any size goes with any workload.

Each setting names its own values under a preset (common.core.settings).  No torch, no numpy: readers use this too.
"""

from __future__ import annotations

from typing import Mapping, Tuple

from common.core.errors import UserError
from common.core.text import closest

SIZES = {
    "full": "batches of 30 utterances (or 10,000 frames when sorted), some 80 in all",
    "cpu": "sized for a CPU, with real shapes and vocabulary but batches of 2 utterances (or 1,000 frames when "
    "sorted); about a minute of measuring for each implementation on two cores",
    "quick": "a smoke run with a small joiner and vocabulary and one round; a quarter of a minute for each "
    "implementation, most of it start-up; its times are too noisy to compare",
}
#: Other names of a size, which are still understood.
ALIASES = {"seed": "full"}

#: The token scales are estimates, from 38 LibriSpeech utterances (299 s, in lhotse's tests) that have 4211 characters,
#: spaces included: 0.567 per frame at x4, while shape_info.pt has 0.213 BPE-500 tokens per frame, 2.66 times less.
#: BPE models trained on other English books (1.1 million words of Project Gutenberg) give the same 38 transcripts 1600
#: tokens at 500 symbols (0.215 per frame, as shape_info.pt) and 1057 at 4096, 0.66 times as many.
WORKLOADS = {
    "bpe500": "the shape file as it is (V 500; 50 with quick)",
    "bpe4096-x8": "a large vocabulary behind a strong front end: V 4096, x8 frames, 0.66 times the tokens",
    "chars": "V 30 (letters, space, apostrophe, blank, unknown), 2.66 times the tokens",
    "long-form": "each 4 utterances joined into one of 30 to 65 s, in batches of a quarter as many",
}
DEFAULT_WORKLOAD = "bpe500"
ESTIMATE = "the token scales are estimates: generate_shape_info.py counts those of your own vocabulary"


def parts(text: str) -> Tuple[str, str]:
    """Return (size or "", workload) of "cpu", "chars", "cpu,chars" or "chars,cpu".  Raises UserError."""
    words = [ALIASES.get(word.strip(), word.strip()) for word in text.split(",")]
    sizes = [word for word in words if word in SIZES]
    workloads = [word for word in words if word in WORKLOADS]
    if len(sizes) > 1 or len(workloads) > 1 or len(sizes) + len(workloads) != len(words):
        wrong = next((word for word in words if word not in (*sizes, *workloads)), "")
        raise UserError(
            f"give a size ({', '.join(SIZES)}), a workload ({', '.join(WORKLOADS)}), or both (cpu,chars), not {text!r}"
            f"{closest(wrong, (*SIZES, *WORKLOADS))}"
        )
    return (sizes[0] if sizes else ""), (workloads[0] if workloads else DEFAULT_WORKLOAD)


def listed(noun: str, texts: Mapping[str, str]) -> str:
    """Return a sentence for each size or workload, for --help: "Size full: ..."."""
    return " ".join(f"{noun} {name}: {text}." for name, text in texts.items())


def note(preset: str) -> str:
    """Describe the preset of resolved settings in one line."""
    size, workload = parts(preset)
    return SIZES[size] if workload == DEFAULT_WORKLOAD else f"{SIZES[size]}; {WORKLOADS[workload]}"
