"""``python -m common.setup [ENVIRONMENT ...]``: `make setup`.

The main environment first; then the source packages are compiled for it while the other environments are installed, and
for those the losses that tell their torch from main's.  Names: only these environments beside main.
"""

from __future__ import annotations

import subprocess
import sys
from typing import List

from common.core import implementations
from common.core.errors import EXIT_OK, guarded
from common.core.files import ROOT
from common.setup import environments


def setup(names: List[str]) -> int:
    """Make the environments and what is compiled current; returns an exit code, a failure only without main."""
    code = environments.setup(["main"])
    if code != EXIT_OK:
        return code
    builds: List[subprocess.Popen[bytes]] = []

    def build(environment: str, *packages: str) -> None:
        if python := environments.interpreter(environment):
            command = [str(python), "-m", "common.setup.extensions", *packages]
            builds.append(subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL))

    try:
        build("main")
        code = environments.setup(names)
        controls = {loss.package for loss in implementations.IMPLEMENTATIONS if loss.control and loss.built}
        for name in set(implementations.environments()).intersection(environments.ENVIRONMENTS) - {"main"}:
            build(name, *controls)
        for process in builds:
            process.wait()
        return code
    finally:
        for process in builds:  # after Ctrl-C; what has ended is left alone
            process.terminate()
            process.wait()


if __name__ == "__main__":
    sys.exit(guarded("setup", lambda: setup(sys.argv[1:]), interrupted=environments.INTERRUPTED))
