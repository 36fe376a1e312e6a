"""Progress on stderr: a bar of jobs on a terminal, with what is known so far above it; elsewhere a line for each timing
round and for each job of another pass; nothing when quiet.  With it the time left, and who is ahead after each timing
round."""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from contextlib import suppress
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

from common.core import guard
from common.core.statistics import mean, median
from common.core.text import number, plain
from common.jobs.redrawn import Redrawn, can_redraw, size_of_bar
from common.records.schema import Sample

#: What a job is like, for how long it takes: the implementation and the pass.
Like = Tuple[str, str]
#: Without tqdm's own time left, which takes all jobs for equal.
BAR = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]"


def time_left(seconds: float) -> str:
    """Return "about 12 min left"."""
    return f"about {seconds / 60:.0f} min left" if seconds >= 90 else f"about {seconds:.0f} s left"


class Progress:
    """Counts jobs.  tqdm draws the bar where it is installed and stderr is a terminal.

    costs: seconds of a job of each sort, as far as known before any has ended."""

    def __init__(self, quiet: bool, costs: Optional[Mapping[Like, float]] = None):
        self.quiet, self.finished, self.total = quiet, 0, 0
        self.costs = costs or {}
        self.most: Optional[Callable[[], float]] = None  # seconds that may be left at most, of --budget
        self.since: Dict[str, float] = {}  # of what runs: when it began
        self.coming: List[Like] = []
        self.took: Dict[Like, List[float]] = defaultdict(list)  # seconds
        self.bar: Optional[Any] = None
        self.so_far: Optional[Redrawn] = None
        if not quiet and sys.stderr.isatty():
            with suppress(ImportError):
                from tqdm import tqdm

                self.bar = tqdm(unit="job", dynamic_ncols=True, file=sys.stderr, bar_format=BAR)
                if can_redraw(sys.stderr):
                    self.so_far = Redrawn(sys.stderr, self.bar)
                    self.bar.dynamic_ncols = size_of_bar

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self.so_far is not None:
            self.so_far.end()
        if self.bar is not None:
            self.bar.close()

    def expect(self, jobs: Sequence[Like]) -> None:
        """Say which jobs there will be; not called where that is not known."""
        self.coming, self.total = list(jobs), len(jobs)
        if self.bar is not None:
            self.bar.reset(total=self.total)

    def expect_more(self, jobs: Sequence[Like]) -> None:
        """Add jobs to those that were expected."""
        self.coming += jobs
        self.total += len(jobs)
        if self.bar is not None:
            self.bar.total = self.total
            self.bar.refresh()

    def start(self, what: str) -> None:
        self.since[what] = time.monotonic()
        if self.bar is not None:
            self.bar.set_description_str(what)
            self.note("")

    def note(self, text: str) -> None:
        """Show how far the job is."""
        if self.bar is not None:
            self.bar.set_postfix_str(", ".join(filter(None, [text, self.left()])))

    def skip(self, like: Optional[Like] = None) -> None:
        """Count a job that will not run, because an earlier one of its implementation failed."""
        self._count(like)
        if self.bar is not None:
            self.bar.update()

    def done(self, what: str, status: str, reason: Optional[str], like: Optional[Like] = None) -> None:
        seconds = time.monotonic() - self.since.pop(what)
        if like is not None and status == "ok":
            self.took[like].append(seconds)
        if like is not None and status != "ok":  # nor will its later ones run
            self.coming = [job for job in self.coming if job[0] != like[0]]
        self._count(like)
        why = f": {reason}" if reason else ""
        of_total = f"/{self.total}" if self.total else ""
        line = f"[{self.finished}{of_total}] {what}: {status}{why} ({seconds:.1f} s)"
        if self.bar is not None:
            if status != "ok":
                self.say(line)
            self.bar.update()
        elif not self.quiet and not (like is not None and like[1] == "timing" and status == "ok"):
            guard.say(", ".join(filter(None, [line, self.left()])))

    def say(self, line: str) -> None:
        if self.so_far is not None:
            self.so_far.above(line)
        elif self.bar is not None:
            self.bar.write(line, file=sys.stderr)
        elif not self.quiet:
            guard.say(line)

    def say_round(self, line: str) -> None:
        """Say how a timing round ended, where `show` has not shown what is known already."""
        if self.so_far is None or not self.so_far.lines:
            self.say(line)

    def warn(self, warning: str) -> None:
        """Print a warning, whatever --quiet says: it is about the results."""
        line = f"warning: {plain(warning)}"
        (guard.say if self.bar is None else self.say)(line)

    def show(self, text: str) -> bool:
        """Show what is known so far in the place of what was shown before; return whether this terminal can."""
        if self.so_far is not None:
            self.so_far.draw(text)
        return self.so_far is not None

    def _count(self, like: Optional[Like]) -> None:
        self.finished += 1
        if like in self.coming:
            self.coming.remove(like)

    def left(self) -> str:
        """Return "about 12 min left", or "" while there is nothing to tell by."""
        if not (self.took or self.costs) or not self.coming:
            return ""
        seconds = self.seconds_of(self.coming)
        most = seconds if self.most is None else self.most()
        return time_left(min(seconds, most)) if most > 0 else ""

    def seconds_of(self, jobs: Sequence[Like]) -> float:
        """Return how long these jobs will take; 0.0 while there is nothing to tell by."""
        scale = self._scale()
        return sum(self._expected(like, scale) for like in jobs) if self.took or self.costs else 0.0

    def _expected(self, like: Like, scale: float) -> float:
        """Return seconds: of the same implementation's pass so far, else its known cost, else of others' same pass,
        else of all jobs."""
        if like in self.took:
            return mean(self.took[like])
        if like in self.costs:
            return self.costs[like] * scale
        same_pass = [took for (_, name), times in self.took.items() if name == like[1] for took in times]
        every = [took for times in self.took.values() for took in times]
        return mean(same_pass or every or [scale * cost for cost in self.costs.values()])

    def _scale(self) -> float:
        """Return how much longer jobs take here than their known costs, from those that have ended."""
        took = sum(mean(self.took[like]) for like in self.took if like in self.costs)
        return took / sum(self.costs[like] for like in self.took if like in self.costs) if took else 1.0


class Standing:
    """Tells who is ahead, by the batches that were timed so far: in a round all measure the same ones."""

    def __init__(self, kind_of: Mapping[str, str]):
        self.kind_of = kind_of
        self.ms: Dict[str, Dict[Any, float]] = {}  # by implementation, then round and batch

    def add(self, name: str, samples: Sequence[Sample]) -> None:
        """Take in the samples of timing jobs."""
        times_of: Dict[Tuple[str, Any], List[float]] = defaultdict(list)
        for sample in samples:
            if not sample.warmup:
                times_of[sample.scope, (sample.round, sample.batch)].append(sample.total_wall_ns / 1e6)
        scope = "step" if any(scope == "step" for scope, _ in times_of) else "loss"
        times = {batch: median(ms) for (of_scope, batch), ms in times_of.items() if of_scope == scope}
        self.ms.setdefault(name, {}).update(times)

    def words(self) -> str:
        """Return "exact: a 577.8, b 969.9 ms; pruned: c 59.2 ms": means over the batches; without those that have
        fewer."""
        kinds: Dict[str, List[str]] = defaultdict(list)
        for name in self.ms:
            kinds[self.kind_of.get(name, "exact")].append(name)
        lines = []
        for kind, names in kinds.items():
            most = max(len(self.ms[name]) for name in names)
            times = sorted((mean(list(self.ms[name].values())), name) for name in names if len(self.ms[name]) == most)
            lines.append(f"{kind}: {', '.join(f'{name} {number(ms)}' for ms, name in times)} ms" if most else "")
        return "; ".join(filter(None, lines))
