"""What must hold after every fault."""

from __future__ import annotations

from typing import Collection, NamedTuple

#: Of a command that came to its end: done, some row failed, bad input.
CODES = (0, 1, 2)


class Broken(Exception):
    """An invariant does not hold."""


class Ended(NamedTuple):
    """A command that ended: its exit code (minus a signal's number where that killed it) and what it said."""

    code: int
    out: str
    err: str


def require(holds: bool, words: str) -> None:
    if not holds:
        raise Broken(words)


def check(done: Ended, codes: Collection[int]) -> None:
    """A known exit code, no traceback, a mistake in one line, nothing that a terminal would obey."""
    shown = f"{done.err[-1500:]}{done.out[-300:]}"
    require(done.code in codes, f"exit code {done.code}: {shown}")
    require("Traceback (most recent call last)" not in done.err + done.out, shown)
    require("\x1b" not in done.out + done.err, f"an escape: {shown!r}")
    mistakes = [line for line in done.err.splitlines() if ": error: " in line]
    require(done.code != 2 or len(mistakes) == 1, f"exit code 2 and {len(mistakes)} lines of errors: {shown}")
