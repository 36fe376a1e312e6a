"""Says where the suite is installed, and what is wrong with a path that a user gives."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Callable, Union

#: The folder that holds the scripts and common/.
ROOT = Path(__file__).resolve().parents[2]
#: Whether this is the suite within the installed package rnnt_bench, which measures in the running Python alone.
INSTALLED = ROOT.name == "_suite"
#: Where compiled losses are kept, and results without --log-dir: an installed suite writes nothing beside itself.
BUILD = (
    Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rnnt-bench" if INSTALLED else ROOT / ".build"
)
LOG = Path("log") if INSTALLED else ROOT / "log"


def not_a_file(path: Union[str, Path]) -> str:
    """Return why a file cannot be read: "no such file", "Permission denied", "a link that leads nowhere"; "" if it
    can."""
    return _why_not(path, "file", stat.S_ISREG, os.R_OK)


def not_a_folder(path: Union[str, Path]) -> str:
    """Return why a folder cannot be listed; "" if it can."""
    return _why_not(path, "folder", stat.S_ISDIR, os.R_OK | os.X_OK)


def not_there(path: Union[str, Path]) -> str:
    """Return why there is neither a file nor a folder; "" if there is one."""
    return _why_not(path, "file or folder", lambda mode: stat.S_ISREG(mode) or stat.S_ISDIR(mode), os.R_OK)


def _why_not(path: Union[str, Path], kind: str, fits: Callable[[int], bool], needed: int) -> str:
    try:
        mode = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return "a link that leads nowhere" if os.path.islink(path) else f"no such {kind}"
    except (OSError, ValueError) as error:  # too long, a loop of links, a folder above it that is closed; a zero byte
        return str(getattr(error, "strerror", None) or error)
    if not fits(mode):
        return f"not a {kind}"
    return "" if os.access(path, needed) else os.strerror(errno.EACCES)
