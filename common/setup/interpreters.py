"""Choose the Python that runs each implementation, and the device of a run.

Torch is not imported here: the chosen Pythons are asked in processes of their own.  The running
Python is chosen if it has the package: `python benchmark_k2.py` in a user's environment with k2
uses that k2.  Otherwise it is a Python of the environments of `make setup`.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from rnnt_bench.core import text
from rnnt_bench.core.called import or_set_up
from rnnt_bench.core.errors import NotRunnable, UserError, say
from rnnt_bench.core.files import INSTALLED, ROOT
from rnnt_bench.core.implementations import FAST_MKL, OTHER_TORCH, Implementation, find
from rnnt_bench.setup import environments, libraries
from rnnt_bench.system import machine, processes


class Choice(NamedTuple):
    """Hold the Python that runs an implementation, or None and the reason why there is none."""

    python: Path | None
    reason: str = ""


def choose(implementation: Implementation, *, in_place: bool, prefer_here: bool) -> Choice:
    """Return the Python that runs an implementation.

    Args:
        in_place: whether to choose the running Python, even if it lacks the package.  An installed
            suite always does.
        prefer_here: whether the running Python, if it has the package, wins over the environment of
            `make setup`.  If False, it is chosen only if there is no such environment."""
    if implementation.condition == FAST_MKL:
        try:
            libraries.mkl_as_intel()
        except NotRunnable as error:
            return Choice(None, str(error))
    here = Path(sys.executable)
    elsewhere = implementation.in_other_environment
    if in_place or INSTALLED:
        program = "an installed suite" if INSTALLED else "--in-place"
        return Choice(None, f"{program} uses this Python alone") if elsewhere else Choice(here)
    managed = environments.interpreter(implementation.environment)
    # What the suite builds need not be installed: it is compiled for the Python that is chosen.
    has_package = implementation.built or not lacks(implementation.package)
    can_run_here = has_package and not elsewhere and not lacks("torch")
    if can_run_here and (prefer_here or not managed):
        return Choice(here)
    return Choice(managed, "" if managed else environments.reason(implementation.environment))


def choose_all(
    names: Sequence[str], in_place: bool, prefer_here: Sequence[str] = ()
) -> dict[str, Choice]:
    """Return {name: the Python that runs this implementation}, see `choose`.

    prefer_here: the names of the implementations for which `choose` gets prefer_here=True."""
    return {
        name: choose(find(name), in_place=in_place, prefer_here=name in prefer_here)
        for name in names
    }


def controls(
    python_of: Mapping[str, Choice], device: str, slow_products: bool = False
) -> dict[str, Choice]:
    """Return {name: Python} of rows to add, which measure losses under another condition too.

    The name of such a row is "fast_rnnt@k2", under the torch of k2, or "fused@fast-mkl"
    (Implementation.controls).

    Args:
        python_of: name -> Python of the losses that are measured anyway.
        device: "cpu", "cuda" or "cuda:N".
        slow_products: whether torch multiplies slowly on this machine; if not, there are no rows
            under FAST_MKL."""
    chosen = _under_other_torch(python_of, device)
    if not slow_products:
        return chosen
    fast: dict[str, Choice] = {}
    for row in map(find, python_of):
        choice = python_of[row.name]
        if FAST_MKL in row.controls and not row.condition and _can_run(row, choice.python, device):
            fast[row.under(FAST_MKL).name] = choice
    if len(fast) > 1:  # one row alone has no ratio
        chosen.update(fast)
    return chosen


def _can_run(row: Implementation, python: Path | None, device: str) -> bool:
    """Tell whether there is a Python for a loss, with its package if the suite builds that.

    `_compile` compiles such a package for the Python, unless it is compiled already, and returns
    whether the package is there then."""
    return python is not None and (not row.built or _compile(row.package, python, device))


def _under_other_torch(python_of: Mapping[str, Choice], device: str) -> dict[str, Choice]:
    """Return {name: Python} of rows to add, such as "fast_rnnt@k2": losses under another torch too.

    If losses of one kind run in two environments, their ratio includes the ratio of the two
    torches.  A loss that runs in both tells the two ratios apart.  So each environment of a kind
    gets one row more: the first loss of this kind from another torch that can run here too.

    Arguments: see `controls`."""
    chosen: dict[str, Choice] = {}
    rows = [find(name) for name in python_of]
    for environment, kind in dict.fromkeys((row.environment, row.kind) for row in rows):
        managed = environments.interpreter(environment)
        pythons = [
            python_of[row.name].python
            for row in rows
            if (row.environment, row.kind) == (environment, kind)
        ]
        # The losses of this environment may all run in another Python, such as the running one:
        # then no ratio includes the torch of `managed`.
        if managed is None or managed not in pythons:
            continue
        for loss in rows:
            python = python_of[loss.name].python
            if (
                loss.kind == kind
                and OTHER_TORCH in loss.controls
                and python is not None
                and torch_version(python) != torch_version(managed)
                and _can_run(loss, python, device)
                and _can_run(loss, managed, device)
            ):
                chosen[loss.under(environment).name] = Choice(managed)
                break
    return chosen


@functools.cache
def _compile(package: str, python: Path, device: str) -> bool:
    """Compile a source package for a Python and a device, unless it is installed or compiled
    already.

    Returns whether it is there then: False if it cannot be compiled."""
    command = [str(python), "-m", "rnnt_bench.setup.extensions", package]
    command += ["--device", device.partition(":")[0]]
    # It prints the folder of the package; the output of a command that fails is "".
    return bool(processes.output(command, stderr=None, cwd=ROOT))


@functools.cache
def torch_version(python: Path) -> tuple[int, ...]:
    """Return the version of a Python's torch, such as (2, 11, 0); () if it has no torch.

    It is read from the package's metadata, which takes less time than to import torch."""
    code = "from importlib.metadata import version; print(version('torch'))"
    return version_numbers(processes.output([str(python), "-c", code], timeout=120))


def version_numbers(version: str) -> tuple[int, ...]:
    """Return (2, 11, 0) for "2.11.0+cu130"; () for a text without numbers."""
    parts = version.strip().partition("+")[0].split(".")
    return tuple(int(part) for part in parts if part.isdigit())


def other(environment: str) -> Path | None:
    """Return the Python of an environment; None if there is none, or if it runs this process."""
    managed = environments.interpreter(environment)
    if managed is None or Path(sys.prefix).resolve() == managed.parent.parent.resolve():
        return None
    return managed


def lacks(*packages: str) -> bool:
    """Tell whether the running Python lacks one of these packages."""
    return any(importlib.util.find_spec(package) is None for package in packages)


def continue_in(environment: str) -> None:
    """Restart this command with the Python of an environment of `make setup`.

    Does nothing if that environment is not there, or already runs this command."""
    managed = other(environment)
    if managed is not None:
        sys.stdout.flush()
        os.execv(managed, [str(managed), *sys.argv])


def need(package: str, environment: str = "main", *, in_place: bool = False) -> None:
    """Make sure that this command runs in a Python that has `package`.

    If the running one lacks it, the command is restarted in the environment.  Raises UserError if
    that is missing or lacks it too.

    in_place: raise UserError instead of a restart."""
    if lacks(package):
        if not in_place:
            continue_in(environment)
        advice = or_set_up(f"pip install {package}", environment)
        raise UserError(f"{package} is not installed in {sys.executable}: {advice}")


def with_torch(*packages: str) -> Path:
    """Return the running Python, after making sure that it has torch.

    If it lacks torch or one of `packages`, the command is restarted in the environment main.
    Raises UserError if there is no torch in the end."""
    if lacks("torch", *packages):
        continue_in("main")
    need_torch({"this command": Choice(Path(sys.executable))})
    return Path(sys.executable)


def need_torch(choices: Mapping[str, Choice]) -> None:
    """Raise UserError if the running Python has no torch, and no other Python was chosen.

    choices: name of an implementation -> the Python that was chosen for it."""
    here = Path(sys.executable)
    if lacks("torch") and all(choice.python in (None, here) for choice in choices.values()):
        raise UserError(
            f"torch is not installed in {sys.executable}: {or_set_up('pip install torch')}"
        )


class Sight(NamedTuple):
    """Hold what the torch of a Python sees.

    devices: number of CUDA devices; torch: its version; reason: why there is no device."""

    devices: int
    torch: str
    reason: str


#: Program that prints a Sight as JSON.
_LOOK = """
import json, torch
try:
    torch.cuda.init()
    devices, reason = torch.cuda.device_count(), ""
except Exception as error:
    devices, reason = 0, str(error).split("\\n")[0]
print(json.dumps([devices, torch.__version__, reason]))
"""


def _look(python: Path) -> Sight:
    """Ask a Python what its torch sees.  Other lines that it prints as it starts are skipped."""
    lines = processes.output([str(python), "-c", _LOOK], timeout=120).strip().splitlines()
    return Sight(*json.loads(lines[-1])) if lines else Sight(0, "none", "torch does not import")


def resolve_device(wanted: str, pythons: Iterable[Path | None]) -> str:
    """Return the device of a run: "cpu", "cuda" or "cuda:N".

    Warn on stderr of each Python whose torch does not see the CUDA device, if there is a GPU
    driver.  Raises UserError if CUDA is wanted and no torch sees the device.

    wanted: the value of --device.  "auto" is "cuda" if the newest torch sees a device, since most
    losses run under that torch; else "cpu".
    pythons: those of the run, None for a missing one; asked only if there is a GPU driver."""
    if wanted == "cpu":
        return wanted
    distinct = dict.fromkeys(filter(None, pythons))
    sights = {python: _look(python) for python in distinct} if machine.gpu_may_be_here() else {}
    device = wanted
    index = int(wanted.partition(":")[2] or 0)  # 1 of "cuda:1"; 0 of "cuda" and "auto"
    if wanted == "auto":
        newest = max(sights.values(), key=lambda sight: version_numbers(sight.torch), default=None)
        device = "cuda" if newest and newest.devices else "cpu"
    elif distinct:  # if all are missing, each row says so
        _check_seen(wanted, index, sights)
    if device == "cpu":
        consequence = "this run is on the CPU, though a GPU driver is here"
    else:
        consequence = "its rows are unsupported"
    for python, sight in sights.items():
        if sight.devices <= index:
            reason = f" ({sight.reason})" if sight.reason else ""
            say(
                f"warning: torch {sight.torch} of {python} does not see the CUDA device{reason}: {consequence}; update "
                "the driver, or run with a torch that is made for it (docs/gpu.md), or give --device cpu"
            )
    return device


def _check_seen(wanted: str, index: int, sights: Mapping[Path, Sight]) -> None:
    """Raise UserError if no torch sees the CUDA device with this index.

    wanted: the value of --device, for the message; sights: Python -> what its torch sees."""
    devices = max((sight.devices for sight in sights.values()), default=0)
    if index >= devices:
        count = text.count(devices, "CUDA device") if devices else "no CUDA devices"
        reasons = "".join(
            f"; {python}: {sight.reason}" for python, sight in sights.items() if sight.reason
        )
        raise UserError(
            f"--device {wanted}: torch sees {count} here; use --device cpu or leave the flag out{reasons}"
        )
