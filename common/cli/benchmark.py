"""Runs every benchmark script, from flags to a table and a report: an ordinary run, --sweep, --find-largest."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence

from common.analysis import logs, metrics
from common.cli import cluster, ending, parser, screen
from common.cli.parser import standard
from common.core import flag_types, grid, implementations, settings
from common.core.errors import NOT_RUNNABLE, UserError
from common.core.implementations import LATTICES, find
from common.core.settings import Settings
from common.core.text import count
from common.jobs import rounds
from common.jobs.job import plan
from common.jobs.session import Executor, Local, Progress, Session
from common.records.run import open_runs
from common.records.schema import MemoryLimit, as_written
from common.setup import interpreters
from common.setup.interpreters import Choice
from common.show import answer, results
from common.system import memory

#: Passes of a run with --budget, without --passes.
BUDGET_PASSES = ("correctness", "timing", "memory")


def benchmark(
    names: Sequence[str],
    arguments: argparse.Namespace,
    names_of_script: Sequence[str] = (),
    executor: Optional[Executor] = None,
) -> int:
    """Measure the implementations `names` as the flags say and print the table; return the exit code.

    Args:
        names_of_script: those of the script that was started, which prefer the Python it was started with.
        executor: in place of this machine's processes.
    """
    if arguments.sweep and arguments.find_largest:
        raise UserError("--sweep does not go with --find-largest, which searches one configuration: remove one")
    if arguments.budget and (arguments.find_largest or arguments.sweep):
        raise UserError("--budget is for an ordinary run: leave --find-largest and --sweep out")
    executor, given = executor or Local(), parser.given_settings(arguments)
    python_of = interpreters.choose_all(names, arguments.in_place, names_of_script)
    device = interpreters.device_of(arguments.device, python_of)
    if tuple(getattr(arguments, "only", ())) == standard():  # no row was named
        rows = default_rows(names, device, bool(arguments.budget), arguments.topology)
        left_out = [name for name in names if name not in (*rows, *names_of_script)]
        if left_out and not arguments.quiet:
            print(f"left out unless --only or --topology names them: {', '.join(left_out)}", file=sys.stderr)
        python_of = {name: choice for name, choice in python_of.items() if name not in left_out}
        if not (arguments.find_largest or arguments.budget):
            python_of.update(interpreters.controls(python_of, device))
    if arguments.budget:
        given["passes"] = given["passes"] or BUDGET_PASSES
    cells, settings_of = grid.cells(arguments.sweep), _settings(arguments.sweep, given, device)
    folders: List[Path] = []
    with ending.measuring() as ended:
        for number, (cell, resolved) in enumerate(zip(cells, settings_of), 1):
            if cell and not arguments.quiet:
                print(f"cell {number} of {len(cells)}: {grid.words(cell)}", file=sys.stderr)
            _measure(python_of, resolved, cell, arguments, given, executor, folders)
    return _finish(ended, folders, arguments, names_of_script)


def on_cluster(arguments: argparse.Namespace, words: Sequence[str]) -> int:
    """Measure each cell on a node of a Ray cluster, and print the table; return the exit code.

    words: the flags as they were given.
    """
    _settings(arguments.sweep, parser.given_settings(arguments), "cpu" if arguments.device == "cpu" else "cuda")
    folders: List[Path] = []
    with ending.measuring() as ended:
        for folder in cluster.measured(arguments, words):
            folders.append(folder)
    return _finish(ended, folders, arguments)


def default_rows(names: Sequence[str], device: str, is_short: bool, topology: Optional[str]) -> List[str]:
    """Return what of these is measured where no row was named.

    Losses on another lattice only with --topology.  On a CPU no loop in Python, which would take most of the time.  For
    a first answer the main environment's rows alone, and on a CPU not the one in plain torch, which nobody trains with
    where another is installed.
    """
    kept, device_type = [], device.partition(":")[0]
    for name in names:
        implementation = find(name)
        is_loop = device_type in implementations.described(implementation).python_loops
        is_plain = implementation.package == "torch" and device_type == "cpu" and not topology
        is_other_lattice = implementation.kind in LATTICES and not topology
        is_late = is_short and (implementation.environment != "main" or is_plain)
        if not (is_loop or is_other_lattice or is_late):
            kept.append(name)
    return kept


def _settings(axes: Sequence[grid.Axis], given: Dict[str, Any], device: str) -> List[Settings]:
    """Return the settings of each cell of a sweep; of one cell without a sweep.  Raises UserError for flags that have
    no effect."""
    grid.check(axes, given)
    if axes:
        given["passes"] = given["passes"] or grid.PASSES
    return [settings.resolve({**given, **cell}, device) for cell in grid.cells(axes)]


def _measure(
    python_of: Mapping[str, Choice],
    resolved: Settings,
    cell: grid.Values,
    arguments: argparse.Namespace,
    given: Mapping[str, Any],
    executor: Executor,
    folders: List[Path],
) -> None:
    """Measure one configuration, and add its folders to `folders`.

    Args:
        python_of: the Python of each row.
        resolved: the settings.
        cell: values of --sweep in this cell.
        given: the settings that flags gave.
    """
    extra: Dict[str, Any] = {"values": cell} if cell else {}
    if resolved.find_largest:
        limit = rounds.memory_limit(resolved, memory.total_memory(), memory.available_memory())
        extra["memory_limit"] = as_written(limit)
    names, is_first = list(python_of), not folders  # a sweep that was stopped has not begun its later cells
    with open_runs(names, resolved, arguments.log_dir, arguments.resume, extra, or_anew=not is_first) as run_of:
        folders += [run.folder for run in run_of.values()]
        if is_first:
            if not arguments.quiet:
                limit_of_run = next(iter(run_of.values())).header.memory_limit or MemoryLimit()
                announce(names, resolved, limit_of_run, given)
            if resolved.find_largest or {"timing", "trace"} & set(resolved.passes):
                ending.warn_of_load(executor, resolved)
        with Progress(arguments.quiet) as progress:
            session = Session(run_of, python_of, resolved, arguments.timeout, progress, executor)
            if resolved.find_largest:
                rounds.search(session, names)
            else:
                limits, wait = parser.with_limits(arguments, resolved), parser.wait(arguments)
                jobs = plan(names, resolved)
                rounds.measure(session, jobs, limits=limits, wait=wait, budget=arguments.budget)


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
    print(f"preset {resolved.preset}: {flag_types.note(resolved.preset)}", file=sys.stderr)
    heading = f"measuring {', '.join(names)} on {resolved.device}: {', '.join(batches)}"
    print(f"{heading}, {joiner}; passes {', '.join(resolved.passes)}", file=sys.stderr)


def _finish(
    ended: ending.Ending, folders: Sequence[Path], arguments: argparse.Namespace, own: Sequence[str] = ()
) -> int:
    """Print the table of these runs, write the report and return the exit code.

    own: rows of the user's own, which fail the command where they cannot run.
    """
    if ended.mistake and not any(folder.exists() for folder in folders):
        raise ended.mistake
    log = logs.read([arguments.log_dir], all_runs=True)  # read back: what is shown is what is kept
    shown = log.of(folders)
    rows = [*shown.rows, *shown.searches, *shown.swept]
    statuses = ["error" if row.name in own and row.status in NOT_RUNNABLE else row.status for row in rows]
    short = answer.of_log(shown, folders=[arguments.log_dir], **screen.how())
    printed = ending.printed(short + "\n", results.of_log(shown) + "\n", statuses, arguments)
    return ending.finish(ended, printed, arguments, log)
