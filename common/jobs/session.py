"""Carries out jobs, one after the other, by an executor, keeps what they measure, and shows how far
they are.  However the process of a job ended, that becomes a status record, and costs only its own
row."""

from __future__ import annotations

import errno
import math
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from rnnt_bench.core import errors
from rnnt_bench.core.files import ROOT
from rnnt_bench.core.settings import Settings
from rnnt_bench.core.text import clipped, plain
from rnnt_bench.jobs.job import Job, Like, Runnable
from rnnt_bench.records import store
from rnnt_bench.records.run import Changed, Run, facts
from rnnt_bench.records.schema import Line, Status, as_written, typed
from rnnt_bench.setup.interpreters import Choice
from rnnt_bench.system import machine
from rnnt_bench.system.memory import tells_of_no_memory
from rnnt_bench.system.processes import Child, signal_name, start_servers
from rnnt_bench.traces import reader

#: Between two looks at the process: looking takes time from what it measures.
POLL_SECONDS = 0.2
#: The module of the processes, and what their servers import once for all jobs of a round.
#: Jobs without rounds get torch alone, since some of them measure the memory of the whole process.
WORKER = "rnnt_bench.jobs.job"
IMPORTS = ("torch",)
IMPORTS_OF_A_ROUND = (
    *IMPORTS,
    # The first backward of a process imports it, with sympy.
    "torch.fx.experimental.symbolic_shapes",
    "rnnt_bench.losses.subject",
    "rnnt_bench.losses.passes.timing",
)
#: tqdm's bar, without its own time left, which takes all jobs for equal.
BAR = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]"

#: The pass that comes first, and how long a job of another takes beside it, as in committed runs:
#: so the time left is known before that pass has run.
FIRST = "correctness"
SHARE_OF_FIRST = {"memory": 0.8, "trace": 0.5, "timing": 0.4, "limits": 0.4}

#: Status and reason.
Ending = tuple[str, str]


class Interrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM came while a job ran; `lines` are its records."""

    def __init__(self, lines: list[Line]):
        super().__init__("interrupted")
        self.lines = lines


class Executor:
    """Runs jobs on this machine.  shared: a folder in which jobs leave what later ones need;
    removed with it."""

    shared: tempfile.TemporaryDirectory[str] | None = None

    def disturbance(self, settings: Settings, seconds: float = 0.0) -> str:
        """Return how busy others keep this machine, as machine.disturbance does.  seconds: how long
        to look."""
        others = machine.ForeignLoad()
        time.sleep(seconds)
        on_cpu = settings.device.partition(":")[0] == "cpu"
        return machine.disturbance(others, settings.threads if on_cpu else 1)

    def get_ready(
        self, jobs: Sequence[Job], python_of: Mapping[str, Choice], settings: Settings
    ) -> None:
        """Start what these jobs of one round need before the first of them is timed."""
        able = [(job, python) for job in jobs if (python := python_of[job.implementation].python)]
        wanted = dict.fromkeys(
            (python, tuple(job.variables(settings).items())) for job, python in able
        )
        if len(wanted) > 1:
            how = [(python, dict(variables)) for python, variables in wanted]
            start_servers(how, WORKER, ROOT, jobs[0].round, IMPORTS_OF_A_ROUND)

    def execute(
        self,
        job: Runnable,
        python: Path,
        folder: Path,
        settings: Settings,
        timeout: float,
        note: Callable[[str], None],
    ) -> list[Line]:
        """Run a job to its end, or for `timeout` seconds, and return its records, the last of which
        is its status.

        note: called with "" while the job runs, so that a progress bar moves.  Raises UserError for
        a mistake in the user's input that the process found, and Interrupted."""
        ending: Ending | None = None
        stopped = "interrupted", f"stopped by the user during {job.name}"
        try:
            spec = job.spec(settings, folder)
            if job.subject == "loss":
                self.shared = self.shared or tempfile.TemporaryDirectory(prefix="rnnt-bench-")
                spec = replace(spec, shared=self.shared.name)
            # a server of processes serves the jobs of one round, or of one pass without rounds
            generation = job.like.pass_name if job.round is None else job.round
            imports = IMPORTS if job.round is None else IMPORTS_OF_A_ROUND
            variables = job.variables(settings)
            with Child.run(
                python, WORKER, as_written(spec), ROOT, variables, generation, imports
            ) as child:
                try:
                    while child.alive(POLL_SECONDS):
                        if child.seconds() > timeout:
                            ending = (
                                "timeout",
                                f"{job.name} took more than {timeout:g} s (--timeout)",
                            )
                            break
                        note("")
                except KeyboardInterrupt:
                    ending = stopped
        except OSError as error:  # no room for its files, or no such Python any more
            where = f"its scratch files are in {tempfile.gettempdir()}; TMPDIR names another folder"
            if error.errno in (errno.EMFILE, errno.ENFILE):
                where = "ulimit -n raises it"
            return [job.status("error", f"could not be run: {error} ({where})")]
        lines = _lines(job, child, ending)
        if ending == stopped:
            raise Interrupted(lines)
        return lines


def _lines(job: Runnable, child: Child, ending: Ending | None) -> list[Line]:
    """Return the records of the process, the last of which is the status of the job.  ending: set
    where we ended it."""
    records = child.records
    last = records[-1] if records else {}
    if last.get("record") == "user_error" and child.returncode == errors.EXIT_USAGE:
        raise errors.UserError(last["message"])
    if last.get("record") == "status":
        records = records[:-1]
        end = job.status(last["status"], last["reason"], last["wall_ns"])
        end.code = last["code"]
    else:
        status, reason = ending or how_it_died(
            child.returncode, child.killed_for_memory, child.stderr
        )
        end = job.status(status, reason, child.wall_ns)
    if end.status not in ("ok", *errors.NOT_RUNNABLE):
        end.stderr_tail = [clipped(line) for line in child.stderr]
    try:
        return [*(typed({**record, "job": job.name}) for record in records), end]
    except ValueError as error:  # a record that is not as the schema says
        return [job.status("error", str(error), child.wall_ns)]


def how_it_died(returncode: int, killed_for_memory: bool, stderr: Sequence[str]) -> Ending:
    """Return the ending of a process that wrote no status; `stderr`: its last lines."""
    last = f": {stderr[-1]}" if stderr else ""
    if returncode >= 0:
        if stderr and tells_of_no_memory(stderr[-1]):
            return "oom", stderr[-1]
        return "error", f"ended with exit code {returncode} and no status{last}"
    if -returncode == signal.SIGKILL and killed_for_memory:
        return (
            "oom",
            "killed by the kernel for lack of memory; try a smaller --batch-size or --max-frames",
        )
    aborted = -returncode == signal.SIGABRT and tells_of_no_memory("\n".join(stderr))
    return "oom" if aborted else "error", f"killed by {signal_name(-returncode)}{last}"


class Progress:
    """Counts jobs on stderr, with the time left by what has run: on a terminal with tqdm a bar,
    elsewhere a line for each job that is no timing one; nothing when quiet.

    Attributes:
        coming: the jobs that will come in any case
        coming_in_time: those that only begin before the deadline
        deadline: a time of time.monotonic()
        took: seconds of each job that ended well
    """

    def __init__(self, quiet: bool):
        self.quiet = quiet
        self.finished = self.total = 0
        self.began = 0.0
        self.coming: list[Like] = []
        self.coming_in_time: list[Like] = []
        self.deadline = math.inf
        self.took: dict[Like, list[float]] = defaultdict(list)
        self.warned: set[str] = set()
        self.bar: Any | None = None
        if not quiet and sys.stderr.isatty():
            with suppress(ImportError):
                from tqdm import tqdm

                self.bar = tqdm(unit="job", dynamic_ncols=True, file=sys.stderr, bar_format=BAR)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.close()

    def expect(self, jobs: Sequence[Like], in_time: Sequence[Like] = ()) -> None:
        """Add to the jobs that will come, and to those that only begin before the deadline."""
        self.coming += jobs
        self.coming_in_time += in_time
        self.total += len(jobs) + len(in_time)
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
        for expected in (self.coming, self.coming_in_time):
            if like in expected:
                expected.remove(like)
                break
        if self.bar is not None:
            self.bar.update()

    def done(self, title: str, status: str, reason: str | None, like: Like) -> None:
        seconds = time.monotonic() - self.began
        self.skip(like)
        if status == "ok":
            self.took[like].append(seconds)
        else:  # nor will its later ones run
            self.coming = [later for later in self.coming if later.row != like.row]
            self.coming_in_time = [later for later in self.coming_in_time if later.row != like.row]
        if status != "ok" or (self.bar is None and like.pass_name != "timing"):
            total = f"/{self.total}" if self.total else ""
            why = f": {reason}" if reason else ""
            line = f"[{self.finished}{total}] {title}: {status}{why} ({seconds:.1f} s)"
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
        """Return "about 12 min left" by the jobs that have run; "" where these tell nothing."""
        seconds = self._seconds(self.coming)
        if seconds is None:
            return ""
        # the others add no more than is then left to the deadline
        until_deadline = max(0.0, self.deadline - time.monotonic() - seconds)
        seconds += min(until_deadline, self._seconds(self.coming_in_time) or 0.0)
        if not seconds:
            return ""
        return (
            f"about {seconds / 60:.0f} min left" if seconds >= 90 else f"about {seconds:.0f} s left"
        )

    def _seconds(self, jobs: Sequence[Like]) -> float | None:
        """Return how long jobs will take; None where nothing has run.

        Each takes as long as earlier jobs of the same implementation and pass, else as those of the
        same pass, else a share of those of the first pass."""
        by_pass: dict[str, list[float]] = defaultdict(list)
        for like, took in self.took.items():
            by_pass[like.pass_name] += took
        total = 0.0
        for like in jobs:
            share = 1.0
            seconds = self.took.get(like) or by_pass[like.pass_name]
            if not seconds:
                share = SHARE_OF_FIRST.get(like.pass_name, 1.0)
                seconds = self.took.get(Like(like.row, FIRST)) or by_pass[FIRST]
            if not seconds:
                return None
            total += share * fmean(seconds)
        return total


@dataclass
class Session:
    """The runs that a command measures, by implementation or task; timeout: seconds for one job."""

    run_of: Mapping[str, Run]
    python_of: Mapping[str, Choice]
    settings: Settings
    timeout: float
    progress: Progress
    executor: Executor

    def execute(self, job: Runnable) -> list[Line]:
        """Run one job and return its records.  Raises Interrupted and UserError."""
        if isinstance(job, Job) and job.same_as and self.run_of[job.same_as].failed:
            job = replace(job, same_as="")  # it is asked all itself
        choice = self.python_of[job.like.row]
        if choice.python is None:
            return [job.status("missing", choice.reason)]
        folder = self.run_of[job.like.row].folder
        return self.executor.execute(
            job, choice.python, folder, self.settings, self.timeout, self.progress.note
        )

    def carry_out(self, job: Runnable) -> tuple[Status, list[Line]]:
        """Run one job and keep its records; return its status, and them.  Raises Interrupted and
        UserError."""
        self.progress.start(job.title)
        try:
            lines = self.execute(job)
        except Interrupted as interruption:
            self._keep(job, interruption.lines)
            raise
        end = self._keep(job, lines)
        for line in lines:
            for warning in getattr(line, "warnings", []):
                self.progress.warn(warning)
        self.progress.done(job.title, end.status, end.reason, job.like)
        return end, lines

    def _agreeing(self, job: Runnable, new: list[Line]) -> list[Line]:
        """Return the records of a job; its status alone, "error", where it measured something else
        than earlier jobs. Raises Changed in a run that another process began."""
        runs = {id(run): run for run in self.run_of.values()}.values()
        if not store.ended_well(new):
            return new
        mine = facts(job.like.row, new)
        for run in runs:
            for key, before in self._facts(run, self.python_of[job.like.row]):
                if mine.get(key, before) != before:
                    words = f"{key} was {before} in earlier jobs, and is {mine[key]}"
                    if any(run.resumed for run in runs):
                        raise Changed(words)
                    return [job.status("error", f"{words}: measure again")]
        return new

    def _facts(self, run: Run, choice: Choice) -> Iterator[tuple[str, object]]:
        """Yield the facts of the jobs of a run that ended well in a Python."""
        for job, lines in store.latest_jobs(run.records).items():
            row = job if job in self.python_of else run.name  # a task, or else an implementation
            if store.ended_well(lines) and self.python_of.get(row) == choice:
                yield from facts(row, lines).items()

    def _keep(self, job: Runnable, lines: list[Line]) -> Status:
        """Add the records of a job to its run.  Traces that failed are removed first: they may have
        filled the disk."""
        run = self.run_of[job.like.row]
        lines = self._agreeing(job, lines)
        if job.like.pass_name == "trace" and not store.ended_well(lines):
            reader.remove(run.folder)
        run.add(lines)
        return next(record for record in reversed(run.records) if isinstance(record, Status))

    def carry_out_all(self, jobs: list[Job]) -> None:
        """Run jobs, but skip the later ones of an implementation after one that is not ok."""
        for job in jobs:
            if self.run_of[job.implementation].failed:
                self.progress.skip(job.like)
            else:
                self.carry_out(job)
