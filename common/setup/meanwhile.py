"""Runs `make setup` in a process beside what measures no time."""

from __future__ import annotations

import subprocess
import sys
from contextlib import contextmanager
from typing import Iterator

from common.core.paths import ROOT


@contextmanager
def setting_up() -> Iterator[None]:
    """Make all environments during the block, and wait for them at its end; stop where the block raises.

    What cannot be set up is said on stderr, and in the rows that need it."""
    with subprocess.Popen([sys.executable, "-m", "common.setup"], cwd=ROOT, stdin=subprocess.DEVNULL) as process:
        try:
            yield
            process.wait()
        finally:
            process.terminate()  # after Ctrl-C; nothing where it has ended
