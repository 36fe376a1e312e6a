"""Progress on stderr: on a terminal a bar of jobs, elsewhere a line for each job that is no timing one; nothing when
quiet.  With it the time left."""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from contextlib import suppress
from typing import Any, Dict, List, Optional, Sequence, Set

from common.core import errors
from common.core.statistics import mean
from common.core.text import plain
from common.jobs.spec import Like

#: Without tqdm's own time left, which takes all jobs for equal.
BAR = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]"


class Progress:
    """Counts jobs.  tqdm draws the bar where it is installed and stderr is a terminal."""

    def __init__(self, quiet: bool):
        self.quiet, self.finished, self.total, self.began = quiet, 0, 0, 0.0
        self.coming: List[Like] = []
        self.took: Dict[Like, List[float]] = defaultdict(list)  # seconds
        self.warned: Set[str] = set()
        self.bar: Optional[Any] = None
        if not quiet and sys.stderr.isatty():
            with suppress(ImportError):
                from tqdm import tqdm

                self.bar = tqdm(unit="job", dynamic_ncols=True, file=sys.stderr, bar_format=BAR)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.close()

    def expect(self, jobs: Sequence[Like]) -> None:
        """Add to the jobs that will come."""
        self.coming += jobs
        self.total += len(jobs)
        if self.bar is not None:
            self.bar.total = self.total
            self.bar.refresh()

    def start(self, title: str) -> None:
        self.began = time.monotonic()
        if self.bar is not None:
            self.bar.set_description_str(title)
            self.note("")

    def note(self, text: str) -> None:
        """Show how far the job is."""
        if self.bar is not None:
            self.bar.set_postfix_str(", ".join(filter(None, [text, self.left()])))

    def skip(self, like: Like) -> None:
        """Count a job that will not run, because an earlier one of its implementation failed."""
        self.finished += 1
        if like in self.coming:
            self.coming.remove(like)
        if self.bar is not None:
            self.bar.update()

    def done(self, title: str, status: str, reason: Optional[str], like: Like) -> None:
        seconds = time.monotonic() - self.began
        self.skip(like)
        if status == "ok":
            self.took[like].append(seconds)
        else:  # nor will its later ones run
            self.coming = [job for job in self.coming if job[0] != like[0]]
        if status != "ok" or (self.bar is None and like[1] != "timing"):
            of_total = f"/{self.total}" if self.total else ""
            why = f": {reason}" if reason else ""
            line = f"[{self.finished}{of_total}] {title}: {status}{why} ({seconds:.1f} s)"
            self.say(line if self.bar is not None else ", ".join(filter(None, [line, self.left()])))

    def say(self, line: str) -> None:
        if self.bar is not None:
            self.bar.write(line, file=sys.stderr)
        elif not self.quiet:
            errors.say(line)

    def warn(self, warning: str) -> None:
        """Print a warning once, whatever --quiet says: it is about the results."""
        if warning not in self.warned:
            self.warned.add(warning)
            (errors.say if self.bar is None else self.say)(f"warning: {plain(warning)}")

    def left(self) -> str:
        """Return "about 12 min left", or "" while there is nothing to tell by."""
        seconds = sum(map(self._expected, self.coming)) if self.took else 0.0
        if not seconds:
            return ""
        return f"about {seconds / 60:.0f} min left" if seconds >= 90 else f"about {seconds:.0f} s left"

    def _expected(self, like: Like) -> float:
        """Return the seconds of a job: those of its like so far, else of others' same pass, else of all."""
        same_pass = [seconds for (_, name), took in self.took.items() if name == like[1] for seconds in took]
        return mean(self.took.get(like) or same_pass or [seconds for took in self.took.values() for seconds in took])
