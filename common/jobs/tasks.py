"""Carries out the tasks of one run, one after the other; a task that fails costs only its own result."""

from __future__ import annotations

from pathlib import Path
from typing import Sequence

from common.core.settings import Settings
from common.jobs.executor import Executor
from common.jobs.progress import Progress
from common.jobs.session import Session
from common.jobs.spec import Task
from common.records.run import Run
from common.setup.interpreters import Choice


def carry_out(
    run: Run,
    tasks: Sequence[Task],
    python: Path,
    settings: Settings,
    timeout: float,
    progress: Progress,
    executor: Executor,
) -> str:
    """Run those of `tasks` that are not done yet; returns what is missing, for one and so for all: then the others are
    not tried.  Raises Interrupted, and UserError for a mistake of the user's."""
    pending = {task.name: task for task in tasks if not run.is_done(task.name)}
    progress.expect([task.like for task in pending.values()])
    python_of = {name: Choice(task.python or python) for name, task in pending.items()}
    session = Session(dict.fromkeys(pending, run), python_of, settings, timeout, progress, executor)
    for task in pending.values():
        end, _ = session.carry_out(task)
        if end.status == "missing":
            return end.reason or "the model is missing"
    return ""
