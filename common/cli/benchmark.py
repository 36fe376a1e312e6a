"""The command of every benchmark script, --find-largest too: from flags to a table and a report.  --sweep: sweep.py."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from typing import Any, Mapping, Optional, Sequence

from common.analysis import metrics
from common.analysis.logs import Log
from common.cli import devices, ending, listing, parser, screen, sweep
from common.cli.ending import Shown
from common.cli.parser import standard
from common.core import presets, settings
from common.core.errors import EXIT_OK, NOT_RUNNABLE, UserError
from common.core.settings import Settings
from common.core.text import count
from common.jobs import costs
from common.jobs.executor import Executor
from common.jobs.plan import plan
from common.jobs.progress import Progress
from common.jobs.search import Searches, memory_limit
from common.jobs.session import Session
from common.jobs.spec import like
from common.records.run import Run, open_runs
from common.records.schema import MemoryLimit
from common.setup.interpreters import Choice
from common.tables import answer, results, search


def benchmark(
    names: Sequence[str], arguments: argparse.Namespace, own: Sequence[str] = (), executor: Optional[Executor] = None
) -> int:
    """Measure the implementations `names` as the flags say and print the table; returns the exit code.  own: those of
    the script that was started, which prefer the Python it was started with; executor: default as --executor says."""
    of_these = partial(measured, names, own)
    return devices.on_each_kind(arguments, of_these, names, _with_controls(arguments), executor=executor)


def _with_controls(arguments: argparse.Namespace) -> bool:
    return not arguments.find_largest and tuple(getattr(arguments, "only", ())) == standard()


def measured(names: Sequence[str], own: Sequence[str], arguments: argparse.Namespace, executor: Executor) -> int:
    """On the devices of one executor."""
    given = parser.given_settings(arguments)
    python_of = executor.choose(names, arguments.in_place, own)
    device = executor.resolve_device(arguments.device, python_of)
    if _with_controls(arguments):
        python_of.update(executor.controls(python_of, device))
        names = list(python_of)
    if arguments.sweep:
        if arguments.find_largest:
            raise UserError("--sweep: does not go with --find-largest, which searches one configuration; name it alone")
        return sweep.benchmark(names, arguments, given, device, python_of, executor)
    resolved = settings.resolve(given, device)
    if arguments.dry_run:
        return dry_run(python_of, resolved, parser.with_limits(arguments, resolved))
    more = {"memory_limit": memory_limit(resolved, *executor.memory())} if resolved.find_largest else {}
    more.update({"machine": executor.machine} if executor.machine else {})
    with open_runs(names, resolved, arguments.log_dir, arguments.resume, more) as run_of:
        if not arguments.quiet:
            announce(names, resolved, next(iter(run_of.values())).header.memory_limit or MemoryLimit(), given)

        def measure() -> None:
            if resolved.find_largest or {"timing", "trace"} & set(resolved.passes):
                ending.warn_of_load(executor, resolved)
            jobs = [] if resolved.find_largest else plan(names, resolved)
            with Progress(arguments.quiet, costs.of([like(job) for job in jobs], resolved)) as progress:
                session = Session(
                    run_of, python_of, resolved, arguments.timeout, progress, executor, wait=parser.wait(arguments)
                )
                if arguments.resume and session.wait:
                    session.loaded |= {(name, number) for name, run in run_of.items() for number in run.loaded_rounds()}
                if resolved.find_largest:
                    Searches(session).run()
                else:
                    session.run(jobs, parser.with_limits(arguments, resolved))

        kept = "the rows above are what is known; --resume continues" if resolved.find_largest else ""
        return ending.finish(
            measure, lambda log: show(run_of, log, arguments), lambda: ending.discard_empty(run_of), arguments, kept
        )


def dry_run(python_of: Mapping[str, Choice], resolved: Settings, with_limits: bool) -> int:
    """Print what a run would do, how long and with how much disk; return EXIT_OK."""
    states = listing.states(python_of, resolved.device)
    for name, state in states.items():
        print(f"{name:24s} {state}")
    names = [name for name, state in states.items() if not state.startswith(NOT_RUNNABLE)]
    print(f"passes {', '.join(resolved.passes)}; scopes {', '.join(resolved.scopes)}; on {resolved.device}")
    if resolved.find_largest:
        print(f"would search the largest {resolved.find_largest}: its time depends on the memory")
        return EXIT_OK
    jobs = plan(names, resolved)
    seconds = costs.seconds(jobs, resolved, with_limits)
    minutes = f"about {seconds / 60:.0f} min on two cores" if seconds else "time not known before the first round"
    disk = costs.megabytes(names, resolved)
    print(f"would run {count(len(jobs), 'job')} of {count(len(names), 'row')}: {minutes}, {disk:.0f} MB of disk")
    return EXIT_OK


def announce(names: Sequence[str], resolved: Settings, limit: MemoryLimit, given: Mapping[str, Any]) -> None:
    """The first lines: what is about to be measured, and how long that may take."""
    joiner = (
        f"V {resolved.vocab_size}, joiner {resolved.encoder_dim}, {resolved.dtype}, {count(resolved.rounds, 'round')}"
    )
    own = given.get("file_vocab_size")
    if own not in (None, resolved.vocab_size):
        print(f"note: V is {resolved.vocab_size}, but the shape file counts tokens of {own} symbols", file=sys.stderr)
    if resolved.find_largest:
        size = f"{metrics.amount(limit.bytes)} ({limit.source})" if limit.bytes else limit.source
        what = f"the largest {resolved.find_largest} of {', '.join(names)} on {resolved.device} within {size}"
        print(f"{what}: scope {resolved.scopes[0]}, {joiner} at the size found", file=sys.stderr)
        return
    if resolved.sort_utterance:
        size = f"of up to {resolved.max_frames} frames, sorted by length"
    else:
        size = f"of {resolved.batch_size} utterances"
    each = " in each round" if resolved.own_batches else ""
    chosen = f"{resolved.num_batches} batches {size} ({resolved.batches}{each})"
    batches = [chosen, *settings.described(resolved.to_json())]
    print(f"preset {resolved.preset}: {presets.note(resolved.preset)}", file=sys.stderr)
    what = f"measuring {', '.join(names)} on {resolved.device}: {', '.join(batches)}"
    print(f"{what}, {joiner}; passes {', '.join(resolved.passes)}", file=sys.stderr)


def show(run_of: Mapping[str, Run], log: Log, arguments: argparse.Namespace) -> Shown:
    """Print what this run's rows tell; the status of each."""
    folders = [run.folder for run in run_of.values()]
    rows, searches = ([row for at in folders for row in of if row.folder == at] for of in (log.rows, log.searches))
    found = searches or rows
    details = search.render(found, "table") if searches else results.render(found, "table")
    statuses = [row.status for row in searches] or [run.status for run in run_of.values()]
    short = answer.render(found, folders=[arguments.log_dir], **screen.how())
    return ending.printed(short + "\n", details + "\n", statuses, arguments)
