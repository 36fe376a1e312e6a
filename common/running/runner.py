"""From flags to a table and a report: plans the jobs of a run, gives each a process in the right Python, and keeps what
they measure.

One job is one pass (and round) of one implementation.  Correctness of all comes first, then the timing rounds in
shuffled order, then memory, then traces.  A job that crashes, hangs, is killed or runs out of memory costs its own row
only.  No torch.
"""

from __future__ import annotations

import argparse
import random
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Dict, List, Optional, Sequence, Set, Tuple

from common import cli, commands, settings, workloads
from common.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, UserError
from common.implementations import find
from common.report import writing
from common.results import records, summary, tables
from common.running import interpreters, processes, runs
from common.running.progress import Progress
from common.running.runs import Run
from common.settings import Settings

#: A row with one of these could not run here; that is no failure of the run.
CANNOT_RUN = ("missing", "unsupported")


@dataclass(frozen=True)
class Job:
    """One process to start.  `name` as in the records: "correctness", "timing-1", ..., "memory", "trace"; "limits", of
    the device, has the implementation in whose Python it runs; with --find-largest also "probe-64", of a `size`, and
    "throughput-64-of-96-1", of a size and a `pool`.  overrides: settings of this job alone; limit_bytes: of its
    memory; pool: the size of the batches whose utterances are timed in batches of `size`."""

    implementation: str
    pass_name: str
    round: Optional[int] = None
    size: Optional[int] = None
    pool: Optional[int] = None
    overrides: Tuple[Tuple[str, Any], ...] = ()
    limit_bytes: Optional[int] = None

    @property
    def name(self) -> str:
        pool = None if self.pool is None else f"of-{self.pool}"
        return "-".join(str(part) for part in (self.pass_name, self.size, pool, self.round) if part is not None)


def plan(names: Sequence[str], chosen: Settings) -> List[Job]:
    """All jobs of a run, in order; the order of implementations within a timing round is shuffled by the seed."""
    jobs = [Job(name, "correctness") for name in names if "correctness" in chosen.passes]
    if "timing" in chosen.passes:
        shuffle = random.Random(chosen.seed)
        for number in range(1, chosen.rounds + 1):
            order = list(names)
            shuffle.shuffle(order)
            jobs += [Job(name, "timing", number) for name in order]
    for name_of_pass in ("memory", "trace"):
        if name_of_pass in chosen.passes:
            jobs += [Job(name, name_of_pass) for name in names]
    return jobs


def announce(names: Sequence[str], chosen: Settings, quiet: bool) -> None:
    """The first lines: what is about to be measured, and how long that may take."""
    if quiet:
        return
    if chosen.sort_utterance:
        batches = (
            f"{chosen.num_batches} batches of up to {chosen.max_frames} frames, sorted by length ({chosen.batches})"
        )
    else:
        batches = f"{chosen.num_batches} batches of {chosen.batch_size} utterances ({chosen.batches})"
    batches = ", ".join([batches, *workloads.described(chosen.to_json())])
    print(f"preset {chosen.preset}: {settings.preset_note(chosen.preset)}", file=sys.stderr)
    print(
        f"measuring {', '.join(names)} on {chosen.device}: {batches}, V {chosen.vocab_size}, "
        f"joiner {chosen.encoder_dim}, {chosen.dtype}, {chosen.rounds} round{'s' * (chosen.rounds != 1)}; "
        f"passes {', '.join(chosen.passes)}",
        file=sys.stderr,
    )


def run_jobs(
    jobs: Sequence[Job],
    run_of: Dict[str, Run],
    python_of: Dict[str, interpreters.Choice],
    chosen: Settings,
    timeout: float,
    quiet: bool,
    with_limits: bool = True,
) -> bool:
    """Run what is not done yet, and `with_limits` the limits job before the first timing job of these.  Returns False
    when the user interrupted.

    After a job that is not ok the later ones of that implementation are skipped.   A user error of a worker (a broken
    shape file, say) concerns every row and ends the run.
    """
    warned: Set[str] = set()
    pending = [job for job in jobs if not run_of[job.implementation].is_done(job.name)]
    with_limits = with_limits and any(job.pass_name == "timing" for job in pending)
    with Progress(len(pending) + with_limits, quiet) as progress:
        for job in pending:
            run = run_of[job.implementation]
            if with_limits and job.pass_name == "timing" and not run.failed:
                with_limits = False
                if not measure_limits(run_of, python_of, chosen, timeout, progress):
                    return False
            if run.failed:
                progress.skip()
                continue
            try:
                carry_out(job, run, python_of[job.implementation], chosen, timeout, progress, warned)
            except processes.Interrupted:
                return False
    return True


def carry_out(
    job: Job,
    run: Run,
    choice: interpreters.Choice,
    chosen: Settings,
    timeout: float,
    progress: Progress,
    warned: Set[str],
) -> None:
    """Run one job and keep its records.  Raises processes.Interrupted, and UserError for a mistake of the user's."""
    progress.start(f"{job.implementation} {job.name}")
    if choice.python is None:
        run.add(processes.status_record(job, "missing", choice.reason))
    else:
        try:
            produced = processes.execute(job, choice.python, run.folder, chosen, timeout, progress.note)
        except processes.Interrupted as interruption:
            keep(job, run, interruption.records)
            raise
        keep(job, run, produced)
        warn(produced, warned)
    progress.done(f"{job.implementation} {job.name}", run.last_status)


def keep(job: Job, run: Run, produced: Sequence[records.Record]) -> None:
    """Add what a job produced; what is left of traces that failed goes first, as they may have filled the disk."""
    if job.pass_name == "trace" and produced[-1]["status"] != "ok":
        records.remove_traces(run.folder)
    run.add(produced)


def measure_limits(
    run_of: Dict[str, Run],
    python_of: Dict[str, interpreters.Choice],
    chosen: Settings,
    timeout: float,
    progress: Progress,
) -> bool:
    """Measure what the device does at best, in the newest torch of the run, and add the ``limits`` record to every run
    that goes on.  It fails nothing: without it there is no "% of limit".  Returns False when the user interrupted.
    """
    pythons = {name: choice.python for name, choice in python_of.items() if choice.python and not run_of[name].failed}
    name = interpreters.with_newest_torch(pythons)
    if name is None:
        progress.skip()
        return True
    job = Job(name, "limits")
    progress.start(job.name)
    try:
        *produced, status = processes.execute(job, pythons[name], run_of[name].folder, chosen, timeout, progress.note)
    except processes.Interrupted:
        return False
    found = [record for record in produced if record["record"] == "limits"]
    if not found:
        reason = f"{status['status']}: {status['reason']}"
        found = [{"record": "limits", "copies": [], "products": [], "reason": reason}]
    for record in found:
        record.pop("job", None)  # of no implementation
    for other in pythons:
        with suppress(records.NotWritten):  # on disk with its next job, if there is room for that
            run_of[other].add(found)
    progress.done(job.name, status)
    return True


def warn(produced: Sequence[records.Record], warned: Set[str]) -> None:
    """Print each warning of the workers once, whatever --quiet says: it is about the results."""
    for record in produced:
        for warning in record.get("warnings", []):
            if warning not in warned:
                warned.add(warning)
                print(f"warning: {warning}", file=sys.stderr)


def exit_code(statuses: Sequence[str]) -> int:
    """0 when every row that could run did (and at least one could), else 1."""
    ran = [status for status in statuses if status not in CANNOT_RUN]
    return EXIT_OK if ran and all(status == "ok" for status in ran) else EXIT_FAILED


def benchmark(names: Sequence[str], arguments: argparse.Namespace, own: Sequence[str] = ()) -> int:
    """Measure the implementations `names` as the flags say and print the table; returns the exit code.

    `own`: those of the script that was started, which prefer the Python it was started with.
    """
    given = cli.given_settings(arguments)
    choices = {
        name: interpreters.choose(find(name), in_place=arguments.in_place, prefer_here=name in own) for name in names
    }
    device = interpreters.resolve_device(
        arguments.device, [choice.python for choice in choices.values() if choice.python]
    )
    if arguments.sweep:
        if arguments.find_largest:
            raise UserError("--sweep: does not go with --find-largest, which searches one configuration; name it alone")
        from common.running import sweeping  # plans and runs the jobs of a cell as below

        return sweeping.benchmark(names, arguments, given, choices, device)
    chosen = settings.resolve(given, device)
    if chosen.find_largest:
        from common.running import largest  # plans jobs of its own and carries them out as below

        return largest.benchmark(names, arguments, chosen, choices)
    with runs.open_runs(names, chosen, arguments.log_dir, resume=arguments.resume) as run_of:
        announce(names, chosen, arguments.quiet)
        return measure(run_of, choices, chosen, arguments)


def measure(
    run_of: Dict[str, Run],
    python_of: Dict[str, interpreters.Choice],
    chosen: Settings,
    arguments: argparse.Namespace,
) -> int:
    """The jobs of a run that are not done yet, its table and the report; returns the exit code."""
    interrupted = False
    try:
        interrupted = not run_jobs(
            plan(list(run_of), chosen), run_of, python_of, chosen, arguments.timeout, arguments.quiet, arguments.limits
        )
    except KeyboardInterrupt:  # between two jobs
        interrupted = True
    except UserError:
        for run in run_of.values():
            run.discard_if_empty()
        if any(run.folder.exists() for run in run_of.values()):
            show(run_of)
        raise
    shown = show(run_of)
    return ended(arguments, [run.status for run in run_of.values()], shown, kept_of(arguments) if interrupted else "")


def ended(arguments: argparse.Namespace, statuses: Sequence[str], whole: bool, interrupted: str) -> int:
    """After the table: the report, and the exit code.  whole: all was kept and shown; interrupted: what is said of an
    interruption, "" where there was none."""
    writing.after_run(arguments.log_dir, arguments.quiet)
    if interrupted:
        print(f"interrupted: {interrupted}", file=sys.stderr)
        return EXIT_INTERRUPTED
    return exit_code(statuses) if whole else EXIT_FAILED


def kept_of(arguments: argparse.Namespace) -> str:
    """What an interruption of these jobs keeps."""
    return (
        f"what was measured is in {arguments.log_dir}, of the stopped job too, which no number above counts; "
        "--resume continues, with that job anew"
    )


def show(run_of: Dict[str, Run]) -> bool:
    """Print the table of this run's rows, read back from disk: what is shown is what is kept.  False where stdout does
    not take it."""
    folders = [run.folder for run in run_of.values() if (run.folder / records.FILE_NAME).exists()]
    return commands.show(tables.render(summary.rows(folders, all_runs=True), "table") + "\n")
