"""The command ``rnnt-bench``, and ``python -m rnnt_bench``."""

from __future__ import annotations

import sys


def main() -> int:
    """Run the command that sys.argv names; return its exit code."""
    from rnnt_bench.command import main
    from rnnt_bench.core.files import ROOT

    # The command may start itself again under another Python, which can run this script but may be
    # unable to import the package.
    sys.argv[0] = str(ROOT / "rnnt-bench")
    return main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
