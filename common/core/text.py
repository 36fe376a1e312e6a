"""Write numbers, names and amounts as people read them, in the terminal, in Markdown and on the
page."""

from __future__ import annotations

import difflib
import html
import math
import re
import reprlib
import unicodedata
from collections.abc import Iterable
from typing import Any, TypeVar

Key = TypeVar("Key")
Inner = TypeVar("Inner")
Value = TypeVar("Value")

LONGEST_CELL = 26  # characters, in the terminal
LONGEST_MESSAGE = 1000  # characters, of a package's message
#: A command to a terminal, such as a colour or the title of its window.
_COMMAND = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|[]PX^_][^\x07\x1b]*(?:\x07|\x1b\\))")

#: Number that stands in JSON for infinity and NaN.
UNBOUNDED = 1e300
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80
_FOLDERS = re.compile(r"(?<![\w.:/])/(?:[\w.+-]+/)+")


def number(value: float | None, digits: int = 4) -> str:
    """Return about `digits` significant digits, without an exponent for what people measure; "-"
    for None, NaN, inf."""
    if value is None or not math.isfinite(value):
        return "-"
    if value == 0:
        return "0"
    decimals = digits - 1 - math.floor(math.log10(abs(value)))
    return f"{value:.{min(max(decimals, 0), 6)}f}"


#: Ends of an interval beyond these say only that it tells nothing.
LEAST_END, MOST_END = 1e-3, 1e4


def interval(low: float | None, high: float | None, digits: int = 3, joint: str = " to ") -> str:
    """Return "1.59 to 1.91", or "below 0.001 to above 10000" where it tells nothing; "" for
    None."""
    if low is None or high is None:
        return ""
    begin = f"below {LEAST_END:g}" if low < LEAST_END else number(low, digits)
    end = f"above {MOST_END:.0f}" if high > MOST_END else number(high, digits)
    return f"{begin}{joint}{end}"


def closest(word: str, choices: Iterable[str]) -> str:
    """Return "; did you mean 'k2'?" for the choice most like a mistyped word; "" where none is like
    it."""
    matches = difflib.get_close_matches(word, list(choices), 1)
    return f"; did you mean {matches[0]!r}?" if matches else ""


def count(number: int, noun: str) -> str:
    """Return "1 round", "3 rounds", "2 batches" or "2 losses"."""
    return (
        f"{number} {noun}"
        if number == 1
        else f"{number} {noun}{'es' if noun.endswith(('ch', 's')) else 's'}"
    )


def percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}%"


def error(value: float | None) -> str:
    """Return a relative error with two digits; "-" for None, "inf" for UNBOUNDED."""
    if value is None:
        return "-"
    return "inf" if value >= UNBOUNDED else f"{value:.1e}"


def finite(value: float) -> float:
    """Clamp to UNBOUNDED, since JSON has no infinity."""
    return value if value < UNBOUNDED else UNBOUNDED


def first_line(error: BaseException) -> str:
    """Return the first line of the message, and the next where the first only announces it; of
    TorchScript the last, after its own traceback."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no message"]
    if any(line.startswith("Traceback of TorchScript") for line in lines):
        return clipped(lines[-1].removeprefix("RuntimeError: "))
    return clipped(" ".join(lines[: 1 + lines[0].endswith(":")]))


def reason_of(error: BaseException) -> str:
    """Return the type and the first line of the message; of a ValueError, a sentence to its caller,
    the line alone."""
    if type(error) is ValueError and str(error).strip():
        return first_line(error)
    return (
        f"{type(error).__name__}: {first_line(error)}"
        if str(error).strip()
        else type(error).__name__
    )


def short(cell: str, longest: int = LONGEST_CELL) -> str:
    return cell if len(cell) <= longest else cell[: longest - 3] + "..."


def escaped(text: Any) -> str:
    """Return Markdown that shows `text` itself, on one line: no markup, no links."""
    return re.sub(r"([\\`*|~]|\](?=[(\[:]))", r"\\\1", html.escape(plain(text), quote=False))


def plain(text: Any) -> str:
    """Return text on one line, without what a terminal would obey: commands, control and direction
    characters."""
    spaced = re.sub(r"\s+", " ", str(text))
    if spaced.isprintable():
        return spaced
    return "".join(
        letter for letter in _COMMAND.sub("", spaced) if unicodedata.category(letter)[0] != "C"
    )


def clipped(text: str) -> str:
    """Return a package's message of any size as `plain` text of at most LONGEST_MESSAGE
    characters."""
    return short(plain(text[: 2 * LONGEST_MESSAGE]), LONGEST_MESSAGE)


def shown(value: Any) -> str:
    """Return `value` as Python writes it, for a message; of a long one the beginning and the
    end."""
    return _SHORT.repr(value)


def without_folders(text: str) -> str:
    """Reduce absolute paths to their last name: folders of one machine tell another nothing.  URLs
    stay."""
    return _FOLDERS.sub("", text)


def gathered(pairs: Iterable[tuple[Key, Value]]) -> dict[Key, list[Value]]:
    """Group pairs: each key once, with the list of its values, in order."""
    groups: dict[Key, list[Value]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def gathered_twice(
    lines: Iterable[tuple[Key, Inner, Value]],
) -> dict[Key, dict[Inner, list[Value]]]:
    """Group triples such as (round, batch, time) into round -> batch -> times, in order."""
    outer = gathered((outer, (inner, value)) for outer, inner, value in lines)
    return {key: gathered(pairs) for key, pairs in outer.items()}


MB = 2**20
GIB = 2**30


def quantity(value: float | None, unit: str = "") -> str:
    """Return "999 FLOPs", "1.0 KFLOPs", "1.23 MMACs", "94.7 M": at most two decimals, steps of
    1000; "-" for None."""
    if value is None:
        return "-"
    scaled: float = round(value)
    for prefix in ("", "K", "M", "G", "T", "P"):
        shown = str(round(scaled, 2) if prefix else scaled)
        if abs(float(shown)) < 1000:
            break
        scaled /= 1000
    return f"{shown} {prefix}{unit}".rstrip()
