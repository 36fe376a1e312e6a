"""Carries out the tasks of one run, one after the other; a task that fails costs only its own result."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Sequence, Set

from common.core.settings import Settings
from common.jobs.executor import Executor, Interrupted
from common.jobs.progress import Progress
from common.jobs.spec import Task
from common.records.run import Run


def carry_out(
    run: Run,
    tasks: Sequence[Task],
    python: Path,
    settings: Settings,
    timeout: float,
    progress: Progress,
    executor: Executor,
) -> None:
    """Run those of `tasks` that are not done yet.  What is missing for one is missing for all: then the others are not
    tried.  Raises Interrupted, and UserError for a mistake of the user's."""
    pending = [task for task in tasks if not run.is_done(task.name)]
    progress.expect([(task.name, task.subject) for task in pending])
    warned: Set[str] = set()
    for task in pending:
        progress.start(task.name)
        try:
            records = executor.execute(task, python, run.folder, settings, timeout, progress.note)
        except Interrupted as interruption:
            run.add(interruption.records)
            raise
        run.add(records)
        for warning in (words for record in records for words in record.get("warnings", [])):
            if warning not in warned:
                warned.add(warning)
                print(f"warning: {warning}", file=sys.stderr)
        end = run.last_status
        progress.done(task.name, end.status, end.reason, (task.name, task.subject))
        if end.status == "missing":
            break
