"""What every command of a tool shares: the flags of a run, its tasks one after another, and the
printed answer."""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from operator import attrgetter
from pathlib import Path
from typing import Any

from rnnt_bench.cli import benchmark, parser
from rnnt_bench.core import files, flag_types, text
from rnnt_bench.core.errors import UserError
from rnnt_bench.core.settings import SETTINGS, Settings
from rnnt_bench.jobs.job import Task
from rnnt_bench.jobs.session import Executor, Progress, Session
from rnnt_bench.records import run, schema
from rnnt_bench.setup.interpreters import Choice
from rnnt_bench.show.tables import FORMATS
from rnnt_bench.tools.kept import Answer, Kept, read

#: Returns the tasks that may come next, by what a run has measured so far; [] ends the run.
Follow = Callable[[Kept], list[Task]]
#: Returns the fields of a header that are equal in two runs of the same measurement.
_identity = attrgetter("tool", "name", "config", "settings")


def run_name(model: str) -> str:
    """Return the name of a run from that of its model.  It may stand in the name of a folder.

    "package.module:name" gives "package.module-name", and "hf:owner/name" gives "name".  A name of
    which nothing is left gives "model"."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", Path(model).name).strip("-.") or "model"


def add_flags(
    group: Any,
    *,
    folder: str,
    quick: str,
    timeout: float | None = 600.0,
    seed: str = "",
    formats: Sequence[str] = FORMATS,
) -> None:
    """Add the flags that every command of a tool has.

    Args:
        group: the parser, or a group of its flags
        folder: name of the run's folder, for the help of --log-dir
        quick: what --preset quick changes, for its help
        timeout: default of --timeout in seconds; None is no limit
        seed: help of --seed; "" leaves out --seed and --device
        formats: choices of --format
    """
    if seed:
        parser.add_setting(
            group, "device", "Device to measure on: auto, cpu, cuda or cuda:N. Default: auto"
        )
        parser.add_setting(
            group,
            "seed",
            f"{seed}. Default: {SETTINGS['seed'].default}",
            default=SETTINGS["seed"].default,
        )
    group.add_argument(
        "--preset", choices=("quick",), help=f"Make a smoke run: {quick}. Other flags override it."
    )
    seconds = "none" if timeout is None else f"{timeout:g}"
    group.add_argument(
        "--timeout",
        type=flag_types.positive,
        default=math.inf if timeout is None else timeout,
        metavar="S",
        help=f"End a process after S seconds; its row says timeout, and the others go on. Default: {seconds}",
    )
    group.add_argument(
        "--format",
        choices=formats,
        default="table",
        help="Format of what is printed. Default: table",
    )
    group.add_argument("--quiet", action="store_true", help="Print no progress.")
    group.add_argument(
        "--log-dir",
        type=flag_types.path,
        default=files.LOG,
        metavar="DIR",
        help=f"Folder in which the run makes its own, {folder}. Default: log/ beside this script",
    )
    # A tool has no flag --details, which the benchmark's printing asks for: it prints all it has.
    group.set_defaults(details=False)
    group.add_argument(
        "--resume",
        action="store_true",
        help="Continue the newest run with the same flags: processes that ended well are not run again.",
    )


def set_quick(
    arguments: argparse.Namespace, quick: Mapping[str, Any], others: schema.Record | None = None
) -> None:
    """Set the default of each flag that is None: the user left it out.

    quick: defaults by flag with --preset quick; others: defaults without it, and with it for flags
    that `quick` lacks."""
    values = dict(others or {})
    if arguments.preset:
        values.update(quick)
    for name, value in values.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)


def _opened(header: schema.Record, log_dir: Path, resume: bool) -> run.Run:
    """Return a new run; with `resume` the newest run of the same measurement, to be continued.

    If the machine or the code has changed since all such runs began, print what changed and return
    a new run.  Raises UserError where there is no run to resume."""
    origin = run.origin()
    if resume:
        # Through JSON the new header becomes what reading it from a file would give.
        identity = _identity(schema.decoded(json.dumps(header).encode()))
        earlier = run.earlier_runs(log_dir, schema.TOOL_FILE_NAME, schema.ToolHeader)
        equal = [before for before in earlier if _identity(before.head) == identity]
        if not equal:
            raise UserError(
                f"--resume: no run of {header['name']} with these flags under {log_dir}; remove the flag to start one"
            )
        resumable = run.resumable(equal, origin)
        if resumable:
            return run.continued_run(resumable[-1].path)
    folder = f"{header['tool']}-{header['name']}"
    return run.new_run(log_dir, folder, schema.TOOL_FILE_NAME, {**header, **origin})


def _pending(tasks: Sequence[Task], of_tool: run.Run) -> list[Task]:
    """Return the tasks to run: those that are not done, and those that left a file for a task to
    run, if the file is gone.

    of_tool: the run of the tool, which says what is done."""
    pending: list[Task] = []
    needed = None  # the file that the next task to run takes
    for task in reversed(tasks):  # so that it is known whether the task that takes a file is to run
        is_gone = task.leaves and task.leaves == needed and not (of_tool.folder / needed).exists()
        if is_gone or not of_tool.is_done(task.name):
            pending.append(task)
            needed = task.takes
    return pending[::-1]


def _carry_out(
    tasks: Sequence[Task],
    of_tool: run.Run,
    settings: Settings,
    arguments: argparse.Namespace,
    executor: Executor,
    follow: Follow | None,
) -> None:
    """Carry out the tasks that are not done, then those that `follow` returns.  Delete the file
    that a task takes, once the task is done.

    Raises UserError (also if the model is missing), Interrupted and Changed."""
    pending = _pending(tasks, of_tool)
    # The session looks tasks up in these two.  The tasks that follow are entered as they come.
    runs: dict[str, run.Run] = {}
    pythons: dict[str, Choice] = {}

    def enter(task: Task) -> None:
        runs[task.name] = of_tool
        pythons[task.name] = Choice(task.python or Path(sys.executable))

    with Progress(arguments.quiet) as progress:
        session = Session(runs, pythons, settings, arguments.timeout, progress, executor)
        for task in tasks:
            enter(task)
        progress.expect([task.row_pass for task in pending])
        for task in tasks:
            if task in pending:
                end, _ = session.carry_out(task)
                if end.status == "missing":
                    raise UserError(end.reason or "the model is missing")
            if task.takes and of_tool.is_done(task.name):
                (of_tool.folder / task.takes).unlink(missing_ok=True)
        for task in _following(follow, of_tool) if follow else ():
            enter(task)
            progress.expect([task.row_pass])
            session.carry_out(task)


def _following(follow: Follow, of_tool: run.Run) -> Iterator[Task]:
    """Yield the first new task that `follow` returns; after the caller has carried it out, call
    `follow` again.  End when it returns no new task.  A task that was yielded before is not new,
    even if it failed."""
    tried: set[str] = set()
    while True:
        untried = [task for task in follow(read(of_tool.path)) if task.name not in tried]
        if not untried:
            return
        tried.add(untried[0].name)
        yield untried[0]


def measured(
    tool: str,
    name: str,
    config: Any,
    tasks: Sequence[Task],
    settings: Settings,
    arguments: argparse.Namespace,
    answer: Callable[[Kept], Answer],
    executor: Executor | None = None,
    timed: bool = True,
    follow: Follow | None = None,
) -> int:
    """Carry out the tasks of a run that are not done yet, then print its answer; return the exit
    code.

    Raises UserError for a mistake of the user's, or a missing package.  If a task has ended well,
    the answer is printed before.  If none has, there is no answer, and a run that this call began
    is removed.  If a resumed run cannot go on, since a package has changed for example, all tasks
    are carried out in a new run.

    Args:
        tool, name: the folder of the run is called after both
        config: a Struct of what is measured, for the header of the run, which `answer` reads
        tasks: what to run; [] with `follow`
        answer: makes what is printed, from the records
        timed: whether other load on the machine would spoil the numbers
        follow: returns the next tasks from what is measured so far.  A task that fails does not
            end the run: the answer shows it as a failed row, and --resume tries it again
    """
    executor = executor or Executor()
    header = dict(
        record="tool",
        tool=tool,
        name=name,
        config=schema.as_written(config),
        settings=settings.to_json(),
    )
    with closing(_opened(header, arguments.log_dir, arguments.resume)) as of_tool:
        is_new = all(isinstance(line, schema.FirstLine) for line in of_tool.records)
        if not arguments.quiet:
            count = f": {text.count(len(tasks), 'job')}" if tasks else ""
            print(f"measuring {tool}-{name} on {settings.device}{count}", file=sys.stderr)
        try:
            # Ctrl-C and UserError end this block only: `ended` keeps them, up to `finish`.
            with benchmark.measuring() as ended:
                if timed:
                    benchmark.warn_of_load(executor, settings)
                _carry_out(tasks, of_tool, settings, arguments, executor, follow)
        except run.Changed as change:
            arguments = benchmark.without_resume(arguments, change)
            return measured(
                tool, name, config, tasks, settings, arguments, answer, executor, timed, follow
            )
        kept = read(of_tool.path)
        if ended.mistake and all(job.status != "ok" for job in kept.jobs.values()):
            of_tool.close()
            if is_new:
                run.remove(of_tool.path)
            raise ended.mistake
        result = answer(kept)
        shown = result.render(arguments.format)
        return benchmark.finish(
            ended, shown, details="", statuses=result.statuses, arguments=arguments
        )
