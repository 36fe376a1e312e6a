"""Judge the cases of one implementation: the job `conformance`, whose cases run in forks of its
process.

A fork that dies, hangs or loses its CUDA context costs the case that it was at, and the next fork
goes on with the next case; cases that may corrupt memory have a fork of their own.  On a CPU the
package is loaded once, before the first fork; CUDA cannot be used in a fork of a process that uses
it, so there each fork loads it.
"""

from __future__ import annotations

import signal
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rnnt_bench.conformance.outcomes import (
    CRASHES,
    ERROR,
    JUDGED,
    NOT_ASKED,
    REFUSES,
    TIMEOUT,
    Outcome,
    Row,
)
from rnnt_bench.core import errors, implementations, settings, text
from rnnt_bench.core.jobspec import JobSpec
from rnnt_bench.core.questions import BY_NAME, Question
from rnnt_bench.instruments.device import current, import_torch
from rnnt_bench.records.schema import Measured, as_written
from rnnt_bench.system import machine, memory, processes

#: Seconds before the first case: importing takes seconds, compiling a minute, and another process
#: may compile first.
LOADING_SECONDS = 1800.0


def judge(case: Question, adapter: Any, device: Any) -> Outcome:
    """Return the outcome of a case.  An error of the loss is "refuses", or "crashes" if it lost the
    CUDA context, which only another process gets back; one of the suite is "error".  Where a pruned
    loss prepares its ranges, its package may refuse them outside of what is asked."""
    from rnnt_bench.conformance import answers, checks
    from rnnt_bench.losses import layouts

    try:
        outcome: Outcome = getattr(checks, case.check)(answers.Examination(adapter, device, case))
        return outcome
    except answers.Refused as refusal:
        return Outcome(REFUSES, str(refusal))
    except (answers.NotAsked, errors.NotRunnable) as reason:
        return Outcome(NOT_ASKED, str(reason))
    except Exception as error:
        if answers.context_lost(device):
            return Outcome(CRASHES, f"the CUDA context is lost: {answers.message(error)}")
        if layouts.of(adapter).approximate:
            raised_in = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
            if implementations.find(adapter.name).package in raised_in.parts:
                return Outcome(REFUSES, answers.message(error))
        traceback.print_exc()
        return Outcome(ERROR, answers.message(error))


def simulator(implementation: implementations.Implementation, device: str) -> Mapping[str, str]:
    """Return environment variables under which a loss for CUDA alone can be judged on the CPU; none
    if they are not needed, or if the script cannot be read, which its process will report."""
    with suppress(errors.UserError):
        attributes = implementations.described(implementation).of_variant(implementation.variant)
        if device == "cpu" and "cpu" not in attributes.devices:
            return attributes.simulator
    return {}


def run(job: JobSpec) -> Iterator[Measured]:
    """Yield the Row of an implementation: `given` has its name, kind, script and variant, the names
    of `cases`, and the `timeout` of one in seconds."""
    given, wanted = job.request, job.settings.device
    row = Row(name=given["name"], kind=given["kind"])

    @cache
    def loaded() -> Any:
        """Return the adapter, its device, and what the row tells of both.  Raises NotRunnable."""
        torch = import_torch()
        device = current(torch.device(wanted))
        adapter = implementations.load(given["script"])(
            settings.resolve({"preset": "quick"}, wanted), given["variant"]
        )
        adapter.load(device.type)
        described = {
            "version": adapter.version(),
            "torch": str(torch.__version__),
            "device_name": torch.cuda.get_device_name(device)
            if device.type == "cuda"
            else machine.cpu_name(),
            "simulator": adapter.simulator_variables if adapter.simulated else None,
        }
        return adapter, device, described

    try:
        if wanted == "cpu":
            loaded()
        together = [name for name in given["cases"] if not BY_NAME[name].alone]
        waiting = [together, *([name] for name in given["cases"] if BY_NAME[name].alone)]
        while waiting and row.status == JUDGED:
            names = [name for name in waiting[0] if name not in row.cells]
            if names:
                _examine(row, names, loaded, given["timeout"])
            else:
                del waiting[0]
    except errors.NotRunnable as error:
        row.status, row.reason = error.status, text.clipped(str(error))
    yield Measured(value=as_written(row))


def _examine(row: Row, names: Sequence[str], loaded: Callable[[], Any], timeout: float) -> None:
    """Judge cases in a fork, until one ends it, and add the outcomes to the row.  Raises
    NotRunnable."""

    def work(pipe: Connection) -> None:
        try:
            adapter, device, described = loaded()
        except errors.NotRunnable as error:
            pipe.send((error.status, str(error)))
            return
        pipe.send(described)
        for name in names:
            pipe.send(name)
            outcome = judge(BY_NAME[name], adapter, device)
            pipe.send(outcome)
            if outcome.result == CRASHES:  # only another process gets another CUDA context
                return

    kills = memory.oom_kills()
    case, late = "", False
    with processes.Fork(work) as fork:
        try:
            while True:
                line = fork.receive(timeout if case else LOADING_SECONDS)
                if isinstance(line, str):
                    case = line
                elif isinstance(line, Outcome):
                    row.cells[case] = line
                elif isinstance(line, tuple):
                    raise errors.NotRunnable(*line)
                else:
                    for name, value in line.items():
                        setattr(row, name, value)
        except TimeoutError:
            late = True
        except EOFError:
            pass
    ending = Outcome(ERROR, f"its process ended with exit code {fork.code}")
    if late and row.simulator:
        ending = Outcome(NOT_ASKED, f"no answer within {timeout:g} s (--timeout) in the simulator")
    elif late:
        ending = Outcome(TIMEOUT, f"no answer within {timeout:g} s (--timeout)")
    elif fork.code == -signal.SIGKILL and memory.oom_kills() > kills:
        ending = Outcome(NOT_ASKED, "killed by the kernel for lack of memory")
    elif fork.code < 0:
        ending = Outcome(CRASHES, f"killed by {processes.signal_name(-fork.code)}")
    if not case:
        row.status, row.reason = "error", f"its process ended before {names[0]}: {ending.message}"
    elif case not in row.cells:
        row.cells[case] = ending
