"""Write numbers, names and messages for people: in the terminal, in Markdown and on the page."""

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

#: Most characters of a cell in the terminal.
LONGEST_CELL = 26
#: Most characters of an error message of a package.
LONGEST_MESSAGE = 1000
#: A command to a terminal: a colour, "\x1b[31m", or the title of its window, "\x1b]0;title\x07".
_COMMAND = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|[]PX^_][^\x07\x1b]*(?:\x07|\x1b\\))")

#: Replaces infinity and NaN in JSON, which has neither.
UNBOUNDED = 1e300
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80  # characters
#: The folders of an absolute path: "/usr/lib/" of "/usr/lib/libc.so", nothing in "https://a.b/c".
_FOLDERS = re.compile(r"(?<![\w.:/])/(?:[\w.+-]+/)+")


def number(value: float | None, digits: int = 4) -> str:
    """Return a number with about `digits` significant digits, at most six of them decimals.

    It has no exponent: "0.001234", "1234567".  None, NaN and infinity are "-"."""
    if value is None or not math.isfinite(value):
        return "-"
    if value == 0:
        return "0"
    decimals = digits - 1 - math.floor(math.log10(abs(value)))
    return f"{value:.{min(max(decimals, 0), 6)}f}"


#: Ends of an interval of ratios beyond these are not written out: it is too wide to say anything.
LEAST_END, MOST_END = 1e-3, 1e4


def interval(low: float | None, high: float | None, digits: int = 3, joint: str = " to ") -> str:
    """Return an interval in words: "1.59 to 1.91", or "below 0.001 to above 10000"; "" for None."""
    if low is None or high is None:
        return ""
    begin = f"below {LEAST_END:g}" if low < LEAST_END else number(low, digits)
    end = f"above {MOST_END:.0f}" if high > MOST_END else number(high, digits)
    return f"{begin}{joint}{end}"


def closest(word: str, choices: Iterable[str]) -> str:
    """Return "; did you mean 'k2'?" with the choice that is closest to a mistyped word.

    Returns "" if no choice is similar."""
    matches = difflib.get_close_matches(word, list(choices), 1)
    return f"; did you mean {matches[0]!r}?" if matches else ""


def count(number: int, noun: str) -> str:
    """Return a number and its noun: "1 round", "3 rounds", "2 batches" or "2 losses"."""
    plural = "es" if noun.endswith(("ch", "s")) else "s"
    return f"{number} {noun}{'' if number == 1 else plural}"


def percent(share: float | None) -> str:
    """Return a fraction as "12.3%"; "-" for None."""
    return "-" if share is None else f"{100 * share:.1f}%"


def error(value: float | None) -> str:
    """Return a relative error with two digits, "1.2e-05"; "-" for None, "inf" from UNBOUNDED on."""
    if value is None:
        return "-"
    return "inf" if value >= UNBOUNDED else f"{value:.1e}"


def finite(value: float) -> float:
    """Return the number; UNBOUNDED in place of NaN, of both infinities and of a number as large,
    since JSON has no NaN and no infinity."""
    return value if abs(value) < UNBOUNDED else UNBOUNDED


def first_line(error: BaseException) -> str:
    """Return the line of an error's message that says what is wrong; "no message" if it is empty.

    That is the first line, joined with the second if the first ends with ":".  The message of an
    error in TorchScript holds a traceback: then the last line says what is wrong."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no message"]
    if any(line.startswith("Traceback of TorchScript") for line in lines):
        return clipped(lines[-1].removeprefix("RuntimeError: "))
    used = 2 if lines[0].endswith(":") else 1
    return clipped(" ".join(lines[:used]))


def reason_of(error: BaseException) -> str:
    """Return the type of an error, and the line of its message that says what is wrong: "OSError:
    disk full".  Without a message it is the type alone.

    The type of a plain ValueError is left out: its message is mostly a whole sentence."""
    name = type(error).__name__
    if not str(error).strip():
        return name
    return first_line(error) if type(error) is ValueError else f"{name}: {first_line(error)}"


def short(text: str, longest: int = LONGEST_CELL) -> str:
    """Return the text, cut with "..." at its end if it has more than `longest` characters."""
    return text if len(text) <= longest else text[: longest - 3] + "..."


def escaped(text: Any) -> str:
    """Return Markdown of one line that shows `text` as it is, without markup or links."""
    # Characters of markup, and a "]" that could end the text of a link: "](", "][", "]:".
    return re.sub(r"([\\`*|~]|\](?=[(\[:]))", r"\\\1", html.escape(plain(text), quote=False))


def plain(text: Any) -> str:
    """Return `text` as one line that is safe to print.

    It is without commands to the terminal, control characters, and characters that change the
    direction of writing."""
    spaced = re.sub(r"\s+", " ", str(text))
    if spaced.isprintable():
        return spaced
    text = _COMMAND.sub("", spaced)
    return "".join(letter for letter in text if not unicodedata.category(letter).startswith("C"))


def clipped(text: str) -> str:
    """Return a message as one safe line of at most LONGEST_MESSAGE characters."""
    return short(plain(text[: 2 * LONGEST_MESSAGE]), LONGEST_MESSAGE)


def shown(value: Any) -> str:
    """Return the repr of a value for a message; the middle of a long one is left out."""
    return _SHORT.repr(value)


def without_folders(text: str) -> str:
    """Return a text with its absolute paths cut to their last names; URLs stay as they are.

    Then the messages of two machines can be compared."""
    return _FOLDERS.sub("", text)


def gathered(pairs: Iterable[tuple[Key, Value]]) -> dict[Key, list[Value]]:
    """Group (key, value) pairs as {key: [value, ...]}, in the order of the pairs."""
    groups: dict[Key, list[Value]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def gathered_twice(
    triples: Iterable[tuple[Key, Inner, Value]],
) -> dict[Key, dict[Inner, list[Value]]]:
    """Group triples such as (round, batch, time) as {round: {batch: [time, ...]}}, in order."""
    groups = gathered((outer, (inner, value)) for outer, inner, value in triples)
    return {outer: gathered(pairs) for outer, pairs in groups.items()}


#: What tables call MB, in bytes.
MB = 2**20
GIB = 2**30


def quantity(value: float | None, unit: str = "") -> str:
    """Return a number with a prefix for powers of 1000: "999 FLOPs", "1.23 MMACs", "94.7 M".

    It has at most two decimals.  None is "-"."""
    if value is None:
        return "-"
    scaled: float = round(value)
    for prefix in ("", "K", "M", "G", "T", "P"):
        # The rounded number decides: 999 999 is 1.0 M, not 1000.0 K.
        shown = str(round(scaled, 2) if prefix else scaled)
        if abs(float(shown)) < 1000:
            break
        scaled /= 1000
    return f"{shown} {prefix}{unit}".rstrip()
