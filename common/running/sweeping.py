"""A sweep, from flags to a table: for each cell of the grid the jobs of an ordinary run, one cell after the other.

Who is missing, or cannot run on this device in this dtype, is asked once for each dtype; the device's limits are
measured once for each dtype and number of threads.  No torch.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import closing
from typing import Any, Dict, List, Optional, Sequence

from common import commands, grid, settings
from common.errors import UserError
from common.results import records, sweep_tables, sweeps
from common.results.records import Record, latest_jobs
from common.running import interpreters, runner, sweep_runs
from common.running.sweep_runs import SweepFile, SweepRun
from common.settings import Settings

#: Settings that the device's limits depend on.
OF_LIMITS = ("dtype", "threads", "denormals")


def benchmark(
    names: Sequence[str],
    arguments: argparse.Namespace,
    given: Dict[str, Any],
    choices: Dict[str, interpreters.Choice],
    device: str,
) -> int:
    """Measure the implementations `names` in every cell and print the table; returns the exit code.

    given: the settings that were given; choices: the Python of each implementation.
    """
    axes: List[grid.Axis] = arguments.sweep
    grid.check(axes, given)
    cells = grid.cells(axes)
    given = {**given, "passes": given.get("passes") or grid.PASSES}
    chosen = [settings.resolve({**given, **cell}, device) for cell in cells]
    _check(axes, chosen)
    shared = grid.shared(chosen, axes)
    if arguments.resume:
        sweep = sweep_runs.resume(axes, shared, arguments.log_dir)
    else:
        sweep = sweep_runs.start(axes, shared, names, arguments.log_dir)
    with closing(sweep):
        if not arguments.quiet:
            _announce(names, axes, chosen)
        return _fill(sweep, names, arguments, cells, chosen, choices)


def _fill(
    sweep: SweepFile,
    names: Sequence[str],
    arguments: argparse.Namespace,
    cells: Sequence[grid.Cell],
    chosen: Sequence[Settings],
    choices: Dict[str, interpreters.Choice],
) -> int:
    """Measure what is not done yet, and show the whole; returns the exit code.  chosen: the settings of each cell."""
    whole = written = True
    try:
        for number, (cell, cell_settings) in enumerate(zip(cells, chosen)):
            title = f"cell {number + 1} of {len(cells)}: {grid.words(cell)}"
            run_of = {name: sweep.open_run(number, cell, name, cell_settings) for name in names}
            whole = _measure(sweep, run_of, title, choices, cell_settings, arguments)
            if not whole:
                break
    except KeyboardInterrupt:  # between two jobs
        whole = False
    except records.NotWritten as error:  # no room for a run's first line: what is measured stays
        print(f"error: {error}", file=sys.stderr)
        written = False
    except UserError:
        sweep.discard_if_empty()
        if sweep.path.exists():
            _show(sweep)
        raise
    shown = _show(sweep)
    statuses = [run.status for run in sweep.runs.values()]
    return runner.ended(arguments, statuses, shown and written, "" if whole else runner.kept_of(arguments))


def _check(axes: Sequence[grid.Axis], chosen: Sequence[Settings]) -> None:
    """Raises UserError for what a sweep has no use for."""
    grid.check_passes(chosen[0].passes)
    keys = {axis.key for axis in axes}
    for key, of_sorted in (("batch_size", False), ("max_frames", True)):
        if key in keys and all(one.sort_utterance is not of_sorted for one in chosen):
            raise UserError(
                f"--sweep {grid.flag(key)}: has no effect with --sort-utterance {grid.said(not of_sorted)}; "
                f"give --sort-utterance {grid.said(of_sorted)}"
            )


def _announce(names: Sequence[str], axes: Sequence[grid.Axis], chosen: Sequence[Settings]) -> None:
    first = chosen[0]
    listed = " x ".join(f"{grid.flag(axis.key)} {', '.join(map(grid.said, axis.values))}" for axis in axes)
    print(f"sweep of {len(chosen)} cells: {listed}", file=sys.stderr)
    print(
        f"measuring {', '.join(names)} on {first.device} in each: preset {first.preset}, "
        f"{first.rounds} round{'s' * (first.rounds != 1)}; passes {', '.join(first.passes)}",
        file=sys.stderr,
    )


def _measure(
    sweep: SweepFile,
    run_of: Dict[str, SweepRun],
    title: str,
    choices: Dict[str, interpreters.Choice],
    chosen: Settings,
    arguments: argparse.Namespace,
) -> bool:
    """The jobs of one cell that are not done yet.  Returns False when the user interrupted."""
    jobs = runner.plan(list(run_of), chosen)
    limits = _limits(sweep, run_of)
    for run in run_of.values():
        known = None if run.is_done("correctness") else _cannot_run(sweep, run)
        if known:
            run.add(known)
        if limits and not run.failed and not any(record["record"] == "limits" for record in run.records):
            run.add(limits)
    runs = [(run_of[job.implementation], job) for job in jobs]
    if not arguments.quiet and any(not run.failed and not run.is_done(job.name) for run, job in runs):
        print(title, file=sys.stderr)
    with_limits = arguments.limits and limits is None
    return runner.run_jobs(jobs, run_of, choices, chosen, arguments.timeout, arguments.quiet, with_limits)


def _limits(sweep: SweepFile, run_of: Dict[str, SweepRun]) -> Optional[Record]:
    """What the device can do, measured in another cell and the same in this one."""
    wanted = next(iter(run_of.values())).records[0]["settings"]
    for (cell, _), other in sweep.runs.items():
        if all(other.records[0]["settings"][key] == wanted[key] for key in OF_LIMITS):
            for record in other.records:
                if record["record"] == "limits":
                    return {"reused_from": cell, **record}
    return None


def _cannot_run(sweep: SweepFile, run: SweepRun) -> Optional[List[Record]]:
    """What another cell of the same dtype found of an implementation that cannot run here; only where it is of now, so
    that a resumed sweep tries again."""
    dtype = run.records[0]["settings"]["dtype"]
    for (cell, name), other in sweep.runs.items():
        if name != run.name or cell == run.cell or not other.touched or other.records[0]["settings"]["dtype"] != dtype:
            continue
        lines = latest_jobs(other.records).get("correctness", [])
        if len(lines) == 1 and lines[0]["record"] == "status" and lines[0]["status"] in runner.CANNOT_RUN:
            return [{"reused_from": cell, **lines[0]}]
    return None


def _show(sweep: SweepFile) -> bool:
    """Print the table, read back from disk: what is shown is what is kept.  False where stdout does not take it."""
    return commands.show(sweep_tables.render([sweeps.read(sweep.path)], "table"))
