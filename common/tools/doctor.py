"""Say what works here, what fails and why, in one block of text to paste into a report of a problem.

Versions, environments and compilers are listed, and each loss is asked for its loss and gradient at a small size, on
the device too where there is a GPU: each in a process of its own, within --seconds in all.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Dict, Iterator, List, Optional, Sequence

from common.cli import listing
from common.cli.parser import Parser, implementations, standard
from common.core import flag_types
from common.core.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, NOT_RUNNABLE
from common.core.guard import guarded
from common.core.implementations import find
from common.core.paths import INSTALLED, ROOT
from common.core.text import plain
from common.core.units import GIB
from common.setup import environments, interpreters
from common.setup.interpreters import Choice
from common.system import machine
from common.system.processes import output

NAME = "rnnt-bench doctor"
#: Asked beside the default rows: they run where a compiler or Triton is missing.
BESIDE = ("fused:torch",)
SECONDS = 120.0
_ASK_TORCH = """
import json, torch
devices = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
print(json.dumps([torch.__version__, torch.version.cuda, devices]))
"""


def parser() -> Parser:
    result = Parser(prog=NAME, description=__doc__)
    names = (*standard(), *BESIDE)
    result.add_argument(
        "--only", type=implementations(names), default=names, metavar="A,B", help="Losses to check. Default: all"
    )
    result.add_argument(
        "--device", type=flag_types.device, default="auto", help="Device: auto, cpu, cuda or cuda:N. Default: auto"
    )
    result.add_argument(
        "--seconds",
        type=flag_types.positive,
        default=SECONDS,
        metavar="S",
        help=f"Check no further loss after S seconds. Default: {SECONDS:g}",
    )
    return result


def main(arguments: Optional[List[str]] = None) -> int:
    options = parser().parse_args(arguments)
    return guarded(NAME, lambda: examine(options.only, options.device, options.seconds))


def examine(names: Sequence[str], wanted: str, seconds: float) -> int:
    """Print the block; return EXIT_OK where every loss that is there is right, else EXIT_FAILED.

    Args:
        names: the losses that are asked.
        wanted: the device, as --device takes it.
        seconds: how long to ask, in all.
    """
    if interpreters.lacks("msgspec"):  # with which records are read
        interpreters.continue_in("main")
    choices = {name: interpreters.choose(find(name), in_place=False, prefer_here=False) for name in names}
    for line in _surroundings(choices):
        print(line, flush=True)
    pythons = list(dict.fromkeys(choice.python for choice in choices.values() if choice.python))
    device = interpreters.resolve_device(wanted, pythons)
    absent = _absent(choices, device)
    asked = [name for name in names if name not in absent]
    print(f"losses on {device} (loss and gradient at a small size):", flush=True)
    answers = _answers(asked, device, seconds) if asked else {}
    width = max(map(len, names))
    failed = False
    for name in names:
        answer = absent.get(name) or answers.get(name) or f"not asked within {seconds:g} s (--seconds)"
        failed = failed or not answer.startswith(("ok", "missing", "unsupported", "not "))
        print(f"  {name:{width}s}  {answer}")
    return EXIT_FAILED if failed else EXIT_OK


def _surroundings(choices: Dict[str, Choice]) -> Iterator[str]:
    """Yield lines about the suite, the machine, the Pythons and the compilers."""
    revision, changed = machine.git_state(ROOT)
    state = f"checkout {revision[:12]}{' with changes' if changed else ''}" if revision else "installed"
    yield f"suite:    {'installed' if INSTALLED else state} in {ROOT}"
    here = machine.describe()
    memory = f"{(here['memory_bytes'] or 0) / GIB:.0f} GiB"
    yield f"machine:  {here['cpu']}, {here['cores']} CPUs, {memory}, load {os.getloadavg()[0]:.1f}, {here['os']}"
    driver = output(["nvidia-smi", "--query-gpu=driver_version,name", "--format=csv,noheader"]).strip()
    yield f"driver:   {driver.replace(chr(10), '; ') or 'no NVIDIA driver answers'}"
    yield f"Python:   {platform.python_version()}, {sys.executable}"
    for python in dict.fromkeys(choice.python for choice in choices.values() if choice.python):
        yield f"torch:    {_torch(python)} ({python})"
    for name in [] if INSTALLED else dict.fromkeys(find(name).environment for name in choices):
        reason = environments.reason(name)
        if reason:
            yield f"missing:  {reason}"
    for program in (os.environ.get("CXX", "c++"), "ninja", "nvcc"):
        version = output([program, "--version"]).strip().splitlines()
        yield f"compiler: {program}: {version[-1] if program == 'nvcc' and version else (version or ['none'])[0]}"


def _torch(python: Path) -> str:
    """Return what the torch of a Python is and sees."""
    lines = output([str(python), "-c", _ASK_TORCH], timeout=120).strip().splitlines()
    if not lines:
        return "none, or it does not import"
    version, cuda, devices = json.loads(lines[-1])
    return f"{version}, CUDA {cuda or 'none'}, devices: {', '.join(devices) or 'none'}"


def _absent(choices: Dict[str, Choice], device: str) -> Dict[str, str]:
    """Return why a loss is not asked, for those that are not there or not compiled yet."""
    result = {}
    for name, state in listing.states(choices, device).items():
        if state.startswith(NOT_RUNNABLE):
            result[name] = state
        elif state.endswith(listing.TO_COMPILE):
            result[name] = f"not compiled yet: rnnt-bench run --only {name} --preset quick does it"
    return result


def _answers(names: Sequence[str], device: str, seconds: float) -> Dict[str, str]:
    """Return "ok ..." or what is wrong, by loss, of those that ended within `seconds`."""
    from common.analysis import logs

    flags = ["--only", ",".join(names), "--device", device, "--preset", "quick", "--passes", "correctness"]
    with tempfile.TemporaryDirectory(prefix="doctor-") as folder:
        command = [sys.executable, str(ROOT / "benchmark_all.py"), *flags, "--log-dir", folder, "--quiet"]
        child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        try:
            _, errors = child.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            child.send_signal(signal.SIGINT)  # what it measured stays
            _, errors = child.communicate()
        rows = logs.rows([folder], all_runs=True)
    answers = {}
    for row in rows:
        right = f"ok, {row.environment.implementation_version or '-'}, loss within {row.checked.loss_error or 0:.1e}"
        wrong = plain(f"{row.status}: {row.reason}")
        if row.status != "interrupted":
            answers[row.name] = right if row.status == "ok" else wrong
    if not rows and child.returncode not in (EXIT_OK, EXIT_INTERRUPTED):
        with suppress(IndexError):
            print(errors.strip().splitlines()[-1], file=sys.stderr)
    return answers
