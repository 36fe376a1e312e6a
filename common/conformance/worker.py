"""Judge cases of one implementation in this process, which common.conformance.isolated starts by the forkserver.

Writes records before and after each case, so that the parent knows which case ended the process: "loaded" or
"not-run", then for each case "start", "asked" (with the code that reproduces it, in case the process dies) and
"outcome".  On a CPU a case that may corrupt memory runs in a fork; if the fork dies, "died" replaces "outcome".  If a
case lost the CUDA context, "lost" follows its outcome and the process ends, since the other cases need another one.
"""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from typing import Any, Callable, Dict

from common.conformance.cases import BY_NAME, Case
from common.conformance.records import CRASHES, Outcome
from common.core import scripts, settings
from common.core.errors import NotRunnable
from common.measure.device import current, import_torch
from common.system import machine, memory, processes


def main(path: str) -> int:
    """Judge the cases of the job in the JSON file `path`, and return the exit code 0."""
    job = json.loads(Path(path).read_text(encoding="utf-8"))
    with open(job["output"], "a", encoding="utf-8") as stream:

        def write(record: Dict[str, Any]) -> None:
            processes.write_record(stream, record)

        try:
            run(job, write)
        except NotRunnable as reason:
            write({"record": "not-run", "status": reason.status, "reason": str(reason)})
    return 0


def run(job: Dict[str, Any], write: Callable[[Dict[str, Any]], None]) -> None:
    """Judge the cases of a job and `write` the records; raise NotRunnable if the implementation cannot run here."""
    torch = import_torch()
    from common.conformance.judge import judge

    device = current(torch.device(job["device"]))
    chosen = settings.resolve({"preset": "quick"}, job["device"])
    adapter = scripts.load(job["script"])(chosen, job["variant"])
    adapter.load(device.type)
    loaded = {"version": adapter.version(), "torch": torch.__version__, "python": platform.python_version()}
    loaded["device_name"] = machine.describe()["cpu"]
    if device.type == "cuda":
        loaded.update(device_name=torch.cuda.get_device_name(device), cuda=torch.version.cuda)
    write({"record": "loaded", "about": loaded})
    for name in job["cases"]:
        case = BY_NAME[name].allowing(large=job["large"])
        write({"record": "start", "case": name})

        def answer(case: Case = case) -> Outcome:
            outcome = judge(case, adapter, device, lambda code: write({"record": "asked", "reproduction": code}))
            write({"record": "outcome", "case": case.name, "outcome": outcome.to_json()})
            return outcome

        if case.alone and device.type == "cpu":
            kills = memory.oom_kills()
            died = in_a_child(answer)
            if died:
                write({"record": "died", "case": name, "signal": died, "oom": memory.oom_kills() > kills})
        elif answer().result == CRASHES:
            write({"record": "lost"})
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
