"""Break things by seed, and ask after each fault what must hold."""

from __future__ import annotations

import subprocess
from collections.abc import Collection

#: Exit codes of a command that came to its end: done, some row failed, bad input.
CODES = (0, 1, 2)


class Broken(Exception):
    """A promise does not hold."""


def require(holds: bool, words: str) -> None:
    if not holds:
        raise Broken(words)


def check(done: subprocess.CompletedProcess[str], codes: Collection[int] = CODES) -> None:
    """A known exit code, no traceback, a mistake in one line, nothing that a terminal would obey."""
    shown = f"{done.stderr[-1500:]}{done.stdout[-300:]}"
    require(done.returncode in codes, f"exit code {done.returncode}: {shown}")
    require("Traceback (most recent call last)" not in done.stderr + done.stdout, shown)
    require("\x1b" not in done.stdout + done.stderr, f"an escape: {shown!r}")
    mistakes = [line for line in done.stderr.splitlines() if ": error: " in line]
    require(done.returncode != 2 or len(mistakes) == 1, f"exit code 2 and {len(mistakes)} lines of errors: {shown}")
