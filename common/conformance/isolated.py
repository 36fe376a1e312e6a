"""All cases of one implementation, judged in processes that may die.  How a process died is the outcome of its case,
and another process goes on with the next case.

Cases that may corrupt memory have a process of their own, so that they cannot change the answer of another case.
"""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Mapping, Sequence, Tuple

from common.conformance.cases import BY_NAME, Case
from common.conformance.records import CRASHES, ERROR, NOT_APPLICABLE, TIMEOUT, Judged, Outcome
from common.core import scripts
from common.core.errors import UserError
from common.core.implementations import Implementation, find
from common.core.paths import ROOT
from common.core.text import clipped
from common.system.processes import Child, signal_name

#: Importing torch and a loss takes seconds, compiling one a minute, waiting for another that compiles several.
LOADING_SECONDS = 1800.0


def run(job: Mapping[str, Any], python: Path, timeout: float, note: Callable[[str], None]) -> Iterator[Dict[str, Any]]:
    """The ``judged`` record of a job, as common.jobs.spec makes it.  The settings are `device`, `cases` by their names,
    and `large`; timeout, note: see `examine`."""
    given = job["settings"]
    cases = [BY_NAME[name] for name in given["cases"]]
    how = {"timeout": timeout, "large": given["large"], "note": note}
    judged = examine(find(job["implementation"]), python, given["device"], cases, **how)
    yield {"record": "judged", "judged": judged.to_json()}


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
    """timeout: seconds for one case; note: called with the name of each case that begins."""
    judged = Judged(implementation.name, implementation.kind)
    variables = simulator(implementation, device)
    waiting = _processes(cases, device)
    while waiting and judged.status == "judged":
        names = waiting.pop(0)
        job = {"script": implementation.script, "variant": implementation.variant, "device": device, "large": large}
        produced, ending = _judge(python, {**job, "cases": names}, variables, timeout, note)
        _take(judged, names, produced, ending)
        left = [name for name in names if name not in judged.cells]
        if left:
            waiting.insert(0, left)
    if variables and judged.status == "judged":
        judged.about["simulator"] = " ".join(f"{name}={value}" for name, value in variables.items())
        for name, outcome in judged.cells.items():
            if outcome.result == TIMEOUT:
                words = f"{outcome.message} in the simulator"
                judged.cells[name] = replace(outcome, result=NOT_APPLICABLE, message=words)
    return judged


def simulator(implementation: Implementation, device: str) -> Mapping[str, str]:
    """Return environment variables under which a loss for CUDA alone can be judged on the CPU; {} where there is no
    need, and for a script that cannot be read, which its process says."""
    try:
        attributes = scripts.described(scripts.file_of(implementation))
    except UserError:
        return {}
    return attributes["simulator"] if device == "cpu" and "cpu" not in attributes["devices"] else {}


def _processes(cases: Sequence[Case], device: str) -> List[List[str]]:
    """Group the names of the cases by process.

    CPU: one process; cases that must be alone run first, in copies of it.  CUDA cannot be used in a copy: a process for
    each such case."""
    alone, together = ([case.name for case in cases if case.alone is choice] for choice in (True, False))
    groups = [[*alone, *together]] if device == "cpu" else [together, *([name] for name in alone)]
    return [names for names in groups if names]


def _take(judged: Judged, names: Sequence[str], produced: Sequence[Dict[str, Any]], ending: Tuple[str, str]) -> None:
    """Put the records of a process into `judged`: of one case at least, or why the implementation cannot be judged."""
    code = ""
    for line in produced:
        if line["record"] == "not-run":
            judged.status, judged.reason = line["status"], clipped(line["reason"])
            return
        if line["record"] == "loaded":
            judged.about.update(line["about"])
        if line["record"] == "outcome":
            judged.cells[line["case"]] = Outcome.from_json(line["outcome"])
        if line["record"] == "died":
            result, words = _how_it_ended(-line["signal"], line["oom"], ())
            judged.cells[line["case"]] = Outcome(result, words, reproduction=code if result == CRASHES else "")
        code = line["reproduction"] if line["record"] == "asked" else ""
    started = [line["case"] for line in produced if line["record"] == "start"]
    if started and started[-1] not in judged.cells:
        result, words = ending
        judged.cells[started[-1]] = Outcome(result, words, reproduction=code if result == CRASHES else "")
    elif produced and produced[-1]["record"] == "lost":
        pass  # a new process has a new CUDA context
    elif any(name not in judged.cells for name in names):  # it died between cases, or before the first
        judged.status, judged.reason = "error", f"its process ended before {names[0]}: {ending[1]}"


def _judge(
    python: Path, job: Dict[str, Any], variables: Mapping[str, str], timeout: float, note: Callable[[str], None]
) -> Tuple[List[Dict[str, Any]], Tuple[str, str]]:
    """(records of one process, (result, words) for the case that it left without an outcome)."""
    with Child.run(python, "common.conformance.worker", job, ROOT, variables) as child:
        in_time = _watch(child, timeout, note)
    if not in_time:
        return child.records, (TIMEOUT, f"no answer within {timeout:g} s (--timeout)")
    return child.records, _how_it_ended(child.returncode, child.killed_for_memory, child.stderr)


def _watch(child: Child, timeout: float, note: Callable[[str], None]) -> bool:
    """Wait for the end of the process; False when a case took longer than `timeout`."""
    count, cases, since, limit, case = 0, 0, 0.0, LOADING_SECONDS, ""
    while child.alive(0.05):
        note(case)  # which may end this
        if child.count() != count:
            count = child.count()
            started = [line["case"] for line in child.written() if line["record"] == "start"]
            if len(started) > cases:
                cases, since, limit, case = len(started), child.seconds(), timeout, started[-1]
        if child.seconds() - since > limit:
            return False
    return True


def _how_it_ended(returncode: int, out_of_memory: bool, tail: Sequence[str]) -> Tuple[str, str]:
    last = f": {clipped(tail[-1])}" if tail else ""
    if returncode >= 0:
        return ERROR, f"its process ended with exit code {returncode}{last}"
    if -returncode == signal.SIGKILL and out_of_memory:
        return NOT_APPLICABLE, "killed by the kernel for lack of memory"
    return CRASHES, f"killed by {signal_name(-returncode)}{last if -returncode == signal.SIGABRT else ''}"
