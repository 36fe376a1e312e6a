"""Run the losses as the flags say, then print the table and write the report.

Every command that measures ends with `measuring` and `finish`: whatever stopped the command, it
shows what was measured, and its rows tell the exit code.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

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

#: The file in --log-dir with the whole table of the last command.
DETAILS = "details.txt"


def main(arguments: Namespace) -> int:
    """Measure what the flags choose, here or on a cluster; return the exit code."""
    names = parser.chosen(arguments)  # refuses flags that choose nothing, for a cluster too
    if arguments.executor == "ray":
        return on_cluster(arguments)
    if arguments.ray_address != "auto":
        raise UserError("--ray-address only applies with --executor ray: add that, or remove it")
    return benchmark(names, arguments, names_of_script=arguments.loss)


def benchmark(
    names: Sequence[str],
    arguments: Namespace,
    names_of_script: Sequence[str] = (),
    executor: Executor | None = None,
) -> int:
    """Measure implementations as the flags say and print the table; return the exit code.

    Args:
        names: the implementations
        arguments: the parsed flags
        names_of_script: the implementation of the script that was started, and losses of --loss:
          they run in the Python of this command if they can; one that cannot run at all fails the
          command
        executor: what runs the jobs, in place of processes on this machine
    """
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
        left_out = _left_out(names, device, arguments, names_of_script)
        python_of = {name: choice for name, choice in python_of.items() if name not in left_out}
    keys = [key for key, value in flags.items() if value is not None]
    keys += [axis.key for axis in arguments.sweep]
    settings.check_kinds(keys, {implementations.find(name).kind for name in python_of})
    cells = settings.cells(arguments.sweep)
    settings_of_cells = _settings(arguments.sweep, flags, device)
    measurement = Measurement(python_of, flags, arguments, executor)
    with measuring() as ended:
        if is_default and not arguments.budget:
            measurement.add_controls(settings_of_cells[0])
        for number, (cell, resolved) in enumerate(zip(cells, settings_of_cells), 1):
            if cell and not arguments.quiet:
                say(f"cell {number} of {len(cells)}: {settings.words(cell)}")
            measurement.measure_cell(resolved, cell)
    return _finish(ended, measurement.folders, arguments, names_of_script)


def _left_out(
    names: Sequence[str], device: str, arguments: Namespace, names_of_script: Sequence[str]
) -> list[str]:
    """Return those of `names` that are not measured by default, except `names_of_script`, which
    always are.  Print them, unless --quiet is given."""
    is_short = bool(arguments.budget)  # the flag is there: the user has little time
    is_sweep = bool(arguments.sweep)
    rows = default_rows(names, device, is_short, arguments.topology, is_sweep)
    left_out = [name for name in names if name not in (*rows, *names_of_script)]
    if left_out and not arguments.quiet:
        say(f"left out unless --only or --topology names them: {', '.join(left_out)}")
    return left_out


@dataclass
class Measurement:
    """Measures the cells of a sweep, one after the other.  A cell is a combination of the values of
    --sweep; without a sweep there is one.

    Attributes:
        python_of: the Python of each row
        flags: the settings, as `read_settings` returns them
        arguments: all flags
        executor: what runs the jobs
        controls: the rows that measure a loss again under another condition, for its times alone
        limits: the ``limits`` records that told which controls are needed
        folders: the folders of the runs so far
    """

    python_of: Mapping[str, interpreters.Choice]
    flags: settings.Values
    arguments: Namespace
    executor: Executor
    controls: Sequence[str] = ()
    limits: Sequence[Limits] = ()
    folders: list[Path] = field(default_factory=list)

    def add_controls(self, resolved: settings.Settings) -> None:
        """Choose the controls of a run for which no row was named, and add them to `python_of`.

        Sets `controls` and `limits`, for which it may measure how fast torch multiplies matrices.
        Raises Interrupted."""
        self.limits = self._products(resolved)
        slow = times.slow_products(self.limits)  # torch's share of the rate, None if it is not slow
        controls = interpreters.controls(self.python_of, resolved.device, slow is not None)
        if slow is not None and not self.arguments.quiet:
            fast = [
                name
                for name in controls
                if implementations.find(name).condition == implementations.FAST_MKL
            ]
            say(
                f"torch multiplies at {slow:.0%} of this processor's rate: "
                f"{', '.join(fast)} are measured with MKL's fast path, see docs/usage.md"
            )
        self.python_of = {**self.python_of, **controls}
        self.controls = list(controls)

    def _products(self, resolved: settings.Settings) -> list[Limits]:
        """Measure how fast torch multiplies matrices; return the ``limits`` records.

        The torch is that of the first loss which has a control under FAST_MKL, since its time
        depends on these products.  Return [] without measuring if there is no such loss, no step is
        timed, or the device's limits are not wanted."""
        times_steps = "timing" in resolved.passes and "step" in resolved.scopes
        if not (times_steps and parser.with_limits(self.arguments, resolved)):
            return []
        for name, choice in self.python_of.items():
            if choice.python and implementations.FAST_MKL in implementations.find(name).controls:
                return rounds.products(
                    self.executor,
                    name,
                    choice.python,
                    resolved,
                    self.arguments.log_dir,
                    self.arguments.timeout,
                )
        return []

    def measure_cell(self, resolved: settings.Settings, cell: settings.Values) -> None:
        """Measure one configuration.  If something has changed so that its run cannot be resumed,
        measure it in a new run.

        resolved: all settings of the configuration; cell: those that --sweep varies."""
        folders_before = len(self.folders)
        try:
            self._measure(resolved, cell, self.arguments)
        except Changed as change:
            del self.folders[folders_before:]
            self._measure(resolved, cell, without_resume(self.arguments, change))

    def _measure(
        self, resolved: settings.Settings, cell: settings.Values, arguments: Namespace
    ) -> None:
        """Measure one configuration in new runs or, with --resume, in the runs that it has.  Raises
        Changed if a run to resume cannot go on.

        resolved, cell: as in `measure_cell`; arguments: the flags"""
        names = list(self.python_of)
        is_first_cell = not self.folders
        # A sweep that was stopped has no runs of its later cells: --resume begins them.
        with open_runs(
            names, resolved, arguments.log_dir, arguments.resume, cell, or_new=not is_first_cell
        ) as run_of:
            self.folders += [run.folder for run in run_of.values()]
            if is_first_cell:
                if not arguments.quiet:
                    announce(names, resolved, self.flags)
                if {"timing", "trace"} & set(resolved.passes):
                    warn_of_load(self.executor, resolved)
            with Progress(arguments.quiet) as progress:
                session = Session(
                    run_of, self.python_of, resolved, arguments.timeout, progress, self.executor
                )
                for run in run_of.values():
                    # If the disk has no room now, the limits are written with the first job.
                    with suppress(store.NotWritten):
                        run.add(self.limits)
                rounds.measure(
                    session,
                    plan(names, resolved, self.controls),
                    limits=parser.with_limits(arguments, resolved),
                    wait=parser.seconds_to_wait(arguments),
                )


def on_cluster(arguments: Namespace) -> int:
    """Measure each cell, with the flags of this command, on a node of a Ray cluster, and print the
    table; return the exit code."""
    # Settings that do not go together are refused before anything is sent.
    flags = parser.read_settings(arguments)
    _settings(arguments.sweep, flags, "cpu" if arguments.device == "cpu" else "cuda")
    folders: list[Path] = []
    with measuring() as ended:
        # Not list(...): if an error or Ctrl-C ends the loop, the folders that came before it stay.
        for folder in cluster.measured(arguments):
            folders.append(folder)
    return _finish(ended, folders, arguments)


def default_rows(
    names: Sequence[str], device: str, is_short: bool, topology: str | None, is_sweep: bool = False
) -> list[str]:
    """Return which rows are measured where the user named none.

    Losses on another lattice need --topology.  Losses that loop in Python are left out on a CPU.

    Args:
        names: the rows to choose from
        device: "cpu", "cuda" or "cuda:N"
        is_short: whether time is short: losses of other environments are left out, and on a CPU
          without --topology those in plain torch
        topology: the lattice of --topology
        is_sweep: whether several configurations are measured: losses by utterance are left out
    """
    kept = []
    device_type = device.partition(":")[0]
    for name in names:
        implementation = implementations.find(name)
        is_loop = device_type in implementations.attributes_of(implementation).python_loops
        is_plain = implementation.package == "torch" and device_type == "cpu" and not topology
        is_other_lattice = implementation.kind in implementations.LATTICES and not topology
        is_left_out_if_short = implementation.environment != "main" or is_plain
        is_by_utterance = implementation.kind == implementations.BY_UTTERANCE
        is_left_out = (
            is_loop
            or is_other_lattice
            or (is_short and is_left_out_if_short)
            or (is_sweep and is_by_utterance)
        )
        if not is_left_out:
            kept.append(name)
    return kept


def _settings(
    axes: Sequence[settings.Axis], flags: settings.Values, device: str
) -> list[settings.Settings]:
    """Return the settings of each cell of a sweep; without a sweep, the settings of the only cell.
    Raises UserError for flags that have no effect.

    A sweep and a run with --budget have no traces by default.  A sweep has no budget."""
    settings.check_axes(axes, flags)
    if axes or flags["budget"]:
        without_traces = tuple(name for name in settings.PASSES if name != "trace")
        flags = {**flags, "passes": flags["passes"] or without_traces}
    resolved = [settings.resolve({**flags, **cell}, device) for cell in settings.cells(axes)]
    return [replace(cell, budget=None) for cell in resolved] if axes else resolved


def announce(names: Sequence[str], resolved: settings.Settings, flags: settings.Values) -> None:
    """Print what is about to be measured.  flags: as `read_settings` returns them."""
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
    number_of_rounds = count(resolved.rounds, "round")
    if resolved.budget and settings.FEWEST_IN_BUDGET < resolved.rounds:
        budget = flag_types.worded_duration(resolved.budget)
        number_of_rounds = (
            f"{settings.FEWEST_IN_BUDGET} to {number_of_rounds}, as many as begin within {budget}"
        )
    described = settings.described(resolved.to_json())  # only what is unusual
    parts = [batches, *described, joiner, resolved.dtype, number_of_rounds]
    heading = f"measuring {', '.join(names)} on {resolved.device}: {', '.join(parts)}"
    say(f"{heading}; passes {', '.join(resolved.passes)}")


def _finish(
    ended: Ending, folders: Sequence[Path], arguments: Namespace, needed: Sequence[str] = ()
) -> int:
    """Print the table of the runs in some folders, write the report and return the exit code.

    If a UserError stopped the measuring, raises it: at once if there is no run, else after the
    table.  But the one that tells of a full disk, store.NotWritten, is then printed.

    needed: names of the rows that fail the command if they cannot run."""
    if ended.mistake and not any(folder.exists() for folder in folders):
        raise ended.mistake
    # The records are read from disk, so that what is shown is what is kept.
    log = logs.read([arguments.log_dir], all_runs=True)
    shown = log.within(folders)
    statuses = [
        "error" if row.name in needed and row.status in NOT_RUNNABLE else row.status
        for row in shown.all_rows
    ]
    log.newest()  # is called only since it sets the `earlier` and `stopped` rows of each row
    short = tables.screen(shown, tables.this_terminal(), [arguments.log_dir])
    details = tables.whole(shown, folders=[arguments.log_dir])
    return finish(ended, short + "\n", details + "\n", statuses, arguments, log)


def without_resume(arguments: Namespace, change: Changed) -> Namespace:
    """Say that a run cannot go on, since something has changed; return the flags without
    --resume."""
    say(f"--resume: {plain(change)}: a run of its own begins")
    return Namespace(**{**vars(arguments), "resume": False})


@dataclass
class Ending:
    """Describe how measuring ended.

    Attributes:
        code: exit code, if the rows do not tell it
        mistake: the mistake of the user, or the full disk, that stopped it
    """

    code: int = EXIT_OK
    mistake: UserError | None = None


@contextmanager
def measuring() -> Iterator[Ending]:
    """Yield an Ending, which tells how the block ended as soon as it has.  Ctrl-C and UserError end
    the block, and are not raised."""
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
    """Print the table, write details and report to --log-dir, and return the exit code.

    If a UserError stopped the measuring, raises it after the table, and writes no report.  But a
    store.NotWritten is only printed, and the report is tried.

    Args:
        ended: how the measuring ended
        short: the table on one screen
        details: the whole table, for --details and DETAILS; "" if the command has one table only
        statuses: those of the rows; they tell the exit code if `ended` has none
        arguments: the flags
        log: the records of --log-dir, if they are read already
    """
    remark = _write_details(arguments, details) if details else ""
    try:
        print(details if arguments.details else short, end="", flush=True)
    except OSError as error:
        drop_stdout()
        ended.code = ended.code or EXIT_FAILED
        remark = f"warning: no table: {error.strerror or error}; {command('summarize')} prints it"
        if isinstance(error, BrokenPipeError):
            remark = ""  # the reader of the table, `head` say, has enough: no remark at all
    if remark:
        say(remark)
    if isinstance(ended.mistake, store.NotWritten):
        say(f"error: {ended.mistake}")
        ended.code = EXIT_FAILED
    elif ended.mistake:
        raise ended.mistake
    page.after_run(arguments.log_dir, arguments.quiet, log)
    if ended.code == EXIT_INTERRUPTED:
        say(
            f"interrupted: what was measured is in {arguments.log_dir}, of the stopped job too, "
            "which the table leaves out; --resume continues and runs that job again"
        )
    return ended.code or exit_code(statuses)


def _write_details(arguments: Namespace, details: str) -> str:
    """Write the whole table to --log-dir; return a line that names the file, "" with --quiet.

    If the table cannot be written, return a warning, also with --quiet."""
    path = arguments.log_dir / DETAILS
    advice = f"{command('summarize')} --details has it"
    try:
        write_whole((path, details), advice=advice)
    except UserError as error:
        return f"warning: {error}"
    return "" if arguments.quiet else f"stages, options, limits, notes: {path}"


def warn_of_load(executor: Executor, resolved: settings.Settings) -> None:
    """Warn on stderr, also with --quiet, if other processes keep this machine so busy that times
    will be wrong."""
    disturbance = executor.disturbance(resolved)
    if disturbance:
        say(f"warning: {disturbance}: times will be too long; wait until the machine is quiet")


def exit_code(statuses: Sequence[str]) -> int:
    """Return 0 if every row that could run is ok, and at least one is; else 1."""
    ran = [status for status in statuses if status not in NOT_RUNNABLE]
    return EXIT_OK if ran and all(status == "ok" for status in ran) else EXIT_FAILED
