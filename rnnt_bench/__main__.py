"""The command ``rnnt-bench``, and ``python -m rnnt_bench``."""

from __future__ import annotations

import sys

from rnnt_bench import SUITE


def main() -> int:
    """Run a command of the suite that comes with this package, or of the checkout that this package lies in."""
    sys.path.insert(0, str(SUITE))  # first: `common` is this suite's, whatever else is called so
    from common.command import main

    return main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
