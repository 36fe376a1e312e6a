"""--find-largest, from flags to a table."""

from __future__ import annotations

import argparse
import sys
from typing import Mapping, Optional, Sequence

from common.analysis import metrics
from common.analysis.logs import Log
from common.cli import ending
from common.cli.ending import Shown
from common.core.settings import Settings
from common.core.text import count
from common.jobs.executor import Executor
from common.jobs.progress import Progress
from common.jobs.search import Searches, memory_limit
from common.jobs.session import Session
from common.records.run import Run, open_runs
from common.records.schema import MemoryLimit
from common.setup import interpreters
from common.tables import search


def benchmark(
    names: Sequence[str],
    arguments: argparse.Namespace,
    chosen: Settings,
    python_of: Mapping[str, interpreters.Choice],
    executor: Executor,
) -> int:
    """Search, and print the table; returns the exit code."""
    more = {"memory_limit": memory_limit(chosen)}
    with open_runs(names, chosen, arguments.log_dir, arguments.resume, more) as run_of:
        if not arguments.quiet:
            announce(names, chosen, next(iter(run_of.values())).header.memory_limit)

        def measure() -> None:
            with Progress(arguments.quiet) as progress:
                Searches(Session(run_of, python_of, chosen, arguments.timeout, progress, executor)).run()

        kept = "the rows above are what is known; --resume continues"
        return ending.finish(
            measure, lambda log: show(run_of, log), lambda: ending.discard_empty(run_of), arguments, kept
        )


def announce(names: Sequence[str], chosen: Settings, limit: Optional[MemoryLimit]) -> None:
    source = limit.source if limit else "what is available"
    size = f"{metrics.amount(limit.bytes)} ({source})" if limit and limit.bytes else source
    print(
        f"the largest {chosen.find_largest} of {', '.join(names)} on {chosen.device} within {size}: "
        f"scope {chosen.scopes[0]}, V {chosen.vocab_size}, joiner {chosen.encoder_dim}, {chosen.dtype}, "
        f"{count(chosen.rounds, 'round')} at the size found",
        file=sys.stderr,
    )


def show(run_of: Mapping[str, Run], log: Log) -> Shown:
    rows = [row for run in run_of.values() for row in log.searches if row.folder == run.folder]
    return ending.printed(search.render(rows, "table") + "\n", [row.status for row in rows])
