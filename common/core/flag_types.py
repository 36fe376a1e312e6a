"""Parse the texts of flags, as `type` of argparse's add_argument.

Most functions take the text of a flag and return its value; they raise UserError, whose message
says what to give instead."""

from __future__ import annotations

import math
import os
import re
import string
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rnnt_bench.core.called import command
from rnnt_bench.core.errors import UserError
from rnnt_bench.core.text import closest, short

#: Most threads that --threads may ask for, for each CPU.
MOST_THREADS = 4
#: Largest number of a flag without a bound of its own: losses keep sizes in 32 bits.
MOST = 2**31 - 1


def str2bool(text: str) -> bool:
    """Parse yes, true, t, y, 1 as True and no, false, f, n, 0 as False, in any case."""
    word = text.strip().lower()
    if word in ("yes", "true", "t", "y", "1"):
        return True
    if word in ("no", "false", "f", "n", "0"):
        return False
    raise UserError(f"give true or false, not {text!r}")


@dataclass(frozen=True)
class Whole:
    """Parse a whole number from `low` to `high`, both included."""

    low: int
    high: int = MOST

    def __call__(self, text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise UserError(f"give a whole number, not {short(text)!r}") from None
        if not self.low <= value <= self.high:
            bound = f"at least {self.low}" if value < self.low else f"at most {self.high}"
            raise UserError(f"must be {bound}, not {short(text)}")
        return value


#: Parses a seed.  Records are JSON, whose numbers are exact up to 2^53.
seed = Whole(0, 2**53)


def threads(text: str) -> int:
    """Parse a number of threads, at most MOST_THREADS for each CPU of this process.

    With thousands of threads a machine hardly responds any more."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Whole(1, MOST_THREADS * cpus)(text)


def name(text: str) -> str:
    """Parse a name, which must not be empty.

    A shell's empty variable gives an empty text, and as a path that is the current folder."""
    if not text:
        raise UserError("must not be empty: give a name, or leave it out")
    return text


def path(text: str) -> Path:
    """Parse a path.  It must be valid UTF-8, like the records and pages that name it."""
    try:
        name(text).encode()
    except UnicodeEncodeError:
        raise UserError(
            f"its name is not UTF-8: {os.fsencode(text)!r}; rename it or name another"
        ) from None
    return Path(text)


def not_negative(text: str) -> float:
    """Parse a finite number of 0 or more."""
    with suppress(ValueError):
        if float(text) == 0:  # "0.00", ".0", "-0"
            return 0.0
    return positive(text)


def durations(text: str) -> str:
    """Parse durations in frames, different whole numbers, and return them as "0,1,2".

    One of them must be above 0: with 0 alone no frame would ever be passed."""
    words = split(text)
    frames = [int(word) for word in words if word.isdecimal()]
    are_different = len({*frames}) == len(words)  # False, too, if a word is no whole number
    if not are_different or not 0 < max(frames, default=0) <= MOST:
        raise UserError(
            f"give different whole numbers of frames, 0,1,2,3,4, one of them above 0, not {text!r}"
        )
    return ",".join(map(str, frames))


def duration(text: str) -> float:
    """Parse "90s", "5m" or "1h", and return seconds.

    The unit is required: 5 alone could mean minutes."""
    seconds = {"s": 1, "m": 60, "h": 3600}
    if text[-1:] not in seconds:
        raise UserError(f"give a time such as 90s, 5m or 1h, with the unit, not {text!r}")
    return positive(text[:-1]) * seconds[text[-1]]


def worded_duration(seconds: float) -> str:
    """Return a time as people write it: "45 s", "8.5 min" or "2 h".

    Minutes and hours are used from 1.5 of them on, so an hour is "60 min"."""
    for size, unit in ((3600, "h"), (60, "min")):
        if seconds >= 1.5 * size:
            return f"{round(seconds / size, 1):g} {unit}"
    return f"{seconds:.0f} s"


def percentage(text: str) -> float:
    """Parse "2%", and return the fraction 0.02.

    The sign is required: 0.02 alone could mean 2% or 0.02%."""
    if not text.endswith("%"):
        raise UserError(f"give a percentage such as 2%, with the sign, not {text!r}")
    return positive(text[:-1]) / 100


def preset(text: str) -> str:
    """Check a preset, such as "cpu", "chars" or "cpu,chars", and return it unchanged."""
    size_and_workload(text)
    return text


def memory_size(text: str) -> str:
    """Check a size, such as "4GiB", "500MB" or "80%" of the device, and return it unchanged."""
    bytes_of(text, device_bytes=2**40)  # raises; the device may be of any size here
    return text


def device(text: str) -> str:
    """Parse the name of a device: auto, cpu, cuda or cuda:N; "gpu" means "cuda"."""
    device = re.sub("^gpu(?=$|:)", "cuda", text)  # "gpu", "gpu:1"
    if not re.fullmatch("auto|cpu|cuda(:[0-9]{1,4})?", device):
        raise UserError(f"give auto, cpu, cuda or cuda:N, not {short(text)!r}")
    return device


#: Other names of dtypes, as frameworks use them -> torch's names.
DTYPE_NAMES = {
    "fp16": "float16",
    "half": "float16",
    "bf16": "bfloat16",
    "fp32": "float32",
    "float": "float32",
    "fp64": "float64",
    "double": "float64",
}


def dtype(text: str) -> str:
    """Return torch's name of a dtype: "float16" for "fp16", "half" or "torch.float16"."""
    dtype = text.strip().lower().replace("torch.", "")
    return DTYPE_NAMES.get(dtype, dtype)


def key_value(form: str, empty: bool = False) -> Callable[[str], tuple[str, str]]:
    """Return a parser of "KEY=VALUE", which returns (KEY, VALUE).

    form: what the message of an error writes for "KEY=VALUE", such as "NAME=FILE"; empty: whether
    VALUE may be empty."""

    def parse(text: str) -> tuple[str, str]:
        key, equals, value = (part.strip() for part in text.partition("="))
        if not (equals and key and (value or empty)):
            raise UserError(f"give {form}, not {text!r}")
        return key, value

    return parse


def split(text: str) -> list[str]:
    """Return the items of a comma-separated list, without empty ones; "" has none."""
    return [item.strip() for item in text.split(",") if item.strip()]


def names(text: str) -> tuple[str, ...]:
    """Parse a comma-separated list of one or more names."""
    items = tuple(split(text))
    if not items:
        raise UserError(f"give names with commas between them, not {text!r}")
    return items


def some_of(
    choices: Sequence[str], everything: Sequence[str] | None = None
) -> Callable[[str], tuple[str, ...]]:
    """Return a parser of a comma-separated list of some of `choices`.

    The parser returns the items in the order of `choices`, each once.  It raises UserError for an
    item that is no choice, and for an empty list.

    everything: what it returns for "all" and for "both"; None: all `choices`."""

    def parse(text: str) -> tuple[str, ...]:
        items = split(text)
        if items in (["all"], ["both"]):
            return tuple(choices if everything is None else everything)
        wrong = next((item for item in items if item not in choices), "")
        if wrong or not items:
            guess = closest(wrong, choices) or ":"  # comes first: the list of choices may be long
            raise UserError(f"{text!r}{guess} Give some of {', '.join(choices)}")
        return tuple(choice for choice in choices if choice in items)

    return parse


#: Largest size in bytes.  Records are JSON, whose numbers are exact up to 2^53.
MOST_BYTES = 2**53

#: Units of sizes in bytes.
SIZE_UNITS = {
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}


def positive(text: str) -> float:
    """Parse a finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        raise UserError(f"give a number, not {text!r}") from None
    if not (value > 0 and math.isfinite(value)):
        raise UserError(f"must be above 0, not {text}")
    return value


def bytes_of(text: str, device_bytes: int) -> int:
    """Parse a size, such as "4GiB", "500MB" or "80%" (of `device_bytes`), and return bytes."""
    number = text.rstrip("%" + string.ascii_letters + " ")
    unit = text[len(number) :].strip().lower()
    units = {**SIZE_UNITS, "%": device_bytes / 100}
    if unit not in units:
        raise UserError(f"give a size such as 4GiB, 500MB or 80% of the device, not {text!r}")
    value = positive(number)
    if unit == "%" and value > 100:
        raise UserError(f"must be at most 100%, not {text}")
    if not 1 <= value * units[unit] <= MOST_BYTES:
        raise UserError(f"must be at least a byte and at most {MOST_BYTES}, not {text}")
    return int(value * units[unit])


#: Sizes of a run, which --preset takes, and what --help says of them.
SIZES = {
    "full": "batches of 30 utterances (or 10,000 frames when sorted), some 80 in all",
    "cpu": "sized for a CPU, with real shapes and vocabulary but batches of 2 utterances (or 1,000 frames when "
    "sorted); about a minute of measuring for each implementation on two cores",
    "quick": "a smoke run with a small joiner and vocabulary and one round; a quarter of a minute for each "
    "implementation, most of it start-up; its times are too noisy to compare",
}
#: Workloads, which --preset takes, and what --help says of them.
#:
#: Their numbers of tokens are estimates, from 38 LibriSpeech utterances (299 s, in lhotse's tests).
#: These have 4211 characters, spaces included: 0.567 per frame at x4.  shape_info.pt has 0.213
#: BPE-500 tokens per frame, which is 2.66 times less.  BPE models trained on other English books
#: (1.1 million words of Project Gutenberg) give the 38 transcripts 1600 tokens at 500 symbols
#: (0.215 per frame, as shape_info.pt) and 1057 at 4096, which is 0.66 times as many.
WORKLOADS = {
    "bpe500": "the shape file as it is (V 500; 50 with quick)",
    "bpe4096-x8": "a large vocabulary behind a strong front end: V 4096, x8 frames, 0.66 times the tokens",
    "chars": "V 30 (letters, space, apostrophe, blank, unknown), 2.66 times the tokens",
    "long-form": "each 4 utterances joined into one of 30 to 65 s, in batches of a quarter as many",
}
DEFAULT_WORKLOAD = "bpe500"
ESTIMATE = (
    f"the token scales are estimates: {command('shapes')} counts those of your own vocabulary"
)


def size_and_workload(preset: str) -> tuple[str, str]:
    """Parse a preset, such as "cpu", "chars", "cpu,chars" or "chars,cpu".

    Returns (size, workload): a size of SIZES, or "" if the preset names no size; a workload of
    WORKLOADS, or DEFAULT_WORKLOAD if it names no workload.  Raises UserError for other words, and
    for two sizes or two workloads."""
    items = [item.strip() for item in preset.split(",")]
    # Old records have "seed" for the size "full".
    items = ["full" if item == "seed" else item for item in items]
    sizes = [item for item in items if item in SIZES]
    workloads = [item for item in items if item in WORKLOADS]
    if len(sizes) > 1 or len(workloads) > 1 or len(sizes) + len(workloads) != len(items):
        wrong = next((item for item in items if item not in (*sizes, *workloads)), "")
        raise UserError(
            f"give a size ({', '.join(SIZES)}), a workload ({', '.join(WORKLOADS)}), or both (cpu,chars), "
            f"not {preset!r}{closest(wrong, (*SIZES, *WORKLOADS))}"
        )
    return "".join(sizes), "".join(workloads) or DEFAULT_WORKLOAD


def help_of(noun: str, texts: Mapping[str, str]) -> str:
    """Return what --help says of all sizes or all workloads: "Size full: ... . Size cpu: ... ."."""
    return " ".join(f"{noun} {name}: {text}." for name, text in texts.items())


def described_preset(preset: str) -> str:
    """Describe a preset with a size, such as "cpu,chars", in one line."""
    size, workload = size_and_workload(preset)
    return SIZES[size] if workload == DEFAULT_WORKLOAD else f"{SIZES[size]}; {WORKLOADS[workload]}"
