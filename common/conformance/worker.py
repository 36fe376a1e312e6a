"""Judge cases of one implementation in this process, which common.conformance.isolated starts by the forkserver.

Writes lines before and after each case, so that the parent knows which case ended the process; see records.Line.  On a
CPU a case that may corrupt memory runs in a fork.  If a case lost the CUDA context, the process ends, since the other
cases need another one.
"""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from typing import Any, Callable

from common.conformance.cases import BY_NAME, Case
from common.conformance.records import CRASHES, Line, Loaded, Outcome, Work
from common.core import scripts, settings
from common.core.errors import NotRunnable
from common.measure.device import current, import_torch
from common.system import machine, memory, processes


def main(path: str) -> int:
    """Judge the cases of the job in the JSON file `path`, and return the exit code 0."""
    job = json.loads(Path(path).read_text(encoding="utf-8"))
    with open(job.pop("output"), "a", encoding="utf-8") as stream:

        def write(line: Line) -> None:
            processes.write_record(stream, line.to_json())

        try:
            run(Work(**job), write)
        except NotRunnable as reason:
            write(Line("not-run", status=reason.status, reason=str(reason)))
    return 0


def run(work: Work, write: Callable[[Line], None]) -> None:
    """Judge the cases and `write` the lines; raise NotRunnable if the implementation cannot run here."""
    torch = import_torch()
    from common.conformance.judge import judge

    device = current(torch.device(work.device))
    chosen = settings.resolve({"preset": "quick"}, work.device)
    adapter = scripts.load(work.script)(chosen, work.variant)
    adapter.load(device.type)
    name, cuda = machine.describe()["cpu"], None
    if device.type == "cuda":
        name, cuda = torch.cuda.get_device_name(device), torch.version.cuda
    loaded = Loaded(adapter.version(), str(torch.__version__), platform.python_version(), name, cuda)
    write(Line("loaded", loaded=loaded))
    for name in work.cases:
        case = BY_NAME[name].allowing(large=work.large)
        write(Line("start", name))

        def answer(case: Case = case) -> Outcome:
            outcome = judge(case, adapter, device, lambda code: write(Line("asked", reproduction=code)))
            write(Line("outcome", case.name, outcome=outcome))
            return outcome

        if case.alone and device.type == "cpu":
            kills = memory.oom_kills()
            died = in_a_child(answer)
            if died:
                write(Line("died", name, signal=died, oom=memory.oom_kills() > kills))
        elif answer().result == CRASHES:
            write(Line("lost"))
            return


def in_a_child(action: Callable[[], Any]) -> int:
    """Run `action` in a fork of this process; return the signal that killed the fork, or 0."""
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        processes.die_with_parent(parent)  # a fork does not inherit this
        try:
            action()
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
