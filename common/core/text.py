"""Numbers and names as people read them, in the terminal, in Markdown and on the page."""

from __future__ import annotations

import html
import math
import re
import reprlib
import unicodedata
from typing import Any, Dict, Iterable, List, Optional, Tuple, TypeVar

Key = TypeVar("Key")
Inner = TypeVar("Inner")
Value = TypeVar("Value")

LONGEST_CELL = 26  # characters, in the terminal
LONGEST_SAID = 1000  # characters, of what a package says
#: What a terminal takes for a command, such as a colour or the title of its window.
_COMMAND = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|[]PX^_][^\x07\x1b]*(?:\x07|\x1b\\))")

#: JSON has no infinity: what is not finite is written as this.
UNBOUNDED = 1e300
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80
_FOLDERS = re.compile(r"(?<![\w.:/])/(?:[\w.+-]+/)+")


def number(value: Optional[float], digits: int = 4) -> str:
    """About `digits` significant digits, never an exponent for what people measure; "-" where nothing is known."""
    if value is None or not math.isfinite(value):
        return "-"
    if value == 0:
        return "0"
    decimals = digits - 1 - math.floor(math.log10(abs(value)))
    return f"{value:.{min(max(decimals, 0), 6)}f}"


def count(number: int, noun: str) -> str:
    """ "1 round", "3 rounds"."""
    return f"{number} {noun}{'s' * (number != 1)}"


def percent(share: Optional[float]) -> str:
    return "-" if share is None else f"{100 * share:.1f}%"


def error(value: Optional[float]) -> str:
    """A relative error."""
    return "-" if value is None else "inf" if value >= UNBOUNDED else f"{value:.1e}"


def finite(value: float) -> float:
    """An error as it is written."""
    return value if value < UNBOUNDED else UNBOUNDED


def first_line(error: BaseException) -> str:
    """Of its message; and the next, where the first only announces it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no message"]
    return said(" ".join(lines[: 1 + lines[0].endswith(":")]))


def reason_of(error: BaseException) -> str:
    """Its type, and the first line of its message where it has one."""
    return f"{type(error).__name__}: {first_line(error)}" if str(error).strip() else type(error).__name__


def short(cell: str, longest: int = LONGEST_CELL) -> str:
    return cell if len(cell) <= longest else cell[: longest - 3] + "..."


def escaped(text: Any) -> str:
    """Markdown that shows `text` itself, on one line: no markup, no links."""
    return re.sub(r"([\\`*|~]|\](?=[(\[:]))", r"\\\1", html.escape(plain(text), quote=False))


def plain(text: Any) -> str:
    """Text on one line, without what a terminal would obey: its commands, control, direction and format characters,
    surrogates."""
    spaced = re.sub(r"\s+", " ", str(text))
    if spaced.isprintable():
        return spaced
    return "".join(one for one in _COMMAND.sub("", spaced) if unicodedata.category(one)[0] != "C")


def said(text: str, longest: int = LONGEST_SAID) -> str:
    """What a package said, which may be of any size, as `plain` text of at most `longest` characters."""
    return short(plain(text[: 2 * longest]), longest)


def without_middle(text: str, longest: int) -> str:
    """Return `text` in one plain line of some `longest` characters: of a longer one, its beginning and end."""
    if len(text) <= longest:
        return plain(text)
    return f"{plain(text[: longest // 2])} ... {plain(text[-longest // 2 :])}"


def shown(value: Any) -> str:
    """Return `value` as Python writes it, for a message; of something long, its beginning and end."""
    return _SHORT.repr(value)


def without_folders(text: str) -> str:
    """Absolute paths by their last name alone: folders of one machine tell another nothing.  Addresses stay."""
    return _FOLDERS.sub("", text)


def gathered(pairs: Iterable[Tuple[Key, Value]]) -> Dict[Key, List[Value]]:
    """(what, who) -> each thing once, with all who it is said of, in order."""
    found: Dict[Key, List[Value]] = {}
    for what, who in pairs:
        found.setdefault(what, []).append(who)
    return found


def gathered_twice(lines: Iterable[Tuple[Key, Inner, Value]]) -> Dict[Key, Dict[Inner, List[Value]]]:
    """(round, batch, time) -> round -> batch -> times, in order."""
    found: Dict[Key, Dict[Inner, List[Value]]] = {}
    for outer, inner, value in lines:
        found.setdefault(outer, {}).setdefault(inner, []).append(value)
    return found
