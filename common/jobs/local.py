"""Jobs on this machine: each in a process of its own, whose end, however it came, becomes a status record."""

from __future__ import annotations

import signal
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Callable, List, Optional, Sequence, Tuple

from common.core.errors import EXIT_USAGE, NOT_RUNNABLE, UserError
from common.core.files import ROOT
from common.core.settings import Settings
from common.core.text import clipped
from common.jobs.session import Executor, Interrupted
from common.jobs.spec import Job, Runnable
from common.system.memory import tells_of_no_memory
from common.system.processes import Child, signal_name, start_servers

if TYPE_CHECKING:
    from common.records.schema import Record

#: Between two looks at the process: looking takes time from what it measures.
POLL_SECONDS = 0.2

#: The module of the processes, and what their servers import once for all jobs of a round.
#: Jobs without rounds get torch alone, since some of them measure the memory of the whole process.
WORKER = "common.jobs.worker"
IMPORTS = ("torch",)
IMPORTS_OF_A_ROUND = (
    *IMPORTS,
    "torch.fx.experimental.symbolic_shapes",  # which the first backward of a process imports, with sympy
    "common.losses.subject",
    "common.losses.passes.timing",
)

#: Status and reason.
Ending = Tuple[str, str]


class Local(Executor):
    """Runs jobs on this machine, one after the other.

    shared: a folder in which jobs leave what later ones need; removed with the executor.
    """

    shared: Optional[tempfile.TemporaryDirectory[str]] = None

    def get_ready(self, jobs: Sequence[Job], pythons: Sequence[Path], settings: Settings) -> None:
        variables = {tuple(job.variables(settings).items()) for job in jobs}
        if len(variables) == 1 and len(pythons) > 1:
            start_servers(pythons, WORKER, ROOT, dict(next(iter(variables))), jobs[0].round, IMPORTS_OF_A_ROUND)

    def execute(
        self, job: Runnable, python: Path, folder: Path, settings: Settings, timeout: float, note: Callable[[str], None]
    ) -> List[Record]:
        ending: Optional[Ending] = None
        stopped = "interrupted", f"stopped by the user during {job.name}"
        try:
            description, variables = job.to_json(settings, folder), job.variables(settings)
            if job.subject == "loss":
                self.shared = self.shared or tempfile.TemporaryDirectory(prefix="rnnt-bench-")
                description["shared"] = self.shared.name
            imports = IMPORTS if job.round is None else IMPORTS_OF_A_ROUND
            with Child.run(python, WORKER, description, ROOT, variables, job.round, imports) as child:
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
        records = _records(job, child, ending)
        if ending and ending[0] == "interrupted":
            raise Interrupted(records)
        return records


def _records(job: Runnable, child: Child, ending: Optional[Ending]) -> List[Record]:
    """Return the records of the process, the last of which is the status of the job.  ending: set where we ended it."""
    records = [{**record, "job": job.name} for record in child.records]
    last = records[-1] if records else {}
    if last.get("record") == "user_error" and child.returncode == EXIT_USAGE:
        raise UserError(last["message"])
    if last.get("record") == "status":
        records[-1] = job.status(last["status"], last["reason"], last["wall_ns"])
    else:
        status, reason = ending or how_it_died(child.returncode, child.killed_for_memory, child.stderr)
        records.append(job.status(status, reason, child.wall_ns))
    if records[-1]["status"] not in ("ok", *NOT_RUNNABLE):
        records[-1]["stderr_tail"] = [clipped(line) for line in child.stderr]
    return records


def how_it_died(returncode: int, killed_for_memory: bool, stderr: Sequence[str]) -> Ending:
    """Return the ending of a process that wrote no status; `stderr`: its last lines."""
    last = f": {stderr[-1]}" if stderr else ""
    if returncode >= 0:
        if stderr and tells_of_no_memory(stderr[-1]):
            return "oom", stderr[-1]
        return "error", f"ended with exit code {returncode} and no status{last}"
    if -returncode == signal.SIGKILL and killed_for_memory:
        return "oom", "killed by the kernel for lack of memory; try a smaller --batch-size or --max-frames"
    aborted = -returncode == signal.SIGABRT and tells_of_no_memory("\n".join(stderr))
    return "oom" if aborted else "error", f"killed by {signal_name(-returncode)}{last}"
