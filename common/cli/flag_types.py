"""What a flag's text may be: each function turns it into a value, or says in one line what it should have been."""

from __future__ import annotations

import argparse
import math
import string
from pathlib import Path
from typing import Callable, Dict, Optional, Sequence, Tuple

from common import settings
from common.errors import UserError
from common.running import machine

#: Threads for each CPU that --threads may ask for.
MOST_THREADS = 4


def str2bool(text: str) -> bool:
    """True for yes, true, t, y, 1; False for no, false, f, n, 0; in any case."""
    word = text.strip().lower()
    if word in ("yes", "true", "t", "y", "1"):
        return True
    if word in ("no", "false", "f", "n", "0"):
        return False
    raise argparse.ArgumentTypeError(f"give true or false, not {text!r}")


def whole(low: int) -> Callable[[str], int]:
    """A whole number of at least `low`."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"give a whole number, not {text!r}") from None
        if value < low:
            raise argparse.ArgumentTypeError(f"must be at least {low}, not {value}")
        return value

    return parse


def threads(text: str) -> int:
    """At most MOST_THREADS for each CPU that this process may use: thousands bring the machine to a standstill."""
    value, most = whole(1)(text), MOST_THREADS * machine.cpu_count()
    if value > most:
        raise argparse.ArgumentTypeError(f"must be at most {most}, {MOST_THREADS} for each CPU here, not {value}")
    return value


def named(text: str) -> str:
    """Anything but nothing: an empty variable in a shell would else name the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("must not be empty: give a name, or leave it out")
    return text


def path(text: str) -> Path:
    return Path(named(text))


def positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"give a number, not {text!r}") from None
    if not (value > 0 and math.isfinite(value)):
        raise argparse.ArgumentTypeError(f"must be above 0, not {text}")
    return value


def percentage(text: str) -> float:
    """A fraction from "2%".  The sign has to be there: 0.02 could be meant as either."""
    if not text.endswith("%"):
        raise argparse.ArgumentTypeError(f"give a percentage such as 2%, with the sign, not {text!r}")
    return positive(text[:-1]) / 100


def preset(text: str) -> str:
    """A size preset, a workload, or both: see common.settings.preset_parts."""
    try:
        settings.preset_parts(text)
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


#: Bytes of each unit that a size may have.
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


def memory_size(text: str) -> str:
    """A size such as "4GiB", "500MB" or "80%" (of the device), as it was given, once it is known to be one."""
    bytes_of(text, 2**40)
    return text


def bytes_of(text: str, device_bytes: int) -> int:
    """The bytes of "4GiB", "500MB" or "80%", the last of `device_bytes`."""
    number = text.rstrip("%" + string.ascii_letters + " ")
    unit = text[len(number) :].strip().lower()
    if unit not in SIZE_UNITS and unit != "%":
        raise argparse.ArgumentTypeError(f"give a size such as 4GiB, 500MB or 80% of the device, not {text!r}")
    value = positive(number)
    if unit == "%" and value > 100:
        raise argparse.ArgumentTypeError(f"must be at most 100%, not {text}")
    size = int(device_bytes * value / 100 if unit == "%" else value * SIZE_UNITS[unit])
    if size < 1:
        raise argparse.ArgumentTypeError(f"must be at least a byte, not {text}")
    return size


def device(text: str) -> str:
    kind, _, index = text.partition(":")
    if kind not in ("auto", "cpu", "cuda") or (index and (kind != "cuda" or not index.isdigit())):
        raise argparse.ArgumentTypeError(f"give auto, cpu, cuda or cuda:N, not {text!r}")
    return text


def words(text: str) -> Tuple[str, ...]:
    """A comma-separated list of anything."""
    found = tuple(word.strip() for word in text.split(",") if word.strip())
    if not found:
        raise argparse.ArgumentTypeError(f"give names with commas between them, not {text!r}")
    return found


def some_of(choices: Sequence[str], everything: Optional[Sequence[str]] = None) -> Callable[[str], Tuple[str, ...]]:
    """A comma-separated list out of `choices`, in their order; "all" (or "both") is `everything`, by default all of
    them."""

    def parse(text: str) -> Tuple[str, ...]:
        given = [word.strip() for word in text.split(",") if word.strip()]
        if given in (["all"], ["both"]):
            return tuple(choices if everything is None else everything)
        unknown = [word for word in given if word not in choices]
        if unknown or not given:
            raise argparse.ArgumentTypeError(f"give some of {', '.join(choices)}, not {text!r}")
        return tuple(choice for choice in choices if choice in given)

    return parse


def schedule(text: str) -> Dict[str, int]:
    """The profiler's schedule from "wait=10,warmup=10,active=20,repeat=2"."""
    lows = {"wait": 0, "warmup": 0, "active": 1, "repeat": 1}
    values = {}
    for part in text.split(","):
        key, _, value = part.partition("=")
        key = key.strip()
        if key not in lows:
            raise argparse.ArgumentTypeError(f"give wait=A,warmup=B,active=C,repeat=D in steps, not {text!r}")
        values[key] = whole(lows[key])(value)
    missing = [key for key in lows if key not in values]
    if missing:
        raise argparse.ArgumentTypeError(f"{', '.join(missing)} is not given in {text!r}")
    return values
