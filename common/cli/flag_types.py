"""What a flag's text may be: each function turns it into a value, or says in one line what it should have been."""

from __future__ import annotations

import argparse
import os
import re
from argparse import ArgumentTypeError
from dataclasses import fields
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

from common.core import settings, units
from common.core.errors import UserError
from common.core.grid import FIXED, Axis, flag
from common.core.text import short
from common.system import machine

#: Threads for each CPU that --threads may ask for.
MOST_THREADS = 4
#: Of a count, where a flag has no bound of its own: losses keep sizes in 32 bits.
MOST = 2**31 - 1
#: Nats; e to the minus as many is the smallest number of float32, and more of them change nothing.
MOST_MARGIN = 100.0


def str2bool(text: str) -> bool:
    """True for yes, true, t, y, 1; False for no, false, f, n, 0; in any case."""
    word = text.strip().lower()
    if word not in ("yes", "true", "t", "y", "1", "no", "false", "f", "n", "0"):
        raise ArgumentTypeError(f"give true or false, not {text!r}")
    return word in ("yes", "true", "t", "y", "1")


def whole(low: int, high: int = MOST) -> Callable[[str], int]:
    """A whole number from `low` to `high`."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise ArgumentTypeError(f"give a whole number, not {short(text)!r}") from None
        if value < low:
            raise ArgumentTypeError(f"must be at least {low}, not {value}")
        if value > high:
            raise ArgumentTypeError(f"must be at most {high}, not {short(text)}")
        return value

    return parse


#: Of what is drawn; as large as records keep a whole number.
seed = whole(0, 2**53)


def threads(text: str) -> int:
    """At most MOST_THREADS for each CPU that this process may use: thousands bring the machine to a standstill."""
    value, most = whole(1)(text), MOST_THREADS * machine.cpu_count()
    if value > most:
        raise ArgumentTypeError(f"must be at most {most}, {MOST_THREADS} for each CPU here, not {value}")
    return value


def named(text: str) -> str:
    """Not empty: an empty variable in a shell would name the current folder."""
    if not text:
        raise ArgumentTypeError("must not be empty: give a name, or leave it out")
    return text


def path(text: str) -> Path:
    """UTF-8, as records and pages that name it are."""
    try:
        named(text).encode()
    except UnicodeEncodeError:
        raise ArgumentTypeError(f"its name is not UTF-8: {os.fsencode(text)!r}; rename it or name another") from None
    return Path(text)


def margin(text: str) -> float:
    """In nats."""
    value = positive(text)
    if value > MOST_MARGIN:
        raise ArgumentTypeError(f"must be at most {MOST_MARGIN:g}: below e^-{MOST_MARGIN:g} float32 ends, not {text}")
    return value


def positive(text: str) -> float:
    return float(_checked(text, units.positive))


def percentage(text: str) -> float:
    """A fraction from "2%".  The sign has to be there: 0.02 could mean 2% or 0.02%."""
    if not text.endswith("%"):
        raise ArgumentTypeError(f"give a percentage such as 2%, with the sign, not {text!r}")
    return positive(text[:-1]) / 100


def preset(text: str) -> str:
    """A size preset, a workload, or both: see common.core.settings.preset_parts."""
    return _checked(text, settings.preset_parts)


def memory_size(text: str) -> str:
    """A size such as "4GiB", "500MB" or "80%" (of the device), as it was given."""
    return _checked(text, lambda text: units.bytes_of(text, 2**40))


def _checked(text: str, read: Callable[[str], Any]) -> str:
    """`text`, once `read` has raised no UserError for it."""
    try:
        read(text)
    except UserError as error:
        raise ArgumentTypeError(str(error)) from None
    return text


def device(text: str) -> str:
    if not re.fullmatch("auto|cpu|cuda(:[0-9]{1,4})?", text):
        raise ArgumentTypeError(f"give auto, cpu, cuda or cuda:N, not {short(text)!r}")
    return text


def pair(form: str, empty: bool = False) -> Callable[[str], Tuple[str, str]]:
    """The words of KEY=VALUE, as `form` names them.  empty: VALUE may be."""

    def parse(text: str) -> Tuple[str, str]:
        key, equals, value = (word.strip() for word in text.partition("="))
        if not (equals and key and (value or empty)):
            raise ArgumentTypeError(f"give {form}, not {text!r}")
        return key, value

    return parse


def _parts(text: str) -> List[str]:
    """The words between commas."""
    return [word.strip() for word in text.split(",") if word.strip()]


def words(text: str) -> Tuple[str, ...]:
    """A comma-separated list of anything."""
    if not _parts(text):
        raise ArgumentTypeError(f"give names with commas between them, not {text!r}")
    return tuple(_parts(text))


def some_of(choices: Sequence[str], everything: Optional[Sequence[str]] = None) -> Callable[[str], Tuple[str, ...]]:
    """A comma-separated list out of `choices`, in their order; "all" (or "both") is `everything`, by default all of
    them."""

    def parse(text: str) -> Tuple[str, ...]:
        given = _parts(text)
        if given in (["all"], ["both"]):
            return tuple(choices if everything is None else everything)
        if not given or not set(given) <= set(choices):
            raise ArgumentTypeError(f"give some of {', '.join(choices)}, not {text!r}")
        return tuple(choice for choice in choices if choice in given)

    return parse


def schedule(text: str) -> Dict[str, int]:
    """The profiler's schedule from "wait=10,warmup=10,active=20,repeat=2"."""
    lows = {"wait": 0, "warmup": 0, "active": 1, "repeat": 1}
    given = {key.strip(): value for key, _, value in (part.partition("=") for part in text.split(","))}
    if not given.keys() <= lows.keys():
        raise ArgumentTypeError(f"give wait=A,warmup=B,active=C,repeat=D in steps, not {text!r}")
    missing = [key for key in lows if key not in given]
    if missing:
        raise ArgumentTypeError(f"{', '.join(missing)} is not given in {text!r}")
    return {key: whole(lows[key])(value) for key, value in given.items()}


def sweepable(parser: argparse.ArgumentParser) -> Dict[str, argparse.Action]:
    """The flags of `parser` that --sweep takes, by their names without dashes: those of one value that say what is
    measured."""
    known = {field.name for field in fields(settings.Settings)} - set(FIXED)
    actions = [action for action in parser._actions if action.dest in known and action.nargs in (None, "?")]
    return {flag(action.dest): action for action in actions if action.option_strings}


def axis_of(parser: argparse.ArgumentParser) -> Callable[[str], Axis]:
    """The type of --sweep: "vocab-size=500,1000" with values as --vocab-size takes them."""

    def parse(text: str) -> Axis:
        name, _, listed = text.partition("=")
        name = name.strip()
        there = sweepable(parser)
        action = there.get(flag(name))
        if action is None:
            raise ArgumentTypeError(f"{text!r}: give KEY=VALUE,VALUE,... with one of {', '.join(there)}")
        if not _parts(listed):
            raise ArgumentTypeError(f"{text!r}: give at least one value, as in {name}=A,B")
        try:
            values = tuple(_value(action, word) for word in _parts(listed))
        except ArgumentTypeError as error:
            raise ArgumentTypeError(f"{name}: {error}") from None
        twice = [str(value) for place, value in enumerate(values) if value in values[:place]]
        if twice:
            raise ArgumentTypeError(f"{name}: {twice[0]} is given twice")
        return Axis(action.dest, values)

    return parse


def _value(action: argparse.Action, word: str) -> Any:
    """A value as the flag itself would take it.  Raises ArgumentTypeError."""
    convert: Callable[[str], Any] = action.type if callable(action.type) else str
    try:
        value = convert(word)
    except (TypeError, ValueError):
        raise ArgumentTypeError(f"not a value of --{flag(action.dest)}: {word!r}") from None
    if action.choices is not None and value not in action.choices:
        raise ArgumentTypeError(f"{word!r} is none of {', '.join(map(str, action.choices))}")
    return value
