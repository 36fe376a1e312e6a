"""Judge all cases of one implementation in processes that may die.

If a process dies, how it died is the outcome of its case, and another process continues with the next case.  Cases
that may corrupt memory have a process of their own, so that they cannot change the answer of another case.
"""

from __future__ import annotations

import signal
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Iterator, List, Mapping, Sequence, Tuple

from common.conformance.cases import BY_NAME, Case
from common.conformance.records import CRASHES, ERROR, NOT_APPLICABLE, TIMEOUT, Judged, Line, Outcome, Work
from common.core import scripts
from common.core.errors import UserError
from common.core.implementations import Implementation, find
from common.core.paths import ROOT
from common.core.text import clipped
from common.system.processes import Child, signal_name

if TYPE_CHECKING:
    from common.records.schema import Record

#: Seconds before the first case: importing takes seconds, compiling a minute, and another process may compile first.
LOADING_SECONDS = 1800.0


def run(job: Mapping[str, Any], python: Path, timeout: float, note: Callable[[str], None]) -> Iterator[Record]:
    """Yield the ``judged`` record of a job of common.jobs.spec; its settings are device, names of cases, and large.

    timeout, note: see `examine`.
    """
    given = job["settings"]
    cases = [BY_NAME[name] for name in given["cases"]]
    how = {"timeout": timeout, "large": given["large"], "note": note}
    judged = examine(find(job["implementation"]), python, given["device"], cases, **how)
    yield {"record": "judged", "judged": asdict(judged)}


def examine(
    implementation: Implementation,
    python: Path,
    device: str,
    cases: Sequence[Case],
    *,
    timeout: float,
    large: bool = False,
    note: Callable[[str], None] = lambda text: None,
) -> Judged:
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
    judged = Judged(implementation.name, implementation.kind)
    variables = simulator(implementation, device)
    waiting = _processes(cases, device)
    while waiting and judged.status == "judged":
        names = waiting.pop(0)
        work = Work(implementation.script, implementation.variant, device, large, names)
        produced, ending = _judge(python, work, variables, timeout, note)
        _take(judged, names, produced, ending)
        left = [name for name in names if name not in judged.cells]
        if left:
            waiting.insert(0, left)
    if variables and judged.status == "judged":
        judged.simulator = " ".join(f"{name}={value}" for name, value in variables.items())
        for name, outcome in judged.cells.items():
            if outcome.result == TIMEOUT:
                message = f"{outcome.message} in the simulator"
                judged.cells[name] = replace(outcome, result=NOT_APPLICABLE, message=message)
    return judged


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


def _processes(cases: Sequence[Case], device: str) -> List[List[str]]:
    """Return the names of the cases of each process.

    On a CPU one process has all: its isolated cases run first, in forks, before it has computed anything.  CUDA cannot
    be used after a fork, so each isolated case has a process.
    """
    alone, together = ([case.name for case in cases if case.alone is choice] for choice in (True, False))
    processes = [[*alone, *together]] if device == "cpu" else [together, *([name] for name in alone)]
    return [names for names in processes if names]


def _take(judged: Judged, names: Sequence[str], produced: Sequence[Line], ending: Tuple[str, str]) -> None:
    """Add the lines of a process to `judged`: at least one outcome, or why the implementation cannot be judged.

    `names` are the cases that it was given, `ending` the (result, message) of one that it left without an outcome.
    """
    code = ""
    for line in produced:
        if line.event == "not-run":
            judged.status, judged.reason = line.status, clipped(line.reason)
            return
        if line.loaded is not None:
            judged.loaded = line.loaded
        if line.outcome is not None:
            judged.cells[line.case] = line.outcome
        if line.event == "died":
            result, words = _how_it_ended(-line.signal, line.oom, ())
            judged.cells[line.case] = Outcome(result, words, reproduction=code if result == CRASHES else "")
        code = line.reproduction
    started = [line.case for line in produced if line.event == "start"]
    if started and started[-1] not in judged.cells:
        result, words = ending
        judged.cells[started[-1]] = Outcome(result, words, reproduction=code if result == CRASHES else "")
    elif produced and produced[-1].event == "lost":
        pass  # a new process has a new CUDA context
    elif any(name not in judged.cells for name in names):  # it died between cases, or before the first
        judged.status, judged.reason = "error", f"its process ended before {names[0]}: {ending[1]}"


def _judge(
    python: Path, work: Work, variables: Mapping[str, str], timeout: float, note: Callable[[str], None]
) -> Tuple[List[Line], Tuple[str, str]]:
    """Run one process; return its lines, and (result, message) for the case that it left without an outcome."""
    with Child.run(python, "common.conformance.worker", vars(work), ROOT, variables) as child:
        in_time = _watch(child, timeout, note)
    lines = list(map(Line.from_json, child.records))
    if not in_time:
        return lines, (TIMEOUT, f"no answer within {timeout:g} s (--timeout)")
    return lines, _how_it_ended(child.returncode, child.killed_for_memory, child.stderr)


def _watch(child: Child, timeout: float, note: Callable[[str], None]) -> bool:
    """Wait for the end of the process; return False if a case took longer than `timeout` seconds."""
    cases, since, limit, case = 0, 0.0, LOADING_SECONDS, ""
    while child.alive(0.05):
        note(case)  # may raise
        started = [line["case"] for line in child.written() if line["event"] == "start"]
        if len(started) > cases:
            cases, since, limit, case = len(started), child.seconds(), timeout, started[-1]
        if child.seconds() - since > limit:
            return False
    return True


def _how_it_ended(returncode: int, out_of_memory: bool, tail: Sequence[str]) -> Tuple[str, str]:
    """Return (result, message) of a process that ended within a case; `tail` is the end of its stderr."""
    last = f": {clipped(tail[-1])}" if tail else ""
    if returncode >= 0:
        return ERROR, f"its process ended with exit code {returncode}{last}"
    if -returncode == signal.SIGKILL and out_of_memory:
        return NOT_APPLICABLE, "killed by the kernel for lack of memory"
    return CRASHES, f"killed by {signal_name(-returncode)}{last if -returncode == signal.SIGABRT else ''}"
