"""The command of every benchmark script: from flags to a table and a report."""

from __future__ import annotations

import argparse
import sys
from typing import Mapping, Optional, Sequence

from common.analysis.logs import Log
from common.cli import ending, parser, search, sweep
from common.cli.ending import Shown
from common.core import settings, workloads
from common.core.errors import UserError
from common.core.implementations import find
from common.core.settings import Settings
from common.core.text import count
from common.jobs.executor import Executor
from common.jobs.local import Local
from common.jobs.plan import plan
from common.jobs.progress import Progress
from common.jobs.session import Session
from common.records.run import Run, open_runs
from common.setup import interpreters
from common.tables import results


def benchmark(
    names: Sequence[str], arguments: argparse.Namespace, own: Sequence[str] = (), executor: Optional[Executor] = None
) -> int:
    """Measure the implementations `names` as the flags say and print the table; returns the exit code.

    own: those of the script that was started, which prefer the Python it was started with; executor: this machine where
    it is not given.
    """
    executor = executor or Local()
    given = parser.given_settings(arguments)
    python_of = {
        name: interpreters.choose(find(name), in_place=arguments.in_place, prefer_here=name in own) for name in names
    }
    pythons = [choice.python for choice in python_of.values() if choice.python]
    device = interpreters.resolve_device(arguments.device, pythons)
    if arguments.sweep:
        if arguments.find_largest:
            raise UserError("--sweep: does not go with --find-largest, which searches one configuration; name it alone")
        return sweep.benchmark(names, arguments, given, device, python_of, executor)
    chosen = settings.resolve(given, device)
    if chosen.find_largest:
        return search.benchmark(names, arguments, chosen, python_of, executor)
    with open_runs(names, chosen, arguments.log_dir, arguments.resume) as run_of:
        if not arguments.quiet:
            announce(names, chosen)

        def measure() -> None:
            with Progress(arguments.quiet) as progress:
                session = Session(run_of, python_of, chosen, arguments.timeout, progress, executor)
                session.run(plan(names, chosen), arguments.limits)

        return ending.finish(measure, lambda log: show(run_of, log), lambda: ending.discard_empty(run_of), arguments)


def announce(names: Sequence[str], chosen: Settings) -> None:
    """The first lines: what is about to be measured, and how long that may take."""
    if chosen.sort_utterance:
        size = f"of up to {chosen.max_frames} frames, sorted by length"
    else:
        size = f"of {chosen.batch_size} utterances"
    batches = [f"{chosen.num_batches} batches {size} ({chosen.batches})", *workloads.described(chosen.to_json())]
    print(f"preset {chosen.preset}: {settings.preset_note(chosen.preset)}", file=sys.stderr)
    print(
        f"measuring {', '.join(names)} on {chosen.device}: {', '.join(batches)}, V {chosen.vocab_size}, "
        f"joiner {chosen.encoder_dim}, {chosen.dtype}, {count(chosen.rounds, 'round')}; "
        f"passes {', '.join(chosen.passes)}",
        file=sys.stderr,
    )


def show(run_of: Mapping[str, Run], log: Log) -> Shown:
    """Print the table of this run's rows."""
    rows = [row for run in run_of.values() for row in log.rows if row.folder == run.folder]
    table = results.render(rows, "table")
    return ending.printed(table + "\n", [run.status for run in run_of.values()])
