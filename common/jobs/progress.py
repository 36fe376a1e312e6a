"""Progress on stderr: a bar of jobs on a terminal, one line per job elsewhere, nothing when quiet."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from typing import Any, Optional


class Progress:
    """Counts jobs.  tqdm draws the bar where it is installed and stderr is a terminal."""

    def __init__(self, quiet: bool):
        self.quiet, self.finished, self.total = quiet, 0, 0
        self.since = time.monotonic()
        self.bar: Optional[Any] = None
        if not quiet and sys.stderr.isatty():
            with suppress(ImportError):
                from tqdm import tqdm

                self.bar = tqdm(unit="job", dynamic_ncols=True, file=sys.stderr)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.close()

    def expect(self, jobs: int) -> None:
        """How many there will be; not called where that is not known."""
        self.total = jobs
        if self.bar is not None:
            self.bar.reset(total=jobs)

    def start(self, what: str) -> None:
        self.since = time.monotonic()
        if self.bar is not None:
            self.bar.set_description_str(what)

    def note(self, text: str) -> None:
        """How far the job is."""
        if self.bar is not None:
            self.bar.set_postfix_str(text)

    def skip(self) -> None:
        """A job that will not run, because an earlier one of its implementation failed."""
        self.finished += 1
        if self.bar is not None:
            self.bar.update()

    def done(self, what: str, status: str, reason: Optional[str]) -> None:
        self.finished += 1
        why = f": {reason}" if reason else ""
        of_total = f"/{self.total}" if self.total else ""
        seconds = time.monotonic() - self.since
        line = f"[{self.finished}{of_total}] {what}: {status}{why} ({seconds:.1f} s)"
        if self.bar is not None:
            if status != "ok":
                self.bar.write(line, file=sys.stderr)
            self.bar.update()
        elif not self.quiet:
            print(line, file=sys.stderr, flush=True)
