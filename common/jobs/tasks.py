"""Carries out the tasks of one run, on every device of its executor; a task that fails costs only its own result."""

from __future__ import annotations

import sys
from pathlib import Path
from threading import RLock
from typing import List, Sequence, Set

from common.core.settings import Settings
from common.jobs.executor import Executor, Interrupted
from common.jobs.progress import Progress
from common.jobs.spec import Task
from common.jobs.spread import OnceMore, spread
from common.records.run import Run


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
    pending = [task for task in tasks if not run.is_done(task.name)]
    progress.expect([(task.name, task.subject) for task in pending])
    once_more, lock = OnceMore(), RLock()
    warned: Set[str] = set()
    missing: List[str] = []

    def serve(lane: Executor, task: Task) -> None:
        with lock:
            if missing:
                return
            progress.start(task.name)
        how = (run.folder, settings, timeout, progress.note)
        try:
            records = once_more.execute(task.name, lane, task, python, *how)
        except Interrupted as interruption:
            with lock:
                run.add(interruption.records)
            raise
        with lock:
            run.add(records)
            for warning in (words for record in records for words in record.get("warnings", [])):
                if warning not in warned:
                    warned.add(warning)
                    print(f"warning: {warning}", file=sys.stderr)
            end = run.last_status
            progress.done(task.name, end.status, end.reason, (task.name, task.subject))
            if end.status == "missing":
                missing.append(end.reason or "the model is missing")

    spread(executor.lanes(), pending, serve)
    return missing[0] if missing else ""
