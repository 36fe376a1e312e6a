"""Runs every benchmark script, from flags to a table and a report.  Every measuring command ends as
this one does: what was measured is shown whatever stopped it, and tells the exit code."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from rnnt_bench.analysis import logs, times
from rnnt_bench.cli import cluster, parser
from rnnt_bench.core import flag_types, implementations, settings
from rnnt_bench.core.called import command
from rnnt_bench.core.errors import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_OK,
    NOT_RUNNABLE,
    UserError,
    drop_stdout,
    say,
)
from rnnt_bench.core.files import write_whole
from rnnt_bench.core.text import count, plain
from rnnt_bench.jobs import rounds
from rnnt_bench.jobs.job import plan
from rnnt_bench.jobs.session import Executor, Progress, Session
from rnnt_bench.records import store
from rnnt_bench.records.run import Changed, open_runs
from rnnt_bench.records.schema import Limits
from rnnt_bench.setup import interpreters
from rnnt_bench.show import page, tables

#: The file in --log-dir that has the last tables with the lines below them.
DETAILS = "details.txt"


def main(arguments: Namespace) -> int:
    """Measure what the flags choose, here or on a cluster; return the exit code."""
    names = parser.chosen(arguments)
    if arguments.executor == "ray":
        return on_cluster(arguments)
    if arguments.ray_address != "auto":
        raise UserError("--ray-address only applies with --executor ray: add that, or remove it")
    return benchmark(names, arguments, arguments.loss)


def benchmark(
    names: Sequence[str],
    arguments: Namespace,
    names_of_script: Sequence[str] = (),
    executor: Executor | None = None,
) -> int:
    """Measure the implementations `names` as the flags say and print the table; return the exit
    code.

    names_of_script: those of the script that was started, which prefer the Python it was started
      with."""
    if arguments.budget and arguments.sweep:
        raise UserError("--budget is for an ordinary run: leave --sweep out")
    executor = executor or Executor()
    flags = parser.read_settings(arguments)
    python_of = interpreters.choose_all(names, arguments.in_place, names_of_script)
    interpreters.need_torch(python_of)
    device = interpreters.resolve_device(
        arguments.device, [choice.python for choice in python_of.values()]
    )
    is_default = tuple(getattr(arguments, "only", ())) == parser.standard()  # no row was named
    if is_default:
        rows = default_rows(
            names, device, bool(arguments.budget), arguments.topology, bool(arguments.sweep)
        )
        left_out = [name for name in names if name not in (*rows, *names_of_script)]
        if left_out and not arguments.quiet:
            say(f"left out unless --only or --topology names them: {', '.join(left_out)}")
        python_of = {name: choice for name, choice in python_of.items() if name not in left_out}
    chosen = [key for key, value in flags.items() if value is not None]
    swept = [axis.key for axis in arguments.sweep]
    settings.check_kinds([*chosen, *swept], {implementations.find(name).kind for name in python_of})
    cells = settings.cells(arguments.sweep)
    settings_of_cells = _settings(arguments.sweep, flags, device)
    folders: list[Path] = []
    with measuring() as ended:
        controls = Controls()
        if is_default and not arguments.budget:
            controls = _controls(python_of, settings_of_cells[0], arguments, executor)
        for number, (cell, resolved) in enumerate(zip(cells, settings_of_cells), 1):
            if cell and not arguments.quiet:
                say(f"cell {number} of {len(cells)}: {settings.words(cell)}")
            measure = partial(
                _measure, python_of, controls, resolved, cell, flags, executor, folders
            )
            before = len(folders)
            try:
                measure(arguments)
            except Changed as change:
                del folders[before:]
                measure(anew_after(change, arguments))
    return _finish(ended, folders, arguments, names_of_script)


class Controls(NamedTuple):
    """Hold the rows that measure losses under another condition for their times alone, and the
    ``limits`` records that gave cause."""

    python_of: Mapping[str, interpreters.Choice] = {}
    limits: Sequence[Limits] = ()


def _controls(
    python_of: Mapping[str, interpreters.Choice],
    resolved: settings.Settings,
    arguments: Namespace,
    executor: Executor,
) -> Controls:
    """Return the controls of a run that no row was named for.  Raises Interrupted."""
    limits: list[Limits] = []
    usual = [
        name
        for name in python_of
        if implementations.FAST_MKL in implementations.find(name).controls
    ]
    python = next((python for name in usual if (python := python_of[name].python)), None)
    times_steps = "timing" in resolved.passes and "step" in resolved.scopes
    if python and times_steps and parser.with_limits(arguments, resolved):
        limits = rounds.products(
            executor, usual[0], python, resolved, arguments.log_dir, arguments.timeout
        )
    slow = times.slow_products(limits)
    rows = interpreters.controls(python_of, resolved.device, slow is not None)
    if slow is not None and not arguments.quiet:
        fast = [
            name
            for name in rows
            if implementations.find(name).condition == implementations.FAST_MKL
        ]
        words = f"torch multiplies at {slow:.0%} of this processor's rate: {', '.join(fast)} are measured without that"
        say(f"{words}, see docs/usage.md")
    return Controls(rows, limits)


def on_cluster(arguments: Namespace) -> int:
    """Measure each cell, with the flags of this command, on a node of a Ray cluster, and print the
    table; return the exit code."""
    # settings that do not go together are refused before anything is sent
    flags = parser.read_settings(arguments)
    _settings(arguments.sweep, flags, "cpu" if arguments.device == "cpu" else "cuda")
    folders: list[Path] = []
    with measuring() as ended:
        for folder in cluster.measured(arguments):
            folders.append(folder)
    return _finish(ended, folders, arguments)


def default_rows(
    names: Sequence[str], device: str, is_short: bool, topology: str | None, is_sweep: bool = False
) -> list[str]:
    """Return which of these are measured where no row was named.

    Left out are losses on another lattice without --topology, and loops in Python on a CPU.  A
    sweep leaves out losses by utterance.  A first answer leaves out those of other environments
    and, on a CPU, those in plain torch."""
    kept = []
    device_type = device.partition(":")[0]
    for name in names:
        implementation = implementations.find(name)
        is_loop = device_type in implementations.attributes_of(implementation).python_loops
        is_plain = implementation.package == "torch" and device_type == "cpu" and not topology
        is_other_lattice = implementation.kind in implementations.LATTICES and not topology
        is_late = is_short and (implementation.environment != "main" or is_plain)
        is_beside = is_sweep and implementation.kind == implementations.BY_UTTERANCE
        if not (is_loop or is_other_lattice or is_late or is_beside):
            kept.append(name)
    return kept


def _settings(
    axes: Sequence[settings.Axis], flags: settings.Values, device: str
) -> list[settings.Settings]:
    """Return the settings of each cell of a sweep; of one cell without a sweep.  Raises UserError
    for flags that have no effect."""
    settings.check_axes(axes, flags)
    if axes or flags["budget"]:
        flags = {**flags, "passes": flags["passes"] or settings.PASSES[:3]}
    resolved = [settings.resolve({**flags, **cell}, device) for cell in settings.cells(axes)]
    return [replace(cell, budget=None) for cell in resolved] if axes else resolved


def _measure(
    python_of: Mapping[str, interpreters.Choice],
    controls: Controls,
    resolved: settings.Settings,
    cell: settings.Values,
    flags: settings.Values,
    executor: Executor,
    folders: list[Path],
    arguments: Namespace,
) -> None:
    """Measure one configuration, and add its folders to `folders`.  cell: its values of --sweep;
    flags: the settings that flags gave."""

    python_of = {**python_of, **controls.python_of}
    names = list(python_of)
    is_first = not folders  # a sweep that was stopped has not begun its later cells
    with open_runs(
        names, resolved, arguments.log_dir, arguments.resume, cell, or_new=not is_first
    ) as run_of:
        folders += [run.folder for run in run_of.values()]
        if is_first:
            if not arguments.quiet:
                announce(names, resolved, flags)
            if {"timing", "trace"} & set(resolved.passes):
                warn_of_load(executor, resolved)
        with Progress(arguments.quiet) as progress:
            session = Session(run_of, python_of, resolved, arguments.timeout, progress, executor)
            for run in run_of.values():
                # goes to disk with its first job, if there is room then
                with suppress(store.NotWritten):
                    run.add(controls.limits)
            jobs = plan(names, resolved, controls.python_of)
            limits = parser.with_limits(arguments, resolved)
            rounds.measure(session, jobs, limits=limits, wait=parser.wait(arguments))


def announce(names: Sequence[str], resolved: settings.Settings, flags: settings.Values) -> None:
    """Print what is about to be measured.  flags: the settings that flags gave."""
    symbols = flags.get("file_vocab_size")
    if symbols not in (None, resolved.vocab_size):
        say(
            f"note: V is {resolved.vocab_size}, but the shape file counts tokens of {symbols} symbols"
        )
    say(f"preset {resolved.preset}: {flag_types.described_preset(resolved.preset)}")
    size = f"of {resolved.batch_size} utterances"
    if resolved.sort_utterance:
        padded = "padded " if resolved.max_frames_padded else ""
        size = f"of up to {resolved.max_frames} {padded}frames, sorted by length"
    choice = f"{resolved.batches} in each round" if resolved.own_batches else resolved.batches
    batches = f"{count(resolved.num_batches, 'batch')} {size} ({choice})"
    joiner = f"V {resolved.vocab_size}, joiner {resolved.encoder_dim}"
    repeated = count(resolved.rounds, "round")
    if resolved.budget and settings.FEWEST_IN_BUDGET < resolved.rounds:
        time = flag_types.worded_duration(resolved.budget)
        repeated = f"{settings.FEWEST_IN_BUDGET} to {repeated}, as many as begin within {time}"
    parts = [batches, *settings.described(resolved.to_json()), joiner, resolved.dtype, repeated]
    heading = f"measuring {', '.join(names)} on {resolved.device}: {', '.join(parts)}"
    say(f"{heading}; passes {', '.join(resolved.passes)}")


def _finish(
    ended: Ending, folders: Sequence[Path], arguments: Namespace, needed: Sequence[str] = ()
) -> int:
    """Print the table of these runs, write the report and return the exit code.  needed: rows that
    must run."""
    if ended.mistake and not any(folder.exists() for folder in folders):
        raise ended.mistake
    log = logs.read([arguments.log_dir], all_runs=True)  # read back: what is shown is what is kept
    shown = log.within(folders)
    rows = [*shown.rows, *shown.swept]
    statuses = [
        "error" if row.name in needed and row.status in NOT_RUNNABLE else row.status for row in rows
    ]
    log.newest()  # gives each row its earlier runs
    short = tables.screen(shown, tables.this_terminal(), [arguments.log_dir])
    details = tables.whole(shown, folders=[arguments.log_dir])
    return finish(ended, short + "\n", details + "\n", statuses, arguments, log)


def anew_after(change: Changed, arguments: Namespace) -> Namespace:
    """Say why a run cannot go on; return the arguments of one of its own."""
    say(f"--resume: {plain(change)}: a run of its own begins")
    return Namespace(**{**vars(arguments), "resume": False})


@dataclass
class Ending:
    """Describe how measuring ended.  mistake: the user's mistake or the full disk that stopped
    it."""

    code: int = EXIT_OK
    mistake: UserError | None = None


@contextmanager
def measuring() -> Iterator[Ending]:
    """Yield how the block ends, filled in when it has: with Ctrl-C, a full disk or a mistake of the
    user's too."""
    ended = Ending()
    try:
        yield ended
    except KeyboardInterrupt:
        ended.code = EXIT_INTERRUPTED
    except UserError as error:
        ended.mistake = error


def finish(
    ended: Ending,
    short: str,
    details: str,
    statuses: Sequence[str],
    arguments: Namespace,
    log: logs.Log | None = None,
) -> int:
    """Print the table, write it whole and the report to --log-dir, and return the exit code.

    short, details: the table without and with --details, "" where that is the same; log: what
    --log-dir holds, where that is read already.  Raises the UserError that stopped the
    measuring."""
    path = arguments.log_dir / DETAILS
    line = f"stages, options, limits, notes: {path}" if details and not arguments.quiet else ""
    try:
        if details:
            write_whole(f"{command('summarize')} --details has it", (path, details))
    except UserError as error:
        line = f"warning: {error}"
    try:
        print(details if arguments.details else short, end="", flush=True)
    except OSError as error:
        drop_stdout()
        ended.code = ended.code or EXIT_FAILED
        line = f"warning: no table: {error.strerror or error}; {command('summarize')} prints it"
        if isinstance(error, BrokenPipeError):
            line = ""
    if line:
        say(line)
    if isinstance(ended.mistake, store.NotWritten):
        say(f"error: {ended.mistake}")
        ended.code = EXIT_FAILED
    elif ended.mistake:
        raise ended.mistake
    page.after_run(arguments.log_dir, arguments.quiet, log)
    if ended.code == EXIT_INTERRUPTED:
        words = f"what was measured is in {arguments.log_dir}, of the stopped job too, which the table leaves out"
        say(f"interrupted: {words}; --resume continues and runs that job again")
    return ended.code or exit_code(statuses)


def warn_of_load(executor: Executor, resolved: settings.Settings) -> None:
    """Warn on stderr, whatever --quiet says, where others keep this machine so busy that times will
    be wrong."""
    disturbance = executor.disturbance(resolved)
    if disturbance:
        say(f"warning: {disturbance}: times will be too long; wait until the machine is quiet")


def exit_code(statuses: Sequence[str]) -> int:
    """Return 0 when every row that could run did (and at least one could), else 1."""
    ran = [status for status in statuses if status not in NOT_RUNNABLE]
    return EXIT_OK if ran and all(status == "ok" for status in ran) else EXIT_FAILED
