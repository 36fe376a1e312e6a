"""Say what works here, what fails and why, in one block of text to paste into a report of a problem.

Versions, environments and compilers are listed, and each loss is asked for its loss and gradient at a small size, on
the device too where there is a GPU: each in a process of its own, within --seconds in all.
"""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import tempfile
from typing import Iterator, List, Optional, Sequence

from common.cli.parser import Parser, implementations, standard
from common.core import flag_types
from common.core.errors import EXIT_INTERRUPTED
from common.core.guard import guarded
from common.core.implementations import find
from common.core.paths import INSTALLED, ROOT
from common.core.text import GIB
from common.setup import environments, interpreters
from common.system import machine
from common.system.processes import output

NAME = "rnnt-bench doctor"
#: Asked beside the default rows: they run where a compiler or Triton is missing.
BESIDE = ("fused:torch",)
SECONDS = 120.0
_ASK_TORCH = """
import torch
devices = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
print(f"{torch.__version__}, CUDA {torch.version.cuda}, devices: {', '.join(devices) or 'none'}")
"""


def main(arguments: Optional[List[str]] = None) -> int:
    parser = Parser(prog=NAME, description=__doc__)
    names = (*standard(), *BESIDE)
    only = "Losses to check. Default: all"
    parser.add_argument("--only", type=implementations(names), default=names, metavar="A,B", help=only)
    device = "Device: auto, cpu, cuda or cuda:N. Default: auto"
    parser.add_argument("--device", type=flag_types.device, default="auto", help=device)
    seconds = f"Stop after S seconds; what was asked until then is shown. Default: {SECONDS:g}"
    parser.add_argument("--seconds", type=flag_types.positive, default=SECONDS, metavar="S", help=seconds)
    options = parser.parse_args(arguments)
    return guarded(NAME, lambda: examine(options.only, options.device, options.seconds))


def examine(names: Sequence[str], device: str, seconds: float) -> int:
    """Print the block: the surroundings, then the table of the correctness of the losses; return the exit code of
    benchmark_all.py, 0 where every loss that could be asked is right."""
    if interpreters.lacks("msgspec"):  # with which records are read
        interpreters.continue_in("main")
    for line in _surroundings(names):
        print(line, flush=True)
    flags = ["--only", ",".join(names), "--device", device, "--preset", "quick", "--passes", "correctness", "--quiet"]
    with tempfile.TemporaryDirectory(prefix="doctor-") as folder:
        command = [sys.executable, str(ROOT / "benchmark_all.py"), *flags, "--log-dir", folder]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        late = ""
        try:
            table, _ = child.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            child.send_signal(signal.SIGINT)  # what it has is shown
            table, _ = child.communicate()
            late = f"not all was asked within {seconds:g} s (--seconds)\n"
    print(table + late, end="")
    return EXIT_INTERRUPTED if late else child.returncode


def _surroundings(names: Sequence[str]) -> Iterator[str]:
    """Yield lines about the suite, the machine, the Pythons and the compilers."""
    revision, changed = machine.git_state(ROOT)
    state = f"checkout {revision[:12]}{' with changes' if changed else ''}" if revision else "installed"
    yield f"suite:    {'installed' if INSTALLED else state} in {ROOT}"
    here = machine.describe()
    memory = f"{(here['memory_bytes'] or 0) / GIB:.0f} GiB"
    load = os.getloadavg()[0]
    yield f"machine:  {here['cpu']}, {here['cores']} CPUs, {memory}, load {load:.1f}, {here['os']}"
    driver = output(["nvidia-smi", "--query-gpu=driver_version,name", "--format=csv,noheader"]).strip()
    yield f"driver:   {driver.replace(chr(10), '; ') or 'no NVIDIA driver answers'}"
    yield f"Python:   {platform.python_version()}, {sys.executable}"
    choices = interpreters.choose_all(names, in_place=False)
    for python in dict.fromkeys(choice.python for choice in choices.values() if choice.python):
        torch = output([str(python), "-c", _ASK_TORCH], timeout=120).strip().rpartition("\n")[2]
        yield f"torch:    {torch or 'none, or it does not import'} ({python})"
    for name in [] if INSTALLED else dict.fromkeys(find(name).environment for name in names):
        reason = environments.reason(name)
        if reason:
            yield f"missing:  {reason}"
    for program in (os.environ.get("CXX", "c++"), "ninja", "nvcc"):
        version = output([program, "--version"]).strip().splitlines()
        yield f"compiler: {program}: {version[-1] if program == 'nvcc' and version else (version or ['none'])[0]}"
