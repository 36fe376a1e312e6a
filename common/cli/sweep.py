"""--sweep, from flags to a table: runs the jobs of an ordinary run for each cell of the grid, cell after cell.

An implementation that is missing, or cannot run in a dtype on this device, is tried once for each dtype; the device's
limits are measured once for each dtype and number of threads.
"""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import closing
from typing import Any, List, Mapping, Sequence

from common.analysis.logs import Log
from common.cli import ending, listing, parser, screen
from common.cli.ending import Shown
from common.core import grid, settings
from common.core.errors import EXIT_OK, UserError
from common.core.setting import worded
from common.core.settings import Settings
from common.core.statistics import mean
from common.core.text import count
from common.jobs import costs
from common.jobs.executor import Executor
from common.jobs.plan import plan
from common.jobs.progress import Progress, time_left
from common.jobs.session import Session
from common.jobs.sweep import reuse
from common.records.sweep import SweepFile, resume, start
from common.setup.interpreters import Choice
from common.tables import sweep as tables


def benchmark(
    names: Sequence[str],
    arguments: argparse.Namespace,
    given: Mapping[str, Any],
    device: str,
    python_of: Mapping[str, Choice],
    executor: Executor,
) -> int:
    """Measure the implementations `names` in every cell and print the table; return the exit code.  given: the
    settings that were given."""
    axes: List[grid.Axis] = arguments.sweep
    grid.check(axes, given)
    cells = grid.cells(axes)
    given = {**given, "passes": given.get("passes") or grid.PASSES}
    settings_of = [settings.resolve({**given, **cell}, device) for cell in cells]
    _check(axes, settings_of)
    if arguments.dry_run:
        return dry_run(python_of, axes, settings_of, arguments)
    shared = grid.shared(settings_of, axes)
    log_dir = arguments.log_dir
    file = resume(axes, shared, log_dir) if arguments.resume else start(axes, shared, names, log_dir)

    def measure() -> None:
        if "timing" in settings_of[0].passes:
            ending.warn_of_load(executor, settings_of[0])
        took: List[float] = []  # seconds, of the cells that had something to measure
        for number, (cell, resolved) in enumerate(zip(cells, settings_of)):
            run_of = {name: file.open_run(number, cell, name, resolved) for name in names}
            known = reuse(file, run_of)
            with Progress(arguments.quiet) as progress:
                session = Session(
                    run_of,
                    python_of,
                    resolved,
                    arguments.timeout,
                    progress,
                    executor,
                    wait=parser.wait(arguments),
                    limited=known,
                )
                jobs = session.pending(plan(names, resolved))
                if jobs and not arguments.quiet:
                    left = f", {time_left(mean(took) * (len(cells) - number))}" if took else ""
                    print(f"cell {number + 1} of {len(cells)}: {grid.words(cell)}{left}", file=sys.stderr)
                began = time.monotonic()
                session.run(jobs, parser.with_limits(arguments, resolved) and not known)
                if jobs:
                    took.append(time.monotonic() - began)

    def discard() -> bool:
        file.discard_if_empty()
        return file.path.exists()

    with closing(file):
        if not arguments.quiet:
            announce(names, axes, settings_of)
        return ending.finish(measure, lambda log: show(file, log, arguments), discard, arguments)


def dry_run(
    python_of: Mapping[str, Choice],
    axes: Sequence[grid.Axis],
    settings_of: Sequence[Settings],
    arguments: argparse.Namespace,
) -> int:
    """Print what a sweep would do and how long; return EXIT_OK.

    Args:
        python_of: the Python of each row.
        axes: what is swept.
        settings_of: the settings of each cell.
        arguments: the flags.
    """
    states = listing.states(python_of, settings_of[0].device)
    names = listing.runnable(states)
    announce(names, axes, settings_of)
    jobs = [plan(names, resolved) for resolved in settings_of]
    limits = parser.with_limits(arguments, settings_of[0])
    seconds = sum(costs.seconds(of_cell, resolved, limits) for of_cell, resolved in zip(jobs, settings_of))
    minutes = "time not known before the first cell"
    if seconds:
        minutes = f"about {seconds / 60:.0f} min on two cores if each cell takes as long as the preset's own sizes"
    print(f"would run {count(sum(map(len, jobs)), 'job')} of {count(len(names), 'row')}: {minutes}")
    return EXIT_OK


def _check(axes: Sequence[grid.Axis], settings_of: Sequence[Settings]) -> None:
    """Raise UserError for flags that have no effect in a sweep."""
    grid.check_passes(settings_of[0].passes)
    keys = {axis.key for axis in axes}
    for key, of_sorted in (("batch_size", False), ("max_frames", True)):
        if key in keys and all(resolved.sort_utterance is not of_sorted for resolved in settings_of):
            raise UserError(
                f"--sweep {grid.flag(key)} has no effect with --sort-utterance {worded(not of_sorted)}: "
                f"give --sort-utterance {worded(of_sorted)}"
            )


def announce(names: Sequence[str], axes: Sequence[grid.Axis], settings_of: Sequence[Settings]) -> None:
    first = settings_of[0]
    listed = " x ".join(f"{grid.flag(axis.key)} {', '.join(map(worded, axis.values))}" for axis in axes)
    print(f"sweep of {len(settings_of)} cells: {listed}", file=sys.stderr)
    how = f"preset {first.preset}, {count(first.rounds, 'round')}; passes {', '.join(first.passes)}"
    print(f"measuring {', '.join(names)} on {first.device} in each: {how}", file=sys.stderr)


def show(file: SweepFile, log: Log, arguments: argparse.Namespace) -> Shown:
    """Print the table of this sweep; return the status of each row."""
    sweeps = [sweep for sweep in log.sweeps if sweep.path == file.path]
    short, details = tables.screen(sweeps, **screen.how()), tables.render(sweeps, "table")
    return ending.printed(short + "\n", details, [run.status for run in file.runs.values()], arguments)
