"""Carries out the run of a tool that measures no loss, from its tasks to the exit code."""

from __future__ import annotations

import argparse
import sys
import uuid
from contextlib import closing
from pathlib import Path
from typing import Callable, Optional, Sequence

from common.cli import ending
from common.cli.ending import Shown
from common.core.errors import UserError
from common.core.settings import Settings
from common.core.text import count
from common.jobs.local import Local
from common.jobs.progress import Progress
from common.jobs.session import Executor, Session
from common.jobs.spec import Task
from common.records import run, schema, store
from common.records.run import Run
from common.records.schema import Record
from common.setup.interpreters import Choice

#: Keys of a header that make two runs the same.
SAME = ("tool", "name", "config", "settings")


def opened(header: Record, log_dir: Path, resume: bool) -> Run:
    """Return a new run with this header, or the newest one of an equal header to go on with.

    Raises UserError where there is no such run, or another process is measuring it."""
    if resume:
        wanted = run.read_back({key: header[key] for key in SAME})
        earlier = run.earlier(log_dir, schema.TOOL_FILE_NAME, schema.ToolHeader)
        paths = [path for head, path in earlier if {key: getattr(head, key) for key in SAME} == wanted]
        if not paths:
            words = f"no run of {header['name']} with these flags under {log_dir}; remove the flag to start one"
            raise UserError(f"--resume: {words}")
        with run.claim_again(paths[-1]) as claim:
            return Run(paths[-1], store.read(paths[-1]), claim)
    claim = run.claim_folder(log_dir, f"{header['tool']}-{header['name']}")
    new = Run(claim.path.with_name(schema.TOOL_FILE_NAME), claim=claim)
    origin = {"run_id": uuid.uuid4().hex[:12], "command": sys.argv, "started": run.now(), **run.origin()}
    try:
        new.add({**header, "schema": schema.SCHEMA, **origin})
    except store.NotWritten:
        new.discard_if_empty()
        raise
    return new


def measured(
    header: Record,
    tasks: Sequence[Task],
    python: Path,
    settings: Settings,
    arguments: argparse.Namespace,
    show: Callable[[Path], Shown],
    executor: Optional[Executor] = None,
) -> int:
    """Carry out the tasks of a run that are not done yet, then show it; return the exit code.

    Raises UserError for what is missing, for one task and so for all, and for other mistakes; a run without results
    leaves nothing then.

    Args:
        header: the ``tool`` record, with the keys SAME.
        python: of tasks that name none.
        settings: of every task.
        arguments: --log-dir, --resume, --timeout and --quiet.
        show: prints the run in a file, and returns the status of each row.
        executor: in place of this machine."""
    executor = executor or Local()
    with closing(opened(header, arguments.log_dir, arguments.resume)) as of_tool:
        if not arguments.quiet:
            print(f"measuring {header['name']} on {settings.device}: {count(len(tasks), 'job')}", file=sys.stderr)
        pending = [task for task in tasks if not of_tool.is_done(task.name)]
        pythons = {task.name: Choice(task.python or python) for task in pending}
        with ending.measuring() as ended:
            ending.warn_of_load(executor, settings)
            with Progress(arguments.quiet) as progress:
                progress.expect([task.like for task in pending])
                runs = dict.fromkeys(pythons, of_tool)
                session = Session(runs, pythons, settings, arguments.timeout, progress, executor)
                for task in pending:
                    end, _ = session.carry_out(task)
                    if end.status == "missing":
                        raise UserError(end.reason or "the model is missing")
        if ended.mistake and not any(of_tool.is_done(task.name) for task in tasks):
            of_tool.close()
            run.remove(of_tool.path)
            raise ended.mistake
        return ending.finish(ended, show(of_tool.path), arguments)
