"""--find-largest: for each implementation the largest batch that fits, and how fast it trains there.

Correctness of all first; then, one implementation after the other, sizes are tried by doubling and bisection, each in a
process of its own (the probe pass); then the throughput at the largest that fits, over the same utterances for all, in
rounds of fresh processes, the implementations in shuffled order.  A size at which the throughput pass runs out of
memory after all counts as too large, and the search goes on.  What is tried next follows from the records alone, so
that --resume asks nothing twice.  No torch.
"""

from __future__ import annotations

import argparse
import random
import sys
from typing import Any, Dict, List, Mapping, Optional, Sequence, Set, Tuple

from common import commands, flag_types
from common.errors import UserError
from common.results import largest, largest_tables, records, summary
from common.running import interpreters, machine, processes, runner, runs
from common.running.progress import Progress
from common.running.runner import Job
from common.running.runs import Run
from common.settings import Settings

#: The search ends when the largest size that fits and the smallest that does not are this close, as a fraction.
TOLERANCE = 0.05
#: Of what is available on a CPU, where no limit is given: the rest is for the loaded process and for others.
SHARE_OF_AVAILABLE = 0.9


def next_size(answers: Mapping[int, bool], low: int, cap: int, start: int) -> Optional[int]:
    """The size to try next; None when the largest is known to within TOLERANCE, or 1.

    answers: does a size fit?  Below `low` no size is worth a try, above `cap` none either.  From `start` on sizes are
    doubled until one fails, then the gap is halved.  A size that fits above one that does not is not believed.
    """
    fits, fails = largest.bounds(answers)
    if fails is None:
        if fits is None:
            return min(max(start, low), cap)
        return None if fits >= cap else min(2 * fits, cap)
    below = low - 1 if fits is None else fits
    if fails - below > max(1, int(TOLERANCE * below)):
        return (below + fails) // 2
    return low if fits is None and fails > low else None


def memory_limit(chosen: Settings) -> Dict[str, Any]:
    """The ``memory_limit`` of the run's header.  bytes: None on CUDA, where the worker knows the device and the
    ``probe`` records tell.  Raises UserError for more than there is."""
    source = f"--memory-limit {chosen.memory_limit}" if chosen.memory_limit else "what is available"
    if chosen.device != "cpu":
        return {"bytes": None, "source": source}
    total, available = machine.total_memory(), machine.available_memory()
    if total is None or available is None:
        raise UserError("--find-largest: on a CPU it needs Linux's /proc, which tells how much memory there is")
    if chosen.memory_limit is None:
        return {"bytes": int(SHARE_OF_AVAILABLE * available), "source": source}
    size = flag_types.bytes_of(chosen.memory_limit, total)
    if size > available:
        raise UserError(
            f"--memory-limit {chosen.memory_limit}: is {size} bytes, but {available} are available here; give less"
        )
    return {"bytes": size, "source": source}


class Search:
    """The search of one implementation.  failed: a probe failed in a way that tells nothing of its size, and ended it;
    untimed: likewise the throughput pass."""

    def __init__(self, name: str, run: Run, chosen: Settings, limit_bytes: Optional[int]):
        self.name, self.run, self.chosen, self.limit_bytes = name, run, chosen, limit_bytes
        self.failed = self.untimed = False

    def job(self, pass_name: str, size: int, pool: Optional[int] = None, round_number: Optional[int] = None) -> Job:
        overrides = (((self.chosen.find_largest or "").replace("-", "_"), size),)
        return Job(self.name, pass_name, round_number, size, pool, overrides, self.limit_bytes)

    def answers(self) -> Dict[int, bool]:
        return largest.answers(records.latest_jobs(self.run.records))

    def range(self) -> Tuple[int, int, int]:
        """(lowest size worth a try, highest, first): sorted batches hold at least the longest utterance."""
        environments = (record for record in self.run.records if record["record"] == "environment")
        totals = next(environments)["shape_file_totals"]
        by_frames = self.chosen.sort_utterance
        most = totals["frames" if by_frames else "utterances"]
        cap = min(most, self.chosen.largest_cap or most)
        start = self.chosen.max_frames if by_frames else self.chosen.batch_size
        if by_frames and cap < totals["T_max"]:
            raise UserError(
                f"--largest-cap {cap}: the longest utterance has {totals['T_max']} frames and is a batch of its own; "
                "give at least that"
            )
        return totals["T_max"] if by_frames else 1, cap, start

    def next_probe(self) -> Optional[Job]:
        if self.failed:
            return None
        size = next_size(self.answers(), *self.range())
        return None if size is None else self.job("probe", size)

    @property
    def size(self) -> Optional[int]:
        """The largest that fits, None when none is known to."""
        return largest.bounds(self.answers())[0]

    def throughput_jobs(self, pool: int) -> List[Job]:
        """Those that are still to do, of the largest size that fits."""
        if self.size is None:
            return []
        jobs = [self.job("throughput", self.size, pool, number) for number in range(1, self.chosen.rounds + 1)]
        return [job for job in jobs if not self.run.is_done(job.name)]


class Searches:
    """All searches of a run, and what they have in common: how a job is carried out."""

    def __init__(
        self,
        run_of: Dict[str, Run],
        python_of: Dict[str, interpreters.Choice],
        chosen: Settings,
        timeout: float,
        progress: Progress,
    ):
        self.run_of, self.python_of, self.chosen = run_of, python_of, chosen
        self.timeout, self.progress = timeout, progress
        self.warned: Set[str] = set()

    def carry_out(self, job: Job) -> str:
        """Its status."""
        run = self.run_of[job.implementation]
        choice = self.python_of[job.implementation]
        runner.carry_out(job, run, choice, self.chosen, self.timeout, self.progress, self.warned)
        return run.last_status["status"]

    def correct(self, name: str) -> bool:
        return self.run_of[name].is_done("correctness") or self.carry_out(Job(name, "correctness")) == "ok"

    def run(self) -> None:
        """Raises processes.Interrupted when the user interrupted."""
        limits = {name: records.run_header(run.records)["memory_limit"]["bytes"] for name, run in self.run_of.items()}
        names = [name for name in self.run_of if self.correct(name)]
        searches = [Search(name, self.run_of[name], self.chosen, limits[name]) for name in names]
        order = random.Random(self.chosen.seed)
        while True:
            for search in searches:
                self.probe(search)
            if self.time(searches, order):
                return

    def probe(self, search: Search) -> None:
        job = search.next_probe()
        while job is not None:
            search.failed = self.carry_out(job) not in largest.OUTCOMES
            job = search.next_probe()

    def time(self, searches: Sequence[Search], order: random.Random) -> bool:
        """The rounds at each one's size; False when one of them did not fit after all: its search goes on."""
        pool = max((search.size or 0 for search in searches), default=0)
        jobs = [(search, job) for search in searches if not search.untimed for job in search.throughput_jobs(pool)]
        order.shuffle(jobs)
        jobs.sort(key=lambda pair: pair[1].round or 0)  # stable: shuffled within each round
        too_large: Set[str] = set()
        for search, job in jobs:
            if search.name not in too_large and not search.untimed:
                status = self.carry_out(job)
                if status in largest.TOO_LARGE:
                    too_large.add(search.name)
                search.untimed = status not in largest.OUTCOMES
        return not too_large


def benchmark(
    names: Sequence[str], arguments: argparse.Namespace, chosen: Settings, python_of: Dict[str, interpreters.Choice]
) -> int:
    """Search, and print the table; returns the exit code."""
    more = {"memory_limit": memory_limit(chosen)}
    with runs.open_runs(names, chosen, arguments.log_dir, arguments.resume, more) as run_of:
        limit = records.run_header(next(iter(run_of.values())).records)["memory_limit"]
        announce(names, chosen, limit, arguments.quiet)
        return measure(run_of, python_of, chosen, arguments)


def measure(
    run_of: Dict[str, Run],
    python_of: Dict[str, interpreters.Choice],
    chosen: Settings,
    arguments: argparse.Namespace,
) -> int:
    """The searches as far as they are not done yet, their table and the report; returns the exit code."""
    interrupted = False
    try:
        with Progress(None, arguments.quiet) as progress:
            Searches(run_of, python_of, chosen, arguments.timeout, progress).run()
    except (processes.Interrupted, KeyboardInterrupt):
        interrupted = True
    except UserError:
        for run in run_of.values():
            run.discard_if_empty()
        raise
    rows = summary.searches([run.folder for run in run_of.values()], all_runs=True)
    shown = commands.show(largest_tables.render(rows, "table") + "\n")
    said = "the rows above are what is known; --resume continues" if interrupted else ""
    return runner.ended(arguments, [row["status"] for row in rows], shown, said)


def announce(names: Sequence[str], chosen: Settings, limit: Mapping[str, Any], quiet: bool) -> None:
    if quiet:
        return
    size = f"{largest_tables.amount(limit['bytes'])} ({limit['source']})" if limit["bytes"] else limit["source"]
    print(
        f"the largest {chosen.find_largest} of {', '.join(names)} on {chosen.device} within {size}: "
        f"scope {chosen.scopes[0]}, V {chosen.vocab_size}, joiner {chosen.encoder_dim}, {chosen.dtype}, "
        f"{chosen.rounds} round{'s' * (chosen.rounds != 1)} at the size found",
        file=sys.stderr,
    )
