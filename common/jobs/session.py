"""Carry out jobs, one after the other, keep what they measure, and show how far they are.

However the process of a job ends, its end becomes a status record, and costs only its own row.  The
processes are forked by servers: a server is a process that has imported torch, so that no job waits
for that.
"""

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
from rnnt_bench.jobs.job import Job, RowPass, Runnable
from rnnt_bench.records import store
from rnnt_bench.records.run import Changed, Run, facts
from rnnt_bench.records.schema import Line, Status, as_written, typed
from rnnt_bench.setup.interpreters import Choice
from rnnt_bench.system import machine
from rnnt_bench.system.memory import tells_of_no_memory
from rnnt_bench.system.processes import Child, signal_name, start_servers
from rnnt_bench.traces import reader

#: The time between two looks at a process: looking takes time from what it measures.
POLL_SECONDS = 0.2
#: The module that a process runs.
WORKER = "rnnt_bench.jobs.job"
#: What a server imports before it forks processes.  Jobs without rounds get torch alone, since some
#: of them measure the memory of the whole process.
IMPORTS = ("torch",)
IMPORTS_OF_A_ROUND = (
    *IMPORTS,
    # Otherwise the first backward of each process would import it, with sympy.
    "torch.fx.experimental.symbolic_shapes",
    "rnnt_bench.losses.subject",
    "rnnt_bench.losses.passes.timing",
)
#: The format of tqdm's bar, without its own time left, which takes all jobs for equal.
BAR = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]"

#: The pass that comes first.
FIRST = "correctness"
#: How long a job of a pass takes, as a share of one of the first pass: the ratios of runs in
#: results/.  They tell the time left before the pass has run.
SHARE_OF_FIRST = {"memory": 0.8, "trace": 0.5, "timing": 0.4, "limits": 0.4}

#: Status and reason of a job.
Ending = tuple[str, str]


class Interrupted(KeyboardInterrupt):
    """Raised where Ctrl-C or SIGTERM came while a job ran; `lines` are the records of the job."""

    def __init__(self, lines: list[Line]):
        super().__init__("interrupted")
        self.lines = lines


class Executor:
    """Runs jobs on this machine.  shared: a folder in which jobs leave the right answers for later
    jobs; it is removed with the executor."""

    shared: tempfile.TemporaryDirectory[str] | None = None

    def disturbance(self, settings: Settings, seconds: float = 0.0) -> str:
        """Return how busy other processes keep this machine: "load 24 on 2 cores, others use 97% of
        the CPU"; "" if it is quiet.

        seconds: how long to watch at least."""
        load = machine.ForeignLoad()
        time.sleep(seconds)
        on_cpu = settings.device.partition(":")[0] == "cpu"
        return machine.disturbance(load, settings.threads if on_cpu else 1)

    def get_ready(
        self, jobs: Sequence[Job], python_of: Mapping[str, Choice], settings: Settings
    ) -> None:
        """Start the servers that the jobs of one round need, so that none starts between two timed
        jobs: one server for each Python with its environment variables.

        If all jobs need the same server, do nothing: it starts with the first job.

        python_of: the Python of each implementation."""
        servers: list[tuple[Path, Mapping[str, str]]] = []
        for job in jobs:
            python = python_of[job.implementation].python
            if python is None:
                continue
            server = python, job.variables(settings)
            if server not in servers:
                servers.append(server)
        if len(servers) > 1:
            start_servers(
                servers, WORKER, ROOT, generation=jobs[0].round, imports=IMPORTS_OF_A_ROUND
            )

    def execute(
        self,
        job: Runnable,
        python: Path,
        folder: Path,
        settings: Settings,
        timeout: float,
        note: Callable[[str], None],
    ) -> list[Line]:
        """Run a job to its end, and return its records, the last of which is its status.

        A process that cannot be started gives a status "error" alone.  Raises UserError for a
        mistake in the user's input that the process found, and Interrupted after Ctrl-C or SIGTERM.

        Args:
            job: the job
            python: the interpreter of its process
            folder: the folder of the run, for traces
            settings: the settings of the run
            timeout: seconds after which the process is ended
            note: called with "" while the job runs, so that a progress bar moves
        """
        try:
            spec = job.spec(settings, folder)
            if job.subject == "loss":
                self.shared = self.shared or tempfile.TemporaryDirectory(prefix="rnnt-bench-")
                spec = replace(spec, shared=self.shared.name)
            # A server serves the jobs of one round, or of one pass without rounds.
            generation = job.row_pass.pass_name if job.round is None else job.round
            imports = IMPORTS if job.round is None else IMPORTS_OF_A_ROUND
            variables = job.variables(settings)
            with Child.run(
                python, WORKER, as_written(spec), ROOT, variables, generation, imports
            ) as child:
                ending = _wait(child, job.name, timeout, note)
        except OSError as error:  # no room for its files, or no such Python any more
            advice = (
                f"its scratch files are in {tempfile.gettempdir()}; TMPDIR names another folder"
            )
            if error.errno in (errno.EMFILE, errno.ENFILE):
                advice = "ulimit -n raises it"
            return [job.status("error", f"could not be run: {error} ({advice})")]
        lines = _lines(job, child, ending)
        if ending and ending[0] == "interrupted":  # an Ending is a status and a reason
            raise Interrupted(lines)
        return lines


def _wait(child: Child, name: str, timeout: float, note: Callable[[str], None]) -> Ending | None:
    """Wait for a process to end, and return None.  If the caller has to kill it, return its ending
    at once: "timeout" after `timeout` seconds, "interrupted" on Ctrl-C.

    name: of the job; note: called with "" after each POLL_SECONDS, so that the time left is shown
    anew."""
    try:
        while child.alive(POLL_SECONDS):
            if child.seconds() > timeout:
                return "timeout", f"{name} took more than {timeout:g} s (--timeout)"
            note("")
    except KeyboardInterrupt:
        return "interrupted", f"stopped by the user during {name}"
    return None


def _lines(job: Runnable, child: Child, ending: Ending | None) -> list[Line]:
    """Return the records of a process, the last of which is the status of the job.  Raises UserError
    for a mistake in the user's input that the process found.

    If a record does not fit the schema, only the status is returned: an error.

    ending: status and reason if this command killed the process; None if it ended by itself."""
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
    except ValueError as error:  # a record does not fit the schema
        return [job.status("error", str(error), child.wall_ns)]


def how_it_died(returncode: int, killed_for_memory: bool, stderr: Sequence[str]) -> Ending:
    """Return the ending of a process that wrote no status.

    Args:
        returncode: its exit code; minus the number of the signal that killed it
        killed_for_memory: whether the kernel killed any process for lack of memory as this one ran
        stderr: its last lines
    """
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
    status = "oom" if aborted else "error"
    return status, f"killed by {signal_name(-returncode)}{last}"


class Progress:
    """Counts jobs on stderr, with an estimate of the time left: on a terminal with tqdm a bar,
    elsewhere a line for each job but the timing ones; nothing when quiet.

    Attributes:
        coming: the jobs that will come in any case
        optional: the jobs that only begin before the deadline
        deadline: a time of time.monotonic()
        took: pass of a row -> seconds of each of its jobs that ended well
    """

    def __init__(self, quiet: bool):
        """Make the bar.  quiet: whether nothing is shown but warnings."""
        self.quiet = quiet
        self.finished = 0
        self.total = 0
        self.began = 0.0
        self.coming: list[RowPass] = []
        self.optional: list[RowPass] = []
        self.deadline = math.inf
        self.took: dict[RowPass, list[float]] = defaultdict(list)
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

    def expect(self, jobs: Sequence[RowPass], optional: Sequence[RowPass] = ()) -> None:
        """Add `jobs`, which will come in any case, and `optional` jobs, none of which begins after
        the deadline."""
        self.coming += jobs
        self.optional += optional
        self.total += len(jobs) + len(optional)
        if self.bar is not None:
            self.bar.total = self.total
            self.bar.refresh()

    def start(self, title: str) -> None:
        """Show that a job begins."""
        self.began = time.monotonic()
        if self.bar is not None:
            self.bar.set_description_str(title)
            self.note("")

    def note(self, text: str) -> None:
        """Show a text on the bar, with the time left."""
        if self.bar is not None:
            self.bar.set_postfix_str(", ".join(filter(None, [text, self.left()])))

    def skip(self, job: RowPass) -> None:
        """Count a job that has ended, or that will not run, and expect it no more."""
        self.finished += 1
        for expected in (self.coming, self.optional):
            if job in expected:
                expected.remove(job)
                break
        if self.bar is not None:
            self.bar.update()

    def done(self, title: str, status: str, reason: str | None, job: RowPass) -> None:
        """Count a job that has ended, and print a line on it on stderr.  A timing job that is ok
        gets no line.  Beside a bar no job that is ok gets one.

        Keep the time of a job that is ok.  After a job that is not ok, expect no later job of its
        row.

        title, status, reason: for the line."""
        seconds = time.monotonic() - self.began
        self.skip(job)  # counts it as finished, and expects it no more
        if status == "ok":
            self.took[job].append(seconds)
        else:
            self.coming = [later for later in self.coming if later.row != job.row]
            self.optional = [later for later in self.optional if later.row != job.row]
        total = f"/{self.total}" if self.total else ""
        colon_reason = f": {reason}" if reason else ""
        line = f"[{self.finished}{total}] {title}: {status}{colon_reason} ({seconds:.1f} s)"
        if self.bar is None and (status != "ok" or job.pass_name != "timing"):
            self.say(", ".join(filter(None, [line, self.left()])))
        elif status != "ok":
            self.say(line)

    def say(self, line: str) -> None:
        """Print a line on stderr, above the bar; nothing when quiet."""
        if self.bar is not None:
            self.bar.write(line, file=sys.stderr)
        elif not self.quiet:
            errors.say(line)

    def warn(self, warning: str) -> None:
        """Print a warning once, also when quiet: it is about the results."""
        if warning in self.warned:
            return
        self.warned.add(warning)
        line = f"warning: {plain(warning)}"
        if self.bar is not None:
            self.say(line)
        else:
            errors.say(line)

    def left(self) -> str:
        """Return "about 12 min left", estimated from the jobs that have run; "" before the first,
        and at the end."""
        seconds = self._seconds(self.coming)
        if seconds is None:
            return ""
        # Optional jobs take no more than the time that is then left to the deadline, and none
        # where that of one of them is unknown.
        until_deadline = max(0.0, self.deadline - time.monotonic() - seconds)
        seconds += min(until_deadline, self._seconds(self.optional) or 0.0)
        if not seconds:
            return ""
        if seconds >= 90:
            return f"about {seconds / 60:.0f} min left"
        return f"about {seconds:.0f} s left"

    def _seconds(self, jobs: Sequence[RowPass]) -> float | None:
        """Return how many seconds jobs will take; None if that of one of them is unknown.

        A job takes the average of the earlier jobs of its row and pass.  If there are none, it
        takes the average of its pass, of all rows.  If that has not run either, it takes a share of
        the first pass: of the average of its row there, or else of all rows."""
        by_pass: dict[str, list[float]] = defaultdict(list)
        for ended, took in self.took.items():
            by_pass[ended.pass_name] += took
        total = 0.0
        for job in jobs:
            share = 1.0
            seconds = self.took.get(job) or by_pass[job.pass_name]
            if not seconds:
                share = SHARE_OF_FIRST.get(job.pass_name, 1.0)
                seconds = self.took.get(RowPass(job.row, FIRST)) or by_pass[FIRST]
            if not seconds:
                return None
            total += share * fmean(seconds)
        return total


@dataclass
class Session:
    """Hold what a command measures, and carry out its jobs.

    Attributes:
        run_of, python_of: the run and the Python of each row, an implementation or a task
        settings: of the command
        timeout: seconds for one job
    """

    run_of: Mapping[str, Run]
    python_of: Mapping[str, Choice]
    settings: Settings
    timeout: float
    progress: Progress
    executor: Executor

    def execute(self, job: Runnable) -> list[Line]:
        """Run a job and return its records.  If its row has no Python, run nothing, and return only
        a status record, "missing".  Raises Interrupted and UserError."""
        if isinstance(job, Job) and job.same_as and self.run_of[job.same_as].failed:
            # The row with the same code has failed, so nothing is judged in place of this row:
            # without `same_as`, this job asks all questions itself.
            job = replace(job, same_as="")
        choice = self.python_of[job.row_pass.row]
        if choice.python is None:
            return [job.status("missing", choice.reason)]
        folder = self.run_of[job.row_pass.row].folder
        return self.executor.execute(
            job, choice.python, folder, self.settings, self.timeout, self.progress.note
        )

    def carry_out(self, job: Runnable) -> tuple[Status, list[Line]]:
        """Run a job, keep its records and show its warnings; return the status that was kept, and
        all records of the job.  Raises UserError.  Raises Interrupted, after the records that the
        job has written are kept."""
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
        self.progress.done(job.title, end.status, end.reason, job.row_pass)
        return end, lines

    def _if_comparable(self, job: Runnable, lines: list[Line]) -> list[Line]:
        """Return the records of a job, if it had the same versions, code and shape file as earlier
        jobs in its Python.  Records of a job that has not ended well are returned unchecked.

        If one of these differs, return only a status "error", which says what changed.  If any run
        of this session was resumed, raise Changed instead."""
        if not store.ended_well(lines):
            return lines
        new_facts = facts(job.row_pass.row, lines)
        runs = {run.path: run for run in self.run_of.values()}.values()  # tasks share a run
        for run in runs:
            for key, before in self._facts(run, self.python_of[job.row_pass.row]):
                if new_facts.get(key, before) != before:
                    change = f"{key} was {before} in earlier jobs, and is {new_facts[key]}"
                    if any(other.resumed for other in runs):
                        raise Changed(change)
                    return [job.status("error", f"{change}: measure again")]
        return lines

    def _facts(self, run: Run, choice: Choice) -> Iterator[tuple[str, object]]:
        """Yield the (key, value) pairs of `facts` for each job of a run, if the job ended well and
        its row runs in the Python `choice`."""
        for job, lines in store.latest_jobs(run.records).items():
            # The job of a task has the name of its row; the run of a loss has that of the loss.
            row = job if job in self.python_of else run.name
            if store.ended_well(lines) and self.python_of.get(row) == choice:
                yield from facts(row, lines).items()

    def _keep(self, job: Runnable, lines: list[Line]) -> Status:
        """Add the records of a job to its run, and return the status that was kept.  That is an
        "error" if the disk has no room.

        If the records are not comparable with earlier ones, either keeps only a status "error", or
        raises Changed: see `_if_comparable`.  The traces of a trace job that failed are removed
        first: they may have filled the disk."""
        run = self.run_of[job.row_pass.row]
        lines = self._if_comparable(job, lines)
        if job.row_pass.pass_name == "trace" and not store.ended_well(lines):
            reader.remove(run.folder)
        run.add(lines)
        return next(record for record in reversed(run.records) if isinstance(record, Status))

    def carry_out_all(self, jobs: list[Job]) -> None:
        """Run jobs.  After one that is not ok, skip the later ones of its implementation."""
        for job in jobs:
            if self.run_of[job.implementation].failed:
                self.progress.skip(job.row_pass)
            else:
                self.carry_out(job)
