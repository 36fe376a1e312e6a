"""One process that judges cases of one implementation.  ``python -m common.conformance.worker JOB.json``, started by
common.conformance.isolated.

Appends a record before and after each case, so that the parent knows which one ended the process: "loaded" or
"not-run", then "start", "asked" (with the code that reproduces it, should the process die) and "outcome" by case.  On a
CPU a case that may corrupt memory is answered by a copy of the process that has just loaded the loss; where that one
dies there is "died" instead of "outcome".  After an outcome that cost this process its CUDA context comes "lost", and
the process ends: the cases that are left need another.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from pathlib import Path
from typing import Any, Callable, Dict

from common import scripts, settings
from common.conformance.cases import BY_NAME, Case
from common.conformance.outcomes import CRASHES, Outcome
from common.errors import NotRunnable
from common.running import machine


def main(path: str) -> int:
    machine.die_with_parent()
    job = json.loads(Path(path).read_text(encoding="utf-8"))
    with open(job["output"], "a", encoding="utf-8") as stream:

        def write(record: Dict[str, Any]) -> None:
            stream.write(json.dumps(record, allow_nan=False) + "\n")
            stream.flush()

        try:
            run(job, write)
        except NotRunnable as reason:
            write({"record": "not-run", "status": reason.status, "reason": str(reason)})
    return 0


def run(job: Dict[str, Any], write: Callable[[Dict[str, Any]], None]) -> None:
    try:
        import torch
    except ImportError as error:
        raise NotRunnable("missing", f"torch does not import in {sys.executable} ({error})") from error
    from common.conformance.judge import judge

    device = torch.device(job["device"])
    if device.type == "cuda" and not torch.cuda.is_available():
        raise NotRunnable("unsupported", f"torch {torch.__version__} in {sys.prefix} sees no CUDA device")
    chosen = settings.resolve({"preset": "quick"}, job["device"])
    adapter = scripts.load(job["script"])(chosen, job["variant"])
    adapter.load(device.type)
    loaded = {"version": adapter.version(), "torch": torch.__version__, "python": platform.python_version()}
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
        loaded.update(device_name=torch.cuda.get_device_name(device), cuda=torch.version.cuda)
    write({"record": "loaded", **loaded})
    for name in job["cases"]:
        case = BY_NAME[name].allowing(large=job["large"])
        write({"record": "start", "case": name})

        def answer(case: Case = case) -> Outcome:
            outcome = judge(case, adapter, device, lambda code: write({"record": "asked", "reproduction": code}))
            write({"record": "outcome", "case": case.name, "outcome": outcome.to_json()})
            return outcome

        if case.alone and device.type == "cpu":
            kills = machine.oom_kills()
            died = in_a_child(answer)
            if died:
                write({"record": "died", "case": name, "signal": died, "oom": machine.oom_kills() > kills})
        elif answer().result == CRASHES:
            write({"record": "lost"})
            return


def in_a_child(action: Callable[[], Any]) -> int:
    """Do it in a copy of this process; returns the signal that killed it, or 0."""
    child = os.fork()
    if child == 0:
        machine.die_with_parent()  # a copy does not inherit that
        try:
            action()
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
