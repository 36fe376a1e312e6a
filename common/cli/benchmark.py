"""Runs every benchmark script, --find-largest too, from flags to a table and a report.  --sweep is in sweep.py."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections import Counter
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, Callable, Container, ContextManager, Iterator, List, Mapping, Optional, Sequence

from common.analysis import logs, metrics
from common.analysis.logs import Log
from common.cli import ending, listing, parser, screen, sweep
from common.cli.ending import Shown
from common.cli.parser import standard
from common.core import presets, scripts, settings
from common.core.errors import EXIT_OK, UserError
from common.core.implementations import LATTICES, find
from common.core.paths import INSTALLED, ROOT
from common.core.settings import Settings
from common.core.text import count
from common.jobs import costs
from common.jobs.budget import Budget
from common.jobs.executor import Executor
from common.jobs.local import Local
from common.jobs.plan import plan
from common.jobs.progress import Progress
from common.jobs.search import Searches, memory_limit
from common.jobs.session import Session
from common.jobs.spec import Job, like
from common.records.run import Run, open_runs
from common.records.schema import MemoryLimit
from common.setup import interpreters
from common.setup.interpreters import Choice
from common.system import memory
from common.tables import answer, results, search

#: Of a run with --budget, where --passes does not say.
BUDGET_PASSES = ("correctness", "timing", "memory")


def benchmark(
    names: Sequence[str],
    arguments: argparse.Namespace,
    names_of_script: Sequence[str] = (),
    executor: Optional[Executor] = None,
) -> int:
    """Measure the implementations `names` as the flags say and print the table; return the exit code.

    names_of_script: those of the script that was started, which prefer the Python it was started with; executor: by
    default of this machine's processes."""
    return measured(names, names_of_script, arguments, executor or Local())


def _with_controls(arguments: argparse.Namespace) -> bool:
    """Tell whether the default losses are measured, which brings those that run under any torch."""
    return not arguments.find_largest and not _is_short(arguments) and _is_default(arguments)


def _is_short(arguments: argparse.Namespace) -> bool:
    """Tell whether the user waits for a first answer."""
    return bool(arguments.budget or arguments.first_verdict)


def _is_default(arguments: argparse.Namespace) -> bool:
    """Tell whether no row was named."""
    return tuple(getattr(arguments, "only", ())) == standard()


def _default_rows(names: Sequence[str], device: str, is_short: bool, topology: Optional[str]) -> List[str]:
    """Return what of these is measured where no row was named.

    Losses on another lattice only with --topology.  On a CPU no loop in Python, which would take most of the time.  For
    a first answer the main environment's rows alone, and on a CPU not the one in plain torch, which nobody trains with
    where another is installed.
    """
    kept, device_type = [], device.partition(":")[0]
    for name in names:
        implementation = find(name)
        is_loop = device_type in scripts.described(scripts.file_of(implementation)).python_loops
        is_extra = implementation.environment != "main"
        is_plain = implementation.package == "torch" and device_type == "cpu" and not topology
        is_other_lattice = implementation.kind in LATTICES and not topology
        if not (is_loop or is_other_lattice or (is_short and (is_extra or is_plain))):
            kept.append(name)
    return kept


def _say_what_is_left_out(names: Sequence[str], rows: Sequence[str], all_rows: Sequence[str]) -> None:
    """Print which of `names` are not measured now.  rows: those that are; all_rows: those of the whole run."""
    later = [name for name in names if name in all_rows and name not in rows]
    left_out = [name for name in names if name not in all_rows]
    if later:
        print(f"after the first verdict, with --resume: {', '.join(later)}", file=sys.stderr)
    if left_out:
        print(f"left out unless --only or --topology names them: {', '.join(left_out)}", file=sys.stderr)


def measured(
    names: Sequence[str], names_of_script: Sequence[str], arguments: argparse.Namespace, executor: Executor
) -> int:
    """Measure, and return the exit code."""
    if _is_short(arguments) and (arguments.find_largest or arguments.sweep):
        flag = "--budget" if arguments.budget else "--first-verdict"
        raise UserError(f"{flag} is for an ordinary run: leave --find-largest and --sweep out")
    if arguments.then_set_up and (INSTALLED or not arguments.first_verdict):
        where = "goes with --first-verdict, in a checkout of the suite"
        raise UserError(f"--then-set-up {where}: leave it out")
    given = parser.given_settings(arguments)
    python_of = interpreters.choose_all(names, arguments.in_place, names_of_script)
    device = interpreters.device_of(arguments.device, python_of)
    if _is_default(arguments):
        rows = _default_rows(names, device, _is_short(arguments), arguments.topology)
        all_rows = _default_rows(names, device, False, arguments.topology) if arguments.first_verdict else rows
        if not arguments.quiet:
            _say_what_is_left_out(names, rows, all_rows)
        names, python_of = rows, {name: python_of[name] for name in rows}
    if arguments.budget:
        given["passes"] = given["passes"] or BUDGET_PASSES
    controls = interpreters.controls(python_of, device) if _with_controls(arguments) else {}
    python_of.update(controls)
    names = list(python_of)
    if arguments.sweep:
        if arguments.find_largest:
            raise UserError("--sweep does not go with --find-largest, which searches one configuration: remove one")
        return sweep.benchmark(names, arguments, given, device, python_of, executor)
    resolved = settings.resolve(given, device)
    if arguments.dry_run:
        jobs_of = partial(_jobs, resolved=resolved, arguments=arguments)
        return dry_run(python_of, resolved, parser.with_limits(arguments, resolved), jobs_of)
    header = {}
    if resolved.find_largest:
        header["memory_limit"] = memory_limit(resolved, memory.total_memory(), memory.available_memory())._asdict()
    with open_runs(names, resolved, arguments.log_dir, arguments.resume, header) as run_of:
        if not arguments.quiet:
            announce(names, resolved, next(iter(run_of.values())).header.memory_limit or MemoryLimit(), given)

        jobs = [] if resolved.find_largest else _jobs(names, resolved, arguments)
        last = jobs_after_verdict(names, resolved, arguments, controls)

        def measure() -> None:
            if resolved.find_largest or {"timing", "trace"} & set(resolved.passes):
                ending.warn_of_load(executor, resolved)
            carry_out([job for job in jobs if job not in last])

        def carry_out(jobs: Sequence[Job]) -> None:
            with Progress(arguments.quiet, costs.of([like(job) for job in jobs], resolved)) as progress:
                session = Session(
                    run_of, python_of, resolved, arguments.timeout, progress, executor, wait=parser.wait(arguments)
                )
                session.resumed = arguments.resume
                session.after_round = partial(verdict_so_far, run_of, progress, arguments)
                if arguments.budget:
                    session.budget = Budget(arguments.budget)
                    progress.most = session.budget.left
                if resolved.find_largest:
                    Searches(session).run()
                else:
                    session.run(jobs, parser.with_limits(arguments, resolved))

        def go_on() -> None:
            pending = [job for job in last if run_of[job.implementation].needs(job.name)]
            if pending and not arguments.quiet:
                print(f"then {_in_words(pending)}; Ctrl-C leaves out these alone", file=sys.stderr)
            beside: ContextManager[None] = setting_up() if arguments.then_set_up else nullcontext()
            with beside:
                carry_out(pending)

        kept = "the rows above are what is known; --resume continues" if resolved.find_largest else ""
        return ending.finish(
            measure,
            partial(show, run_of, arguments),
            lambda: ending.discard_empty(run_of),
            arguments,
            kept,
            later=go_on if last else None,
            show_again=partial(show, run_of, arguments, on_screen=False),
        )


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


def jobs_after_verdict(
    names: Sequence[str], resolved: Settings, arguments: argparse.Namespace, controls: Container[str]
) -> List[Job]:
    """Return the jobs that the table and the verdict do not wait for.

    They are the traces of a run that measures times without a budget, and the memory of its `controls`, which are there
    for their times; with --then-set-up the memory pass of all."""
    if resolved.find_largest or arguments.budget or "timing" not in resolved.passes:
        return []
    if arguments.first_verdict and not arguments.then_set_up:
        return []
    jobs = plan(names, resolved)
    if arguments.then_set_up:
        return [job for job in jobs if job.pass_name == "memory"]
    return [
        job
        for job in jobs
        if job.pass_name == "trace" or (job.pass_name == "memory" and job.implementation in controls)
    ]


def _in_words(jobs: Sequence[Job]) -> str:
    """Return what jobs after the verdict measure: "the memory of 3 rows, the traces of 13 rows"."""
    nouns = {"memory": "memory", "trace": "traces"}
    counted = Counter(job.pass_name for job in jobs)
    return ", ".join(f"the {nouns[name]} of {count(number, 'row')}" for name, number in counted.items())


def verdict_so_far(run_of: Mapping[str, Run], progress: Progress, arguments: argparse.Namespace, number: int) -> None:
    """Show the table and the verdict of what is known after a round, from the rounds on that every loss gets: on a
    terminal in the place of those of the round before, elsewhere once, with --budget."""
    if number < settings.FEWEST_ROUNDS or progress.quiet:
        return
    is_first = number == settings.FEWEST_ROUNDS
    if progress.so_far is None and not (is_first and arguments.budget):
        return
    with suppress(UserError):  # what cannot be read now is said at the end
        log = logs.read([run.folder for run in run_of.values()], all_runs=True)
        text = answer.so_far(log.rows, folders=[arguments.log_dir], **screen.how())
        words = f"after {number} rounds:\n{text}"
        if not progress.show(words):
            progress.say(words)


def _jobs(names: Sequence[str], resolved: Settings, arguments: argparse.Namespace) -> List[Job]:
    """Return the jobs of a run; with --first-verdict those of its first rounds."""
    jobs = plan(names, resolved)
    if not arguments.first_verdict:
        return jobs
    return [
        job
        for job in jobs
        if job.pass_name == "correctness" or (job.pass_name == "timing" and (job.round or 0) <= settings.FIRST_ROUNDS)
    ]


def dry_run(
    python_of: Mapping[str, Choice],
    resolved: Settings,
    with_limits: bool,
    jobs_of: Callable[[Sequence[str]], List[Job]],
) -> int:
    """Print what a run would do, how long and with how much disk; return EXIT_OK.

    Args:
        python_of: the Python of each row.
        resolved: the settings.
        with_limits: whether the device's limits are measured.
        jobs_of: returns the jobs of these rows.
    """
    states = listing.states(python_of, resolved.device)
    for name, state in states.items():
        print(f"{name:24s} {state}")
    names = listing.runnable(states)
    print(f"passes {', '.join(resolved.passes)}; scopes {', '.join(resolved.scopes)}; on {resolved.device}")
    if resolved.find_largest:
        print(f"would search the largest {resolved.find_largest}: its time depends on the memory")
        return EXIT_OK
    jobs = jobs_of(names)
    seconds = costs.seconds(jobs, resolved, with_limits)
    minutes = f"about {seconds / 60:.0f} min on two cores" if seconds else "time not known before the first round"
    disk = costs.megabytes(names, resolved)
    print(f"would run {count(len(jobs), 'job')} of {count(len(names), 'row')}: {minutes}, {disk:.0f} MB of disk")
    return EXIT_OK


def announce(names: Sequence[str], resolved: Settings, limit: MemoryLimit, given: Mapping[str, Any]) -> None:
    """Print what is about to be measured.  limit: of --find-largest; given: the settings that flags gave."""
    joiner = (
        f"V {resolved.vocab_size}, joiner {resolved.encoder_dim}, {resolved.dtype}, {count(resolved.rounds, 'round')}"
    )
    symbols = given.get("file_vocab_size")
    if symbols not in (None, resolved.vocab_size):
        note = f"note: V is {resolved.vocab_size}, but the shape file counts tokens of {symbols} symbols"
        print(note, file=sys.stderr)
    if resolved.find_largest:
        size = f"{metrics.amount(limit.bytes)} ({limit.source})" if limit.bytes else limit.source
        heading = f"the largest {resolved.find_largest} of {', '.join(names)} on {resolved.device} within {size}"
        print(f"{heading}: scope {resolved.scopes[0]}, {joiner} at the size found", file=sys.stderr)
        return
    if resolved.sort_utterance:
        size = f"of up to {resolved.max_frames} frames, sorted by length"
    else:
        size = f"of {resolved.batch_size} utterances"
    each = " in each round" if resolved.own_batches else ""
    chosen = f"{resolved.num_batches} batches {size} ({resolved.batches}{each})"
    batches = [chosen, *settings.described(resolved.to_json())]
    print(f"preset {resolved.preset}: {presets.note(resolved.preset)}", file=sys.stderr)
    heading = f"measuring {', '.join(names)} on {resolved.device}: {', '.join(batches)}"
    print(f"{heading}, {joiner}; passes {', '.join(resolved.passes)}", file=sys.stderr)


def show(run_of: Mapping[str, Run], arguments: argparse.Namespace, log: Log, on_screen: bool = True) -> Shown:
    """Print the table of this run's rows and return the status of each.

    on_screen: whether the table is printed; else only its verdict is, on stderr, and the details are written."""
    folders = [run.folder for run in run_of.values()]
    if arguments.first_verdict:
        for row in log.rows:  # it stopped where it was asked to
            if row.folder in folders and row.status == "interrupted" and row.rounds >= settings.FIRST_ROUNDS:
                row.status, row.reason = "ok", ""
    rows = [row for folder in folders for row in log.rows if row.folder == folder]
    searches = [row for folder in folders for row in log.searches if row.folder == folder]
    details = search.render(searches, "table") if searches else results.render(rows, "table")
    statuses = [row.status for row in searches] or [run.status for run in run_of.values()]
    if not on_screen:
        if not arguments.quiet:
            print(f"\n{answer.verdict_alone(rows, folders=[arguments.log_dir], **screen.how())}", file=sys.stderr)
        ending.keep(details + "\n", arguments)
        return statuses
    short = answer.render(searches or rows, folders=[arguments.log_dir], **screen.how())
    return ending.printed(short + "\n", details + "\n", statuses, arguments)
