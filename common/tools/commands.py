"""Shared by the commands about models: the flags of a run, the run itself, and its end."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
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

Follow = Callable[[Kept], list[Task]]
#: Returns the fields of a header that make two runs the same.
same = attrgetter("tool", "name", "config", "settings")


def add_flags(
    group: Any,
    *,
    folder: str,
    quick: str,
    timeout: float | None = 600.0,
    seed: str = "",
    formats: Sequence[str] = FORMATS,
) -> None:
    """Add the flags that every command about a model has; their help names the run's `folder` and
    what --preset changes, `quick`.  timeout: the default in seconds; None is no limit.  seed: help
    of --seed; "": nor --device."""
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
    group.set_defaults(details=False)  # what is printed is all there is
    group.add_argument(
        "--resume",
        action="store_true",
        help="Continue the newest run with the same flags: processes that ended well are not run again.",
    )


def set_quick(
    arguments: argparse.Namespace, quick: Mapping[str, Any], others: schema.Record | None = None
) -> None:
    """Set the flags that were not given, those that are None: to `quick` with --preset quick, then
    to `others`."""
    for name, value in {**(others or {}), **(quick if arguments.preset == "quick" else {})}.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)


def _opened(header: schema.Record, log_dir: Path, resume: bool) -> run.Run:
    """Return a new run, or the newest one of an equal header to go on with.  Raises UserError where
    none can be."""
    origin = run.origin()
    if resume:
        wanted = same(schema.decoded(json.dumps(header).encode()))
        earlier = run.earlier_runs(log_dir, schema.TOOL_FILE_NAME, schema.ToolHeader)
        equal = [before for before in earlier if same(before.head) == wanted]
        if not equal:
            raise UserError(
                f"--resume: no run of {header['name']} with these flags under {log_dir}; remove the flag to start one"
            )
        if resumable := run.resumable(equal, origin):
            return run.continued_run(resumable[-1].path)
    return run.new_run(
        log_dir, f"{header['tool']}-{header['name']}", schema.TOOL_FILE_NAME, {**header, **origin}
    )


def _pending(tasks: Sequence[Task], of_tool: run.Run) -> list[Task]:
    """Return the tasks that are not done, and those whose file one of these takes and finds no
    longer."""
    pending: list[Task] = []
    for task in reversed(tasks):
        is_taken = bool(pending and task.leaves and task.leaves == pending[-1].takes)
        if not of_tool.is_done(task.name) or (
            is_taken and not (of_tool.folder / str(task.leaves)).exists()
        ):
            pending.append(task)
    return pending[::-1]


def _carry_out(
    tasks: Sequence[Task],
    of_tool: run.Run,
    settings: Settings,
    arguments: argparse.Namespace,
    executor: Executor,
    follow: Follow | None,
) -> None:
    """Carry out the tasks that are not done, then those that follow.  Raises UserError, Interrupted
    and Changed."""
    pending = _pending(tasks, of_tool)
    pythons = {task.name: Choice(task.python or Path(sys.executable)) for task in tasks}
    runs = dict.fromkeys(pythons, of_tool)
    with Progress(arguments.quiet) as progress:
        progress.expect([task.row_pass for task in pending])
        session = Session(runs, pythons, settings, arguments.timeout, progress, executor)
        for task in tasks:
            if task in pending:
                end, _ = session.carry_out(task)
                if end.status == "missing" and follow is None:
                    raise UserError(end.reason or "the model is missing")
            if task.takes and of_tool.is_done(task.name):
                (of_tool.folder / task.takes).unlink(missing_ok=True)
        carried: set[str] = set()  # one that failed is not tried again
        while follow and (
            coming := [task for task in follow(read(of_tool.path)) if task.name not in carried]
        ):
            task = coming[0]
            carried.add(task.name)
            pythons[task.name] = Choice(task.python or Path(sys.executable))
            runs[task.name] = of_tool
            progress.expect([task.row_pass])
            session.carry_out(task)


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

    Raises UserError, also for what is missing; a run without results leaves nothing then.  config:
    a Struct that tells the run from others, and that `answer` reads again.  timed: whether other
    load makes longer what it measures.
    follow: returns the tasks that come next by what is known; the first is carried out.  One that
    failed, or a missing package, is a row then, which --resume tries again."""
    executor = executor or Executor()
    header = dict(
        record="tool",
        tool=tool,
        name=name,
        config=schema.as_written(config),
        settings=settings.to_json(),
    )
    with closing(_opened(header, arguments.log_dir, arguments.resume)) as of_tool:
        earlier = [line for line in of_tool.records if not isinstance(line, schema.FirstLine)]
        if not arguments.quiet:
            count = f": {text.count(len(tasks), 'job')}" if tasks else ""
            print(f"measuring {tool}-{name} on {settings.device}{count}", file=sys.stderr)
        try:
            with benchmark.measuring() as ended:
                if timed:
                    benchmark.warn_of_load(executor, settings)
                _carry_out(tasks, of_tool, settings, arguments, executor, follow)
        except run.Changed as change:
            arguments = benchmark.anew_after(change, arguments)
            return measured(
                tool, name, config, tasks, settings, arguments, answer, executor, timed, follow
            )
        if ended.mistake and not any(
            job.status == "ok" for job in read(of_tool.path).jobs.values()
        ):
            of_tool.close()
            if not earlier:
                run.remove(of_tool.path)
            raise ended.mistake
        result = answer(read(of_tool.path))
        shown = result.render(arguments.format)
        return benchmark.finish(ended, shown, "", result.statuses, arguments)
