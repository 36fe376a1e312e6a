"""Judge cases of one implementation in this process, which common.conformance.isolated starts by the forkserver.

Everything that does not end the process becomes an Outcome.  Lines before and after each case tell the parent which
case ended the process: {"versions"}, or {"not_run", "reason"}; then for each case {"start"} and {"case", "outcome"}, or
{"case", "signal", "oom"} if the fork of the case was killed; {"lost"} if no other case can be judged here.  On a CPU a
case that may corrupt memory runs in a fork.  If a case lost the CUDA context, the process ends, since the other cases
need another one.
"""

from __future__ import annotations

import json
import os
import platform
import traceback
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Mapping

from common.conformance.cases import BY_NAME, Case
from common.conformance.outcomes import CRASHES, ERROR, NOT_APPLICABLE, REFUSES, Outcome
from common.core import scripts, settings
from common.core.errors import NotRunnable
from common.measure.device import current, import_torch
from common.records.schema import as_written
from common.system import machine, memory, processes

if TYPE_CHECKING:
    from common.losses.adapter import Adapter


def judge(case: Case, adapter: Adapter, device: Any) -> Outcome:
    """Return the outcome of a case.

    An error of the loss is "refuses".  If it lost the CUDA context, so that this process can judge no other case, it is
    "crashes".  An error of the suite, or of the adapter's `prepare`, is "error".
    """
    from common.conformance import checks, questions

    try:
        check = getattr(checks, case.check or case.name.replace("-", "_"))
        return check(questions.Examination(adapter, device), **case.values)
    except questions.Refused as refusal:
        return Outcome(REFUSES, str(refusal))
    except (questions.NotAsked, NotRunnable) as reason:
        return Outcome(NOT_APPLICABLE, str(reason))
    except questions.ContextLost as error:
        return Outcome(CRASHES, f"the CUDA context is lost: {error}")
    except Exception as error:
        if questions.context_lost(device):
            return Outcome(CRASHES, f"the CUDA context is lost: {questions.message(error)}")
        traceback.print_exc()
        return Outcome(ERROR, questions.message(error))


def main(path: str) -> int:
    """Judge the cases of the job in the JSON file `path`, and return the exit code 0.

    The job has the `script`, its `variant`, the `device`, `large` and the names of `cases`.
    """
    job = json.loads(Path(path).read_text(encoding="utf-8"))
    with open(job["output"], "a", encoding="utf-8") as stream:
        write = partial(processes.write_record, stream)
        try:
            _run(job, write)
        except NotRunnable as reason:
            write({"not_run": reason.status, "reason": str(reason)})
    return 0


def _run(job: Mapping[str, Any], write: Callable[[Any], None]) -> None:
    torch = import_torch()
    device = current(torch.device(job["device"]))
    adapter = scripts.load(job["script"])(settings.resolve({"preset": "quick"}, job["device"]), job["variant"])
    adapter.load(device.type)
    on_cuda = device.type == "cuda"
    versions = {
        "version": adapter.version(),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "device_name": torch.cuda.get_device_name(device) if on_cuda else machine.describe()["cpu"],
        "cuda": torch.version.cuda if on_cuda else None,
    }
    write({"versions": versions})
    for name in job["cases"]:
        case = BY_NAME[name].allowing(large=job["large"])
        write({"start": name})

        def answered(case: Case = case) -> Outcome:
            outcome = judge(case, adapter, device)
            write({"case": case.name, "outcome": as_written(outcome)})
            return outcome

        if case.alone and not on_cuda:
            kills = memory.oom_kills()
            killed = _in_a_fork(answered)
            if killed:
                write({"case": name, "signal": killed, "oom": memory.oom_kills() > kills})
        elif answered().result == CRASHES:
            write({"lost": True})
            return


def _in_a_fork(action: Callable[[], Any]) -> int:
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
