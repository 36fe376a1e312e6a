"""What the scripts share, in two wings on one ground: what measures ends in records, what reads begins there.

The folders and who may import whom: CONTRIBUTING.md, "Find your way in the code".

Every command imports this first, so what holds from its first moment is here: the oldest Python, and that Ctrl-C is one
line while the rest is imported.  It runs under older Pythons too.
"""

import os
import sys

OLDEST = (3, 9)


def _say(words):
    sys.stderr.write(f"{os.path.basename(sys.argv[0]) or 'python'}: {words}\n")
    sys.stderr.flush()


def _uncaught(kind, error, traceback):
    """End with one line and exit code 130 for Ctrl-C before core.errors.guarded takes over, or after it."""
    if not issubclass(kind, KeyboardInterrupt) or hasattr(sys, "ps1"):
        return sys.__excepthook__(kind, error, traceback)
    _say("interrupted")
    os._exit(130)


if sys.version_info < OLDEST:
    _say(f"error: Python {sys.version.split()[0]} is too old: use {OLDEST[0]}.{OLDEST[1]} or newer")
    raise SystemExit(2)
os.environ.pop("PYTHONSAFEPATH", None)  # `python -m common.x`, which the commands start, would not find this folder
if sys.excepthook is sys.__excepthook__:
    sys.excepthook = _uncaught
