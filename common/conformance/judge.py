"""Judge the cases of one implementation: the job `conformance`, whose cases run in forks of its
process.

A fork that dies, hangs or loses its CUDA context costs the case that it was at, and the next fork
goes on with the next case.  A case that may corrupt memory has a fork of its own.  On a CPU the
package is loaded once, before the first fork.  CUDA cannot be used in a fork of a process that uses
it, so there each fork loads the package.
"""

from __future__ import annotations

import signal
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
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
    """Return the outcome of a case for an adapter on a torch.device.

    NOT_ASKED: the case does not concern the loss, or cannot run here.
    CRASHES: an error was raised, and the CUDA context is lost.
    REFUSES: the loss raised an error, or the package of a pruned loss raised one before the loss.
    ERROR: any other error, which is of this suite; its traceback is printed on stderr.
    """
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
        # The package of a pruned loss makes the ranges before the loss is called.
        raised_in = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
        is_pruned = layouts.of(adapter).approximate
        if is_pruned and implementations.find(adapter.name).package in raised_in.parts:
            return Outcome(REFUSES, answers.message(error))
        traceback.print_exc()
        return Outcome(ERROR, answers.message(error))


def simulator(implementation: implementations.Implementation, device: str) -> Mapping[str, str]:
    """Return the environment variables under which a loss runs its kernels for CUDA on the CPU.

    Return {} if `device` is not "cpu", if the loss has kernels for the CPU, or if its script cannot
    be read: then its job reports the error."""
    with suppress(errors.UserError):
        attributes = implementations.attributes_of(implementation).of_variant(
            implementation.variant
        )
        if device == "cpu" and "cpu" not in attributes.devices:
            return attributes.simulator
    return {}


@cache
def load(script: str, variant: str, device: str) -> tuple[Any, Any]:
    """Load an implementation once; return its adapter and its torch.device.  Raises NotRunnable."""
    where = current(import_torch().device(device))
    # The sizes of the preset do not matter: each case has its own.
    adapter = implementations.load(script)(settings.resolve({"preset": "quick"}, device), variant)
    adapter.load(where.type)
    return adapter, where


def fields_of(adapter: Any, device: Any) -> dict[str, str | None]:
    """Return the fields of a Row that tell what was judged on which device."""
    import torch

    is_cuda = device.type == "cuda"
    return {
        "version": adapter.version(),
        "torch": str(torch.__version__),
        "device_name": torch.cuda.get_device_name(device) if is_cuda else machine.cpu_name(),
        "simulator": adapter.simulator_variables if adapter.simulated else None,
    }


def run(job: JobSpec) -> Iterator[Measured]:
    """Yield one record: the Row of an implementation, with the outcomes of the cases.

    The request of the job has the name, kind, script and variant of the implementation, the names
    of the `cases`, and the `timeout` of a case in seconds.
    """
    request, device = job.request, job.settings.device
    row = Row(name=request["name"], kind=request["kind"])
    loaded = partial(load, request["script"], request["variant"], device)
    together = [name for name in request["cases"] if not BY_NAME[name].alone]
    alone = [[name] for name in request["cases"] if BY_NAME[name].alone]
    try:
        if device == "cpu":  # the forks then have the package; on CUDA each fork loads it
            loaded()
        for names in (together, *alone):
            # A fork that ends early leaves cases to the next fork.  Each fork adds an outcome to
            # the row, or changes its status.
            while row.status == JUDGED and (
                waiting := [name for name in names if name not in row.cells]
            ):
                judge_in_fork(row, waiting, loaded, request["timeout"])
    except errors.NotRunnable as error:
        row.status, row.reason = error.status, text.clipped(str(error))
    yield Measured(value=as_written(row))


def judge_in_fork(
    row: Row, names: Sequence[str], loaded: Callable[[], tuple[Any, Any]], timeout: float
) -> None:
    """Judge cases in their order in one fork, and add their outcomes to the row.

    The case at which the fork dies or hangs gets an outcome too.  The cases after it get none, as
    do those after a case whose outcome is CRASHES.  If the fork ends before its first case, the
    status of the row becomes ERROR.  The row also gets the versions and the device that the fork
    sends.  Raises NotRunnable if the implementation cannot be loaded.

    Args:
        row: the row of the implementation.
        names: the names of the cases.
        loaded: returns the adapter and the device, as `load` does.
        timeout: seconds for a case.
    """

    def work(pipe: Connection) -> None:
        """Send a dict of fields of the row, then each outcome; if the implementation cannot be
        loaded, send only a tuple: its status and the reason."""
        try:
            adapter, device = loaded()
        except errors.NotRunnable as error:
            pipe.send((error.status, str(error)))
            return
        pipe.send(fields_of(adapter, device))
        for name in names:
            pipe.send(judge(BY_NAME[name], adapter, device))

    kills = memory.oom_kills()
    case = ""  # the case that the fork judges; "" before the first
    ending: Outcome | None = None
    with processes.Fork(work) as fork:
        try:
            first = fork.receive(LOADING_SECONDS)
            if isinstance(first, tuple):
                raise errors.NotRunnable(*first)
            for field, value in first.items():
                setattr(row, field, value)
            for case in names:
                outcome: Outcome = fork.receive(timeout)
                row.cells[case] = outcome
                if outcome.result == CRASHES:  # only another process gets another CUDA context
                    break
            return
        except TimeoutError:
            ending = late(timeout, row.simulator)
        except EOFError:
            pass  # the fork has died; its code is known after the block
    ending = ending or dead(fork.code, kills)
    if case:
        row.cells[case] = ending
    else:
        row.status, row.reason = ERROR, f"its process ended before {names[0]}: {ending.message}"


def late(timeout: float, simulator: str | None) -> Outcome:
    """Return the outcome of a case without an answer in `timeout` seconds.

    simulator: as in Row; None where no simulator runs the kernels."""
    message = f"no answer within {timeout:g} s (--timeout)"
    if simulator:
        return Outcome(NOT_ASKED, f"{message} in the simulator")
    return Outcome(TIMEOUT, message)


def dead(code: int, kills: int) -> Outcome:
    """Return the outcome of a case at which its process ended.

    Args:
        code: exit code of the process, or minus the number of the signal that killed it.
        kills: what memory.oom_kills returned before the process began.
    """
    if code >= 0:
        return Outcome(ERROR, f"its process ended with exit code {code}")
    if code == -signal.SIGKILL and memory.oom_kills() > kills:
        return Outcome(NOT_ASKED, "killed by the kernel for lack of memory")
    return Outcome(CRASHES, f"killed by {processes.signal_name(-code)}")
