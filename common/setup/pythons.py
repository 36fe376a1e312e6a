"""Finding a Python on this machine that has a wanted version and can make virtual environments."""

from __future__ import annotations

import shutil
import subprocess
import sys
from typing import Iterator, Sequence, Tuple

from common.errors import NotRunnable

RUNNING = "{}.{}".format(*sys.version_info)
_PROBE = "import sys; print('{}.{}'.format(*sys.version_info)); import ensurepip, venv"


def find(versions: Sequence[str]) -> Tuple[str, str]:
    """(command, minor version) of a Python with one of `versions`: the running one where it fits, else one on PATH.

    Raises NotRunnable("missing") when there is none, or none that has venv and ensurepip.
    """
    without_venv = ""
    for command in _candidates(versions):
        try:
            done = subprocess.run([command, "-c", _PROBE], capture_output=True, text=True)
        except OSError:
            continue
        version = done.stdout.strip()
        if version not in versions:  # for example a pyenv shim of a version that is not switched on
            continue
        if done.returncode == 0:
            return command, version
        without_venv = without_venv or version
    if without_venv:
        raise NotRunnable(
            "missing",
            f"Python {without_venv} has no venv or ensurepip: install them (Debian, Ubuntu: apt install "
            f"python{without_venv}-venv), then run `make setup`",
        )
    needed = " or ".join(sorted(versions, key=lambda version: int(version.split(".")[1])))
    raise NotRunnable(
        "missing",
        f"needs Python {needed}, found none on PATH (this is Python {RUNNING}): install it, then run `make setup`",
    )


def _candidates(versions: Sequence[str]) -> Iterator[str]:
    if RUNNING in versions:
        # Not sys.executable: in a virtual environment that is a link which goes when the environment is made anew.
        yield getattr(sys, "_base_executable", None) or sys.executable
    for version in versions:
        for name in (f"python{version}", "python3"):
            found = shutil.which(name)
            if found:
                yield found
