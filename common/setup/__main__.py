"""``python -m common.setup [ENVIRONMENT ...]``: `make setup`.

The main environment first; then the source packages are compiled for it while the other environments are installed, and
for those the losses that tell their torch from main's.  Names: only these environments beside main.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Iterable, List

from common.core import implementations
from common.core.errors import EXIT_OK, guarded
from common.core.files import ROOT
from common.setup import environments, extensions
from common.setup.extensions import SOURCE_PACKAGES


def setup(names: List[str]) -> int:
    """Make the environments and what is compiled current; returns an exit code, a failure only without main."""
    code = environments.setup(["main"])
    if code != EXIT_OK:
        return code
    builds = _builds("main", SOURCE_PACKAGES)
    try:
        code = environments.setup(names)
        controls = {loss.package for loss in implementations.IMPLEMENTATIONS if loss.control and loss.built}
        for name in set(implementations.environments()).intersection(environments.ENVIRONMENTS) - {"main"}:
            builds += _builds(name, controls)
        for build in builds:
            build.wait()
        return code
    finally:
        for build in builds:  # after Ctrl-C; what has ended is left alone
            build.terminate()
            build.wait()


def _builds(environment: str, packages: Iterable[str]) -> List[subprocess.Popen[bytes]]:
    """Return processes that compile the packages for an environment; none where it is not there."""
    python, names = environments.interpreter(environment), list(packages)
    variables = {"MAX_JOBS": extensions.compilers(len(names)), **os.environ}  # they compile at once
    command = [str(python), "-m", "common.setup.extensions", "build"]
    return [subprocess.Popen([*command, name], cwd=ROOT, env=variables) for name in names] if python else []


if __name__ == "__main__":
    sys.exit(guarded("setup", lambda: setup(sys.argv[1:]), interrupted=environments.INTERRUPTED))
