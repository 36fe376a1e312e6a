"""``python -m common.setup.node ENVIRONMENT ...``: a node of a cluster, before its first job.

Makes those of the environments that are not there (one process at a time, by the lock of set-up) and prints the Python
that the node's jobs are started from.  Exit code 1, the reason on stderr, where there is none.  Standard library only.
"""

from __future__ import annotations

import sys
from typing import List

from common.core.errors import EXIT_FAILED, EXIT_OK
from common.core.guard import guarded
from common.setup import environments
from common.setup.__main__ import setup


def main(names: List[str]) -> int:
    usual = [name for name in names if not environments.ENVIRONMENTS[name].optional]
    lacking = [name for name in usual if environments.interpreter(name) is None]
    if lacking and setup(lacking) != EXIT_OK:
        return EXIT_FAILED
    python = environments.interpreter("main")
    print(python or environments.reason("main"), file=sys.stdout if python else sys.stderr)
    return EXIT_OK if python else EXIT_FAILED


if __name__ == "__main__":
    sys.exit(guarded("setup", lambda: main(sys.argv[1:]), interrupted=environments.INTERRUPTED))
