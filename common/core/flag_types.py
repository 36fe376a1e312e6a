"""Turn the text of a flag into a value, or raise UserError with what it should have been."""

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

#: Threads for each CPU that --threads may ask for.
MOST_THREADS = 4
#: The largest count where a flag has no bound of its own: losses keep sizes in 32 bits.
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
    """Parse a whole number from `low` to `high`."""

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


whole = Whole
#: Records keep no larger whole number.
seed = Whole(0, 2**53)


def threads(text: str) -> int:
    """Parse a number of threads: at most MOST_THREADS a CPU, since thousands bring the machine to a
    standstill."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Whole(1, MOST_THREADS * cpus)(text)


def named(text: str) -> str:
    """Parse a name; an empty one is an error, since an empty variable of a shell would name the
    current folder."""
    if not text:
        raise UserError("must not be empty: give a name, or leave it out")
    return text


def path(text: str) -> Path:
    """Parse a path.  It has to be UTF-8, as records and pages that name it are."""
    try:
        named(text).encode()
    except UnicodeEncodeError:
        raise UserError(
            f"its name is not UTF-8: {os.fsencode(text)!r}; rename it or name another"
        ) from None
    return Path(text)


def not_negative(text: str) -> float:
    """Return a finite number of 0 or more."""
    with suppress(ValueError):
        if float(text) == 0:  # "0.00", ".0", "-0"
            return 0.0
    return positive(text)


def durations(text: str) -> str:
    """Return "0,1,2" of different whole numbers, one of them above 0."""
    numbers = split(text)
    frames = [int(number) for number in numbers if number.isdecimal()]
    if len({*frames}) < len(numbers) or not 0 < max(frames, default=0) <= MOST:
        raise UserError(
            f"give different whole numbers of frames, 0,1,2,3,4, one of them above 0, not {text!r}"
        )
    return ",".join(map(str, frames))


def duration(text: str) -> float:
    """Return the seconds of "90s", "5m" or "1h".  The unit has to be there: 5 could mean
    minutes."""
    seconds = {"s": 1, "m": 60, "h": 3600}
    if text[-1:] not in seconds:
        raise UserError(f"give a time such as 90s, 5m or 1h, with the unit, not {text!r}")
    return positive(text[:-1]) * seconds[text[-1]]


def worded_duration(seconds: float) -> str:
    """Return "45 s", "8.5 min" or "2 h" of seconds."""
    for size, unit in ((3600, "h"), (60, "min")):
        if seconds >= 1.5 * size:
            return f"{round(seconds / size, 1):g} {unit}"
    return f"{seconds:.0f} s"


def percentage(text: str) -> float:
    """Parse "2%" as a fraction.  The sign has to be there: 0.02 could mean 2% or 0.02%."""
    if not text.endswith("%"):
        raise UserError(f"give a percentage such as 2%, with the sign, not {text!r}")
    return positive(text[:-1]) / 100


def preset(text: str) -> str:
    """Check a size preset, a workload, or both, and return the text: see `parts`."""
    parts(text)
    return text


def memory_size(text: str) -> str:
    """Check a size such as "4GiB", "500MB" or "80%" (of the device), and return the text."""
    bytes_of(text, 2**40)
    return text


def device(text: str) -> str:
    """Check the name of a device, and return it; "gpu" is "cuda"."""
    name = re.sub("^gpu(?=$|:)", "cuda", text)
    if not re.fullmatch("auto|cpu|cuda(:[0-9]{1,4})?", name):
        raise UserError(f"give auto, cpu, cuda or cuda:N, not {short(text)!r}")
    return name


#: Other names of dtypes, as frameworks have them.
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
    """Return torch's name of a dtype: "float16" for "fp16"."""
    name = text.strip().lower().replace("torch.", "")
    return DTYPE_NAMES.get(name, name)


def pair(form: str, empty: bool = False) -> Callable[[str], tuple[str, str]]:
    """Return the type of KEY=VALUE, which gives both.  form: names them in messages; empty: VALUE
    may be empty."""

    def parse(text: str) -> tuple[str, str]:
        key, equals, value = (word.strip() for word in text.partition("="))
        if not (equals and key and (value or empty)):
            raise UserError(f"give {form}, not {text!r}")
        return key, value

    return parse


def split(text: str) -> list[str]:
    """Return what stands between commas, without empty words."""
    return [word.strip() for word in text.split(",") if word.strip()]


def words(text: str) -> tuple[str, ...]:
    """Parse a comma-separated list of anything."""
    names = tuple(split(text))
    if not names:
        raise UserError(f"give names with commas between them, not {text!r}")
    return names


def some_of(
    choices: Sequence[str], everything: Sequence[str] | None = None
) -> Callable[[str], tuple[str, ...]]:
    """Return the type of a comma-separated list out of `choices`, in their order; "all", "both":
    `everything`."""

    def parse(text: str) -> tuple[str, ...]:
        names = split(text)
        if names in (["all"], ["both"]):
            return tuple(choices if everything is None else everything)
        wrong = next((name for name in names if name not in choices), "")
        if wrong or not names:
            guess = closest(wrong, choices)  # first: the list may be long
            raise UserError(
                f"{text!r}{guess}{' ' if guess else ': '}Give some of {', '.join(choices)}"
            )
        return tuple(choice for choice in choices if choice in names)

    return parse


#: The largest size that records keep.
MOST_BYTES = 2**53

#: Bytes of each unit that a size may have.
SIZE_UNITS = {
    f"{letter}{end}": base**power
    for end, base in (("ib", 1024), ("b", 1000))
    for power, letter in enumerate("kmgt", 1)
}


def positive(text: str) -> float:
    """Return the number above 0 in a text.  Raises UserError."""
    try:
        value = float(text)
    except ValueError:
        raise UserError(f"give a number, not {text!r}") from None
    if not (value > 0 and math.isfinite(value)):
        raise UserError(f"must be above 0, not {text}")
    return value


def bytes_of(text: str, device_bytes: int) -> int:
    """Return the bytes of "4GiB", "500MB" or "80%" (of `device_bytes`).  Raises UserError."""
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


SIZES = {
    "full": "batches of 30 utterances (or 10,000 frames when sorted), some 80 in all",
    "cpu": "sized for a CPU, with real shapes and vocabulary but batches of 2 utterances (or 1,000 frames when "
    "sorted); about a minute of measuring for each implementation on two cores",
    "quick": "a smoke run with a small joiner and vocabulary and one round; a quarter of a minute for each "
    "implementation, most of it start-up; its times are too noisy to compare",
}
#: The token scales are estimates, from 38 LibriSpeech utterances (299 s, in lhotse's tests) that
#: have 4211 characters, spaces included: 0.567 per frame at x4, while shape_info.pt has 0.213
#: BPE-500 tokens per frame, 2.66 times less. BPE models trained on other English books (1.1 million
#: words of Project Gutenberg) give the same 38 transcripts 1600 tokens at 500 symbols (0.215 per
#: frame, as shape_info.pt) and 1057 at 4096, 0.66 times as many.
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


def parts(text: str) -> tuple[str, str]:
    """Return (size or "", workload) of "cpu", "chars", "cpu,chars" or "chars,cpu".  Raises
    UserError."""
    # its name in old runs
    words = ["full" if word.strip() == "seed" else word.strip() for word in text.split(",")]
    sizes = [word for word in words if word in SIZES]
    workloads = [word for word in words if word in WORKLOADS]
    if len(sizes) > 1 or len(workloads) > 1 or len(sizes) + len(workloads) != len(words):
        wrong = next((word for word in words if word not in (*sizes, *workloads)), "")
        raise UserError(
            f"give a size ({', '.join(SIZES)}), a workload ({', '.join(WORKLOADS)}), or both (cpu,chars), not {text!r}"
            f"{closest(wrong, (*SIZES, *WORKLOADS))}"
        )
    return "".join(sizes), "".join(workloads) or DEFAULT_WORKLOAD


def listed(noun: str, texts: Mapping[str, str]) -> str:
    """Return a sentence for each size or workload, for --help: "Size full: ..."."""
    return " ".join(f"{noun} {name}: {text}." for name, text in texts.items())


def note(preset: str) -> str:
    """Describe the preset of resolved settings in one line."""
    size, workload = parts(preset)
    return SIZES[size] if workload == DEFAULT_WORKLOAD else f"{SIZES[size]}; {WORKLOADS[workload]}"
