"""``python -m common.setup [ENVIRONMENT ...]``: `make setup`.

The main environment first; then the source packages are compiled for it while the other environments are installed.
Names: only these environments beside main.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import List

from common.core.errors import EXIT_OK
from common.core.guard import guarded
from common.core.paths import ROOT
from common.setup import environments
from common.setup.source_packages import SOURCE_PACKAGES


def setup(names: List[str]) -> int:
    """Make the environments and what is compiled current; returns an exit code, a failure only without main."""
    code = environments.setup(["main"])
    if code != EXIT_OK:
        return code
    python = str(environments.interpreter("main"))
    # Two compile at once, each with half of the cores: a package has few files, of different length.
    variables = {"MAX_JOBS": str(max(1, (os.cpu_count() or 1) // 2)), **os.environ}
    builds = [
        subprocess.Popen([python, "-m", "common.setup.extensions", "build", package], cwd=ROOT, env=variables)
        for package in SOURCE_PACKAGES
    ]
    try:
        code = environments.setup(names)
        for build in builds:
            build.wait()
        return code
    finally:
        for build in builds:  # after Ctrl-C; what has ended is left alone
            build.terminate()
            build.wait()


if __name__ == "__main__":
    sys.exit(guarded("setup", lambda: setup(sys.argv[1:]), interrupted=environments.INTERRUPTED))
