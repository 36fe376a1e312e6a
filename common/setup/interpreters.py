"""Which Python runs an implementation, and which device the run is on.  No torch here: others are
asked.

A user's own Python wins where it has the implementation: `python benchmark_k2.py` in an environment
with k2 uses that k2.  Otherwise the environments of `make setup` are used, wherever the script was
started.
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
    """Hold an interpreter, or None and the reason why there is none."""

    python: Path | None
    reason: str = ""


def choose(implementation: Implementation, *, in_place: bool, prefer_here: bool) -> Choice:
    """Return the Python for one implementation.

    in_place: the running one, whatever it has; prefer_here: the running one where it can run it."""
    if implementation.condition == FAST_MKL:
        try:
            libraries.mkl_as_intel()
        except NotRunnable as error:
            return Choice(None, str(error))
    here = Path(sys.executable)
    if in_place or INSTALLED:
        if implementation.in_other_environment:  # it runs in its environment, or nowhere
            program = "an installed suite" if INSTALLED else "--in-place"
            return Choice(None, f"{program} uses this Python alone")
        return Choice(here)
    managed = environments.interpreter(implementation.environment)
    has_package = implementation.built or not lacks(implementation.package)
    if (
        has_package
        and not implementation.in_other_environment
        and not lacks("torch")
        and (prefer_here or not managed)
    ):
        return Choice(here)
    return Choice(managed, "" if managed else environments.reason(implementation.environment))


def choose_all(
    names: Sequence[str], in_place: bool, prefer_here: Sequence[str] = ()
) -> dict[str, Choice]:
    """Return the Python of each implementation.  prefer_here: those for which the running Python
    comes first."""
    return {
        name: choose(find(name), in_place=in_place, prefer_here=name in prefer_here)
        for name in names
    }


def controls(
    python_of: Mapping[str, Choice], device: str, slow_products: bool = False
) -> dict[str, Choice]:
    """Return the rows that measure losses of `python_of` under another condition too:
    {"fast_rnnt@k2": its Python}.

    slow_products: whether torch multiplies so slowly here that losses are measured with
      FAST_MKL."""
    chosen = _under_other_torch(python_of, device)
    if not slow_products:
        return chosen
    fast: dict[str, Choice] = {}
    for row in map(find, python_of):
        choice = python_of[row.name]
        if FAST_MKL in row.controls and not row.condition and _can_run(row, choice.python, device):
            fast[row.under(FAST_MKL).name] = choice
    if len(fast) > 1:  # one alone makes no ratio
        chosen.update(fast)
    return chosen


def _can_run(row: Implementation, python: Path | None, device: str) -> bool:
    return python is not None and (not row.built or _has(row.package, python, device))


def _under_other_torch(python_of: Mapping[str, Choice], device: str) -> dict[str, Choice]:
    """Return the rows that measure a loss in an environment with another torch too.

    One for each such environment and each kind of its rows in `python_of`: a loss of that kind that
    runs under both."""
    chosen: dict[str, Choice] = {}
    rows = [find(name) for name in python_of]
    for environment, kind in dict.fromkeys((row.environment, row.kind) for row in rows):
        managed = environments.interpreter(environment)
        group = [row for row in rows if (row.environment, row.kind) == (environment, kind)]
        if managed is None or managed not in [python_of[row.name].python for row in group]:
            continue
        for loss in rows:
            if loss.kind != kind or OTHER_TORCH not in loss.controls:
                continue
            python = python_of[loss.name].python
            has_other_torch = python is not None and torch_version(python) != torch_version(managed)
            if (
                has_other_torch
                and _can_run(loss, python, device)
                and _can_run(loss, managed, device)
            ):
                chosen[loss.under(environment).name] = Choice(managed)
                break
    return chosen


@functools.cache
def _has(package: str, python: Path, device: str) -> bool:
    """Return whether the package is compiled for this Python, or can be."""
    command = [str(python), "-m", "rnnt_bench.setup.extensions", package]
    command += ["--device", device.partition(":")[0]]
    return bool(processes.output(command, stderr=None, cwd=ROOT))


@functools.cache
def torch_version(python: Path) -> tuple[int, ...]:
    """Return the version of torch as (2, 11, 0), without importing it; () where there is none."""
    code = "from importlib.metadata import version; print(version('torch'))"
    return version_numbers(processes.output([str(python), "-c", code], timeout=120))


def version_numbers(version: str) -> tuple[int, ...]:
    """Return (2, 11, 0) for "2.11.0+cu130"; () for what is no version."""
    return tuple(
        int(part) for part in version.strip().partition("+")[0].split(".") if part.isdigit()
    )


def other(environment: str) -> Path | None:
    """Return the environment's Python; None where there is none or it is this one."""
    managed = environments.interpreter(environment)
    if managed is None or Path(sys.prefix).resolve() == managed.parent.parent.resolve():
        return None
    return managed


def lacks(*packages: str) -> bool:
    """Return whether one of `packages` is missing from the running Python."""
    return any(importlib.util.find_spec(package) is None for package in packages)


def continue_in(environment: str) -> None:
    """Restart this command with the Python of an environment of `make setup`.

    Does nothing if that environment is not there, or already runs this command."""
    managed = other(environment)
    if managed is not None:
        sys.stdout.flush()
        os.execv(managed, [str(managed), *sys.argv])


def need(package: str, environment: str = "main", *, in_place: bool = False) -> None:
    """Restart the command in the environment where this Python lacks `package`.  Raises UserError
    where there is no such environment, and with `in_place`."""
    if lacks(package):
        if not in_place:
            continue_in(environment)
        advice = or_set_up(f"pip install {package}", environment)
        raise UserError(f"{package} is not installed in {sys.executable}: {advice}")


def with_torch(*packages: str) -> Path:
    """Return the running Python, for a command that needs torch; without that or one of `packages`,
    restart the command in the main environment.  Raises UserError where there is no torch then."""
    if lacks("torch", *packages):
        continue_in("main")
    need_torch({"": Choice(Path(sys.executable))})
    return Path(sys.executable)


def need_torch(choices: Mapping[str, Choice]) -> None:
    """Raise UserError where all that can run would run in this Python, and it has no torch."""
    if lacks("torch") and {choice.python for choice in choices.values()} <= {
        None,
        Path(sys.executable),
    }:
        raise UserError(
            f"torch is not installed in {sys.executable}: {or_set_up('pip install torch')}"
        )


class Sight(NamedTuple):
    """Hold what the torch of one Python sees.  torch: its version; reason: why there is no CUDA
    device."""

    devices: int
    torch: str
    reason: str


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
    lines = processes.output([str(python), "-c", _LOOK], timeout=120).strip().splitlines()
    return Sight(*json.loads(lines[-1])) if lines else Sight(0, "none", "torch does not import")


def resolve_device(wanted: str, pythons: Iterable[Path | None]) -> str:
    """Return "cpu", "cuda" or "cuda:N" for `wanted`, asking the Pythons of the run only where a GPU
    driver is there.

    "auto" is decided by the Python with the newest torch, which most rows run in: a driver that is
    too old for it may still serve k2's.  A line on stderr names each whose torch does not see the
    device: in a run on CUDA its rows are unsupported.  Raises UserError when CUDA was asked for and
      no torch of this run sees the device."""
    if wanted == "cpu":
        return wanted
    distinct = dict.fromkeys(filter(None, pythons))
    sights = {python: _look(python) for python in distinct} if machine.gpu_may_be_here() else {}
    device = wanted
    if wanted == "auto":
        newest = max(sights.values(), key=lambda sight: version_numbers(sight.torch), default=None)
        device = "cuda" if newest and newest.devices else "cpu"
    if device == "cpu":
        consequence = "this run is on the CPU, though a GPU driver is here"
    else:
        consequence = "its rows are unsupported"
    index = int(wanted.partition(":")[2] or 0)
    devices = max((sight.devices for sight in sights.values()), default=0)
    if wanted != "auto" and distinct and index >= devices:
        count = text.count(devices, "CUDA device") if devices else "no CUDA devices"
        reasons = "".join(
            f"; {python}: {sight.reason}" for python, sight in sights.items() if sight.reason
        )
        raise UserError(
            f"--device {wanted}: torch sees {count} here; use --device cpu or leave the flag out{reasons}"
        )
    for python, sight in sights.items():
        if sight.devices <= index:
            reason = f" ({sight.reason})" if sight.reason else ""
            say(
                f"warning: torch {sight.torch} of {python} does not see the CUDA device{reason}: {consequence}; update "
                "the driver, or run with a torch that is made for it (docs/gpu.md), or give --device cpu"
            )
    return device
