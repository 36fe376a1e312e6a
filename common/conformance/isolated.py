"""All cases of one implementation, judged in processes that may die: what ended one is its case's outcome, and the next
process goes on after it.  No torch.

Cases that may corrupt memory have a process of their own, so that no other case's answer comes from what they left.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Sequence, Tuple

from common import scripts
from common.conformance.cases import Case
from common.conformance.outcomes import CRASHES, ERROR, NOT_APPLICABLE, TIMEOUT, Outcome
from common.implementations import Implementation
from common.running import machine, processes
from common.settings import ROOT

#: Importing torch and a loss takes seconds, compiling one a minute, waiting for another that compiles several.
LOADING_SECONDS = 1800.0


@dataclass
class Judged:
    """status: "judged", or why not: "missing", "unsupported", or "error" when the suite failed, with the reason;
    about: version, torch, python (and of a GPU cuda, device_name); cells: outcome of each case by its name."""

    name: str
    kind: str
    status: str = "judged"
    reason: str = ""
    about: Dict[str, Any] = field(default_factory=dict)
    cells: Dict[str, Outcome] = field(default_factory=dict)


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
    """timeout: seconds for one case; note: told the case that begins."""
    judged = Judged(implementation.name, implementation.kind)
    variables = simulator(implementation, device)
    waiting = _processes(cases, device)
    while waiting and judged.status == "judged":
        names = waiting.pop(0)
        job = {"script": implementation.script, "variant": implementation.variant, "device": device, "large": large}
        produced, ending = _run(python, {**job, "cases": names}, variables, timeout, note)
        judged.about.update(
            {key: value for line in produced if line["record"] == "loaded" for key, value in line.items()}
        )
        _take(judged, names, produced, ending)
        left = [name for name in names if name not in judged.cells]
        if left:
            waiting.insert(0, left)
    judged.about.pop("record", None)
    if variables and judged.status == "judged":
        judged.about["simulator"] = " ".join(f"{name}={value}" for name, value in variables.items())
        for name, outcome in judged.cells.items():
            if outcome.result == TIMEOUT:
                judged.cells[name] = replace(
                    outcome, result=NOT_APPLICABLE, message=f"{outcome.message} in the simulator"
                )
    return judged


def simulator(implementation: Implementation, device: str) -> Mapping[str, str]:
    """Environment variables under which a loss for CUDA alone can be judged on the CPU; {} where there is no need."""
    try:
        adapter = scripts.load(implementation.script)
    except (Exception, SystemExit):  # its own process will tell
        return {}
    return adapter.simulator if device == "cpu" and "cpu" not in adapter.devices else {}


def _processes(cases: Sequence[Case], device: str) -> List[List[str]]:
    """Names of the cases of each process: on a CPU one, whose copies answer what is to be alone before it has computed
    anything; CUDA cannot be used in a copy."""
    alone, together = ([case.name for case in cases if case.alone is choice] for choice in (True, False))
    found = [[*alone, *together]] if device == "cpu" else [together, *([name] for name in alone)]
    return [names for names in found if names]


def _take(judged: Judged, names: Sequence[str], produced: Sequence[Dict[str, Any]], ending: Tuple[str, str]) -> None:
    """Put what a process told into `judged`; every process settles one case at least, or the whole implementation."""
    code = ""
    for line in produced:
        if line["record"] == "not-run":
            judged.status, judged.reason = line["status"], line["reason"]
            return
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


def _run(
    python: Path, job: Dict[str, Any], variables: Mapping[str, str], timeout: float, note: Callable[[str], None]
) -> Tuple[List[Dict[str, Any]], Tuple[str, str]]:
    """(records of one process, (result, words) for the case that it left without an outcome)."""
    with tempfile.TemporaryDirectory(prefix="transducer-conformance-") as scratch:
        output, errors, description = (Path(scratch) / name for name in ("records.jsonl", "stderr.txt", "job.json"))
        output.touch()
        description.write_text(json.dumps({**job, "output": str(output)}))
        environment = {**os.environ, **variables}
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [environment.get("PYTHONPATH")])])
        kills = machine.oom_kills()
        with errors.open("wb") as stream:
            process = subprocess.Popen(
                [str(python), "-m", "common.conformance.worker", str(description)],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                start_new_session=True,
            )
        try:
            in_time = _watch(process, output, timeout, note)
        finally:
            processes.end(process)
        tail = [line.strip() for line in errors.read_text(errors="replace").splitlines() if line.strip()]
        produced = processes.read_records(output)
    if not in_time:
        return produced, (TIMEOUT, f"no answer within {timeout:g} s (--timeout)")
    return produced, _how_it_ended(process.returncode, machine.oom_kills() > kills, tail)


def _watch(process: subprocess.Popen, output: Path, timeout: float, note: Callable[[str], None]) -> bool:
    """Wait for the end of the process; False when a case took longer than `timeout`."""
    size, cases, since, limit = 0, 0, time.monotonic(), LOADING_SECONDS
    while process.poll() is None:
        grown = output.stat().st_size
        if grown != size:
            size = grown
            started = [line["case"] for line in processes.read_records(output) if line["record"] == "start"]
            if len(started) > cases:
                cases, since, limit = len(started), time.monotonic(), timeout
                note(started[-1])
        if time.monotonic() - since > limit:
            return False
        time.sleep(0.05)
    return True


def _how_it_ended(returncode: int, out_of_memory: bool, tail: Sequence[str]) -> Tuple[str, str]:
    last = f": {tail[-1]}" if tail else ""
    if returncode >= 0:
        return ERROR, f"its process ended with exit code {returncode}{last}"
    if -returncode == signal.SIGKILL and out_of_memory:
        return NOT_APPLICABLE, "killed by the kernel for lack of memory"
    return CRASHES, f"killed by {signal_name(-returncode)}{last if -returncode == signal.SIGABRT else ''}"


def signal_name(number: int) -> str:
    return signal.Signals(number).name if number in signal.valid_signals() else f"signal {number}"
