"""Jobs on this machine: each in a process of its own, whose end, however it came, becomes a status record."""

from __future__ import annotations

import importlib
import signal
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Callable, List, Optional, Sequence, Tuple

from common.core.errors import EXIT_USAGE, NOT_RUNNABLE, UserError
from common.core.paths import ROOT
from common.core.settings import Settings
from common.core.text import clipped
from common.jobs.executor import Executor, Interrupted
from common.jobs.spec import STARTING, SUBJECTS, Runnable
from common.system.memory import tells_of_no_memory
from common.system.processes import Child, signal_name

if TYPE_CHECKING:
    from common.records.schema import Record

#: Between two looks at the process: looking takes time from what it measures.
POLL_SECONDS = 0.2

#: Status and reason.
Ending = Tuple[str, str]


class Local(Executor):
    def execute(
        self, job: Runnable, python: Path, folder: Path, settings: Settings, timeout: float, note: Callable[[str], None]
    ) -> List[Record]:
        ending: Optional[Ending] = None
        stopped = "interrupted", f"stopped by the user during {job.name}"
        try:
            about, variables = job.to_json(settings, folder), job.variables(settings)
            if job.subject in STARTING:
                try:
                    found = list(importlib.import_module(SUBJECTS[job.subject]).run(about, python, timeout, note))
                except KeyboardInterrupt:
                    raise Interrupted([job.status(*stopped)]) from None
                ended = bool(found) and found[-1]["record"] == "status"
                return found if ended else [*found, job.status("ok", "")]
            with Child.run(python, "common.jobs.worker", about, ROOT, variables, job.round) as child:
                try:
                    while child.alive(POLL_SECONDS):
                        if child.seconds() > timeout:
                            ending = "timeout", f"{job.name} took more than {timeout:g} s (--timeout)"
                            break
                        note("")
                except KeyboardInterrupt:
                    ending = stopped
        except OSError as error:  # no room for its files, or no such Python any more
            where = f"its scratch files are in {tempfile.gettempdir()}; TMPDIR names another folder"
            return [job.status("error", f"could not be run: {error} ({where})")]
        found = _records(job, child, ending)
        if ending and ending[0] == "interrupted":
            raise Interrupted(found)
        return found


def _records(job: Runnable, child: Child, ending: Optional[Ending]) -> List[Record]:
    """What the process wrote, then the status of the job.  ending: set where we ended the process."""
    found = [{**record, "job": job.name} for record in child.records]
    last = found[-1] if found else {}
    if last.get("record") == "user_error" and child.returncode == EXIT_USAGE:
        raise UserError(last["message"])
    if last.get("record") == "status":
        found[-1] = job.status(last["status"], last["reason"], last["wall_ns"])
    else:
        status, reason = ending or how_it_died(child.returncode, child.killed_for_memory, child.stderr)
        found.append(job.status(status, reason, child.wall_ns))
    if found[-1]["status"] not in ("ok", *NOT_RUNNABLE):
        found[-1]["stderr_tail"] = [clipped(line) for line in child.stderr]
    return found


def how_it_died(returncode: int, killed_for_memory: bool, stderr: Sequence[str]) -> Ending:
    """Of a process that wrote no status; `stderr`: its last lines."""
    last = f": {stderr[-1]}" if stderr else ""
    if returncode >= 0:
        if stderr and tells_of_no_memory(stderr[-1]):
            return "oom", stderr[-1]
        return "error", f"ended with exit code {returncode} and no status{last}"
    if -returncode == signal.SIGKILL and killed_for_memory:
        return "oom", "killed by the kernel for lack of memory; try a smaller --batch-size or --max-frames"
    aborted = -returncode == signal.SIGABRT and tells_of_no_memory("\n".join(stderr))
    return "oom" if aborted else "error", f"killed by {signal_name(-returncode)}{last}"
