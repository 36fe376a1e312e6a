"""The command ``rnnt-bench``, and ``python -m rnnt_bench``."""

from __future__ import annotations

import sys
from pathlib import Path


def main() -> int:
    """Run a command of the suite that comes with this package, or of the checkout that this package lies in."""
    here = Path(__file__).resolve().parent
    suite = here / "_suite" if (here / "_suite").is_dir() else here.parent
    sys.path.insert(0, str(suite))  # first: `common` is this suite's, whatever else is called so
    from common.command import main

    return main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
