"""Progress on stderr: a bar of jobs on a terminal, one line per job elsewhere, nothing when quiet."""

from __future__ import annotations

import sys
import time
from typing import Any, Dict, Optional


class Progress:
    """Counts jobs, out of `total` where that is known.  tqdm draws the bar where it is installed and stderr is a
    terminal."""

    def __init__(self, total: Optional[int], quiet: bool):
        self.total, self.quiet, self.finished = total, quiet, 0
        self.since = time.monotonic()
        self.bar: Optional[Any] = None
        if not quiet and sys.stderr.isatty():
            try:
                from tqdm import tqdm

                self.bar = tqdm(total=total, unit="job", dynamic_ncols=True, file=sys.stderr)
            except ImportError:
                pass

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.close()

    def start(self, what: str) -> None:
        self.since = time.monotonic()
        if self.bar is not None:
            self.bar.set_description_str(what)

    def note(self, text: str) -> None:
        if self.bar is not None:
            self.bar.set_postfix_str(text)

    def skip(self) -> None:
        """A job that will not run, because an earlier one of its implementation failed."""
        self.finished += 1
        if self.bar is not None:
            self.bar.update()

    def done(self, what: str, status: Dict[str, Any]) -> None:
        self.finished += 1
        reason = f": {status['reason']}" if status["reason"] else ""
        of = "" if self.total is None else f"/{self.total}"
        line = f"[{self.finished}{of}] {what}: {status['status']}{reason} ({time.monotonic() - self.since:.1f} s)"
        if self.bar is not None:
            if status["status"] != "ok":
                self.bar.write(line, file=sys.stderr)
            self.bar.update()
        elif not self.quiet:
            print(line, file=sys.stderr, flush=True)
