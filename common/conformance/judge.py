"""Judge cases of one implementation in a process that the forkserver starts (`main`), and start it (`run`).

Everything that does not end the process becomes an Outcome.  Lines before and after each case tell the parent which
case ended the process: {"versions"}, or {"not_run", "reason"}; then for each case {"start"} and {"case", "outcome"}, or
{"case", "signal", "oom"} if the fork of the case was killed; {"lost"} if no other case can be judged here.  On a CPU a
case that may corrupt memory runs in a fork.  If a case lost the CUDA context, the process ends, since the other cases
need another one.  If a process dies, how it died is the outcome of its case, and another goes on with the next case.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import traceback
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Iterator, Mapping, Sequence, Tuple

from msgspec.structs import replace

from common.conformance.cases import (
    BY_NAME,
    CRASHES,
    ERROR,
    JUDGED,
    NOT_APPLICABLE,
    REFUSES,
    TIMEOUT,
    Case,
    Outcome,
    Row,
)
from common.core import scripts, settings
from common.core.errors import NotRunnable, UserError
from common.core.implementations import Implementation, find
from common.core.paths import ROOT
from common.core.text import clipped
from common.measure.device import current, import_torch
from common.records import schema
from common.records.schema import Record, as_written
from common.system import machine, memory, processes
from common.system.processes import Child, signal_name

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


# -- the process that starts these -------------------------------------------------------------------------------------

#: Seconds before the first case: importing takes seconds, compiling a minute, and another process may compile first.
LOADING_SECONDS = 1800.0


def run(job: Mapping[str, Any], python: Path, timeout: float, note: Callable[[str], None]) -> Iterator[Record]:
    """Yield the record of a task, whose value is a Row; `given`: the implementation, names of cases, and large.

    timeout, note: see `examine`.
    """
    given = job["given"]
    cases = [BY_NAME[name] for name in given["cases"]]
    device = job["settings"]["device"]
    row = examine(find(given["implementation"]), python, device, cases, timeout, given["large"], note)
    yield {"record": "measured", "job": job["job"], "value": as_written(row)}


def examine(
    implementation: Implementation,
    python: Path,
    device: str,
    cases: Sequence[Case],
    timeout: float,
    large: bool = False,
    note: Callable[[str], None] = lambda text: None,
) -> Row:
    """Judge an implementation by the cases and return its row.

    Args:
        implementation: what is judged.
        python: interpreter of its environment.
        device: "cpu", "cuda" or "cuda:N".
        cases: what is asked.
        timeout: seconds for one case.
        large: also ask for more than 2^31 elements.
        note: called with the name of each case that begins; it may raise to end the examination.
    """
    row = Row(name=implementation.name, kind=implementation.kind)
    variables = simulator(implementation, device)
    # On a CPU one process has all: its isolated cases run first, in forks, before it has computed anything.  CUDA
    # cannot be used after a fork, so each isolated case has a process.
    alone, together = ([case.name for case in cases if case.alone is choice] for choice in (True, False))
    waiting = [[*alone, *together]] if device == "cpu" else [together, *([name] for name in alone)]
    while waiting and row.status == JUDGED:
        names = waiting.pop(0)
        job = {"script": implementation.script, "variant": implementation.variant, "device": device}
        with Child.run(
            python, "common.conformance.judge", {**job, "large": large, "cases": names}, ROOT, variables
        ) as child:
            in_time = _watch(child, timeout, note)
        late: Tuple[Any, str] = TIMEOUT, f"no answer within {timeout:g} s (--timeout)"
        ending = how_it_ended(child.returncode, child.killed_for_memory, child.stderr) if in_time else late
        _take(row, names, child.records, ending)
        left = [name for name in names if name not in row.cells]
        waiting = [left, *waiting] if left else waiting
    if variables and row.status == JUDGED:
        row.simulator = " ".join(f"{name}={value}" for name, value in variables.items())
        for name, outcome in row.cells.items():
            if outcome.result == TIMEOUT:
                message = f"{outcome.message} in the simulator"
                row.cells[name] = replace(outcome, result=NOT_APPLICABLE, message=message)
    return row


def simulator(implementation: Implementation, device: str) -> Mapping[str, str]:
    """Return environment variables under which a loss for CUDA alone can be judged on the CPU.

    Empty if they are not needed, or if the script cannot be read, which its process will report.
    """
    try:
        attributes = scripts.described(implementation)
    except UserError:
        return {}
    attributes = attributes.of_variant(implementation.variant)
    return attributes.simulator if device == "cpu" and "cpu" not in attributes.devices else {}


def _take(row: Row, names: Sequence[str], lines: Sequence[Mapping[str, Any]], ending: Tuple[Any, str]) -> None:
    """Add the lines of a process to the row: at least one outcome, or why the implementation cannot be judged.

    `names` are the cases that it was given, `ending` the (result, message) of one that it left without an outcome.
    """
    started = ""
    for line in lines:
        if "not_run" in line:
            row.status, row.reason = line["not_run"], clipped(line["reason"])
            return
        started = line.get("start", started)
        for name, value in line.get("versions", {}).items():
            setattr(row, name, value)
        if "outcome" in line:
            row.cells[line["case"]] = schema.typed(line["outcome"], Outcome)
        elif "signal" in line:
            row.cells[line["case"]] = Outcome(*how_it_ended(-line["signal"], line["oom"], ()))
    if started and started not in row.cells:
        row.cells[started] = Outcome(*ending)
    elif not (lines and "lost" in lines[-1]) and any(name not in row.cells for name in names):
        # it died between cases, or before the first; after "lost" a new process has a new CUDA context
        row.status, row.reason = "error", f"its process ended before {names[0]}: {ending[1]}"


def _watch(child: Child, timeout: float, note: Callable[[str], None]) -> bool:
    """Wait for the end of the process; return False if a case took longer than `timeout` seconds."""
    cases, since, limit, case = 0, 0.0, LOADING_SECONDS, ""
    while child.alive(0.05):
        note(case)  # may raise
        started = [line["start"] for line in child.written() if "start" in line]
        if len(started) > cases:
            cases, since, limit, case = len(started), child.seconds(), timeout, started[-1]
        if child.seconds() - since > limit:
            return False
    return True


def how_it_ended(returncode: int, out_of_memory: bool, tail: Sequence[str]) -> Tuple[Any, str]:
    """Return (result, message) of a process that ended within a case; `tail` is the end of its stderr."""
    last = f": {clipped(tail[-1])}" if tail else ""
    if returncode >= 0:
        return ERROR, f"its process ended with exit code {returncode}{last}"
    if -returncode == signal.SIGKILL and out_of_memory:
        return NOT_APPLICABLE, "killed by the kernel for lack of memory"
    return CRASHES, f"killed by {signal_name(-returncode)}{last if -returncode == signal.SIGABRT else ''}"
